"""The module's interface: `MPComm`, and `StandIn`, which is the module and what a test needs beside it."""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from tent_mock.mpcomm import responder, system
from tent_mock.mpcomm.regions import Connection, Keys, Regions

__version__ = "1.4.0+tent.stand.in"

INVALID_TRANSFER_HANDLE = 0
DEFAULT_PORT = 13579
ON_THE_PATH = Path(__file__).parent / "path"
"""A directory with a module `mpcomm` that is this one."""

MOVES = "TENT_MPCOMM_STAND_IN_MOVES"
"""The environment's word for `StandIn(moves=...)` where nobody can pass it: 0 moves nothing."""

_ANSWER_S = 10.0


class Code(enum.IntEnum):
    """What calls answer."""

    OK = 0
    DEVICE = -1
    CONTEXT = -2
    MEMORY = -3
    CONNECTION = -4
    TRANSFER = -5
    TIMEOUT = -6
    INVALID_ARGUMENT = -7
    INVALID_HANDLE = -8
    PENDING = -9


class StandIn:
    """What the module `mpcomm` has, and levers for tests. Thread-safe.

    Without `moves` a transfer has succeeded as soon as it is submitted, and no byte moves. `calls` counts
    calls by name over all instances, `released` releases by handle; `leaked` is how many connections were
    replaced.
    """

    INVALID_TRANSFER_HANDLE = INVALID_TRANSFER_HANDLE

    def __init__(self, *, moves: bool = True, version: str | None = __version__) -> None:
        if version is not None:
            self.__version__ = version
        self.moves = moves
        self.calls: Counter[str] = Counter()
        self.released: Counter[int] = Counter()
        self.leaked = 0
        self.instances: list[_MPComm] = []
        self._lock = threading.Condition()
        self._open = True
        self._planned: dict[str, deque[int]] = {}
        self._handles = itertools.count(1)

    def MPComm(self) -> _MPComm:
        """A new instance, as the class of that name makes one."""
        made = MPComm(self)
        self.instances.append(made)
        return made

    def hold(self) -> None:
        """Transfers that are submitted from now on stay under way until `let_go`."""
        with self._lock:
            self._open = False

    def let_go(self) -> None:
        """What was held goes on."""
        with self._lock:
            self._open = True
            self._lock.notify_all()

    def plan(self, call: str, *answers: int) -> None:
        """The next calls of that name do nothing and answer these.

        `transfer` means what becomes of the transfers submitted next: a code, or, above 0, how many of its
        bytes it moves. 0 lets one be.
        """
        with self._lock:
            self._planned.setdefault(call, deque()).extend(answers)

    def _planned_for(self, call: str) -> int:
        with self._lock:
            waiting = self._planned.get(call)
            return waiting.popleft() if waiting else 0

    def _pass(self, instance: _MPComm) -> None:
        """Wait while transfers are held, until the instance shuts down."""
        with self._lock:
            self._lock.wait_for(lambda: self._open or instance._ended)

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    @property
    def _held(self) -> bool:
        return not self._open


class _Transfer:
    __slots__ = (
        "bytes",
        "code",
        "connection",
        "done",
        "length",
        "local",
        "remote",
        "taken",
        "writes",
    )

    def __init__(
        self, connection: Connection, local: int, remote: int, length: int, writes: bool
    ) -> None:
        self.connection = connection
        self.local = local
        self.remote = remote
        self.length = length
        self.writes = writes
        self.code = int(Code.PENDING)
        self.bytes = 0
        self.taken = False
        self.done = False


