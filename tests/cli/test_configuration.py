"""`tent plugins`, `tent check` and `tent explain`: what is installed, and what a configuration does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
WRONG = """\
control: {listen: "nowhere"}
transports:
  tpc: {enable: true}
policy:
  - name: a
    intents: foreground
    min_size: 64 kilobytes
    transports: [tcp]
  - name: b
    priority: urgent
    transports: [tcp]
"""


def test_plugins_lists_what_is_installed(run: Any) -> None:
    found = {row["name"]: row for row in json.loads(run("plugins", "--json").stdout)}
    assert {"shm", "tcp", "mock"} <= set(found)
    assert (found["shm"]["number"], found["tcp"]["number"], found["mock"]["number"]) == (3, 7, 1000)
    ours = [found[name] for name in ("shm", "tcp", "mock")]  # others need a library from elsewhere
    assert all(row["usable"] and not row["reason"] for row in ours)
    assert found["tcp"]["capabilities"]["reach"] == "network"
    assert ["dram", "dram"] in found["tcp"]["capabilities"]["memory_pairs"]
    table = run("plugins").stdout
    assert "tent-tcp" in table
    assert "yes" in table


def test_plugins_shows_what_each_transport_claims_and_for_which_contract(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tent_mock
    from tent_core import plugins
    from tent_core.types import Retained

    able = tent_mock.declare(
        "able",
        1001,
        cancellation=True,
        qp_pools=True,
        largest_request=1 << 30,
        retained_per_peer=Retained("a key"),
    )
    monkeypatch.setattr(plugins, "discover", lambda: plugins.Registry.of(able))
    monkeypatch.setenv("COLUMNS", "250")
    table = run("plugins").stdout
    assert f" {'.'.join(map(str, able.api_version))} " in table
    assert "dram-dram, owner checked, cancellation, qp pools, at most 1 GiB a request" in table
    assert "keeps of each departed peer: a key" in table


def test_plugins_shows_why_one_is_not_usable(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tent_core import plugins

    def broken() -> object:
        raise ImportError("libfast.so: not found")

    registry = plugins.Registry(
        [plugins.Offer("fast", "tent-fast", "1.0", "tent_fast.plugin", broken)]
    )
    monkeypatch.setattr(plugins, "discover", lambda: registry)
    (row,) = json.loads(run("plugins", "--json").stdout)
    assert not row["usable"]
    assert "libfast.so: not found" in row["reason"]
    assert "libfast.so" in run("plugins").stdout.replace("\n", "")


def test_plugins_says_what_to_install_when_there_is_none(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tent_core import plugins

    monkeypatch.setattr(plugins, "discover", lambda: plugins.Registry([]))
    assert "pip install" in run("plugins").stdout
    assert json.loads(run("plugins", "--json").stdout) == []


@pytest.mark.parametrize("name", ["tent.yaml", "mixed.yaml"])
def test_the_examples_have_no_mistakes(run: Any, name: str) -> None:
    result = run("check", EXAMPLES / name)
    assert result.exit_code == 0
    assert "no mistakes" in result.stdout
    assert json.loads(run("check", EXAMPLES / name, "--json").stdout) == {
        "valid": True,
        "mistakes": [],
    }


def test_every_mistake_is_reported_at_once(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(WRONG)
    result = run("check", path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"tent: {path}: 5 mistakes\n")
    found = json.loads(run("check", path, "--json").stdout)
    assert not found["valid"]
    assert [(m["line"], m["key"]) for m in found["mistakes"]] == [
        (1, "control.listen"),
        (3, "transports.tpc"),
        (6, "policy[0].intents"),
        (7, "policy[0].min_size"),
        (10, "policy[1].priority"),
    ]
    assert found["mistakes"][1]["nearest"] == "tcp"


def test_the_schema_has_the_settings_of_installed_transports(run: Any) -> None:
    schema = json.loads(run("check", "--schema").stdout)
    transports = schema["properties"]["transports"]["properties"]
    assert {"shm", "tcp", "mock"} <= set(transports)
    assert "copy_threads" in transports["shm"]["properties"]


def test_check_needs_a_configuration_or_schema_and_not_both(run: Any) -> None:
    assert run("check").exit_code == 2
    assert run("check", "--schema", EXAMPLES / "tent.yaml").exit_code == 2


def explained(run: Any, *args: object) -> list[dict[str, Any]]:
    result = run("explain", "--json", *args)
    assert result.exit_code == 0, result.stderr
    answers: list[dict[str, Any]] = json.loads(result.stdout)["answers"]
    return answers


def test_explain_shows_every_range_of_sizes_that_selects_alike(run: Any) -> None:
    small, large = explained(run, "--config", EXAMPLES / "mixed.yaml")
    assert (small["from"], small["below"], small["entry"], small["candidates"]) == (
        1,
        65536,
        "small",
        ["tcp"],
    )
    assert (large["from"], large["below"], large["entry"], large["candidates"]) == (
        65536,
        None,
        "large",
        ["shm"],
    )


@pytest.mark.parametrize(
    ("size", "name"), [("1", "tcp"), ("65535", "tcp"), ("64KiB", "shm"), ("1GiB", "shm")]
)
def test_explain_shows_one_size(run: Any, size: str, name: str) -> None:
    (answer,) = explained(run, "--config", EXAMPLES / "mixed.yaml", size)
    assert answer["candidates"] == [name]


def test_explain_says_why_others_are_out(run: Any) -> None:
    (answer,) = explained(run, "--config", EXAMPLES / "tent.yaml", "4KiB", "--other-machine")
    assert answer["candidates"] == ["tcp"]
    assert answer["passed_over"] == [
        {"transport": "shm", "reason": answer["passed_over"][0]["reason"]},
    ]
    assert "machine" in answer["passed_over"][0]["reason"]


def test_explain_takes_intent_priority_entry_and_hint(run: Any) -> None:
    config = ("--config", EXAMPLES / "tent.yaml")
    assert (
        explained(run, *config, "4KiB", "--intent", "foreground_get")[0]["entry"]
        == "foreground-get"
    )
    assert explained(run, *config, "4KiB", "--policy", "bulk")[0]["entry"] == "bulk"
    assert explained(run, *config, "4KiB", "--transport", "tcp")[0]["candidates"] == ["tcp", "shm"]
    bulk = explained(run, *config, "1MiB", "--intent", "checkpoint", "--priority", "low")
    assert bulk[0]["entry"] == "bulk"


def test_explain_shows_that_nobody_carries_device_memory(run: Any) -> None:
    (answer,) = explained(
        run, "--config", EXAMPLES / "mixed.yaml", "4KiB", "--local-memory", "cuda:0"
    )
    assert answer["candidates"] == []
    assert "gpu" in answer["passed_over"][0]["reason"]
    shown = run(
        "explain", "--config", EXAMPLES / "mixed.yaml", "4KiB", "--local-memory", "cuda:0"
    ).stdout
    assert "no candidate: such a request fails" in shown


def test_explain_shows_what_is_disabled_and_what_is_not_installed(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "tent.yaml"
    path.write_text(
        "transports: {shm: {enable: false}}\npolicy: [{name: all, transports: [shm, gds, tcp]}]\n"
    )
    (answer,) = explained(run, "--config", path)
    reasons = {p["transport"]: p["reason"] for p in answer["passed_over"]}
    assert "disabled" in reasons["shm"]
    assert "no installed package" in reasons["gds"]


def test_explain_says_what_it_assumes(run: Any) -> None:
    result = run("explain")
    assert "assumed: a peer with the same transports" in result.stderr
    assert result.stdout.startswith("requests of any size: entry 'default'\n  1. shm\n")


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (("--policy", "absent"), 2, "no policy entry is named 'absent'; there are small, large"),
        (("--local-memory", "moon base"), 1, "location 'moon base' is none"),
        (("0",), 2, "at least one byte"),
    ],
)
def test_explain_refuses_what_makes_no_sense(
    run: Any, args: Any, status: int, message: str
) -> None:
    result = run("explain", "--config", EXAMPLES / "mixed.yaml", *args)
    assert result.exit_code == status
    assert message in result.stderr


RULED = """
failover: {max_attempts: 1}
scheduling: {low: {bytes: 2MiB, tasks: 7}, slice: 256KiB}
policy: [{name: slow, transports: [shm, rdma, tcp], attempt_timeout_s: 2.5, stall_s: 500ms}]
transports: {rdma: {enable: false}}
"""


def test_explain_shows_attempts_time_limits_and_turns(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "tent.yaml"
    path.write_text(RULED)
    (answer,) = explained(run, "--config", path, "4KiB", "--priority", "low")
    assert answer["attempts"] == 2
    assert (answer["attempt_timeout_s"], answer["stall_s"]) == (2.5, 0.5)
    assert answer["turns"] == {"bytes": 2 << 20, "tasks": 7, "slice": 256 << 10}
    assert explained(run, "--config", path, "4KiB")[0]["turns"] is None
    shown = run("explain", "--config", path, "4KiB", "--priority", "low").stdout
    assert "each may take 2.5 s" in shown
    assert "takes turns: starts when at most 2MiB and 7 requests are under way" in shown
