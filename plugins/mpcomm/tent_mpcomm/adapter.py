"""The vendor's library behind a seam: the only module that imports `mpcomm`.

It knows nothing of requests, segments or peers. The bindings do not release the interpreter lock: a call
that blocks stops every Python thread, so nothing here waits for a transfer, and whoever connects or queries
has made sure first that somebody answers. What numbers mean is from the library's header.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from tent_core.errors import TransportError

OLDEST = (1, 4)
"""The oldest version that is supported, and the only major one."""

REMEDY = "install the wheel of UCL-MPComm, 1.4 or newer; it is not on PyPI"

CODES: Mapping[int, str] = {
    -1: "device",
    -2: "context",
    -3: "memory",
    -4: "connection",
    -5: "transfer",
    -6: "timeout",
    -7: "invalid argument",
    -8: "invalid handle",
    -9: "pending",
}
UNSETTLED = frozenset({-6, -9})
"""Codes that do not say that the library has let go of a transfer."""


def code_text(code: int) -> str:
    """A code in words: `-5 (transfer)`."""
    return f"{code} ({CODES.get(code, 'unknown')})"


class NativeError(TransportError):
    """A call of the library failed; `code` is what it answered."""

    def __init__(self, doing: str, code: int) -> None:
        self.code = code
        super().__init__(f"MPComm cannot {doing}: it answers {code_text(code)}")


class Range(NamedTuple):
    """Memory of a peer whose key the library holds: address and length in bytes."""

    address: int
    length: int


class Comm(Protocol):
    """One running instance of the library. Callers serialise all but the calls for transfers."""

    @property
    def port(self) -> int:
        """Of the handshake."""
        ...

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that it uses."""
        ...

    def register(self, address: int, length: int) -> None:
        """Pin memory. Raises NativeError, as all of the following do."""
        ...

    def unregister(self, address: int) -> None: ...

    def publish(self, address: int, length: int, numa_node: int) -> None: ...

    def unpublish(self, address: int) -> None: ...

    def connect(self, host_id: str, host: str, port: int) -> None:
        """Blocks without a deadline. A host id that was connected before loses its connection and keys."""
        ...

    def query(self, host_id: str, host: str, port: int) -> tuple[Range, ...]:
        """Replace all keys of a host by those for what it publishes now."""
        ...

    @property
    def put(self) -> Callable[[int, str, int, int], int]:
        """Submit a write: local address, host id, remote address, length; a handle, 0 for failure."""
        ...

    @property
    def get(self) -> Callable[[int, str, int, int], int]:
        """Submit a read, likewise."""
        ...

    @property
    def ended(self) -> Callable[[int], bool]:
        """Whether a transfer has ended, well or not."""
        ...

    @property
    def result(self) -> Callable[[int], Mapping[str, Any]]:
        """`error_code`, and `bytes_transferred`, which are those that were posted."""
        ...

    @property
    def release(self) -> Callable[[int], object]:
        """Forget a handle; once."""
        ...

    def close(self) -> None:
        """Shut down: afterwards nothing of the library touches memory. Idempotent; raises nothing."""
        ...


class Adapter(Protocol):
    """The library as it is on this machine."""

    @property
    def version(self) -> str:
        """As the module says, or `unknown`."""
        ...

    @property
    def obstacle(self) -> str:
        """Why it cannot be used, with the remedy; "" if it can."""
        ...

    @property
    def warning(self) -> str:
        """What should be said in the log before it is used, or ""."""
        ...

    def make(self, host_id: str, devices: str, port: int) -> Comm:
        """A new instance that listens and answers. Reads the environment. Raises NativeError."""
        ...


class UnavailableAdapter:
    """Where the library is missing, or of a version that is not supported."""

    version = "none"
    warning = ""

    def __init__(self, obstacle: str) -> None:
        self.obstacle = obstacle

    def make(self, host_id: str, devices: str, port: int) -> Comm:
        """Raises TransportError."""
        raise TransportError(self.obstacle)


class ModuleAdapter:
    """The library by a Python module with its interface."""

    obstacle = ""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.version = str(getattr(module, "__version__", "unknown"))
        known = _numbers(self.version) is not None
        self.warning = (
            "" if known else f"its version is {self.version!r}; tested are 1.4 and newer of 1"
        )

    def make(self, host_id: str, devices: str, port: int) -> Comm:
        """A new instance that listens and answers. Raises NativeError."""
        return _ModuleComm(self._module.MPComm(), host_id, devices, port)


