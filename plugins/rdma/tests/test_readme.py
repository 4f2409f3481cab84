"""What the README says of the settings is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from tent_rdma.settings import DeviceSettings, PoolSettings, Settings

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_every_setting_is_in_the_readme() -> None:
    models: list[type[BaseModel]] = [Settings, DeviceSettings, PoolSettings]
    for model in models:
        assert [name for name in model.model_fields if f"`{name}`" not in README] == []


def test_the_settings_that_it_shows_are_accepted() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    own: dict[str, Any] = yaml.safe_load(shown)["transports"]["rdma"]
    own.pop("enable")
    settings = Settings.model_validate(own)
    assert settings.pools["foreground"].queue_pairs == 2
