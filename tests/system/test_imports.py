"""What is imported when: an application that imports TENT pays for it only when an engine starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    "click": "for the command line",
    "difflib": "for mistakes",
    "encodings.idna": "for international host names",
    "pydantic": "for JSON Schemas",
    "rich": "for the command line",
    "structlog": "imports rich",
    "yaml": "for files of YAML",
}
"""What takes much memory, and what it would be for."""
LATE = ["grpc", "google.protobuf", "tent_tcp", "tent_shm", "tent_mock", *HEAVY]
ENGINE = "tent_core.Engine({'transports': {%s}, 'log': {'level': 'error'}}).close()\n"


def imported(source: str) -> tuple[set[str], float]:
    """Which modules of LATE are there after `source` in a fresh process, and how many ms it took."""
    script = (
        "import sys, time; began = time.perf_counter()\n"
        + source
        + "\ntook = (time.perf_counter() - began) * 1e3\n"
        + f"import json; print(json.dumps([[m for m in {LATE} if m in sys.modules], took]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=50, check=True
    )
    names, took = json.loads(done.stdout.splitlines()[-1])
    return set(names), took


@pytest.mark.parametrize("source", ["import tent_core", "from tent_core import Engine"])
def test_importing_tent_imports_neither_grpc_nor_pydantic_nor_a_plugin(source: str) -> None:
    runs = [imported(source) for _ in range(3)]
    print(f"{source}: {min(took for _, took in runs):.0f} ms")
    assert all(names == set() for names, _ in runs)


def test_asking_which_transports_are_installed_imports_none() -> None:
    names, _ = imported("from tent_core import plugins; assert plugins.discover().names()")
    assert not any(name.startswith("tent_") for name in names)


@pytest.mark.parametrize("enabled", ["tcp", "shm"])
def test_an_engine_imports_the_plugins_that_are_enabled_and_no_other(enabled: str) -> None:
    names, _ = imported("import tent_core\n" + ENGINE % f"'{enabled}': {{'enable': True}}")
    assert {name for name in names if name.startswith("tent_")} == {f"tent_{enabled}"}


def test_an_engine_that_is_given_a_mapping_imports_nothing_heavy_that_it_has_no_use_for() -> None:
    enabled = "'tcp': {'enable': True}, 'shm': {'enable': True, 'copy_threads': 1}"
    names, took = imported("import tent_core\n" + ENGINE % enabled)
    print(f"an engine: {took:.0f} ms")
    assert {"grpc", "tent_tcp", "tent_shm"} <= names
    assert not names & HEAVY.keys()


def test_disabled_plugins_are_not_imported_although_the_policy_names_them() -> None:
    off = "'tcp': {'enable': True}, 'shm': {'enable': False}, 'mock': {'enable': False}"
    policy = ENGINE.replace(
        "'log'", "'policy': [{'name': 'any', 'transports': ['shm', 'tcp']}], 'log'"
    )
    names, _ = imported("import tent_core\n" + policy % off)
    assert {name for name in names if name.startswith("tent_")} == {"tent_tcp"}
