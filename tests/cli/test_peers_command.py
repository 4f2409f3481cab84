"""`tent peers`: what a running engine says of its peers, to people and to machines."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import tent_core as tent
from tent_core.inspection import Inspector, document
from tent_core.testing import wait_until

CONFIG = {
    "transports": {"shm": {"enable": True}},
    "policy": [{"name": "shm", "transports": ["shm"]}],
    "log": {"level": "error"},
}
PEER = {
    "name", "incarnation", "pid", "same_machine", "opened", "opens", "state", "handles", "handshakes",
    "idle_s", "transports",
}  # fmt: skip


@pytest.fixture
def pair() -> Iterator[tuple[tent.Engine, tent.Engine]]:
    """Two engines, of which the first has written 1 MiB to the second."""
    with tent.Engine(CONFIG) as here, tent.Engine(CONFIG) as there:
        there.allocate(1 << 20, name="target")
        segment = here.open_segment(there.segment_name)
        segment.write(here.allocate(1 << 20), segment.buffer("target"))
        yield here, there


def test_machines_get_the_engine_and_each_of_its_peers(run: Any, pair: Any) -> None:
    here, there = pair
    result = run("peers", here.segment_name, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["engine"] == here.segment_name
    assert found["incarnation"] == here.incarnation.hex()
    assert found["uptime_s"] > 0
    assert found["stats"]["transports"]["shm"]["bytes"] == 1 << 20
    assert "peers" not in found["stats"]
    (peer,) = found["peers"]
    assert set(peer) == PEER
    assert (peer["name"], peer["state"], peer["opened"]) == (there.segment_name, "live", True)
    assert peer["transports"]["shm"]["bytes"] == 1 << 20
    (back,) = json.loads(run("peers", there.segment_name, "--json").stdout)["peers"]
    assert (back["name"], back["state"], back["opens"]) == (here.segment_name, "open", True)


def test_people_get_a_table(run: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    here, there = pair
    result = run("peers", here.segment_name)
    assert result.exit_code == 0, result.stderr
    assert f"{here.segment_name}#{here.incarnation.hex()[:8]}" in result.stdout
    (row,) = [line for line in result.stdout.splitlines() if there.segment_name in line]
    assert "opened" in row
    assert "shm 1 MiB" in row
    assert " opens " in run("peers", there.segment_name).stdout


def test_an_engine_without_peers_says_so(run: Any) -> None:
    with tent.Engine(CONFIG) as engine:
        result = run("peers", engine.segment_name)
        assert result.exit_code == 0, result.stderr
        assert "0, at most" in result.stdout
        assert engine.peers() == []  # asking made none


def test_an_address_at_which_nobody_answers_is_an_error(run: Any) -> None:
    with tent.Engine(CONFIG) as engine:
        name = engine.segment_name
    result = run("peers", name, "--timeout", "2s")
    assert result.exit_code == 1
    assert f"no engine answers at {name}" in result.stderr
    assert result.stdout == ""


def test_what_is_no_address_is_an_error(run: Any) -> None:
    result = run("peers", "nonsense")
    assert result.exit_code == 1
    assert "no address" in result.stderr


def test_watching_goes_on_until_it_is_interrupted(start: Any, pair: Any) -> None:
    here, _ = pair
    process = start("peers", here.segment_name, "--json", "--watch", "50ms")
    rows = [json.loads(process.stdout.readline()) for _ in range(3)]
    assert all(row["engine"] == here.segment_name for row in rows)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_asking_again_and_again_leaves_nothing(pair: Any) -> None:
    from tent_core.control.inquiry import inspect
    from tent_core.testing.leaks import nothing_stays_behind

    here, _ = pair
    inspect(here.segment_name, 10)
    with nothing_stays_behind():
        for _ in range(10):
            inspect(here.segment_name, 10)


# -------------------------------------------------------------------- the document


def test_peers_that_do_not_fit_are_left_out_and_counted() -> None:
    peers = [{"name": f"10.0.0.1:{i}"} for i in range(1000)]
    whole = json.loads(document({"engine": "me"}, peers))
    assert (whole["peers"], whole["peers_left_out"]) == (peers, 0)
    for most in (200, 1000, 10_000):
        data = document({"engine": "me"}, peers, most)
        assert len(data) <= most
        found = json.loads(data)
        assert found["peers"] == peers[: len(found["peers"])]
        assert found["peers_left_out"] == 1000 - len(found["peers"]) > 0
        assert len(data) + len(json.dumps(peers[0])) * 2 > most


def test_what_a_transport_says_in_words_of_its_own_is_shown_as_text() -> None:
    found = json.loads(document({"stats": {"held": {1, 2}, "pair": (1, b"x")}}, []))
    assert found["stats"] == {"held": "{1, 2}", "pair": [1, "b'x'"]}


def test_those_who_ask_at_the_same_time_share_one_answer_and_later_ones_get_a_new_one() -> None:
    import threading

    gate, gathered = threading.Event(), []

    def gather() -> bytes:
        gate.wait(20)
        gathered.append(1)
        return b"%d" % len(gathered)

    inspector = Inspector(gather)
    answers = [inspector.ask() for _ in range(5)]
    answers[0].cancel()  # whose asker gave up; the others do not mind
    gate.set()
    assert [answer.result(20) for answer in answers[1:]] == [b"1"] * 4
    assert inspector.ask().result(20) == b"2"
    inspector.close()
    with pytest.raises(tent.ClosedError):
        inspector.ask().result(20)


def test_an_inspection_that_fails_says_why(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with tent.Engine(CONFIG) as engine:
        engine.inspector.close()
        wait_until(lambda: run("peers", engine.segment_name).exit_code == 1)
        assert "takes no more calls" in run("peers", engine.segment_name).stderr
