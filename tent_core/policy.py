"""Selection: which transports may carry a request, in which order, and why each other one may not.

Pure functions of a policy and of facts: no I/O, no clock, no state. The first entry that matches a request
names the transports that are considered, in its order; each is a candidate or is passed over with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tent_core.types import Capabilities, Intent, MemoryKind, Priority, Reach, memory_kind

DEFAULT_ORDER = ("shm", "rdma", "mpcomm", "tcp")
"""What is preferred without a policy; other transports follow by name."""

HOST_MEMORY = "cpu:0"
"""Where data is staged."""


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One entry of the policy. A match field that is None, and a size without a bound, match any value.

    - `segment_type`: "memory" or "file".
    - `local_memory`, `remote_memory`: patterns of locations, see `location_matches`.
    - `min_size`, `max_size`: bytes of one request, both inclusive.
    - `devices`: NICs that may be used, `qp_pool`: a named pool of queue pairs; transports that cannot be
      told so are passed over.
    - `attempt_s`, `stall_s`: seconds that an attempt may take, and may go without moving a byte.
    """

    name: str
    transports: tuple[str, ...]
    segment_type: str | None = None
    same_machine: bool | None = None
    local_memory: str | None = None
    remote_memory: str | None = None
    min_size: int = 0
    max_size: int | None = None
    priority: Priority | None = None
    intent: Intent | None = None
    devices: tuple[str, ...] = ()
    qp_pool: str | None = None
    attempt_s: float | None = None
    stall_s: float | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """What is known of a request. `size` is in bytes; `policy_name` is the entry that the request names."""

    size: int
    segment_type: str = "memory"
    same_machine: bool = False
    local_memory: str = "cpu:0"
    remote_memory: str = "cpu:0"
    priority: Priority = Priority.MEDIUM
    intent: Intent = Intent.UNSPEC
    policy_name: str | None = None


@dataclass(frozen=True, slots=True)
class TransportFacts:
    """What an engine knows of one transport; `reason` says why it is not `available`."""

    name: str
    number: int
    available: bool
    reason: str = ""
    capabilities: Capabilities | None = None


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A transport that is no candidate, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Route:
    """A way through host memory: `copies` move between the local memory and host memory here (empty: there is
    no need), `carriers` between what is here and what is at the peer. `at_peer`: the peer's engine lends host
    memory and copies between it and its buffers. Each in order of preference."""

    copies: tuple[str, ...]
    carriers: tuple[str, ...]
    at_peer: bool = False

    def __str__(self) -> str:
        copies, carriers = (" or ".join(names) for names in (self.copies, self.carriers))
        here = [f"staged in host memory here, by {copies}"] if copies else []
        there = ["staged in host memory at the peer, which copies itself"] if self.at_peer else []
        return "; ".join([*here, *there, f"in between, by {carriers}"])


