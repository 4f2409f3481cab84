"""Who may be connected to, and which file may be mapped: everything else is refused, and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shm_owners as owners
from shm_harness import (
    Context,
    FakePeer,
    Node,
    Owner,
    Pair,
    bytes_of,
    pair,
    requests,
    submit,
    transfer,
)

from tent_core.descriptor import Attribute, PeerKey
from tent_core.errors import PeerDeparted, TransportError, TransportUnavailable, Unreachable
from tent_core.host import identify
from tent_core.testing import wait_until
from tent_core.types import Opcode, Status
from tent_shm import owner as owner_module
from tent_shm import syscalls, targets, transport
from tent_shm.attribute import BufferAttribute, ProcessAttribute
from tent_shm.plugin import tent_transport

WRITE = [(0, 0, 0, 0, 5000)]


@pytest.fixture(scope="module")
def made() -> Iterator[Pair]:
    with pair(owners.allocated_and_registered) as made:
        yield made


def attempt(made: Pair, change: Callable[[ProcessAttribute], ProcessAttribute]) -> Any:
    """Connect to the owner as if it had published something else."""
    segment = made.owner.peer.segment
    process = change(ProcessAttribute.decode(segment.attributes["shm"].payload))
    attribute = Attribute(3, "shm", process.encode())
    return made.node.transport.connect(FakePeer(replace(segment, attributes={"shm": attribute})))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"boot_id": str(uuid.UUID(int=5))}, Unreachable, "another machine"),
        ({"pid_namespace": 77}, Unreachable, "another pid namespace.*shareProcessNamespace"),
        ({"start_time": 1}, PeerDeparted, "another one has its pid"),
        ({"keeper": 1 << 22}, PeerDeparted, "has ended"),
        ({"pid": (1 << 22) - 1}, PeerDeparted, "has ended"),
    ],
)
def test_a_process_that_is_not_the_one_that_published_is_not_connected_to(
    made: Pair, change: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        attempt(made, lambda process: replace(process, **change))


def test_a_page_of_another_incarnation_is_not_accepted(made: Pair) -> None:
    segment = replace(made.owner.peer.segment, incarnation=os.urandom(16))
    with pytest.raises(TransportError, match="is not engine"):
        made.node.transport.connect(FakePeer(segment))


def test_a_thread_that_is_not_the_keeper_is_not_accepted(made: Pair) -> None:
    """Its descriptor table is the owner's, so that the page can be mapped: only the word in it differs."""
    others = [int(t) for t in os.listdir(f"/proc/{made.owner.pid}/task")]
    keeper = ProcessAttribute.decode(made.owner.peer.segment.attributes["shm"].payload).keeper
    other = next(t for t in others if t not in (made.owner.pid, keeper))
    with pytest.raises(PeerDeparted):
        attempt(made, lambda process: replace(process, keeper=other))


def test_a_page_that_is_not_the_published_file_is_not_mapped(made: Pair) -> None:
    with pytest.raises(TransportError, match="is another file now"):
        attempt(made, lambda p: replace(p, page=p.page._replace(inode=p.page.inode + 1)))


@pytest.mark.parametrize("payload", [b"", b"\0", b"\1", b"\2" * 81, b"\1" * 81])
def test_a_malformed_attribute_is_unreachable(made: Pair, payload: bytes) -> None:
    segment = replace(made.owner.peer.segment, attributes={"shm": Attribute(3, "shm", payload)})
    with pytest.raises(Unreachable, match="attribute"):
        made.node.transport.connect(FakePeer(segment))


def test_a_peer_that_publishes_nothing_may_do_so_later(made: Pair) -> None:
    segment = replace(made.owner.peer.segment, attributes={})
    with pytest.raises(TransportError) as caught:
        made.node.transport.connect(FakePeer(segment))
    assert not isinstance(caught.value, Unreachable)


