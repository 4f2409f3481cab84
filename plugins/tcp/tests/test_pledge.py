"""The page that tells a receiver, by one look at memory, that its engine is not what it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tent_core.testing import wait_until
from tent_tcp.counters import Counters

PROGRAM = """
import os, sys, threading
from tent_tcp.counters import Counters

counters, ready = Counters(int(sys.argv[1])), threading.Event()

def live():
    print(counters.pledge().hex(), flush=True)
    ready.set()
    threading.Event().wait()

threading.Thread(target=live, daemon=True).start()
ready.wait()
if sys.stdin.readline() == "exec\\n":
    os.execvp("sleep", ["sleep", "60"])
"""


@pytest.mark.parametrize("end", ["exits", "is killed", "execs"])
def test_the_mark_stands_until_the_process_is_another_or_none(end: str) -> None:
    page = Counters()
    engine = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(page.descriptor)],
        pass_fds=[page.descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    try:
        mark = bytes.fromhex(engine.stdout.readline())
        assert page.pledged == mark
        assert any(mark)
        if end == "is killed":
            engine.send_signal(signal.SIGKILL)
        else:
            engine.stdin.write("exec\n" if end == "execs" else "exit\n")
            engine.stdin.flush()
        wait_until(lambda: page.pledged != mark)
        assert end != "execs" or engine.poll() is None
    finally:
        engine.kill()
        engine.communicate()
        page.close()


def test_counters_do_not_touch_the_mark() -> None:
    page = Counters()
    mark = page.pledge()
    page.write(2**64 - 1, 2**64 - 1, 2**64 - 1)
    assert page.pledged == mark
    page.close()
