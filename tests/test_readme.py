"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tent_core import config, plugins

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The code blocks of one language, each on the lines that it has in the README, for tracebacks."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return ["\n" * README.count("\n", 0, match.start(1)) + match[1] for match in found]


def test_the_tour_of_the_api_runs_as_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "kv-pool" in printed
    assert "256 blocks" in printed


def test_the_configuration_that_it_shows_is_accepted() -> None:
    (shown,) = blocks("yaml")
    settings = config.load(yaml.safe_load(shown), plugins.discover())
    assert [entry.name for entry in settings.policy] == ["small", "anything"]


@pytest.mark.parametrize("command", [b.split()[0] for b in blocks("sh")])
def test_each_command_that_it_gives_is_there_and_can_be_run(command: str) -> None:
    assert (ROOT / command).stat().st_mode & 0o111


def test_every_file_that_it_links_to_exists() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert len(links) > 4
    assert [link for link in links if not (ROOT / link).exists()] == []
