"""A whole replay on one machine: starts both roles as processes, and follows them to the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tent_core.children import ChildFailed, Children, Event, Link, NobodyLeft
from tent_core.errors import WaitTimeout
from tent_core.replay.decode import Received
from tent_core.replay.errors import Refused, ReplayError
from tent_core.replay.geometry import Geometry
from tent_core.replay.prefill import check_requests
from tent_core.replay.report import Report, Tally
from tent_core.replay.roles import RoleOptions, run_decode, run_prefill
from tent_core.replay.trace import TraceRequest
from tent_core.units import format_size

_START_S = 60.0
_CAUSE_S = 10.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replay is."""

    requests: int
    bytes: int
    seconds: float


def replay(
    options: RoleOptions,
    geometry: Geometry,
    requests: tuple[TraceRequest, ...],
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Report:
    """Replay the requests between two processes made for it. Raises TentError; never waits without a bound.

    A process that fails or dies ends the replay with its error, and both processes are gone afterwards.
    """
    check_requests(requests, geometry, options.pool_bytes)
    check_memory(options, geometry, requests)
    silence = 2 * options.timeout + _START_S
    with Children() as children:
        children.start("decode", _decode, options)
        peer = _await(children, "ready", silence, "the decode process to start").value
        children.start("prefill", _prefill, options, geometry, requests, peer)
        report: Report | None = None
        received: Received | None = None
        while report is None or received is None:
            event = children.next_event(silence, "a request to be replayed")
            match event.kind:
                case "refused":
                    raise _cause(children, event)
                case "progress":
                    progress(event.value)
                case "report":
                    report = event.value
                case "received":
                    received = event.value
        children.join(_END_S)
    if (received.pieces, received.mismatches) != (report.pieces, report.mismatches):
        raise ReplayError(
            f"prefill and decode do not agree: {report.pieces} pieces sent with {report.mismatches} "
            f"mismatches, {received.pieces} received with {received.mismatches}"
        )
    return report


def check_memory(
    options: RoleOptions, geometry: Geometry, requests: tuple[TraceRequest, ...]
) -> None:
    """Raise ReplayError if this machine has not the memory that both pools will come to fill."""
    distinct = len({block for request in requests for block in request.hashes})
    needed = 2 * min(options.pool_bytes, distinct * geometry.block_bytes)
    available = _available_bytes()
    if available is not None and needed > available:
        raise ReplayError(
            f"two pools of {format_size(needed // 2)} need more memory than the {available >> 20} MiB that "
            "this machine has: give a smaller --pool-size, fewer --requests or a smaller --model"
        )


def _available_bytes() -> int | None:
    """MemAvailable of /proc/meminfo, or None where it cannot be read."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(
                int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _cause(children: Children, refused: Event) -> Exception:
    """The error of the other side, which is why this one was refused."""
    try:
        _await(children, "nothing else", _CAUSE_S, "the error of the other process")
    except (NobodyLeft, WaitTimeout):
        return ReplayError(f"{refused.child}: {refused.value}")
    except ChildFailed as error:
        return error
    raise AssertionError("unreachable")


def _await(children: Children, kind: str, timeout: float, what: str) -> Event:
    while True:
        event = children.next_event(timeout, what)
        if event.kind == kind:
            return event


def _decode(link: Link, options: RoleOptions) -> None:
    with _refusals_told(link):
        link.say("received", run_decode(options, lambda name: link.say("ready", name)))


def _prefill(
    link: Link,
    options: RoleOptions,
    geometry: Geometry,
    requests: tuple[TraceRequest, ...],
    peer: str,
) -> None:
    def progress(tally: Tally) -> None:
        link.say("progress", Progress(tally.requests, tally.bytes, tally.seconds))

    with _refusals_told(link):
        link.say("report", run_prefill(options, geometry, requests, peer, progress))


@contextmanager
def _refusals_told(link: Link) -> Iterator[None]:
    """Tell the parent that the other side refused, which is no error of this process."""
    try:
        yield
    except Refused as error:
        link.say("refused", str(error))
