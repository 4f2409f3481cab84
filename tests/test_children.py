"""Spawned processes tell their parent everything, and none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tent_core.children import ChildFailed, Children, Link, NobodyLeft
from tent_core.errors import UsageError, WaitTimeout

BOUND_S = 30.0


def echo(link: Link, *words: str) -> None:
    for word in words:
        link.say("word", word)


def obey(link: Link) -> None:
    link.say("pid", os.getpid())
    while True:
        link.say("heard", link.hear(BOUND_S))


def finish_late(link: Link, path: Path) -> None:
    link.say("result")
    time.sleep(0.2)
    path.touch()


def misuse(link: Link) -> None:
    raise UsageError("the buffer is too small")


def divide(link: Link) -> None:
    link.say("result", 1 // 0)


def vanish(link: Link) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def give_up(link: Link) -> None:
    os._exit(3)


def stubborn(link: Link) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link.say("pid", os.getpid())
    time.sleep(BOUND_S)


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + BOUND_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            return
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


def test_what_children_say_arrives_in_order_with_their_names() -> None:
    with Children() as children:
        children.start("anna", echo, "a", "b")
        events = [children.next_event(BOUND_S, "a word") for _ in range(2)]
    assert [(e.child, e.kind, e.value) for e in events] == [
        ("anna", "word", "a"),
        ("anna", "word", "b"),
    ]


def test_children_are_given_the_time_to_end_by_themselves(tmp_path: Path) -> None:
    with Children() as children:
        children.start("anna", finish_late, tmp_path / "finished")
        children.next_event(BOUND_S, "a result")
        children.join(BOUND_S)
    assert (tmp_path / "finished").exists()


def test_a_child_hears_its_commands() -> None:
    with Children() as children:
        child = children.start("anna", obey)
        children.next_event(BOUND_S, "a pid")
        child.tell("fetch")
        assert children.next_event(BOUND_S, "an answer").value == "fetch"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (misuse, "^anna: the buffer is too small$"),
        (divide, "^anna: ZeroDivisionError: integer division"),
        (vanish, "^the anna process was ended by SIGKILL; was the machine out of memory"),
        (give_up, "^the anna process ended with exit status 3"),
    ],
)
def test_a_child_that_fails_is_an_error_that_says_why(
    target: Callable[..., None], message: str
) -> None:
    with Children() as children:
        children.start("anna", target)
        with pytest.raises(ChildFailed, match=message):
            children.next_event(BOUND_S, "nothing in particular")


def test_the_traceback_of_a_child_is_kept_for_who_debugs() -> None:
    with Children() as children:
        children.start("anna", divide)
        with pytest.raises(ChildFailed) as caught:
            children.next_event(BOUND_S, "a result")
    assert "1 // 0" in caught.value.trace


def test_silence_ends_in_an_error_that_names_who_was_silent() -> None:
    with Children() as children:
        children.start("anna", obey)
        children.next_event(BOUND_S, "a pid")
        with pytest.raises(WaitTimeout, match=r"waited 0\.05 s for an answer; anna said nothing"):
            children.next_event(0.05, "an answer")


def test_children_that_have_all_finished_say_nothing_more() -> None:
    with Children() as children:
        children.start("anna", echo)
        with pytest.raises(NobodyLeft, match="every process ended before a word"):
            children.next_event(BOUND_S, "a word")


def test_leaving_ends_every_child_even_a_stubborn_one() -> None:
    with Children() as children:
        for target in (obey, stubborn):
            children.start(target.__name__, target)
        pids = [children.next_event(BOUND_S, "a pid").value for _ in range(2)]
    for pid in pids:
        wait_until_gone(pid)


PARENT = """
import os, sys
sys.path.insert(0, {tests!r})
from test_children import obey
from tent_core.children import Children
if __name__ == "__main__":
    with Children() as children:
        children.start("anna", obey)
        print(children.next_event(30, "a pid").value, flush=True)
        os.kill(os.getpid(), 9)
"""


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=str(Path(__file__).parent)))
    parent = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, timeout=BOUND_S, check=False
    )
    assert parent.returncode == -signal.SIGKILL
    wait_until_gone(int(parent.stdout))
