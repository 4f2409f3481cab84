"""One hierarchy of errors under `TentError`. A message says what was asked, what was found, what to do."""

from __future__ import annotations

from collections.abc import Sequence


class TentError(Exception):
    """Everything that TENT raises on purpose."""


class ConfigError(TentError):
    """The configuration has mistakes; `mistakes` holds them all, one text each."""

    def __init__(self, mistakes: Sequence[str], source: str = "configuration") -> None:
        self.mistakes = tuple(mistakes)
        self.source = source
        noun = "mistake" if len(self.mistakes) == 1 else "mistakes"
        super().__init__("\n".join([f"{source}: {len(self.mistakes)} {noun}", *self.mistakes]))


class PluginError(TentError):
    """A transport package clashes with another, is missing, or does not fit this version."""


class TransportUnavailable(TentError):
    """A transport cannot run here at all; the message is the reason that `tent plugins` shows."""


class UsageError(TentError):
    """A mistake of the caller: never retried, and nothing was moved."""


class ClosedError(UsageError):
    """The engine, segment, batch or buffer was closed, or belongs to the parent of a forked child."""


class RangeError(UsageError):
    """An address range that lies in no registered buffer, is empty, or overflows."""


class PermissionDenied(UsageError):
    """The buffer's permission forbids what was asked."""


class MemoryUnsupported(UsageError):
    """Memory that no enabled transport can move."""


class UnknownSegment(TentError):
    """No engine answers under this segment name."""


class PeerRefused(TentError):
    """The engine at a segment name answered, and refused; the message is its reason."""


class StaleHandle(UsageError):
    """A handle or prepared transfer of a buffer, segment or incarnation that is gone."""


class BufferRevoked(StaleHandle):
    """The owner is withdrawing the buffer: it refuses new requests."""


class RevocationTimeout(TentError):
    """Peers may still touch a buffer that is being unregistered; `holders` names them.

    Call `unregister` again to go on waiting.
    """

    def __init__(self, message: str, holders: Sequence[str]) -> None:
        self.holders = tuple(holders)
        super().__init__(message)


class TransportError(TentError):
    """A transport could not carry something out. Another candidate may be tried."""


class Unreachable(TransportError):
    """A transport cannot reach a peer at all, so it is no candidate for it; the message says why."""


class PeerDeparted(TransportError):
    """The peer is gone; the message names it and the reason. No candidate can reach it."""


class TransferCanceled(TentError):
    """The application cancelled it."""


class DeadlinePassed(TransportError):
    """It was not done by its deadline."""


class OutcomeUnknown(TransportError):
    """A write failed in such a way that it may still go on: what it was to write to is in doubt."""


class NotificationFailed(TentError):
    """All data of a batch has arrived, but the peer's engine did not acknowledge the notification about it.

    Whether that arrives is unknown; the message says why.
    """


class TransferFailed(TentError):
    """A task ended without moving every byte; the message lists each attempt with its cause."""


class WaitTimeout(TentError, TimeoutError):
    """What was waited for did not happen in time. The work itself goes on."""
