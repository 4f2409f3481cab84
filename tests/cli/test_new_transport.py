"""`tent new-transport`: what it writes can be installed as it is, and passes the suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NUMBER = 1042
BOUND_S = 100
EXAMPLES = Path(__file__).parents[2] / "examples"
ESSENTIAL = "any_size or many_blocks or owner_refuses or another_process_and_come_back or closing"
"""All of the suite takes half a minute; these tests tell a transport that works from one that does not."""


def installed(package: Path, into: Path) -> dict[str, str]:
    """Install a package into a directory; the environment in which Python finds it."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--target", into, package]
    subprocess.run(command, check=True, timeout=BOUND_S)
    path = os.pathsep.join(filter(None, [str(into), os.environ.get("PYTHONPATH")]))
    # Options for the run that this test is a part of, such as coverage, are not for the package's own.
    return {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_package_as_it_is_written_can_be_installed_and_passes_the_suite(
    run: Any, tmp_path: Path
) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling, to build without an index")
    package = tmp_path / "tent-my-demo"
    written = run("new-transport", "my_demo", "--number", NUMBER, "--into", package, "--json")
    assert written.exit_code == 0, written.stderr
    assert str(package / "tent_my_demo" / "transport.py") in json.loads(written.stdout)["files"]
    environment = installed(package, tmp_path / "site")

    command = [sys.executable, "-m", "tent_core.cli", "plugins", "--json"]
    listed = subprocess.run(command, env=environment, capture_output=True, timeout=BOUND_S)
    (row,) = [row for row in json.loads(listed.stdout) if row["name"] == "my_demo"]
    assert (row["usable"], row["number"], row["package"]) == (True, NUMBER, "tent-my-demo")

    # All of it takes half a minute; this is what tells a transport that works from one that does not.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k"]
    command += [
        "any_size or many_blocks or owner_refuses or another_process_and_come_back or closing"
    ]
    tested = subprocess.run(
        command, env=environment, cwd=package, capture_output=True, text=True, timeout=BOUND_S
    )
    assert tested.returncode == 0, tested.stdout
    assert "conformance of my_demo" in tested.stdout


def test_nothing_of_the_template_is_left_in_what_is_written(run: Any, tmp_path: Path) -> None:
    package = tmp_path / "made"
    assert run("new-transport", "demo", "--number", NUMBER, "--into", package).exit_code == 0
    files = [file for file in package.rglob("*") if file.is_file()]
    assert files
    for file in files:
        text = str(file.relative_to(package)) + file.read_text()
        assert "newname" not in text.lower(), file
        assert "1999" not in text, file
        assert f"1000 to {NUMBER}" not in text, file


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("demo", 1000, "1000 is the number of 'mock' of tent-mock"),
        ("demo", 999, "999 is no private number; those are 1000 to 1999, and 1001 is free"),
        ("tcp", 1042, "'tcp' is a name with a number of its own (7)"),
        ("mock", 1042, "there is a transport of that name installed: 'mock' of tent-mock"),
        ("Demo", 1042, "'Demo' cannot be a transport's name"),
        ("unspec", 1042, "'unspec' cannot be a transport's name"),
    ],
)
def test_a_name_or_number_that_clashes_is_refused_and_nothing_is_written(
    run: Any, tmp_path: Path, name: str, number: int, message: str
) -> None:
    into = tmp_path / "made"
    result = run("new-transport", name, "--number", number, "--into", into)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not into.exists()


def test_what_exists_is_not_overwritten(run: Any, tmp_path: Path) -> None:
    result = run("new-transport", "demo", "--number", NUMBER, "--into", tmp_path)
    assert result.exit_code == 1
    assert "exists; move it away" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["uds", "files"])
def test_the_example_packages_can_be_installed_and_pass_the_suite(
    tmp_path: Path, name: str
) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling, to build without an index")
    package = EXAMPLES / f"tent-{name}"
    environment = installed(package, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", ESSENTIAL]
    tested = subprocess.run(
        command, env=environment, cwd=package, capture_output=True, text=True, timeout=BOUND_S
    )
    assert tested.returncode == 0, tested.stdout
    assert f"conformance of {name}" in tested.stdout
