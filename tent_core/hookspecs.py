"""Every hook of the pluggy project `tent`, with one docstring each. See docs/hooks.md for examples.

Hooks are for discovery and lifecycle. None runs per request on the data path unless a package
implements `tent_select`. They are called on one queue per package, never with a lock of the engine held;
one that raises is logged, one that blocks is marked stuck and harms only its own package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tent_core.descriptor import PeerKey, SegmentDescriptor
    from tent_core.doctor.finding import Finding
    from tent_core.topology import Topology
    from tent_core.transport import LocalBuffer, TransportDeclaration

PROJECT = "tent"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def tent_transport() -> TransportDeclaration:
    """Declare this package's transport: name, number, factory, settings model, capabilities."""
    raise NotImplementedError


@hookspec
def tent_doctor(topology: Topology, settings: Any) -> Sequence[Finding]:
    """Look at this machine for what the package's transport needs, and change nothing: for `tent doctor`.

    `settings` is an instance of the declared model. No engine calls it. What is wrong comes with its remedy.
    """
    raise NotImplementedError


@hookspec
def tent_engine_started(engine: Any) -> None:
    """An engine has started: its transports run and it answers peers."""


@hookspec
def tent_engine_stopping(engine: Any) -> None:
    """An engine is about to stop; its transports still run."""


@hookspec
def tent_segment_opened(engine: Any, segment: SegmentDescriptor) -> None:
    """The first handle of a peer's segment was opened here."""


@hookspec
def tent_segment_refreshed(
    engine: Any, segment: SegmentDescriptor, added: tuple[int, ...], removed: tuple[int, ...]
) -> None:
    """A peer published a new snapshot: which buffer ids appeared and which went."""


@hookspec
def tent_segment_closed(engine: Any, peer: PeerKey) -> None:
    """The last handle of a peer's segment was closed here."""


@hookspec
def tent_peer_departed(engine: Any, peer: PeerKey, reason: str) -> None:
    """A peer is gone, as opener or as opened; fires once per peer, with the reason."""


@hookspec
def tent_buffer_registered(engine: Any, buffer: LocalBuffer) -> None:
    """A buffer of this engine was registered and published."""


@hookspec
def tent_buffer_unregistered(engine: Any, buffer: LocalBuffer) -> None:
    """A buffer of this engine was unregistered: no peer can touch it any more."""


@hookspec
def tent_transfers_finished(
    engine: Any,
    peer: PeerKey,
    transport: str,
    tasks: int,
    bytes_moved: int,
    failed: int,
    seconds: float,
) -> None:
    """A sub-batch has ended on one transport, for observers: how many tasks, bytes, failures, and how long
    this attempt took."""


@hookspec(firstresult=True)
def tent_select(
    engine: Any, peer: PeerKey, candidates: tuple[str, ...], entry: str, total: int, requests: int
) -> tuple[str, ...] | None:
    """Overrule selection for a sub-batch: answer another order or a subset of `candidates`, or None."""
