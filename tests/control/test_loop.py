"""One control thread per process, that starts, stops, refuses to work in a forked child, and is quiet."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from control_harness import Side, side

from tent_core import host
from tent_core.control import loop as loops
from tent_core.control.processes import ProcessWatcher
from tent_core.descriptor import HostIdentity
from tent_core.errors import ClosedError, UsageError, WaitTimeout
from tent_core.testing import wait_until
from tent_core.testing.leaks import nothing_stays_behind


class Log:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def error(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def loop(log: Log) -> Iterator[loops.ControlLoop]:
    # Not the shared one: what other tests of this process do must not show here.
    it = loops.ControlLoop(log)
    yield it
    it.stop()


def control_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "tent-control"]


def test_all_engines_of_a_process_share_one_thread_and_the_last_one_ends_it() -> None:
    with side(), side(), side():
        assert len(control_threads()) == 1
    assert control_threads() == []


def test_engines_that_come_and_go_leave_nothing() -> None:
    def round_trip() -> None:
        with side() as one, side() as two:
            one.connect(two.name).notify("n", b"", 5)

    for _ in range(5):  # the threads that gRPC keeps come one by one
        round_trip()
    with nothing_stays_behind():
        for _ in range(10):
            round_trip()


def test_work_is_carried_out_on_the_control_thread(loop: loops.ControlLoop) -> None:
    async def where() -> tuple[str, bool]:
        return threading.current_thread().name, loop.here

    assert loop.run(where(), 5) == ("tent-control", True)
    assert not loop.here


def test_what_work_raises_reaches_the_caller(loop: loops.ControlLoop) -> None:
    async def fail() -> None:
        raise WaitTimeout("its own")

    with pytest.raises(WaitTimeout, match="its own"):
        loop.run(fail(), 5)


def test_a_control_thread_that_does_not_answer_is_an_error_after_the_deadline(
    loop: loops.ControlLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "_MARGIN_S", 0.1)
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.set()

    with pytest.raises(WaitTimeout, match="did not answer within"):
        loop.run(hang(), 0.05)
    assert cancelled.wait(5)


def test_a_call_that_waits_is_refused_on_the_control_thread(loop: loops.ControlLoop) -> None:
    async def nested() -> None:
        loop.run(asyncio.sleep(0), 1)

    with pytest.raises(UsageError, match="use another thread"):
        loop.run(nested(), 5)


def test_a_task_that_fails_is_logged(loop: loops.ControlLoop, log: Log) -> None:
    async def fail() -> None:
        raise KeyError("lost")

    loop.call(lambda: loop.spawn(fail(), "some task"))
    wait_until(lambda: log.events)
    assert log.events[0][0] == "control_task_failed"
    assert log.events[0][1]["task"] == "some task"


def test_an_error_of_a_callback_is_logged_and_the_pollers_empty_reads_are_not(
    loop: loops.ControlLoop, log: Log
) -> None:
    def fail(error: Exception) -> None:
        raise error

    loop.call(fail, BlockingIOError(11, "nothing there"))
    loop.call(fail, KeyError("lost"))
    wait_until(lambda: log.events)
    assert [event for event, _ in log.events] == ["control_loop_error"]


def test_work_after_the_end_is_dropped_and_stopping_again_changes_nothing(log: Log) -> None:
    it = loops.ControlLoop(log)

    async def forever() -> None:
        await asyncio.sleep(1000)

    it.call(lambda: it.spawn(forever(), "forever"))
    it.stop()
    it.stop()
    it.call(log.events.append)
    assert log.events == []


def test_the_limit_of_descriptors_is_raised_to_the_hard_one() -> None:
    source = (
        "import resource as r; hard = r.getrlimit(r.RLIMIT_NOFILE)[1];"
        "r.setrlimit(r.RLIMIT_NOFILE, (100, hard));"
        "from tent_core.control import loop;"
        "assert loop.raise_descriptor_limit() == loop.raise_descriptor_limit() == hard;"
        "assert r.getrlimit(r.RLIMIT_NOFILE)[0] == hard"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_a_limit_that_cannot_be_raised_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: int, limits: tuple[int, int]) -> None:
        raise ValueError

    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert loops.raise_descriptor_limit() == 64


@pytest.mark.parametrize(
    ("limit", "most", "waiting"),
    [(1_000_000, 4096, 256), (256, 56, 24), (64, 1, 1), (10, 1, 1)],
)
def test_sessions_are_kept_below_the_limit_of_descriptors(
    limit: int, most: int, waiting: int
) -> None:
    found = loops.capacity(limit, 4096)
    assert (found.peers, found.waiting) == (most, waiting)
    assert found.limit == ("peers.max" if most == 4096 else f"the limit of {limit} descriptors")


FORK = """
import os, sys, threading
sys.path.insert(0, {folder!r})
from control_harness import Side, Listener
from tent_core.errors import ClosedError
parent, other = Side(), Side()
connection = parent.connect(other.name)
pid = os.fork()
if pid == 0:
    uses = [
        Side,
        lambda: parent.connect(other.name),
        lambda: connection.notify("n", b"", 1),
        lambda: connection.close(),
        lambda: parent.plane.sessions(),
        lambda: parent.plane.wait_acknowledged(1, lambda _: True, 1),
    ]
    for use in uses:
        try:
            use()
        except ClosedError as error:
            assert "spawn" in str(error), error
        else:
            os._exit(1)
    connection.acknowledge(3)
    parent.stop()
    {end}
