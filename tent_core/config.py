"""The configuration: YAML, or a mapping, to checked settings, with every mistake of it in one report.

Which transports are enabled:

- `transports` says `enable: true` (failing to load or to start is an error), `auto` (skipped then, with its
  reason; what a transport is that is mentioned without `enable`) or `false` (its package is not imported,
  so that its settings are not checked).
- A transport that `policy` names and `transports` does not mention is `auto`.
- Without a `policy`, what `transports` enables is used, in the default order. If that is nothing, the
  transports of the default order and every other installed one whose name the wire contract knows are
  `auto`. So a transport with a private number, such as mock, is used only where it is named.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from tent_core import models, section
from tent_core.document import Document, of_mapping
from tent_core.errors import ConfigError, PluginError
from tent_core.mistakes import Mistake, Path, described, dotted, nearest
from tent_core.plugins import Registry
from tent_core.policy import DEFAULT_ORDER, default_policy
from tent_core.section import Complaint
from tent_core.settings import (
    ControlSettings,
    Enable,
    FailoverSettings,
    HookSettings,
    LogSettings,
    NotificationSettings,
    PeerSettings,
    PolicySettings,
    RevocationSettings,
    Sections,
    Settings,
    TransferSettings,
    TransportChoice,
    WaitSettings,
    Yaml,
)
from tent_core.types import TransportType, transport_name, transport_number

__all__ = [
    "Checked",
    "ControlSettings",
    "Enable",
    "FailoverSettings",
    "HookSettings",
    "LogSettings",
    "NotificationSettings",
    "PeerSettings",
    "PolicySettings",
    "RevocationSettings",
    "Settings",
    "Source",
    "TransferSettings",
    "TransportChoice",
    "WaitSettings",
    "check",
    "json_schema",
    "load",
]

Source = str | os.PathLike[str] | Mapping[str, Any] | Document | None
"""The path of a YAML file, a mapping of that shape, text read by `yamldoc.parse`, or None: the defaults."""

_KNOWN = tuple(name for number in TransportType if (name := transport_name(number)) is not None)
_ENABLE = {True: Enable.TRUE, "auto": Enable.AUTO, False: Enable.FALSE}


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration that was looked through: `settings`, or else `mistakes` in the order of their lines."""

    source: str
    settings: Settings | None
    mistakes: tuple[Mistake, ...] = ()


def load(source: Source, registry: Registry) -> Settings:
    """The settings that a configuration makes. Loads the packages that it enables, and no other.

    Raises ConfigError with every mistake.
    """
    checked = check(source, registry)
    if checked.settings is None:
        raise ConfigError([str(mistake) for mistake in checked.mistakes], checked.source)
    return checked.settings


def check(source: Source, registry: Registry) -> Checked:
    """The same without raising."""
    document = _document(source)
    checker = _Checker(document, registry)
    settings = checker.settings()
    mistakes = sorted(
        (*document.mistakes, *checker.mistakes), key=lambda mistake: mistake.line or 0
    )
    return Checked(document.source, None if mistakes else settings, tuple(mistakes))


