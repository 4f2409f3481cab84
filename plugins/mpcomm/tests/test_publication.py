"""What the library is told of this engine's memory: each address once, before anybody else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tent_core.errors import TransportError
from tent_core.transport import LocalBuffer
from tent_core.types import Permission
from tent_mpcomm.adapter import NativeError
from tent_mpcomm.publication import Publication, node_of

WRITABLE, PRIVATE = Permission.GLOBAL_READ_WRITE, Permission.LOCAL_READ_WRITE


class Comm:
    """Writes down what it is told, and fails where a test says so."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.failing: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            self.told.append((name, *arguments))
            if name in self.failing:
                raise NativeError(name, -3)

        return call


def buffer(
    number: int, address: int = 4096, length: int = 100, permission: Permission = WRITABLE
) -> LocalBuffer:
    return LocalBuffer(number, number + 10, f"b{number}", address, length, "cpu:1", permission)


def test_an_address_is_registered_once_and_goes_with_the_last_buffer_there() -> None:
    comm, publication = Comm(), Publication()
    first, second, shorter = buffer(0), buffer(1), buffer(2, length=60)
    for each in (first, second, shorter):
        publication.add(comm, each)
    assert comm.told == [("register", 4096, 100), ("publish", 4096, 100, 1)]
    publication.remove(comm, first)
    publication.remove(comm, shorter)
    assert len(comm.told) == 2
    publication.remove(comm, second)
    publication.remove(comm, second)
    assert comm.told[2:] == [("unpublish", 4096), ("unregister", 4096)]
    assert len(publication) == 0


def test_memory_that_peers_may_not_reach_is_registered_and_not_published() -> None:
    comm, publication = Comm(), Publication()
    private, public = buffer(0, permission=PRIVATE), buffer(1)
    publication.add(comm, private)
    assert [name for name, *_ in comm.told] == ["register"]
    publication.add(comm, public)
    publication.remove(comm, public)
    publication.remove(comm, private)
    assert [name for name, *_ in comm.told] == ["register", "publish", "unpublish", "unregister"]


def test_a_longer_buffer_at_a_registered_address_is_declined_and_harms_nothing() -> None:
    comm, publication = Comm(), Publication()
    publication.add(comm, buffer(0, length=100))
    with pytest.raises(TransportError, match=r"'b1' is 101 bytes long.*100 bytes registered"):
        publication.add(comm, buffer(1, length=101))
    publication.remove(comm, buffer(0))
    assert comm.told[-1] == ("unregister", 4096)


def test_memory_that_cannot_be_registered_or_published_leaves_nothing() -> None:
    comm, publication = Comm(), Publication()
    comm.failing = {"register"}
    with pytest.raises(NativeError):
        publication.add(comm, buffer(0))
    comm.failing = {"publish"}
    with pytest.raises(NativeError):
        publication.add(comm, buffer(0))
    assert comm.told[-1] == ("unregister", 4096)
    assert len(publication) == 0


def test_a_buffer_that_the_library_does_not_let_go_of_can_be_removed_again() -> None:
    comm, publication = Comm(), Publication()
    publication.add(comm, buffer(0))
    comm.failing = {"unregister"}
    with pytest.raises(NativeError):
        publication.remove(comm, buffer(0))
    comm.failing = set()
    publication.remove(comm, buffer(0))
    assert [name for name, *_ in comm.told].count("unpublish") == 1
    assert len(publication) == 0


def test_a_new_instance_is_told_everything_and_refusals_are_said() -> None:
    publication, old, new = Publication(), Comm(), Comm()
    publication.add(old, buffer(0))
    publication.add(old, buffer(1, 8192, permission=PRIVATE))
    assert publication.restore(new) == []
    assert new.told == [
        ("register", 4096, 100),
        ("publish", 4096, 100, 1),
        ("register", 8192, 100),
    ]
    broken = Comm()
    broken.failing = {"register"}
    assert len(publication.restore(broken)) == 2
    publication.remove(
        broken, buffer(0)
    )  # which it does not have, so that nobody has to let go of it
    assert [name for name, *_ in broken.told] == ["register", "register"]


@pytest.mark.parametrize(
    ("location", "node"), [("cpu:0", 0), ("cpu:3", 3), ("cpu", -1), ("*", -1), ("cuda:1", -1)]
)
def test_the_numa_node_of_host_memory_is_passed_on(location: str, node: int) -> None:
    assert node_of(location) == node
