"""What the README says of the settings is so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tent_core import models, section
from tent_rdma.settings import DeviceSettings, PoolSettings, Settings

README = (Path(__file__).parents[1] / "README.md").read_text()
SCRIPTS = Path(__file__).parents[3] / "scripts"


def test_every_setting_is_in_the_readme() -> None:
    for model in (Settings, DeviceSettings, PoolSettings):
        assert [name for name in section.keys(model) if f"`{name}`" not in README] == []


def test_the_settings_that_it_shows_are_accepted() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    own: dict[str, Any] = yaml.safe_load(shown)["transports"]["rdma"]
    own.pop("enable")
    settings = models.make(Settings, **own)
    assert settings.pools["foreground"].queue_pairs == 4


def test_the_scripts_that_it_names_can_be_run() -> None:
    names = set(re.findall(r"scripts/([a-z-]+)", README))
    assert names == {"rdma-lab", "rdma-rails"}
    assert all((SCRIPTS / name).stat().st_mode & 0o111 for name in names)


def test_the_lab_explains_each_of_its_variables_and_refuses_what_is_no_command() -> None:
    lab = SCRIPTS / "rdma-lab"
    said = subprocess.run([lab, "--help"], capture_output=True, text=True, timeout=10, check=True)
    assert set(re.findall(r"\$\{(TENT_LAB_[A-Z]+)", lab.read_text())) <= set(said.stdout.split())
    for arguments in ([], ["ls"], ["--rw", "/", "--"]):
        refused = subprocess.run([lab, *arguments], capture_output=True, text=True, timeout=10)
        assert refused.returncode == 2
        assert "COMMAND" in refused.stderr
