"""What is made of the module `mpcomm`, and of its absence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tent_core.errors import TransportError
from tent_mock.mpcomm import StandIn
from tent_mpcomm import adapter
from tent_mpcomm.adapter import ModuleAdapter, NativeError


def _raising(error: BaseException) -> Any:
    def find(name: str) -> Any:
        raise error

    return find


def test_where_the_module_is_missing_the_reason_says_what_to_install() -> None:
    found = adapter.load(_raising(ModuleNotFoundError("No module named 'mpcomm'", name="mpcomm")))
    assert "not installed: install the wheel of UCL-MPComm" in found.obstacle
    with pytest.raises(TransportError, match="install the wheel"):
        found.make("me", "", 1)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libibverbs.so.1: cannot open shared object file"),
        ModuleNotFoundError("No module named 'torch'", name="torch"),
        SystemExit(3),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_obstacle_with_the_cause(
    error: BaseException,
) -> None:
    found = adapter.load(_raising(error))
    assert "cannot be imported" in found.obstacle
    assert str(error) in found.obstacle


@pytest.mark.parametrize("version", ["1.4", "1.4.0", "1.10.2", "1.4.0rc1", "1.5+cuda12"])
def test_major_version_1_from_1_4_on_is_supported(version: str) -> None:
    found = adapter.load(lambda _: StandIn(version=version))
    assert (found.obstacle, found.warning, found.version) == ("", "", version)


@pytest.mark.parametrize("version", ["1.3.9", "0.9", "2.0.0", "10.4"])
def test_another_version_is_an_obstacle_that_names_it(version: str) -> None:
    assert version in adapter.load(lambda _: StandIn(version=version)).obstacle


@pytest.mark.parametrize("version", [None, "dev", "nightly-7"])
def test_an_unknown_version_is_used_with_a_warning(version: str | None) -> None:
    found = adapter.load(lambda _: StandIn(version=version))
    assert found.obstacle == ""
    assert (version or "unknown") in found.warning


def test_another_module_of_that_name_is_an_obstacle() -> None:
    assert "MPComm" in adapter.load(lambda _: SimpleNamespace(__version__="1.4.0")).obstacle


class _Native:
    """Answers whatever a test says to every call, and writes calls down."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.made: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.answers.get(name, 0) is AttributeError:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.made.append((name, *arguments))
            answer = self.answers.get(name, 0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def _made(native: _Native) -> adapter.Comm:
    native.answers.setdefault("get_active_devices", ["mlx5_0"])
    return ModuleAdapter(SimpleNamespace(MPComm=lambda: native)).make("me", "mlx5_0,mlx5_1", 4711)


def test_an_instance_is_initialised_and_accepts_before_it_is_handed_out() -> None:
    native = _Native(get_tcp_port=4711)
    comm = _made(native)
    assert native.made[:2] == [("init", "me", "mlx5_0,mlx5_1", 4711), ("start_accept_thread",)]
    assert (comm.port, comm.devices) == (4711, ("mlx5_0",))


def test_builds_without_put_and_get_transfer_by_the_calls_for_several_hosts() -> None:
    native = _Native(
        put_async=AttributeError, get_async=AttributeError, scatter_async=7, gather_async=8
    )
    comm = _made(native)
    assert (comm.put(1, "host", 2, 3), comm.get(4, "host", 5, 6)) == (7, 8)
    assert native.made[-2:] == [
        ("scatter_async", 1, ["host"], [2], [3]),
        ("gather_async", 4, ["host"], [5], [6]),
    ]


def test_an_instance_that_cannot_start_is_shut_down_and_the_code_is_in_words() -> None:
    native = _Native(init=-1)
    with pytest.raises(NativeError, match=r"-1 \(device\)") as raised:
        _made(native)
    assert raised.value.code == -1
    assert native.made[-1] == ("shutdown",)


@pytest.mark.parametrize(
    ("call", "doing"),
    [
        (lambda c: c.register(16, 32), "register 32 bytes at 0x10"),
        (lambda c: c.publish(16, 32, 1), "publish 32 bytes at 0x10"),
        (lambda c: c.connect("b", "10.0.0.1", 80), "connect to b at 10.0.0.1:80"),
    ],
)
def test_errors_say_what_was_asked_and_what_was_answered(call: Any, doing: str) -> None:
    failing = {"register_memory": -3, "publish_buffer": -3, "connect": -3}
    with pytest.raises(NativeError, match=rf"{doing}.*-3 \(memory\)"):
        call(_made(_Native(**failing)))
    broken = {name: RuntimeError("oh") for name in failing}
    with pytest.raises(TransportError, match="raises RuntimeError"):
        call(_made(_Native(**broken)))


@pytest.mark.parametrize(
    "reply", [{}, {"other": 1}, {"buffers": [{"addr": 1}]}, RuntimeError("oh")]
)
def test_a_query_that_failed_is_an_error(reply: Any) -> None:
    with pytest.raises(TransportError, match="query the memory of b"):
        _made(_Native(query_remote_buffers=reply)).query("b", "10.0.0.1", 80)


def test_a_query_of_a_peer_that_publishes_nothing_is_none() -> None:
    assert _made(_Native(query_remote_buffers={"buffers": []})).query("b", "10.0.0.1", 80) == ()


def test_closing_twice_shuts_down_once_and_never_raises() -> None:
    native = _Native(shutdown=RuntimeError("oh"))
    comm = _made(native)
    comm.close()
    comm.close()
    assert [name for (name, *_) in native.made].count("shutdown") == 1
