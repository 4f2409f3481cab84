"""A process is known by more than its pid, and its end is seen."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tent_core import host
from tent_core.descriptor import HostIdentity


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], HostIdentity]]:
    source = "from tent_core import host; print(host.identify()); input()"
    with subprocess.Popen(
        [sys.executable, "-c", f"{source}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        identity = eval(process.stdout.readline(), {"HostIdentity": HostIdentity})
        yield process, identity
        process.kill()


def ended(descriptor: int, timeout: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout)[0])


def test_a_process_is_named_by_machine_namespace_pid_and_start() -> None:
    me = host.identify()
    assert me.pid == os.getpid()
    assert me.boot_id
    assert host.identify() is me
    assert not host.has_ended(me)


def test_a_child_has_another_identity_on_the_same_machine(
    child: tuple[subprocess.Popen[str], HostIdentity],
) -> None:
    process, identity = child
    assert identity.pid == process.pid
    assert host.same_pids(host.identify(), identity)
    assert identity.start_time >= host.identify().start_time


def test_a_forked_child_knows_that_it_is_another_process() -> None:
    host.identify()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, str(host.identify().pid).encode())
        os._exit(0)
    assert int(os.read(reader, 100)) == pid
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)


def test_the_descriptor_of_a_process_tells_when_it_is_killed(
    child: tuple[subprocess.Popen[str], HostIdentity],
) -> None:
    process, identity = child
    descriptor = host.open_process(identity)
    assert descriptor is not None
    try:
        assert not ended(descriptor, 0)
        process.kill()
        assert ended(descriptor, 10)
        # It has not been waited for: a zombie has ended.
        assert host.has_ended(identity)
        with pytest.raises(ProcessLookupError):
            host.open_process(identity)
    finally:
        os.close(descriptor)


def test_a_reused_pid_is_not_the_process(child: tuple[subprocess.Popen[str], HostIdentity]) -> None:
    _, identity = child
    earlier = replace(identity, start_time=identity.start_time - 1)
    assert host.has_ended(earlier)
    with pytest.raises(ProcessLookupError):
        host.open_process(earlier)


def test_a_pid_that_is_reused_while_it_is_opened_is_noticed(
    child: tuple[subprocess.Popen[str], HostIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, identity = child
    answers = iter([False, True])
    monkeypatch.setattr(host, "has_ended", lambda _: next(answers))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProcessLookupError):
        host.open_process(identity)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_of_another_machine_or_namespace_cannot_be_watched() -> None:
    me = host.identify()
    assert host.open_process(replace(me, boot_id="elsewhere")) is None
    assert host.open_process(replace(me, pid_namespace=1)) is None
    assert not replace(me, boot_id="").same_machine(replace(me, boot_id=""))


def test_a_kernel_that_refuses_descriptors_of_processes_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert host.open_process(host.identify()) is None


def test_no_descriptor_left_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="too many"):
        host.open_process(host.identify())