assert os.waitpid(pid, 0)[1] == 0
connection.notify("n", b"", 5)
assert other.handler.notes[0].name == "n"
parent.stop()
other.stop()
print("fine")
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_forked_child_is_told_to_spawn_at_once_and_its_parent_goes_on(end: str) -> None:
    source = FORK.format(folder=os.path.dirname(__file__), end=end)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


FORKS = """
import os, sys, time
sys.path.insert(0, {folder!r})
from control_harness import Side
one, other = Side(), Side()
connection = one.connect(other.name)
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        time.sleep(0.03)
        os._exit(0)
    connection.notify("n", b"", 5)
    assert os.waitpid(pid, 0)[1] == 0
one.stop()
other.stop()
"""


def test_children_forked_from_a_process_with_engines_live_on() -> None:
    source = FORKS.format(folder=os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_forked_before_any_engine_may_start_one() -> None:
    source = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from control_harness import Side
pid = os.fork()
if pid == 0:
    Side().stop()
    os._exit(0)
sys.exit(os.waitpid(pid, 0)[1])
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=50)


QUIET = """
import os, sys
sys.path.insert(0, {folder!r})
from control_harness import *
assert "GRPC_VERBOSITY" not in os.environ
one, two = Side(), Side()
one.connect(two.name)
try:
    Side(Control(listen=two.name))
except Exception:
    pass
try:
    one.connect("127.0.0.1:1")
except Exception:
    pass
{end}
"""


@pytest.mark.parametrize("end", ["one.stop(); two.stop()", "", "two.stop()"])
def test_a_process_is_quiet_and_ends_also_when_nothing_was_closed(end: str) -> None:
    source = QUIET.format(folder=os.path.dirname(__file__), end=end)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_application_that_wants_grpc_to_speak_is_let_alone() -> None:
    source = "import os; import tent_core.control.options; print(os.environ['GRPC_VERBOSITY'])"
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "GRPC_VERBOSITY": "info"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout == "info\n"


class TestProcessWatcher:
    """The end of processes, on a loop of the test's own."""

    async def test_the_end_of_a_process_is_told_to_all_who_watch_it(self) -> None:
        watcher = ProcessWatcher(asyncio.get_running_loop())
        with child() as (process, identity):
            first, second, third = asyncio.Event(), asyncio.Event(), asyncio.Event()
            watcher.watch(identity, first.set)
            watcher.watch(identity, second.set)
            watcher.watch(identity, third.set)()
            process.kill()
            await asyncio.wait_for(asyncio.gather(first.wait(), second.wait()), 10)
            assert not third.is_set()
        watcher.close()

    async def test_one_that_has_ended_already_is_told_soon(self) -> None:
        watcher = ProcessWatcher(asyncio.get_running_loop())
        with child() as (process, identity):
            process.kill()
            process.wait(10)
            ended = asyncio.Event()
            watcher.watch(identity, ended.set)
            assert not ended.is_set()
            await asyncio.wait_for(ended.wait(), 10)

    @pytest.mark.parametrize(
        "error", [PermissionError(1, "sandbox"), OSError(24, "no descriptor left")]
    )
    async def test_one_that_has_no_descriptor_is_looked_at_now_and_then(
        self, monkeypatch: pytest.MonkeyPatch, error: OSError
    ) -> None:
        def refuse(pid: int) -> int:
            raise error

        monkeypatch.setattr(os, "pidfd_open", refuse)
        watcher = ProcessWatcher(asyncio.get_running_loop())
        with child() as (process, identity):
            ended = asyncio.Event()
            watcher.watch(identity, ended.set)
            process.kill()
            await asyncio.wait_for(ended.wait(), 10)
        watcher.close()

    async def test_watching_leaves_no_descriptor(self) -> None:
        watcher = ProcessWatcher(asyncio.get_running_loop())
        with child() as (_, identity):
            before = len(os.listdir("/proc/self/fd"))
            end = watcher.watch(identity, lambda: None)
            watcher.watch(identity, lambda: None)
            assert len(os.listdir("/proc/self/fd")) == before + 1
            end()
            end()
            watcher.close()
            assert len(os.listdir("/proc/self/fd")) == before


class child:
    """A process that does nothing, and its identity."""

    def __enter__(self) -> tuple[subprocess.Popen[bytes], HostIdentity]:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        me = host.identify()
        stat = host._stat(str(self.process.pid))
        identity = HostIdentity(me.boot_id, me.pid_namespace, self.process.pid, stat.start_time)
        return self.process, identity

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


def test_importing_the_contract_imports_no_grpc() -> None:
    source = "import sys, tent_core.control.contract; assert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=50)


def test_who_waits_when_the_loop_ends_is_told_so(log: Log) -> None:
    it = loops.ControlLoop(log)
    started = threading.Event()

    async def wait() -> None:
        started.set()
        await asyncio.sleep(1000)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(it.run, wait(), 1000)
        assert started.wait(10)
        it.stop()
        with pytest.raises(ClosedError, match="ended meanwhile"):
            waiting.result(10)
    with pytest.raises(ClosedError, match="has ended"):
        it.run(wait(), 1)


def test_a_stopped_plane_is_closed_for_every_use() -> None:
    it = Side()
    started = time.monotonic()
    it.stop()
    it.stop()
    assert time.monotonic() - started < 10
    for use in (it.plane.sessions, lambda: it.connect("127.0.0.1:1"), lambda: it.plane.bind(1)):
        with pytest.raises(ClosedError):
            use()
