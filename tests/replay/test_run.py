"""When both processes of a replay end with an error, the user is told the one that is the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tent_core.children import Children, Link
from tent_core.replay import run
from tent_core.replay.errors import PoolTooSmall, Refused, ReplayError
from tent_core.replay.geometry import MODELS
from tent_core.replay.roles import RoleOptions
from tent_core.replay.trace import TraceRequest

BOUND_S = 30.0
REQUESTS = (TraceRequest(0, 512 * 4, 1, (1, 2, 3, 4)),)


def is_refused(link: Link) -> None:
    with run._refusals_told(link):
        raise Refused("decode has no memory")


def fails_when_told(link: Link) -> None:
    link.hear(BOUND_S)
    raise ReplayError("no memory")


def ends_when_told(link: Link) -> None:
    link.hear(BOUND_S)


@pytest.mark.parametrize(
    ("other", "message"),
    [(fails_when_told, "decode: no memory"), (ends_when_told, "prefill: decode has no memory")],
)
def test_the_reason_for_a_refusal_is_told_by_the_process_that_has_it(
    other: Callable[[Link], None], message: str
) -> None:
    with Children() as children:
        decode = children.start("decode", other)
        children.start("prefill", is_refused)
        refused = run._await(children, "refused", BOUND_S, "a refusal")
        decode.tell("now")
        assert str(run._cause(children, refused)) == message


def test_a_request_too_large_for_the_pool_starts_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "Children", None)
    with pytest.raises(PoolTooSmall, match="--pool-size 24MiB or more"):
        run.replay(RoleOptions(pool_bytes=23 << 20), MODELS["Qwen2.5-0.5B"], REQUESTS)


def test_only_what_the_trace_will_fill_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_available_bytes", lambda: 50 << 20)
    large = RoleOptions(pool_bytes=1 << 40)
    run.check_memory(large, MODELS["Qwen2.5-0.5B"], REQUESTS)  # two times 24 MiB
    with pytest.raises(ReplayError, match="two pools of 56MiB need more memory than the 50 MiB"):
        run.check_memory(large, MODELS["Qwen2.5-1.5B"], REQUESTS)
    monkeypatch.setattr(run, "_available_bytes", lambda: None)
    run.check_memory(large, MODELS["Qwen2.5-1.5B"], REQUESTS)