def test_refused_connections_leave_nothing_behind(made: Pair) -> None:
    descriptors, maps = os.listdir("/proc/self/fd"), Path("/proc/self/maps").read_text()
    for _ in range(3):
        test_a_page_of_another_incarnation_is_not_accepted(made)
        test_a_thread_that_is_not_the_keeper_is_not_accepted(made)
        test_a_page_that_is_not_the_published_file_is_not_mapped(made)
    assert os.listdir("/proc/self/fd") == descriptors
    assert Path("/proc/self/maps").read_text().count("tent-identity") == maps.count("tent-identity")


@pytest.mark.parametrize(
    "setup",
    [owners.descriptor_reused_for_a_file, owners.descriptor_reused_for_a_pipe, owners.unsealed],
)
def test_a_descriptor_that_is_not_the_sealed_memory_published_is_not_mapped(
    setup: Callable[[Node], None],
) -> None:
    """The bytes get to the buffer all the same: through its owner's address space."""
    with pair(setup) as made:
        inodes = {owners.inode_of(b) for b in made.owner.peer.segment.buffers.values()}
        work = made.transfer(Opcode.WRITE, WRITE)
        assert work.status.tolist() == [Status.COMPLETED]
        made.check(WRITE)
        assert [owners.protections(inode) for inode in inodes] == [[] for _ in inodes]
        assert "shm_buffer_not_mapped" in made.node.context.log.names()
        if len(made.owner.peer.segment.buffers) > 1:
            assert made.owner.ask(bytes_of, 1, 0, 5000) == bytes(5000)


def test_a_descriptor_reused_after_it_was_mapped_changes_nothing() -> None:
    with pair(owners.allocated_and_registered) as made:
        made.transfer(Opcode.WRITE, WRITE)
        made.owner.ask(owners.reuse_descriptor, 0)
        made.node.arrays[0][:5000] = 9
        work = made.transfer(Opcode.WRITE, WRITE)
        assert work.status.tolist() == [Status.COMPLETED]
        made.check(WRITE)


def test_a_malformed_buffer_attribute_is_not_mapped_either(made: Pair) -> None:
    segment = made.owner.peer.segment
    buffer = segment.buffers[0]
    file = BufferAttribute.decode(buffer.attributes["shm"].payload).file
    assert file is not None
    for payload in (b"\7" * 29, BufferAttribute(file._replace(size=4096)).encode()):
        changed = replace(buffer, attributes={"shm": Attribute(3, "shm", payload)})
        peer = FakePeer(replace(segment, buffers={0: changed}))
        endpoint = made.node.transport.connect(peer)
        assert transfer(endpoint, made.node, peer, Opcode.WRITE, WRITE).status.tolist() == [4]
        assert endpoint.holdings()["mappings"] == 0
        endpoint.close("done")


def test_a_buffer_that_is_not_offered_is_refused(made: Pair) -> None:
    segment = made.owner.peer.segment
    peer = FakePeer(replace(segment, buffers={0: replace(segment.buffers[0], attributes={})}))
    endpoint = made.node.transport.connect(peer)
    work, _ = submit(endpoint, requests(made.node, peer, Opcode.WRITE, WRITE))
    assert work.status.tolist() == [Status.INITIAL]
    endpoint.close("done")


# ---------------------------------------------------------------- what the kernel does not permit


def test_without_process_vm_allocated_memory_moves_and_registered_memory_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under kernel.yama.ptrace_scope 1, which forbids attaching and allows looking at descriptors."""
    monkeypatch.setattr(owner_module, "_ptrace_scope", lambda: 1)
    real = dict(syscalls._VECTOR_CALLS)

    def denying(call: Any) -> Any:
        def vector_call(pid: int, *arguments: int) -> int:
            if pid == os.getpid():
                return int(call(pid, *arguments))
            owners.ctypes.set_errno(1)  # EPERM
            return -1

        return vector_call

    monkeypatch.setattr(
        syscalls, "_VECTOR_CALLS", {key: denying(call) for key, call in real.items()}
    )
    with pair(owners.allocated_and_registered) as made:
        assert made.node.context.log.names() == ["shm_only_allocated_memory"]
        rows = [(0, i * 1000, i % 2, i * 1000, 900) for i in range(100)]
        work = made.transfer(Opcode.WRITE, rows)
        assert work.status.tolist() == [Status.COMPLETED, Status.INITIAL] * 50
        assert "allow_ptrace_by_anyone: true" in str(work.cause_of(1))
        made.check(rows[0:20:2])


def test_another_user_is_unreachable_and_the_remedy_is_said(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    program = f"""
import json, os, sys
sys.path[:0] = {sys.path!r}
from shm_harness import Context, FakePeer, Node
from tent_core.descriptor import Attribute, SegmentDescriptor
from tent_core.errors import Unreachable
incarnation, payload = (bytes.fromhex(x) for x in json.load(sys.stdin))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
node = Node("other:1")
attributes = {{"shm": Attribute(3, "shm", payload)}}
segment = SegmentDescriptor("o:1", incarnation, 1, node.context.host, {{}}, attributes)
try:
    node.transport.connect(FakePeer(segment))