@dataclass(frozen=True, slots=True)
class Selection:
    """The entry that matched (None if none did), its candidates in order, and what was passed over. Where
    there is no candidate, there may be a `route` of two."""

    entry: PolicyEntry | None
    candidates: tuple[str, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()
    route: Route | None = None
    untimed: bool = field(init=False, default=False)
    """Whether an entry matched that gives attempts no time of their own, and there is no route: worked out
    once, since every transfer asks."""

    def __post_init__(self) -> None:
        entry = self.entry
        if entry is not None and self.candidates and self.route is None:
            untimed = entry.attempt_s is None and entry.stall_s is None
            object.__setattr__(self, "untimed", untimed)

    def __str__(self) -> str:
        entry = f"policy entry {self.entry.name!r}" if self.entry else "no policy entry matches"
        way = " then ".join(self.candidates) or str(self.route or "no candidate")
        lines = [f"{entry}: {way}"]
        return "\n".join([*lines, *(f"not {p.name}: {p.reason}" for p in self.passed_over)])


def location_matches(pattern: str, location: str) -> bool:
    """Whether a location such as `cpu:0` fits a pattern: `*` fits all, `cpu` each `cpu:N`, `cpu:0` itself.

    Memory registered at `*` is host memory of no node in particular: `cpu` fits it, `cpu:0` does not.
    """
    if location == "*":
        location = "cpu"
    return pattern in ("*", location, location.partition(":")[0])


def default_policy(names: Sequence[str]) -> tuple[PolicyEntry, ...]:
    """The policy of an engine whose configuration has none."""
    known = [name for name in DEFAULT_ORDER if name in names]
    others = sorted(name for name in names if name not in DEFAULT_ORDER)
    return (PolicyEntry("default", (*known, *others)),)


def match(entries: Sequence[PolicyEntry], query: Query) -> PolicyEntry | None:
    """The entry that the query names, whatever that one's match fields say; else the first that matches."""
    if query.policy_name is not None:
        return next((entry for entry in entries if entry.name == query.policy_name), None)
    return next((entry for entry in entries if _matches(entry, query)), None)


def size_edges(
    entries: Sequence[PolicyEntry], facts: Mapping[str, TransportFacts]
) -> tuple[int, ...]:
    """Ascending sizes above 0 at which the answer for a request may change.

    Whatever else is asked, all sizes below the first edge, all in [edge i, edge i+1), and all from the last
    one on select alike, so that a batch needs one selection for each such range that occurs in it.
    """
    edges = set()
    for entry in entries:
        edges.add(entry.min_size)
        if entry.max_size is not None:
            edges.add(entry.max_size + 1)
        for name in entry.transports:
            capabilities = facts[name].capabilities if name in facts else None
            if capabilities is not None and capabilities.largest_request is not None:
                edges.add(capabilities.largest_request + 1)
    return tuple(sorted(edge for edge in edges if edge > 0))


def select(
    entries: Sequence[PolicyEntry],
    query: Query,
    facts: Mapping[str, TransportFacts],
    local_offers: Mapping[str, int],
    remote_offers: Mapping[str, int],
    unreachable: Mapping[str, str],
    hint: str | None = None,
) -> Selection:
    """Candidates for a request, in order, and what was passed over with its reason.

    `local_offers` and `remote_offers` say by which transports, name to number, the buffer at that side can
    be used; `unreachable` names transports that cannot reach this peer, with the reason. `hint` moves one
    of the entry's transports first; a hint at another one changes nothing, and is passed over visibly.
    """
    entry = match(entries, query)
    if entry is None:
        return Selection(None)
    names = entry.transports
    passed_over = []
    if hint in names:
        names = (hint, *(name for name in names if name != hint))
    elif hint is not None:
        passed_over.append(
            PassedOver(hint, f"hinted at, but entry {entry.name!r} does not list it")
        )
    candidates = []
    for name in names:
        reason = _objection(entry, query, name, facts.get(name), local_offers, remote_offers)
        reason = reason or unreachable.get(name, "")
        if reason:
            passed_over.append(PassedOver(name, reason))
        else:
            candidates.append(name)
    return Selection(entry, tuple(candidates), tuple(passed_over))


def find_route(
    entries: Sequence[PolicyEntry],
    entry: PolicyEntry,
    query: Query,
    facts: Mapping[str, TransportFacts],
    local_offers: Mapping[str, int],
    remote_offers: Mapping[str, int],
    unreachable: Mapping[str, str],
) -> Route | None:
    """How a request that no transport carries alone gets through host memory, or None.

    The way to the peer is chosen by the request's own `entry`. The one between host memory here and the local
    buffer is a request within this process, with the intent STAGING_INTERNAL, that the policy's entries match
    like any other. Whether the peer can copy it knows itself. As little is staged as will do.
    """
    here, there = memory_kind(query.local_memory), memory_kind(query.remote_memory)
    host = {
        name: fact.number
        for name, fact in facts.items()
        if fact.capabilities is not None and fact.capabilities.touches(MemoryKind.DRAM)
    }
    inside = replace(
        query,
        segment_type="memory",
        same_machine=True,
        remote_memory=HOST_MEMORY,
        size=1,
        intent=Intent.STAGING_INTERNAL,
        policy_name=None,
    )
    copies: tuple[str, ...] = ()
    if here is not MemoryKind.DRAM:
        copies = select(entries, inside, facts, local_offers, host, {}).candidates
    may_here = bool(copies)
    may_there = there is MemoryKind.GPU and _may_copy(there, facts, remote_offers)
    for at_here, at_peer in ((True, False), (False, True), (True, True)):
        if (at_here and not may_here) or (at_peer and not may_there):
            continue
        onward = replace(
            query,
            local_memory=HOST_MEMORY if at_here else query.local_memory,
            remote_memory=HOST_MEMORY if at_peer else query.remote_memory,
            size=1,
            policy_name=entry.name,
        )
        offers = host if at_here else local_offers, host if at_peer else remote_offers
        carriers = select(entries, onward, facts, *offers, unreachable).candidates
        if carriers:
            return Route(copies if at_here else (), carriers, at_peer)
    return None


def _may_copy(
    kind: MemoryKind, facts: Mapping[str, TransportFacts], offers: Mapping[str, int]
) -> bool:
    """Whether one of those that offer a peer's buffer may copy between it and host memory there. One that is
    not known here may."""
    known = [facts[name].capabilities if name in facts else None for name in offers]
    return any(able is None or able.moves(kind, MemoryKind.DRAM) for able in known)


def _matches(entry: PolicyEntry, query: Query) -> bool:
    return (
        entry.segment_type in (None, query.segment_type)
        and entry.same_machine in (None, query.same_machine)
        and (entry.local_memory is None or location_matches(entry.local_memory, query.local_memory))
        and (
            entry.remote_memory is None
            or location_matches(entry.remote_memory, query.remote_memory)
        )
        and entry.min_size <= query.size
        and (entry.max_size is None or query.size <= entry.max_size)
        and entry.priority in (None, query.priority)
        and entry.intent in (None, query.intent)
    )


def _objection(
    entry: PolicyEntry,
    query: Query,
    name: str,
    facts: TransportFacts | None,
    local_offers: Mapping[str, int],
    remote_offers: Mapping[str, int],
) -> str:
    """The first reason why a transport is no candidate, or the empty string."""
    if facts is None:
        return "is not enabled in this engine"
    if not facts.available:
        return facts.reason or "is not available"
    return (
        _incapable(entry, query, facts.capabilities or Capabilities())
        or _not_offered(
            facts.number, local_offers.get(name), "the local buffer is not usable by it"
        )
        or _not_offered(
            facts.number, remote_offers.get(name), "the peer's buffer is not usable by it"
        )
    )


def _incapable(entry: PolicyEntry, query: Query, can: Capabilities) -> str:
    local, remote = memory_kind(query.local_memory), memory_kind(query.remote_memory)
    if not can.moves(local, remote):
        return f"cannot move between {local} here and {remote} at the peer"
    if can.reach < (Reach.PROCESS if query.same_machine else Reach.NETWORK):
        return "reaches nobody" if can.reach == Reach.NONE else "does not reach another machine"
    if can.largest_request is not None and query.size > can.largest_request:
        return f"the request is larger than its largest, {can.largest_request:,} bytes"
    if entry.devices and not can.device_choice:
        return f"cannot be told to use the devices {', '.join(entry.devices)}"
    if entry.qp_pool is not None and not can.qp_pools:
        return f"has no queue-pair pools, and the entry asks for {entry.qp_pool!r}"
    return ""


def _not_offered(number: int, offered: int | None, missing: str) -> str:
    if offered is None:
        return missing
    if offered != number:
        return f"another transport has this name at the other side: number {offered}, here {number}"
    return ""
