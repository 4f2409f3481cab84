"""The shape of the configuration: one section for each of the YAML, with its defaults."""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Le, MinLen

from tent_core.admission import Limit, Rules
from tent_core.health import HealthRules
from tent_core.mistakes import NotAllowed, nearest
from tent_core.policy import PolicyEntry
from tent_core.section import Check, Reads, Section
from tent_core.types import Intent, Priority
from tent_core.units import Microseconds, Seconds, Size, format_size

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

_LOCATION = re.compile(r"\*|[a-z][a-z0-9_]*(:[^\s*]+)?")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})")
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\[\]:]+))(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class _ByName(Reads):
    """Reads an enum by the lower-case names of its members, and nothing else."""

    kind: type[enum.Enum]

    def read(self, value: object) -> enum.Enum:
        """The member. Raises NotAllowed."""
        names = {member.name.lower(): member for member in self.kind}
        if isinstance(value, str) and value in names:
            return names[value]
        raise NotAllowed(", ".join(names), nearest(value, names))

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            self.read,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda member: member.name.lower(), when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [member.name.lower() for member in self.kind]}


def _location(value: str) -> str:
    if not _LOCATION.fullmatch(value):
        raise NotAllowed("a kind of memory such as cpu or cuda, one device such as cuda:1, or '*'")
    return value


def _listen(value: str) -> str:
    if _split(value)[1] is None:
        raise NotAllowed("host:port or [IPv6 address]:port; port 0 takes any that is free")
    return value


def _advertise(value: str) -> str:
    host, port = _split(value)
    if port == 0 or host in ("0.0.0.0", "::"):
        raise NotAllowed("an address that peers can connect to")
    return value


def _split(value: str) -> tuple[str, int | None]:
    match = _ADDRESS.fullmatch(value)
    allowed = "a host, IPv4 address or [IPv6 address], and a port up to 65535 after a colon"
    if match is None or int(match["port"] or 0) > 65535:
        raise NotAllowed(allowed)
    if match["v6"] is not None:
        try:
            ipaddress.IPv6Address(match["v6"])
        except ValueError:
            raise NotAllowed(allowed) from None
    elif not _HOST.fullmatch(match["host"]):
        raise NotAllowed(allowed)
    return match["v6"] or match["host"], int(match["port"]) if match["port"] else None


Location = Annotated[str, Check(_location)]
Text = Annotated[str, MinLen(1)]
Count = Annotated[int, Ge(1)]
Positive = Annotated[Seconds, Gt(0)]


@dataclass(frozen=True, slots=True)
class ControlSettings(Section):
    """The control plane: where peers reach this engine, and how a lost peer is noticed."""

    listen: Annotated[str, Check(_listen)] = "127.0.0.1:0"
    """Where to listen: host:port or [IPv6 address]:port; port 0 takes any that is free."""
    advertise: Annotated[str, Check(_advertise)] | None = None
    """What peers are told, a host or host:port; without it, the address that is listened on."""
    call_timeout_s: Positive = 5.0
    """Deadline of a call to a peer."""
    keepalive_time_s: Positive = 2.0
    """How long a connection may be silent before it is pinged."""
    keepalive_timeout_s: Positive = 2.0
    """How long the answer to a ping may take before the connection counts as broken."""
    reconnect_max_s: Positive = 1.0
    """The longest pause between two attempts to connect again."""


@dataclass(frozen=True, slots=True)
class PeerSettings(Section):
    """When a peer has departed, and how many are kept."""

    grace_s: Seconds = 10.0
    """How long a peer whose connection broke may take to come back before it has departed."""
    idle_timeout_s: Positive = 300.0
    """How long a peer to which this engine sends nothing keeps its connections."""
    max: Count = 4096
    """The most peers that are kept at once."""


@dataclass(frozen=True, slots=True)
class RevocationSettings(Section):
    """Unregistering a buffer that peers may be using."""

    timeout_s: Positive = 10.0
    """How long `unregister` waits for peers to let go before it raises; calling again goes on waiting."""


