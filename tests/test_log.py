"""Logging: events with fields on standard error, nothing global, repeated failures counted."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.log import RateLimited, configure
from tent_core.settings import LogSettings


def test_console_lines_have_time_level_event_and_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = configure(LogSettings()).bind(engine="[::1]:5")
    log.info("peer_reached", transports=["shm", "tcp"], reason="went away", empty="")
    out, err = capsys.readouterr()
    assert out == ""
    stamp, rest = err.split(" ", 1)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}Z", stamp)
    fields = "engine=[::1]:5 transports=[shm,tcp] reason='went away' empty=''"
    assert rest == f"info    peer_reached {fields}\n"


def test_json_lines_are_documents(capsys: pytest.CaptureFixture[str]) -> None:
    log = configure(LogSettings(format="json"))
    log.warning("peer_departed", peer=b"raw", count=3)
    document = json.loads(capsys.readouterr().err)
    assert document["event"] == "peer_departed"
    assert document["level"] == "warning"
    assert document["count"] == 3
    assert document["timestamp"].endswith("Z")


@pytest.mark.parametrize("format", ["console", "json"])
def test_a_traceback_is_shown_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], format: Any
) -> None:
    log = configure(LogSettings(format=format))
    try:
        raise ValueError("broken")
    except ValueError:
        log.error("hook_raised", exc_info=True)
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ValueError: broken" in err


def test_events_below_the_level_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    log = configure(LogSettings(level="warning"))
    log.info("quiet")
    log.debug("quiet")
    assert capsys.readouterr().err == ""
    log.warning("loud")
    assert "loud" in capsys.readouterr().err


@given(st.text(max_size=40))
def test_what_came_from_outside_stays_on_its_line(text: str) -> None:
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        configure(LogSettings()).info("event", field=text)
        written = sys.stderr.getvalue()
    finally:
        sys.stderr = stderr
    assert written.endswith("\n")
    assert len(written.splitlines()) == 1
    assert "\x1b" not in written


def test_two_engines_log_differently_and_nothing_is_configured_globally(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handlers = list(logging.getLogger().handlers)
    loud, quiet = (
        configure(LogSettings(level="debug", format="json")),
        configure(LogSettings(level="error")),
    )
    loud.debug("one")
    quiet.info("two")
    assert json.loads(capsys.readouterr().err)["event"] == "one"
    assert logging.getLogger().handlers == handlers


def test_importing_the_log_configures_nothing() -> None:
    code = """
        import logging
        import tent_core.log
        assert not logging.getLogger().handlers
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_a_closed_standard_error_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    log = configure(LogSettings())
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        log.error("event")


# ---------------------------------------------------------------- repeated failures


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log() -> Log:
    return Log()


def test_the_first_failure_is_logged_at_once_and_repeats_are_counted(
    log: Log, clock: Clock
) -> None:
    limited = RateLimited(log, every_s=30, clock=clock)
    for i in range(5):
        limited.warning("transfer_failed", transport="tcp", peer="a", cause=i)
    assert log.lines == [("transfer_failed", {"transport": "tcp", "peer": "a", "cause": 0})]
    clock.now += 30
    limited.warning("transfer_failed", transport="tcp", peer="a", cause=5)
    assert log.lines[1:] == [
        ("transfer_failed", {"transport": "tcp", "peer": "a", "cause": 5, "repeated": 5})
    ]
    limited.warning("transfer_failed", transport="tcp", peer="a", cause=6)
    assert len(log.lines) == 2


def test_a_failure_after_a_silence_is_logged_without_a_count(log: Log, clock: Clock) -> None:
    limited = RateLimited(log, every_s=30, clock=clock)
    limited.warning("transfer_failed", cause=1)
    clock.now += 31
    limited.warning("transfer_failed", cause=2)
    assert log.lines == [("transfer_failed", {"cause": 1}), ("transfer_failed", {"cause": 2})]


def test_failures_of_another_event_transport_or_peer_are_of_another_kind(
    log: Log, clock: Clock
) -> None:
    limited = RateLimited(log, clock=clock)
    for event, transport, peer in (
        ("x", "t", "p"),
        ("y", "t", "p"),
        ("x", "u", "p"),
        ("x", "t", "q"),
    ):
        limited.warning(event, transport=transport, peer=peer)
        limited.warning(event, transport=transport, peer=peer)
    assert len(log.lines) == 4


def test_what_was_counted_is_told_when_it_is_flushed(log: Log, clock: Clock) -> None:
    limited = RateLimited(log, by=("peer",), clock=clock)
    for peer in ("a", "a", "a", "b", "b", "c"):
        limited.warning("refused", peer=peer)
    del log.lines[:]
    limited.flush()
    assert log.lines == [("refused", {"peer": "a", "repeated": 2}), ("refused", {"peer": "b"})]
    limited.flush()
    assert len(log.lines) == 2


def test_peers_that_failed_long_ago_are_forgotten_when_another_one_fails(
    log: Log, clock: Clock
) -> None:
    limited = RateLimited(log, by=("peer",), every_s=30, clock=clock)
    for peer in ("a", "b", "b"):
        limited.warning("refused", peer=peer)
    clock.now += 30
    limited.warning("refused", peer="c")
    assert [fields["peer"] for _, fields in log.lines] == ["a", "b", "b", "c"]
    assert list(limited._kinds) == [("refused", "c")]


def test_it_remembers_a_bounded_number_of_kinds_and_loses_no_count(log: Log, clock: Clock) -> None:
    limited = RateLimited(log, by=("peer",), capacity=3, clock=clock)
    limited.warning("refused", peer="a")
    limited.warning("refused", peer="a", cause="second")
    for i in range(1000):
        limited.warning("refused", peer=i)
    assert ("refused", {"peer": "a", "cause": "second"}) in log.lines
    assert len(limited._kinds) == 3


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), max_size=60))
def test_every_failure_is_in_some_line(steps: list[tuple[str, int]]) -> None:
    log, clock = Log(), Clock()
    limited = RateLimited(log, by=("peer",), every_s=30, capacity=1, clock=clock)
    for peer, wait in steps:
        clock.now += wait
        limited.warning("refused", peer=peer)
    limited.flush()
    told = {
        peer: sum(f.get("repeated", 1) for _, f in log.lines if f["peer"] == peer) for peer in "ab"
    }
    assert told == {peer: sum(name == peer for name, _ in steps) for peer in "ab"}


def test_failures_of_many_threads_are_all_counted(log: Log) -> None:
    limited = RateLimited(log, every_s=1e9)
    threads = [
        threading.Thread(target=lambda: [limited.warning("refused") for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    limited.flush()
    assert sum(fields.get("repeated", 1) for _, fields in log.lines) == 2000