class MPComm:
    """One instance of the library. The environment is read here; calls answer 0 or a negative `Code`."""

    def __init__(self, stand_in: StandIn | None = None) -> None:
        self._stand_in = stand_in if stand_in is not None else _THE_MODULE
        self.environment = {k: v for k, v in os.environ.items() if k.startswith("MPCOMM_")}
        """What it would have been tuned by."""
        self._port = int(self.environment.get("MPCOMM_TCP_PORT", DEFAULT_PORT))
        self._moves = self._stand_in.moves
        self._host_id = ""
        self._devices = ""
        self._memory = Regions()
        self._published: dict[int, dict[str, Any]] = {}
        self._connections: dict[str, Connection] = {}
        self._leaked: list[Connection] = []
        self._transfers: dict[int, _Transfer] = {}
        self._jobs: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._order_lock = threading.Lock()
        self._orders: socket.socket | None = None
        self._keys: Keys | None = None

    # ---------------------------------------------------------------- its life

    def init(self, local_host_id: str, device_names: str = "", tcp_port: int = 0) -> int:
        """Listen on all interfaces. A port that is taken is an error, and 0 is the default port."""
        if answer := self._enter("init"):
            return answer
        if not local_host_id or self._orders is not None:
            return Code.INVALID_ARGUMENT
        self._port = tcp_port or self._port
        self._host_id, self._devices = local_host_id, device_names
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("0.0.0.0", self._port))
                listener.listen(128)
            except OSError:
                return Code.CONTEXT
            self._orders, theirs = socket.socketpair()
            opened.enter_context(theirs)
            fds = (listener.fileno(), theirs.fileno())
            subprocess.run(  # which leaves a process behind that lives until `_orders` is closed
                [sys.executable, "-I", "-S", responder.__file__, *map(str, fds), str(os.getpid())],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                timeout=_ANSWER_S,
                check=True,
            )
        system.let_others_copy()
        self._orders.settimeout(_ANSWER_S)
        self._keys = Keys.make()
        who = {
            "pid": os.getpid(),
            "started": system.start_time(os.getpid()),
            "boot": system.boot_id(),
            "keys": self._keys.fd,
        }
        self._order({"connect": who, "query": {"buffers": []}})
        return Code.OK

    def shutdown(self) -> int:
        """End everything: no transfer touches memory afterwards."""
        if answer := self._enter("shutdown"):
            return answer
        self._ended = True
        self._stand_in._wake()
        if self._worker is not None:
            self._jobs.put(None)
            self._worker.join(_ANSWER_S)
        if self._orders is not None:
            with self._order_lock, contextlib.suppress(OSError):
                self._orders.shutdown(socket.SHUT_WR)
                self._orders.recv(1)  # nothing: the port is free
            self._orders.close()
        for connection in (*self._connections.values(), *self._leaked):
            connection.close()
        self._connections.clear()
        self._leaked.clear()
        if self._keys is not None:
            self._keys.close()
            self._keys = None
        return Code.OK

    def start_accept_thread(self) -> int:
        """Answer at the port. Until then whoever connects waits."""
        return self._enter("start_accept_thread") or self._order({"accept": True})

    def stop_accept_thread(self) -> int:
        """Answer no more."""
        return self._enter("stop_accept_thread") or self._order({"accept": False})

    def get_tcp_port(self) -> int:
        """The port."""
        return self._port

    def get_active_devices(self) -> list[str]:
        """The devices that it was told to use; it has none of its own."""
        return [name for name in self._devices.split(",") if name]

    # ---------------------------------------------------------------- memory

    def register_memory(self, addr: int, length: int) -> int:
        """Pin a range, under a key that nobody had before. An address is registered once."""
        if answer := self._enter("register_memory"):
            return answer
        if self._keys is None:
            return Code.CONTEXT
        if length <= 0 or addr in self._memory:
            return Code.MEMORY
        self._memory.add(addr, length, self._keys.new())
        return Code.OK

    def unregister_memory(self, addr: int) -> int:
        """The key is dead afterwards, whoever knows it."""
        if answer := self._enter("unregister_memory"):
            return answer
        key = self._memory.remove(addr)
        if key is None or self._keys is None:
            return Code.MEMORY
        self._keys.kill(key)
        return Code.OK

    def publish_buffer(self, addr: int, length: int, numa_node: int = -1) -> int:
        """Tell whoever asks of memory that is registered."""
        if answer := self._enter("publish_buffer"):
            return answer
        key = self._memory.find(addr, length)
        if key is None:
            return Code.MEMORY
        self._published[addr] = {
            "addr": addr,
            "length": length,
            "numa_node": numa_node,
            "rkeys": [key],
        }
        return self._tell()

    def unpublish_buffer(self, addr: int) -> int:
        """Tell nobody any more."""
        if answer := self._enter("unpublish_buffer"):
            return answer
        if self._published.pop(addr, None) is None:
            return Code.MEMORY
        return self._tell()

    def _tell(self) -> int:
        return self._order({"query": {"buffers": list(self._published.values())}})

    # ---------------------------------------------------------------- peers

    def connect(self, host_id: str, tcp_addr: str, tcp_port: int) -> int:
        """Make, or replace, the record of a host. Blocks for as long as it takes, with the lock held."""
        if answer := self._enter("connect"):
            return answer
        try:
            who = system.ask(tcp_addr, tcp_port, {"ask": "connect", "from": self._host_id})
            if who["boot"] != system.boot_id():
                return Code.CONNECTION
            process = system.Process(who["pid"], who["started"])
            made = Connection(process, Keys.of(who["pid"], who["keys"]))
        except (OSError, ValueError, KeyError, TypeError):
            return Code.CONNECTION
        old = self._connections.get(host_id)
        self._connections[host_id] = made
        if old is not None:
            self._leaked.append(old)
            self._stand_in.leaked += 1
        return Code.OK

    def query_remote_buffers(self, host_id: str, tcp_addr: str, tcp_port: int) -> dict[str, Any]:
        """Replace all keys of a host by those that it publishes now; empty on failure."""
        if self._enter("query_remote_buffers"):
            return {}
        connection = self._connections.get(host_id)
        if connection is None:
            return {}
        try:
            reply: dict[str, Any] = system.ask(tcp_addr, tcp_port, {"ask": "query"})
            known = Regions()
            for buffer in reply["buffers"]:
                known.add(buffer["addr"], buffer["length"], buffer["rkeys"][0])
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return {}
        connection.known = known
        return reply

    # ---------------------------------------------------------------- transfers

    def put_async(self, local: int, host_id: str, remote: int, length: int) -> int:
        """Submit a write; 0 if that fails."""
        return self._submit("put_async", local, host_id, remote, length, True)

    def get_async(self, local: int, host_id: str, remote: int, length: int) -> int:
        """Submit a read; 0 if that fails."""
        return self._submit("get_async", local, host_id, remote, length, False)

    def scatter_async(
        self, local: int, hosts: list[str], remotes: list[int], lengths: list[int]
    ) -> int:
        """Writes to several hosts as one transfer; here to one."""
        (host,), (remote,), (length,) = hosts, remotes, lengths
        return self._submit("scatter_async", local, host, remote, length, True)

    def gather_async(
        self, local: int, hosts: list[str], remotes: list[int], lengths: list[int]
    ) -> int:
        """Reads from several hosts as one transfer; here from one."""
        (host,), (remote,), (length,) = hosts, remotes, lengths
        return self._submit("gather_async", local, host, remote, length, False)

    def is_transfer_complete(self, handle: int) -> bool:
        """Whether it has ended, well or not. What was released has."""
        transfer = self._transfers.get(handle)
        return transfer is None or transfer.done

    def wait_transfer(self, handle: int, timeout_ms: int = -1) -> int:
        """Block until it has ended, with the lock held: nothing else of Python runs meanwhile."""
        self._stand_in.calls["wait_transfer"] += 1
        transfer = self._transfers.get(handle)
        if transfer is None:
            return Code.INVALID_HANDLE
        until = time.monotonic() + (timeout_ms / 1e3 if timeout_ms >= 0 else 1e9)
        while not transfer.done:
            if time.monotonic() >= until:
                return Code.TIMEOUT
            if not self._stand_in._held:
                # The worker is a Python thread here, which can hardly run now; the library's can.
                self._carry(transfer)
            system.sleep_with_the_lock(1e-4)
        return transfer.code

    def get_transfer_result(self, handle: int) -> dict[str, Any]:
        """How it ended; `bytes_transferred` are those that were posted."""
        transfer = self._transfers.get(handle)
        if transfer is None:
            return {"error_code": Code.INVALID_HANDLE, "bytes_transferred": 0, "elapsed_ms": 0.0}
        return {
            "error_code": transfer.code,
            "bytes_transferred": transfer.bytes,
            "elapsed_ms": 0.0,
        }

    def release_transfer(self, handle: int) -> int:
        """Forget a transfer; one that is under way goes on."""
        self._stand_in.released[handle] += 1
        gone = self._transfers.pop(handle, None)
        return Code.INVALID_HANDLE if gone is None else Code.OK

    @property
    def transfers(self) -> int:
        """How many were not released yet."""
        return len(self._transfers)

    # ---------------------------------------------------------------- the rest is private

    def _submit(
        self, call: str, local: int, host_id: str, remote: int, length: int, writes: bool
    ) -> int:
        stand_in = self._stand_in
        stand_in.calls[call] += 1
        connection = self._connections.get(host_id)
        if (
            connection is None
            or self._ended
            or self._memory.find(local, length) is None
            or (stand_in._planned and stand_in._planned_for(call))
        ):
            return INVALID_TRANSFER_HANDLE
        handle = next(stand_in._handles)
        transfer = self._transfers[handle] = _Transfer(connection, local, remote, length, writes)
        if stand_in._planned and (planned := stand_in._planned_for("transfer")):
            transfer.code, transfer.bytes = planned, length
            if planned > 0:
                transfer.code = Code.PENDING
                transfer.length, transfer.bytes = planned, 0
        if self._moves or stand_in._held:
            self._start()
            self._jobs.put(transfer)
        elif connection.known.find(remote, length) is None:
            self._end(transfer, Code.TRANSFER)
        else:
            self._end(transfer, Code.OK)
        return handle

    def _start(self) -> None:
        if self._worker is None:
            with self._lock:
                if self._worker is None:
                    self._worker = threading.Thread(
                        target=self._work, name="mpcomm-stand-in", daemon=True
                    )
                    self._worker.start()

    def _work(self) -> None:
        while (transfer := self._jobs.get()) is not None and not self._ended:
            if self._stand_in._held:
                self._stand_in._pass(self)
            if not self._ended:
                self._carry(transfer)

    def _carry(self, transfer: _Transfer) -> None:
        with self._lock:
            if transfer.taken:
                return
            transfer.taken = True
        if transfer.code != Code.PENDING:
            self._end(transfer, transfer.code)
            return
        connection = transfer.connection
        key = connection.known.find(transfer.remote, transfer.length)
        moved = key is not None and connection.keys.alive(key)
        if moved and self._moves:
            moved = connection.process.copy(
                transfer.local, transfer.remote, transfer.length, writes=transfer.writes
            )
        self._end(transfer, Code.OK if moved else Code.TRANSFER)

    def _end(self, transfer: _Transfer, code: int) -> None:
        transfer.code = int(code)
        transfer.bytes = transfer.length
        transfer.done = True

    def _enter(self, call: str) -> int:
        """Count a call, and answer what was planned for it."""
        self._stand_in.calls[call] += 1
        return self._stand_in._planned_for(call)

    def _order(self, order: dict[str, object]) -> int:
        with self._order_lock:
            if self._orders is None:
                return Code.CONTEXT
            try:
                self._orders.sendall(json.dumps(order).encode() + b"\n")
                return Code.OK if self._orders.recv(1) == b"\n" else Code.CONTEXT
            except OSError:
                return Code.CONTEXT


_MPComm = MPComm  # the class, where a method of that name is in the way
_THE_MODULE = StandIn(moves=os.environ.get(MOVES) != "0")
