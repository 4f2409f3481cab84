"""What the packages of the enabled transports find: the hook `tent_doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tent_core import config as configuration
from tent_core import plugins
from tent_core.doctor.finding import Finding, Level
from tent_core.errors import TentError
from tent_core.plugins import Registry
from tent_core.topology import Topology


def packages(config: Mapping[str, Any], topology: Topology) -> list[Finding]:
    """Findings of every package that the configuration enables; a configuration with mistakes has none."""
    registry = plugins.discover()
    try:
        enabled = configuration.load(config, registry).enabled
    except TentError:
        return []  # the attempt to start an engine with it has said so
    return [
        finding
        for name, choice in enabled.items()
        for finding in _ask(registry, name, topology, choice.settings)
    ]


def _ask(registry: Registry, name: str, topology: Topology, settings: Any) -> list[Finding]:
    loaded = registry.load(name)
    others = [plugin for plugin in registry.hooks.get_plugins() if plugin is not loaded.module]
    call = registry.hooks.subset_hook_caller("tent_doctor", others)
    try:
        found = [each for answer in call(topology=topology, settings=settings) for each in answer]
        strange = [each for each in found if not isinstance(each, Finding)]
        if strange:
            raise TypeError(f"it answered {strange[0]!r}, which is no Finding")
    except (Exception, SystemExit) as error:
        package = f"{loaded.package} {loaded.version}".strip()
        what = f"its hook tent_doctor fails: {type(error).__name__}: {error}"
        return [Finding(name, package, Level.BAD, what, f"report this to the authors of {package}")]
    return found
