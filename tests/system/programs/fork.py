"""Run by an engine's process: forks, tries everything in the child, and says what happened there."""

from __future__ import annotations

import atexit
import json
import os
import select
from typing import Any

import numpy as np

import tent_core as tent

WAIT_S = 15.0


def try_in_child(
    engine: tent.Engine, owner: str, name: str, config: dict[str, Any]
) -> dict[str, str]:
    """What each call answered in a forked child, by its name, and under `after` how the child ended."""
    global segment, local, remote
    segment = engine.open_segment(owner)
    local = engine.register(np.ones(4096, np.uint8))
    remote = segment.buffer(name)
    prepared = segment.prepare("write", local, remote)
    prepared.run()
    calls = {
        "write": lambda: segment.write(local, remote),
        "read": lambda: segment.read(local, remote),
        "submit": lambda: segment.submit("write", local, [0], remote, [0], 64),
        "run": prepared.run,
        "post": prepared.post,
        "notify": lambda: segment.notify("note"),
        "allocate": lambda: engine.allocate(64),
        "register": lambda: engine.register(bytearray(64)),
        "unregister": lambda: local.unregister(timeout=1),
        "open": lambda: engine.open_segment(owner, timeout=1),
        "next": lambda: engine.next_notification(1),
        "new engine": lambda: tent.Engine(config),
        "close": engine.close,
    }
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for what, call in calls.items():
                os.write(writable, (json.dumps([what, outcome(call)]) + "\n").encode())
            atexit._run_exitfuncs()
        finally:
            os._exit(0)
    os.close(writable)
    answers = dict(json.loads(line) for line in lines(readable))
    answers["after"] = ended(child)
    return answers


def outcome(call: Any) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def lines(readable: int) -> list[bytes]:
    """What the child writes until it ends, or has hung for WAIT_S."""
    data = b""
    while select.select([readable], [], [], WAIT_S)[0] and (piece := os.read(readable, 65536)):
        data += piece
    os.close(readable)
    return data.splitlines()


def ended(child: int) -> str:
    """Whether the child has ended; if not, it is killed."""
    descriptor = os.pidfd_open(child)
    in_time = bool(select.select([descriptor], [], [], WAIT_S)[0])
    os.close(descriptor)
    if not in_time:
        os.kill(child, 9)
    os.waitpid(child, 0)
    return "ended" if in_time else "hung"
