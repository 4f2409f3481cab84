"""The command as a whole: help that teaches, errors that are one message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from tent_core.cli import options
from tent_core.cli.app import tent

COMMANDS = (
    "replay",
    "bench",
    "serve",
    "plugins",
    "new-transport",
    "check",
    "explain",
    "peers",
    "doctor",
)


def test_the_commands_are_these() -> None:
    assert tuple(tent.commands) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_examples(run: Any, name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"tent {name}" in result.stdout
    assert "Examples:" in result.stdout
    assert "--json" in result.stdout
    command = tent.commands[name]
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name not in (
            "help",
            "priority",
            "intent",
        ):
            assert parameter.help, f"{name} {parameter.opts} has no help"


def test_without_a_command_it_says_what_to_try(run: Any) -> None:
    result = run()
    assert "New here? Try these:" in result.output


def test_a_mistake_is_one_message_on_stderr_and_exit_status_1(run: Any, tmp_path: Path) -> None:
    config = tmp_path / "tent.yaml"
    config.write_text("polcy: []\n")
    result = run("serve", "--config", config)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(
        f"tent: {config}: 1 mistake\nline 1, polcy: found an unknown key"
    )
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("before", [True, False])
def test_debug_adds_the_traceback_wherever_it_is_given(
    run: Any, tmp_path: Path, before: bool
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n")
    args = ("--debug", "replay", trace) if before else ("replay", trace, "--debug")
    result = run(*args)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert (
        result.stderr.rstrip().splitlines()[-1].startswith(f"tent: {trace}:1: input_length must be")
    )


def test_an_error_nobody_foresaw_is_one_message_too() -> None:
    failure = options.failure_of(KeyError("x"))
    assert failure.message == "unexpected KeyError: 'x' (add --debug to see where)"
    assert failure.exit_code == 1


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from tent_core.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert (
        done.stderr == "tent: the command line needs click and rich: pip install 'tent-core[cli]'\n"
    )


def test_help_imports_neither_an_engine_nor_a_plugin() -> None:
    code = (
        "import sys; sys.argv = ['tent', '--help']\n"
        "from tent_core.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "loaded = {'grpc', 'pydantic', 'tent_tcp', 'tent_shm', 'tent_mock'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("replay", "x", "--pool-size", "2 gigs"), "found '2 gigs'; allowed: a size"),
        (("replay", "x", "--timeout", "soon"), "found 'soon'; allowed: a duration"),
        (("serve", "--config", "/absent.yaml"), "does not exist"),
    ],
)
def test_a_wrong_option_says_what_is_allowed(
    run: Any, tmp_path: Path, given: Any, message: str
) -> None:
    trace = tmp_path / "x"
    trace.touch()
    result = run(*(trace if word == "x" else word for word in given))
    assert result.exit_code == 2
    assert message in result.stderr


class TestEngineConfig:
    """What the options do to the YAML."""

    def config(self, tmp_path: Path) -> Path:
        path = tmp_path / "tent.yaml"
        path.write_text(
            "control: {call_timeout_s: 3s}\n"
            "transports: {tcp: {enable: auto, streams: 2}, shm: {enable: true}}\n"
            "policy: [{name: all, transports: [shm, tcp]}]\n"
            "log: {level: error}\n"
        )
        return path

    def test_without_options_it_is_the_yaml(self, tmp_path: Path) -> None:
        found = options.engine_config(self.config(tmp_path))
        assert set(found) == {"control", "transports", "policy", "log"}
        assert found["log"] == {"level": "error"}

    def test_a_transport_leaves_that_one_alone_with_its_settings(self, tmp_path: Path) -> None:
        found = options.engine_config(self.config(tmp_path), "tcp")
        assert found["transports"] == {"tcp": {"enable": True, "streams": 2}}
        assert [entry["transports"] for entry in found["policy"]] == [["tcp"]]

    def test_listen_and_advertise_go_over_what_the_yaml_says(self, tmp_path: Path) -> None:
        found = options.engine_config(self.config(tmp_path), None, "[::1]:0", "host-a")
        assert found["control"] == {
            "call_timeout_s": "3s",
            "listen": "[::1]:0",
            "advertise": "host-a",
        }

    def test_commands_log_warnings_unless_the_yaml_says_otherwise(self) -> None:
        assert options.engine_config(None) == {"log": {"level": "warning"}}
