"""The tools that tests of transports and applications stand on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tent_core.testing import holding, wait_until
from tent_core.testing.leaks import nothing_stays_behind
from tent_core.testing.peers import Nursery, PeerError, PeerProcess, thread_states


def test_waiting_answers_the_first_true_value_or_says_what_it_last_saw() -> None:
    answers = iter([0, "", "yes", "never"])
    assert wait_until(lambda: next(answers)) == "yes"
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: the moon; it last was \[\]"):
        wait_until(list, timeout=0.01, what="the moon")


def test_a_descriptor_that_stays_open_is_named(tmp_path: Path) -> None:
    file = tmp_path / "left open"
    with (
        pytest.raises(AssertionError, match=r"descriptors: .*left open"),
        nothing_stays_behind(0.01),
    ):
        descriptor = os.open(file, os.O_CREAT | os.O_RDWR)
    os.close(descriptor)


def test_a_thread_that_goes_on_is_named() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=[30], name="goes on", daemon=True)
    with pytest.raises(AssertionError, match="threads: goes on"), nothing_stays_behind(0.01):
        thread.start()
    end.set()
    thread.join(5)


def test_a_child_process_that_goes_on_is_named() -> None:
    before = holding()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert f"children: {child.pid}" in holding().beyond(before)
    child.communicate(b"\n", timeout=10)


def test_shared_memory_that_stays_mapped_is_named() -> None:
    import mmap

    before = holding()
    descriptor = os.memfd_create("left mapped")
    os.ftruncate(descriptor, 4096)
    mapping = mmap.mmap(descriptor, 4096)
    os.close(descriptor)
    assert any("left mapped" in thing for thing in holding().beyond(before))
    mapping.close()
    assert not any("left mapped" in thing for thing in holding().beyond(before))


def test_what_ends_in_time_is_no_leak() -> None:
    end = threading.Event()
    with nothing_stays_behind(5.0):
        threading.Thread(target=end.wait, args=[0.05], daemon=True).start()


def test_what_another_process_holds_can_be_counted() -> None:
    script = "import threading; threading.Thread(target=input).start(); print('up', flush=True)"
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    assert len(holding(child.pid).threads) == 2
    child.communicate(b"\n", timeout=10)
    assert holding(child.pid).threads == ()


def test_a_peer_process_runs_what_it_is_told_and_remembers() -> None:
    with PeerProcess({"transports": {"mock": {"enable": True}}}) as peer:
        peer.run("a = 20")
        assert peer.run("b = a + c\nb * 2", c=1) == 42
        assert peer.run("repr(engine)").startswith("<Engine")
        assert peer.pid != os.getpid()
        peer.begin("os.getppid()")
        assert peer.answer() == os.getpid()


def test_a_peer_process_says_what_was_raised_there_and_goes_on() -> None:
    with PeerProcess() as peer:
        with pytest.raises(PeerError, match="unregistered") as raised:
            peer.run("b = engine.allocate(8, name='gone')\nb.unregister()\nb.array")
        assert raised.value.kind == "UsageError"
        with pytest.raises(PeerError, match="pickle"):
            peer.run("engine")
        assert peer.run("1 + 1") == 2


def test_a_peer_process_can_be_stopped_resumed_and_killed() -> None:
    with PeerProcess() as peer:
        peer.stop()
        peer.begin("'resumed'")
        with pytest.raises(TimeoutError):
            peer.answer(timeout=0.05)
        peer.resume()
        assert peer.answer() == "resumed"
        peer.kill()
        assert peer.process.poll() is not None


def test_a_peer_process_counts_as_stopped_when_its_last_thread_has(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with PeerProcess() as peer, ThreadPoolExecutor(1) as pool:
        # A thread that starts a process waits for it in the kernel, and nothing stops it there; the new one
        # waits for the pipe to be opened.
        peer.begin(
            "reads = os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0\n"
            "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[reads])",
            pipe=str(pipe),
        )
        wait_until(lambda: "D" in thread_states(peer.pid), what="a thread to wait in the kernel")
        stopping = pool.submit(peer.stop)
        with pytest.raises(TimeoutError):
            stopping.result(timeout=0.05)
        with pipe.open("wb"):
            stopping.result(timeout=10)
        assert set(thread_states(peer.pid)) == {"T"}
        peer.kill()


def test_a_nursery_forks_processes_that_start_engines_close_and_can_be_killed() -> None:
    with Nursery() as nursery:
        with PeerProcess(nursery=nursery) as first, PeerProcess(nursery=nursery) as second:
            assert len({os.getpid(), first.pid, second.pid, nursery._process.pid}) == 4
            assert first.run("engine.open_segment(name).name", name=second.segment_name)
            assert first.run("os.getppid()") == nursery._process.pid
            second.kill()
            assert second.process.poll() == 0
            wait_until(lambda: not first.run("engine.peers()"), 10, "the killed one to depart")
            first.run("import subprocess")
            assert first.run("subprocess.call(['false'])") == 1
        assert first.process.poll() == 0
        nursery.close()


def test_what_a_nursery_forked_goes_on_without_it() -> None:
    with Nursery() as nursery:
        peer = PeerProcess(nursery=nursery)
    with peer:
        assert peer.run("engine.segment_name") == peer.segment_name


def test_a_peer_process_ends_when_the_one_that_started_it_is_killed() -> None:
    script = (
        "from tent_core.testing.peers import PeerProcess\n"
        "peer = PeerProcess()\nprint(peer.pid, flush=True)\nimport time; time.sleep(30)"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    starter.kill()
    starter.communicate(timeout=10)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True


def test_a_configuration_that_is_wrong_is_told_by_whom_it_was_given_to() -> None:
    with pytest.raises(PeerError, match="no such section") as raised:
        PeerProcess({"no such section": 1})
    assert raised.value.kind == "ConfigError"


def test_a_process_of_a_test_does_not_load_the_test_tools() -> None:
    script = "import sys, tent_core.testing.peers; sys.exit('pytest' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