def json_schema(registry: Registry) -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of the YAML, for editors. Loads every package that is installed."""
    schema = models.json_schema(Yaml, "#/$defs/{model}")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "TENT configuration"
    names = sorted({*_KNOWN, *registry.names()})
    transports = {name: _transport_schema(name, registry, schema["$defs"]) for name in names}
    schema["properties"]["transports"] = {
        "description": schema["properties"]["transports"]["description"],
        "type": "object",
        "properties": transports,
        "additionalProperties": False,
    }
    schema["$defs"]["PolicySettings"]["properties"]["transports"]["items"] = {"enum": names}
    return schema


def _transport_schema(name: str, registry: Registry, definitions: dict[str, Any]) -> dict[str, Any]:
    """What YAML may say of one transport; what its model refers to is added to `definitions`."""
    enable = {
        "enum": [True, "auto", False],
        "default": "auto",
        "description": "true: failing to start is an error; auto: it is skipped then; false: never used",
    }
    try:
        declaration = registry.load(name).declaration
    except PluginError as error:
        return {"type": "object", "properties": {"enable": enable}, "description": str(error)}
    own = models.json_schema(declaration.settings, f"#/$defs/{name}.{{model}}")
    for model, definition in own.pop("$defs", {}).items():
        definitions[f"{name}.{model}"] = definition
    return {**own, "properties": {"enable": enable, **own.get("properties", {})}}


def _document(source: Source) -> Document:
    if source is None:
        return of_mapping({}, "default configuration")
    if isinstance(source, Document):
        return source
    if isinstance(source, Mapping):
        return of_mapping(source)
    # Here: a program that gives a mapping has no use for the parser, which takes a MiB.
    from tent_core import yamldoc

    return yamldoc.read(source)


class _Checker:
    """One pass over one document; collects mistakes as it goes."""

    def __init__(self, document: Document, registry: Registry) -> None:
        self.mistakes: list[Mistake] = []
        self._document = document
        self._registry = registry
        self._names = sorted({*_KNOWN, *registry.names()})

    def settings(self) -> Settings | None:
        data = self._document.root.data
        if data is not None and not isinstance(data, Mapping):
            keys = ", ".join(section.keys(Yaml))
            self._add((), described(data), f"a mapping with the keys {keys}")
            return None
        # A section of which all lines are comments is null in YAML, and means the defaults.
        sections = {key: value for key, value in (data or {}).items() if value is not None}
        yaml, complaints = section.read(Yaml, sections)
        self.mistakes.extend(self._mistake(each, ()) for each in complaints)
        asked = self._asked(sections.get("transports", {}))
        named = self._named(sections.get("policy", ()))
        choices = self._choices(asked, named, "policy" in sections)
        if yaml is None:
            return None
        entries = None if yaml.policy is None else tuple(entry.entry() for entry in yaml.policy)
        return Settings(
            **{field.name: getattr(yaml, field.name) for field in fields(Sections)},
            transports=MappingProxyType(choices),
            policy=default_policy(tuple(choices)) if entries is None else entries,
        )

    def _asked(self, transports: object) -> dict[str, Enable]:
        """What the section `transports` says of each transport; one with a mistake counts as disabled."""
        if not isinstance(transports, Mapping):
            self._add(("transports",), described(transports), "a mapping from names of transports")
            return {}
        asked = {}
        for name, said in transports.items():
            path: Path = ("transports", name)
            if not self._exists(name, path):
                continue
            if said is not None and not isinstance(said, Mapping):
                self._add(path, described(said), "a mapping such as {enable: auto}")
                said = {"enable": False}
            enable = (said or {}).get("enable", "auto")
            if isinstance(enable, (bool, str)) and enable in _ENABLE:
                asked[name] = _ENABLE[enable]
            else:
                allowed = ("true", "auto", "false")
                self._add(
                    (*path, "enable"),
                    described(enable),
                    ", ".join(allowed),
                    nearest(enable, allowed),
                )
                asked[name] = Enable.FALSE
        return asked

    def _named(self, policy: object) -> list[str]:
        """The transports that the section `policy` names; values of a wrong type are reported elsewhere."""
        named: list[str] = []
        entries: dict[object, int] = {}
        for i, entry in enumerate(policy if isinstance(policy, list) else ()):
            if not isinstance(entry, Mapping):
                continue
            name = entry.get("name")
            if isinstance(name, str) and entries.setdefault(name, i) != i:
                found = f"the name {described(name)} again, after policy[{entries[name]}]"
                self._add(("policy", i, "name"), found, "a name of its own for each entry")
            transports = entry.get("transports")
            transports = transports if isinstance(transports, list) else []
            for j, transport in enumerate(transports):
                path: Path = ("policy", i, "transports", j)
                if isinstance(transport, str) and transport and self._exists(transport, path):
                    named.append(transport)
                    if transport in transports[:j]:
                        self._add(path, f"{transport!r} again", "each transport once in an entry")
        return named

    def _exists(self, name: str, path: Path) -> bool:
        """Whether anybody knows this transport; a mistake if not."""
        if name in self._names:
            return True
        found = f"the unknown transport {described(name)}"
        self._add(path, found, ", ".join(self._names), nearest(name, self._names))
        return False

    def _choices(
        self, asked: Mapping[str, Enable], named: Iterable[str], has_policy: bool
    ) -> dict[str, TransportChoice]:
        """Load what is enabled, by the rules at the top of this module, and check its settings."""
        implied = list(named)
        nothing_asked = all(enable is Enable.FALSE for enable in asked.values())
        if nothing_asked and not has_policy and not self.mistakes:
            known = [name for name in self._registry.names() if transport_number(name) is not None]
            implied = [*DEFAULT_ORDER, *known]
        enables = {**asked, **{name: Enable.AUTO for name in implied if name not in asked}}
        for name in sorted(enables):
            if enables[name] is not Enable.FALSE:
                self._try(name)  # all of them first: two that clash are both refused
        return {name: self._choice(name, enable) for name, enable in sorted(enables.items())}

    def _choice(self, name: str, enable: Enable) -> TransportChoice:
        if enable is Enable.FALSE:
            return TransportChoice(enable, None, "is disabled by transports in the configuration")
        loaded = self._try(name)
        if isinstance(loaded, PluginError):
            if enable is Enable.TRUE:
                path: Path = ("transports", name, "enable")
                self._add(path, f"true, but {loaded}", "auto, false, or true once that is mended")
            return TransportChoice(enable, None, str(loaded))
        path = ("transports", name)
        own = self._document.get(path) or {}
        try:
            made, complaints = models.read(loaded, own, foreign=("enable",))
        except Exception as error:  # a check of the package is broken
            found = f"settings on which its package fails: {type(error).__name__}: {error}"
            complaints = [Complaint((), found, "others")]
        if not complaints:
            return TransportChoice(enable, made)
        mistakes = [self._mistake(each, path) for each in complaints]
        if self._document.has(path):
            self.mistakes.extend(mistakes)
        return TransportChoice(enable, None, "; ".join(map(str, mistakes)))

    def _try(self, name: str) -> models.Model | PluginError:
        try:
            return self._registry.load(name).declaration.settings
        except PluginError as error:
            return error

    def _mistake(self, complaint: Complaint, prefix: Path) -> Mistake:
        """The same, with where it is in the document."""
        path, found, allowed, near = complaint
        path = (*prefix, *path)
        return Mistake(dotted(path), found, allowed, near, self._document.line(path))

    def _add(self, path: Path, found: str, allowed: str, near: str | None = None) -> None:
        self.mistakes.append(Mistake(dotted(path), found, allowed, near, self._document.line(path)))