def load(find: Callable[[str], Any] = importlib.import_module) -> Adapter:
    """The adapter for this machine. Never raises; nothing is started."""
    try:
        module = find("mpcomm")
    except ModuleNotFoundError as error:
        if error.name != "mpcomm":
            return UnavailableAdapter(f"the module mpcomm cannot be imported: {error}: {REMEDY}")
        return UnavailableAdapter(f"the module mpcomm is not installed: {REMEDY}")
    except (Exception, SystemExit) as error:  # a library that is linked against what is missing
        return UnavailableAdapter(f"the module mpcomm cannot be imported: {error!r}: {REMEDY}")
    adapter = ModuleAdapter(module)
    numbers = _numbers(adapter.version)
    if numbers is not None and (numbers[0] != OLDEST[0] or numbers < OLDEST):
        return UnavailableAdapter(
            f"the module mpcomm has version {adapter.version}, which is not supported: {REMEDY}"
        )
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    if missing:
        return UnavailableAdapter(
            f"the module mpcomm has no {', '.join(missing)}: is it the vendor's? {REMEDY}"
        )
    return adapter


_NEEDED = ("MPComm",)


def _numbers(version: str) -> tuple[int, int] | None:
    found = re.match(r"([0-9]{1,6})\.([0-9]{1,6})(?![0-9])", version)
    return None if found is None else (int(found[1]), int(found[2]))


class _ModuleComm:
    def __init__(self, native: Any, host_id: str, devices: str, port: int) -> None:
        self._native = native
        self._closed = False
        self._answering = False
        self.put: Callable[[int, str, int, int], int]
        self.get: Callable[[int, str, int, int], int]
        if hasattr(native, "put_async") and hasattr(native, "get_async"):
            self.put, self.get = native.put_async, native.get_async
        else:
            self.put, self.get = _of_one(native.scatter_async), _of_one(native.gather_async)
        self.ended: Callable[[int], bool] = native.is_transfer_complete
        self.result: Callable[[int], Mapping[str, Any]] = native.get_transfer_result
        self.release: Callable[[int], object] = native.release_transfer
        try:
            self._do(f"start at port {port}", native.init, host_id, devices, port)
            self._do("accept connections", native.start_accept_thread)
            self._answering = True
        except BaseException:
            self.close()
            raise
        self.port = int(native.get_tcp_port())
        self.devices = tuple(map(str, native.get_active_devices()))

    def _do(self, doing: str, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            code = call(*arguments)
        except Exception as error:
            raise TransportError(f"MPComm cannot {doing}: it raises {error!r}") from error
        # The bindings answer 0; None is what a binding without a return value gives.
        if code not in (0, None):
            raise NativeError(doing, int(code))

    def register(self, address: int, length: int) -> None:
        doing = f"register {length} bytes at {address:#x}"
        self._do(doing, self._native.register_memory, address, length)

    def unregister(self, address: int) -> None:
        self._do(f"unregister memory at {address:#x}", self._native.unregister_memory, address)

    def publish(self, address: int, length: int, numa_node: int) -> None:
        doing = f"publish {length} bytes at {address:#x}"
        self._do(doing, self._native.publish_buffer, address, length, numa_node)

    def unpublish(self, address: int) -> None:
        doing = f"withdraw memory at {address:#x}"
        self._do(doing, self._native.unpublish_buffer, address)

    def connect(self, host_id: str, host: str, port: int) -> None:
        self._do(
            f"connect to {host_id} at {host}:{port}", self._native.connect, host_id, host, port
        )

    def query(self, host_id: str, host: str, port: int) -> tuple[Range, ...]:
        doing = f"query the memory of {host_id} at {host}:{port}"
        try:
            reply = self._native.query_remote_buffers(host_id, host, port)
            if not reply:
                raise TransportError(f"MPComm cannot {doing}: it answers nothing")
            return tuple(Range(int(b["addr"]), int(b["length"])) for b in reply["buffers"])
        except TransportError:
            raise
        except Exception as error:
            raise TransportError(f"MPComm cannot {doing}: {error!r}") from error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for call in ([self._native.stop_accept_thread] if self._answering else []) + [
            self._native.shutdown
        ]:
            try:
                call()
            except Exception:  # it is gone either way
                continue


def _of_one(call: Callable[[int, list[str], list[int], list[int]], int]) -> Any:
    """Builds without put and get have calls for several hosts, which do the same for one."""

    def transfer(local: int, host_id: str, remote: int, length: int) -> int:
        return call(local, [host_id], [remote], [length])

    return transfer