except Unreachable as error:
    print(error)
node.transport.stop()
"""
    with Owner(owners.allocated_and_registered) as owner:
        segment = owner.peer.segment
        question = json.dumps([segment.incarnation.hex(), segment.attributes["shm"].payload.hex()])
        found = subprocess.run(
            [sys.executable, "-c", program],
            input=question,
            text=True,
            capture_output=True,
            timeout=30,
        )
        assert "belongs to user 0 and this process to user 65534" in found.stdout, found.stderr
        assert "CAP_SYS_PTRACE" in found.stdout


@pytest.mark.parametrize(
    ("scope", "says"), [(1, "allow_ptrace_by_anyone"), (2, "CAP_SYS_PTRACE"), (0, "seccomp")]
)
def test_the_remedy_fits_the_ptrace_scope(
    made: Pair, scope: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_module, "_ptrace_scope", lambda: scope)
    process = ProcessAttribute.decode(made.owner.peer.segment.attributes["shm"].payload)
    assert says in owner_module._remedy(process)
    denied = owner_module._explained(PermissionError(13, "Permission denied"), process)
    assert isinstance(denied, Unreachable)
    assert not isinstance(owner_module._explained(OSError(24, "EMFILE"), process), Unreachable)


def test_an_owner_may_allow_everyone_to_trace_it() -> None:
    """Without Yama the kernel knows no such permission, and nothing is forbidden."""
    node = Node("here:1", allow_ptrace_by_anyone=True)
    try:
        assert node.context.published is not None
        expected = (
            [] if Path("/proc/sys/kernel/yama").exists() else ["shm_ptrace_scope_not_changed"]
        )
        assert node.context.log.names() == expected
    finally:
        node.transport.stop()


def test_without_proc_or_a_boot_id_the_transport_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(transport.os, "readlink", lambda _: "1234567")
        with pytest.raises(TransportUnavailable, match="pid namespace"):
            Node("here:1")
    context = Context(PeerKey("here:1", os.urandom(16)), host=replace(identify(), boot_id=""))
    with pytest.raises(TransportUnavailable, match="boot id"):
        transport.ShmTransport().start(context)


def test_device_memory_is_not_offered() -> None:
    node = Node("here:1")
    try:
        owners.allocated_and_registered(node)
        gpu = replace(node.locals[1], location="cuda:0")
        assert list(node.transport.add_buffers([gpu])) == [None]
    finally:
        node.transport.stop()


def test_a_kernel_without_thread_pidfds_is_served_by_one_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.pidfd_open

    def before_6_9(pid: int, flags: int = 0) -> int:
        if flags:
            raise OSError(22, "Invalid argument")
        return real(pid)

    monkeypatch.setattr(owner_module.os, "pidfd_open", before_6_9)
    with pair(owners.allocated_and_registered) as made:
        assert made.transfer(Opcode.WRITE, WRITE).status.tolist() == [Status.COMPLETED]
        made.owner.kill()
        wait_until(lambda: made.owner.peer.suspicions)


def test_the_name_of_the_attribute_is_the_transports() -> None:
    declaration = tent_transport()
    assert (declaration.name, declaration.number) == (targets.NAME, 3) == ("shm", 3)
