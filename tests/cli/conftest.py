"""Running the command: in this process, or in one of its own, which may keep running."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from tent_core.cli.app import tent

Run = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[str]"]
BOUND_S = 60
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules(request: pytest.FixtureRequest) -> Iterator[dict[str, ModuleType]]:
    """The modules of benchmarks/ that the test's module names in MODULES, which are no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in request.module.MODULES}
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in request.module.MODULES:
            del sys.modules[name]


@pytest.fixture
def run() -> Run:
    """Run the command here; the result has `stdout`, `stderr` and `exit_code`."""

    def call(*args: object) -> Result:
        return CliRunner().invoke(tent, [str(arg) for arg in args])

    return call


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the command in a process of its own, which is killed at the end if it still runs."""
    running: list[subprocess.Popen[str]] = []

    def call(*args: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tent_core.cli", *(str(arg) for arg in args)]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        return running[-1]

    yield call
    for process in running:
        process.kill()
        process.communicate(timeout=BOUND_S)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six requests of two conversations that begin alike."""
    prompts = [[0, 1], [0, 2, 3], [0, 1, 4], [0, 2, 3, 5], [0, 1, 4, 6, 7], [8]]
    lines = [
        {"timestamp": i, "input_length": 512 * len(p), "output_length": 1, "hash_ids": p}
        for i, p in enumerate(prompts)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
