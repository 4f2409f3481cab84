"""Transport packages: found without an import, loaded one by one, refused with reasons."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tent_core import hookspecs
from tent_core.errors import PluginError
from tent_core.hookspecs import hookimpl
from tent_core.plugins import HOOKS, PluginReport, Registry, discover
from tent_core.section import Section
from tent_core.transport import API_VERSION, Transport, TransportDeclaration
from tent_core.types import Capabilities

PLUGIN = """\
print("imported", __name__)
from pydantic import BaseModel
from tent_core.errors import TransportUnavailable
from tent_core.hookspecs import hookimpl
from tent_core.transport import Transport, TransportDeclaration
from tent_core.types import Capabilities

class Absent(Transport):
    def start(self, context): raise TransportUnavailable("there is no such device")
    def connect(self, peer): raise NotImplementedError
    def stop(self): pass

class Settings(BaseModel, extra="forbid"):
    streams: int = 1

@hookimpl
def tent_transport():
    return TransportDeclaration({name!r}, {number}, Absent, Settings, Capabilities(), {version}, "a summary")
"""

Install = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of installed packages, in front of all others."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(
    site: Path,
    package: str,
    name: str,
    number: int = 1001,
    *,
    declares: str | None = None,
    version: tuple[int, int] = API_VERSION,
    source: str | None = None,
) -> str:
    """Install a package that offers the transport `name`; returns the name of its module."""
    module = f"{package.replace('-', '_')}_{site.name.replace('-', '_')}"
    info = site / f"{package.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[tent.transports]\n{name} = {module}\n")
    made = PLUGIN.format(name=declares or name, number=number, version=version)
    (site / f"{module}.py").write_text(made if source is None else textwrap.dedent(source))
    return module


def row(registry: Registry, name: str) -> PluginReport:
    (found,) = [report for report in registry.report() if report.name == name]
    return found


def refused(name: str, registry: Registry | None = None) -> str:
    registry = discover() if registry is None else registry
    with pytest.raises(PluginError) as first:
        registry.load(name)
    with pytest.raises(PluginError) as second:
        registry.load(name)
    assert str(first.value) == str(second.value)
    assert {report.reason for report in registry.report() if report.name == name} <= {
        str(first.value)
    }
    return str(first.value)


def test_names_are_known_and_nothing_is_imported(site: Path) -> None:
    module = install(site, "tent-own", "own")
    registry = discover()
    assert "own" in registry.names()
    assert module not in sys.modules


def test_a_package_is_imported_when_it_is_loaded_and_only_then_its_hooks_exist(site: Path) -> None:
    module = install(site, "tent-own", "own")
    registry = discover()
    assert not registry.hooks.get_plugins()
    loaded = registry.load("own")
    assert registry.load("own") is loaded
    assert (loaded.name, loaded.package, loaded.version) == ("own", "tent-own", "1.2")
    assert loaded.declaration.number == 1001
    assert loaded.module is sys.modules[module]
    assert registry.hooks.get_plugin("own") is loaded.module


def test_a_report_has_every_package_with_what_it_declares_or_why_not(site: Path) -> None:
    install(site, "tent-own", "own")
    module = install(site, "tent-bad", "bad", source="import pyverbs_that_nobody_has")
    registry = discover()
    good = row(registry, "own")
    assert (good.package, good.version, good.number, good.reason) == ("tent-own", "1.2", 1001, "")
    assert (good.summary, good.api_version) == ("a summary", API_VERSION)
    assert good.capabilities == Capabilities()
    bad = row(registry, "bad")
    assert bad.target == module
    assert bad.reason == (
        "tent-bad 1.2 cannot be imported: ModuleNotFoundError: No module named 'pyverbs_that_nobody_has'"
    )


def test_a_transport_that_is_not_installed_is_refused() -> None:
    assert refused("nothing") == "no installed package offers the transport 'nothing'"
    assert refused("ascend") == "no installed package offers the transport 'ascend'"
    assert refused("mpcomm", Registry([])).endswith("install tent-mpcomm")  # this project's own


def test_two_packages_with_one_name_are_refused_with_both_names_and_not_imported(
    site: Path,
) -> None:
    modules = {install(site, "tent-first", "own"), install(site, "tent-second", "own")}
    reason = refused("own")
    assert "tent-first 1.2 and by tent-second 1.2" in reason
    assert not modules & set(sys.modules)
    assert len([report for report in discover().report() if report.name == "own"]) == 2


def test_two_loaded_transports_with_one_number_are_both_refused_with_both_names(site: Path) -> None:
    install(site, "tent-first", "first", 1005)
    install(site, "tent-second", "second", 1005)
    registry = discover()
    registry.load("first")
    for name in ("second", "first"):
        with pytest.raises(
            PluginError, match=r"'first' of tent-first 1\.2 and 'second' of tent-second 1\.2"
        ):
            registry.load(name)
    assert not registry.hooks.get_plugins()


@pytest.mark.parametrize(
    "source",
    [
        "raise RuntimeError('no driver')",
        "import sys; sys.exit(3)",
        "def broken(:",
    ],
)
def test_a_package_that_fails_to_import_is_refused_whatever_it_raises(
    site: Path, source: str
) -> None:
    install(site, "tent-own", "own", source=source)
    assert refused("own").startswith("tent-own 1.2 cannot be imported: ")


def test_a_package_that_vanished_after_discovery_is_refused(site: Path) -> None:
    module = install(site, "tent-own", "own")
    registry = discover()
    (site / f"{module}.py").unlink()
    with pytest.raises(PluginError, match="No module named"):
        registry.load("own")


def test_another_major_version_of_the_api_is_refused_and_another_minor_one_is_not(
    site: Path,
) -> None:
    major, minor = API_VERSION
    install(site, "tent-old", "old", version=(major + 1, 0))
    install(site, "tent-new", "new", version=(major, minor + 7))
    assert f"written for version {major + 1}.0 of the plugin API" in refused("old")
    assert discover().load("new")


def test_the_declared_name_must_be_that_of_the_entry_point(site: Path) -> None:
    install(site, "tent-own", "own", declares="other")
    assert "declares the transport 'other' under the entry point 'own'" in refused("own")


@pytest.mark.parametrize("number", [0, 7, 13, 999, 2000, -1])
def test_a_transport_from_outside_must_have_a_private_number(site: Path, number: int) -> None:
    install(site, "tent-own", "own", number)
    assert "private numbers are 1000 to 1999" in refused("own")


@pytest.mark.parametrize("number", [0, 6, 1007])
def test_a_known_name_must_have_its_number(site: Path, number: int) -> None:
    install(site, "tent-nvlink", "nvlink", number)
    assert "which has the number 4" in refused("nvlink")


@pytest.mark.parametrize("name", ["TCP", "own-link", "unspec", "1st", "é"])
def test_a_name_that_yaml_could_confuse_is_refused_before_the_import(site: Path, name: str) -> None:
    module = install(site, "tent-own", name)
    assert f"offers a transport named {name!r}" in refused(name)
    assert module not in sys.modules


# ---------------------------------------------------------------- hooks and declarations


class Settings(BaseModel, extra="forbid"):
    pass


class Open(BaseModel):
    pass


class Taken(BaseModel, extra="forbid"):
    enable: bool = True


@dataclass(frozen=True)
class TakenSection(Section):
    enable: bool = True


class Undecorated(Section):
    streams: int = 1


def factory() -> Transport:
    raise AssertionError("nothing is started here")


def declared(
    name: str = "own", number: int = 1001, settings: Any = Settings
) -> TransportDeclaration:
    return TransportDeclaration(name, number, factory, settings, Capabilities())


class Package:
    def __init__(self, declaration: object) -> None:
        self.declaration = declaration

    @hookimpl
    def tent_transport(self) -> Any:
        return self.declaration


class Misspelled(Package):
    @hookimpl
    def tent_peer_departd(self, engine: object) -> None: ...


class Curious(Package):
    @hookimpl
    def tent_peer_departed(self, peer: object, cause: object) -> None: ...


class Wrapping(Package):
    @hookimpl(wrapper=True)
    def tent_select(self) -> Any:
        return (yield)


class Undeclared:
    @hookimpl
    def tent_engine_started(self, engine: object) -> None: ...


class Failing:
    @hookimpl
    def tent_transport(self) -> Any:
        raise OSError("no such device")


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        (
            Misspelled(declared()),
            "'tent_peer_departd', which is no hook; did you mean 'tent_peer_departed'",
        ),
        (Curious(declared()), "cause"),
        (Wrapping(declared()), "wraps the hook 'tent_select'"),
        (Undeclared(), "declares nothing in its hook 'tent_transport'"),
        (Failing(), "fails in its hook 'tent_transport': OSError: no such device"),
        (Package({"name": "own"}), "declares dict in its hook 'tent_transport'"),
    ],
)
def test_hooks_that_do_not_fit_are_refused(package: object, reason: str) -> None:
    with pytest.raises(PluginError) as caught:
        Registry.of(package)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict, "neither a section nor a pydantic model"),
        (Settings(), "which are no class"),
        (Open, 'extra="forbid"'),
        (Taken, "a field 'enable'"),
        (TakenSection, "a field 'enable'"),
        (Undecorated, "a section and no dataclass"),
    ],
)
def test_settings_that_would_let_mistakes_pass_are_refused(settings: Any, reason: str) -> None:
    registry = Registry.of(declared(settings=settings))
    with pytest.raises(PluginError) as caught:
        registry.load("own")
    assert reason in str(caught.value)


def test_declarations_and_objects_with_hooks_can_be_given_directly() -> None:
    registry = Registry.of(declared("one", 1001), Package(declared("two", 1002)))
    assert registry.names() == ("one", "two")
    assert registry.load("one").declaration.number == 1001
    assert registry.load("two").declaration.number == 1002
    assert {name for name, _ in registry.hooks.list_name_plugin()} == {"one", "two"}


def test_a_transport_that_cannot_run_on_this_machine_is_reported_with_the_obstacle() -> None:
    def broken() -> str:
        raise LookupError("where am I")

    registry = Registry.of(
        replace(declared("one", 1001), obstacle=lambda: "no device: buy one"),
        replace(declared("two", 1002), obstacle=lambda: ""),
        replace(declared("three", 1003), obstacle=broken),
    )
    reasons = {row.name: row.reason for row in registry.report()}
    assert reasons["one"] == "no device: buy one"
    assert reasons["two"] == ""
    assert "LookupError: where am I" in reasons["three"]
    assert [row.number for row in registry.report()] == [1001, 1003, 1002]


def test_every_hook_is_documented_with_its_arguments() -> None:
    page = (Path(__file__).parent.parent / "docs" / "hooks.md").read_text()
    manager = Registry([]).hooks
    for name in HOOKS:
        assert getattr(hookspecs, name).__doc__
        arguments = ", ".join(getattr(manager.hook, name).spec.argnames)
        assert re.search(
            rf"`{name}(\({arguments}\)`|` \| {f'`{arguments}`' if arguments else ''})", page
        ), name


def test_an_engine_imports_what_its_configuration_enables_and_nothing_else(site: Path) -> None:
    used = install(site, "tent-used", "used", 1001)
    unused = install(site, "tent-unused", "unused", 1002)
    disabled = install(site, "tent-disabled", "disabled", 1003)
    code = f"""
        import sys
        sys.path.insert(0, {str(site)!r})
        import tent_core as tent
        from tent_core import plugins
        assert {{"used", "unused", "disabled"}} <= set(plugins.discover().names())
        assert not {{{used!r}, {unused!r}, {disabled!r}}} & set(sys.modules)
        print("no engine yet")
        with tent.Engine(
            {{
                "transports": {{"disabled": {{"enable": False}}}},
                "policy": [{{"name": "any", "transports": ["used", "disabled"]}}],
            }}
        ):
            pass
        assert not [name for name in sys.modules if name.startswith(("tent_tcp", "tent_shm"))]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["no engine yet", f"imported {used}"]
    assert "there is no such device" in done.stderr
