"""What is said of a registration that failed."""

from __future__ import annotations

import errno
import resource

import pytest
from rig import MIB, connected, fabric

from tent_rdma.advice import advice, pinned
from tent_rdma.verbs import Limits, VerbsError

LIMITS = Limits(
    max_registration=1 << 30,
    max_registrations=1000,
    max_queue_pairs=10,
    max_work_requests=10,
    max_completions=10,
    max_reads=1,
)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOMEM, "ulimit -l"),
        (errno.EFAULT, "nvidia_peermem"),
        (errno.EAGAIN, "rdma resource show mr"),
        (errno.EINVAL, "at most 1GiB at once"),
    ],
)
def test_each_reason_comes_with_what_to_do(number: int, words: str) -> None:
    assert words in advice(number, 1 << 31, LIMITS)


def test_nothing_is_said_of_what_is_not_known() -> None:
    error = VerbsError("cannot register", errno.EPERM)
    assert advice(errno.EPERM, 1, LIMITS) == ""
    assert error.advised("") is error


def test_advice_keeps_the_number_and_the_error_that_it_is_about() -> None:
    error = VerbsError("cannot register 8 bytes", errno.ENOMEM)
    said = error.advised("register less")
    assert (said.errno, said.scarce, said.__cause__) == (errno.ENOMEM, True, error)
    assert str(said) == f"{error}; register less"


def test_what_this_process_has_locked_is_a_number() -> None:
    assert pinned() >= 0


def test_the_limit_is_raised_as_far_as_the_process_may(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 30))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: asked.append(limit))
    with connected():
        pass
    assert set(asked) == {(resource.RLIMIT_MEMLOCK, (1 << 30, 1 << 30))}


def test_a_buffer_beyond_the_limit_is_declined_with_the_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    verbs = fabric()
    with connected(verbs) as rig:
        verbs.faults.max_pinned = MIB
        buffer, _ = rig.buffer(rig.a, 4 * MIB)
        offered = rig.a.segment.snapshot.buffers[buffer.id].attributes
        assert "rdma" not in offered
    assert "ulimit -l" in capsys.readouterr().err