@dataclass(frozen=True, slots=True)
class FailoverSettings(Section):
    """What happens when a transport fails."""

    max_attempts: Annotated[int, Ge(0)] = 3
    """How many attempts may follow the first one, by other candidates or the same again; 0 turns it off."""
    on_poll: bool = True
    """Whether `poll` may carry on what has failed, in its thread; else only the engine does."""
    failures: Count = 3
    """So many failures of a transport to one peer, within `window_s`, pause it for that peer."""
    window_s: Positive = 10.0
    """The time in which failures add up, and after which a pause that is to come is shortened."""
    pause_s: Positive = 1.0
    """The first pause; each further one is twice as long."""
    longest_pause_s: Positive = 60.0
    """The longest pause."""

    def health(self) -> HealthRules:
        """The same for what judges transports, which knows nothing of YAML."""
        return HealthRules(self.failures, self.window_s, self.pause_s, self.longest_pause_s)


@dataclass(frozen=True, slots=True)
class LimitSettings(Section):
    """What may be under way on one transport to one peer when something of a priority starts."""

    bytes: Annotated[Size, Ge(1)] = 4 << 20
    """Bytes of all that have a limit; something larger starts when nothing else is under way."""
    tasks: Count = 4096
    """Requests of all that have a limit."""


@dataclass(frozen=True, slots=True)
class SchedulingSettings(Section):
    """Who goes first when there is more to do than room. What has no limit starts at once."""

    order: Literal["arrival", "deadline"] = "arrival"
    """Within a priority: who came first, or whose deadline is the earliest."""
    high: LimitSettings | None = None
    """Limit of high priority; without one it never waits."""
    medium: LimitSettings | None = None
    """Limit of medium priority, which is what a transfer has when nothing is said."""
    low: LimitSettings | None = LimitSettings()
    """Limit of low priority: what else is under way of it is all that others may have to wait for."""
    slice: Annotated[Size, Ge(4096)] = 1 << 20
    """What has a limit goes in parts of about this size."""
    promotion_timeout_s: Positive = 0.5
    """Who has waited so long moves up by one priority."""

    def turns(self, priority: Priority) -> tuple[int, int, int] | None:
        """Bytes and tasks that may be under way when something of a priority starts, and the size of its
        parts; None if it never waits."""
        limit = (self.high, self.medium, self.low)[priority]
        return None if limit is None else (limit.bytes, limit.tasks, self.slice)

    def admission(self) -> Rules:
        """The same for what lets in and holds back, which knows nothing of YAML."""
        limits = {
            priority: Limit(limit.bytes, limit.tasks)
            for priority, limit in zip(Priority, (self.high, self.medium, self.low), strict=True)
            if limit is not None
        }
        return Rules(limits, self.promotion_timeout_s, self.order == "deadline")


@dataclass(frozen=True, slots=True)
class QosSettings(Section):
    """Turns between the processes of this user on this host."""

    shared_slots: Annotated[int, Interval(ge=0, le=64)] = 0
    """In how many processes bulk may be under way at once; 0: none of this. All should say the same."""
    turns: Literal["low", "medium"] = "low"
    """The highest priority that takes turns with other processes."""

    def priorities(self) -> frozenset[Priority]:
        """Those that take turns."""
        if not self.shared_slots:
            return frozenset()
        return frozenset({Priority.LOW} | ({Priority.MEDIUM} if self.turns == "medium" else set()))


@dataclass(frozen=True, slots=True)
class StagingSettings(Section):
    """Memory through which data goes that no transport moves directly."""

    buffers: Annotated[int, Ge(2)] = 8
    """How many chunks may be on their way at once, in all; this much memory is taken at the first use."""
    chunk: Annotated[Size, Ge(8192)] = 4 << 20
    """Size of each."""
    lent: Annotated[int, Ge(0)] = 8
    """To how many peers at once as much is lent again, for them to stage at this side."""


@dataclass(frozen=True, slots=True)
class WaitSettings(Section):
    """Waiting for a batch."""

    spin_us: Annotated[Microseconds, Le(1e6)] = 50.0
    """How long a wait spins before it blocks."""


@dataclass(frozen=True, slots=True)
class NotificationSettings(Section):
    """Notifications between peers."""

    queue: Count = 4096
    """The most notifications that wait at the receiver; senders wait beyond it."""
    timeout_s: Positive = 10.0
    """How long a notification may take until the receiver's engine has it; one about a batch has the time of
    the batch."""


@dataclass(frozen=True, slots=True)
class TransferSettings(Section):
    """Transfers of data."""

    timeout_s: Positive = 30.0
    """Deadline of a transfer for which the caller gave none."""


@dataclass(frozen=True, slots=True)
class HookSettings(Section):
    """Hooks of packages; each package has a queue of its own."""

    stuck_s: Positive = 5.0
    """How long a hook may take before its package is called stuck, and its events are dropped and counted."""
    queue: Count = 1024
    """The most events that wait for one package."""


@dataclass(frozen=True, slots=True)
class LogSettings(Section):
    """Events on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important events that are written."""
    format: Literal["console", "json"] = "console"
    """Lines for people, or one JSON document a line."""


@dataclass(frozen=True, slots=True)
class PolicySettings(Section):
    """One entry of the policy: which requests it is for, and which transports carry them, in order."""

    name: Text
    """Shown by `tent explain`, and by which a request may ask for this entry."""
    transports: Annotated[tuple[Text, ...], MinLen(1)]
    """In order of preference; those that cannot carry a request are passed over."""
    segment_type: Literal["memory", "file"] | None = None
    """Matches requests to this type of segment."""
    same_machine: bool | None = None
    """Matches requests to peers on this machine (true) or on others (false)."""
    local_memory: Location | None = None
    """Matches where the local buffer is: cpu, cuda, one device such as cuda:1, or '*'."""
    remote_memory: Location | None = None
    """Matches where the peer's buffer is: cpu, cuda, one device such as cuda:1, or '*'."""
    min_size: Size = 0
    """Matches requests of at least this size."""
    max_size: Size | None = None
    """Matches requests of at most this size."""
    priority: Annotated[Priority, _ByName(Priority)] | None = None
    """Matches requests of this priority."""
    intent: Annotated[Intent, _ByName(Intent)] | None = None
    """Matches requests with this intent."""
    devices: tuple[Text, ...] = ()
    """NICs to use; transports that cannot be told so are passed over."""
    qp_pool: Text | None = None
    """Pool of queue pairs to use; transports that have none are passed over."""
    attempt_timeout_s: Positive | None = None
    """How long one transport may take before the next one is tried; without it, as long as the transfer."""
    stall_s: Positive | None = None
    """How long a transport that can say so may go without moving a byte before the next one is tried."""

    @classmethod
    def conflicts(cls, read: Mapping[str, Any]) -> Iterator[tuple[str, NotAllowed]]:
        """A largest size below the least."""
        least, most = read.get("min_size", 0), read.get("max_size")
        if most is not None and most < least:
            yield "max_size", NotAllowed(f"at least min_size, which is {format_size(least)}")

    def entry(self) -> PolicyEntry:
        """The same for selection, which knows nothing of YAML."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        return PolicyEntry(attempt_s=said.pop("attempt_timeout_s"), **said)


class Enable(enum.Enum):
    """Whether a transport is used. Failing to start is an error with TRUE; with AUTO it is skipped then."""

    TRUE = "true"
    AUTO = "auto"
    FALSE = "false"


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """What the configuration says of one transport.

    `settings` is an instance of the model that its package declares, or None with the `reason` why this
    transport cannot be started: it is disabled, not installed, or its package cannot be loaded.
    """

    enable: Enable
    settings: Any = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Sections(Section):
    """The sections that are the core's own."""

    control: ControlSettings = ControlSettings()
    peers: PeerSettings = PeerSettings()
    revocation: RevocationSettings = RevocationSettings()
    failover: FailoverSettings = FailoverSettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    qos: QosSettings = QosSettings()
    staging: StagingSettings = StagingSettings()
    wait: WaitSettings = WaitSettings()
    notifications: NotificationSettings = NotificationSettings()
    transfer: TransferSettings = TransferSettings()
    hooks: HookSettings = HookSettings()
    log: LogSettings = LogSettings()


@dataclass(frozen=True, slots=True)
class Yaml(Sections):
    """The whole document, except that each transport's settings are checked by its own package's model."""

    transports: Any = None
    """Each transport: `enable` (true, auto or false) and its own settings."""
    policy: Annotated[tuple[PolicySettings, ...], MinLen(1)] | None = None
    """Entries of which the first that matches a request decides; without them, a default order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Sections):
    """The checked configuration of one engine. Immutable.

    `transports` has every transport that the configuration, or the default, asks for or forbids.
    """

    transports: Mapping[str, TransportChoice]
    policy: tuple[PolicyEntry, ...]

    @property
    def enabled(self) -> Mapping[str, TransportChoice]:
        """The transports to start."""
        return {
            name: choice for name, choice in self.transports.items() if choice.settings is not None
        }

    @property
    def skipped(self) -> Mapping[str, str]:
        """The transports not to start, each with its reason."""
        return {
            name: choice.reason
            for name, choice in self.transports.items()
            if choice.settings is None
        }
