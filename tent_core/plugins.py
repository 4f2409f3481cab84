"""Transport packages: found by entry point without importing anything, then loaded one by one and checked.

A package offers a transport as an entry point of the group `tent.transports`; the entry point's name is
the transport's name in YAML, and its value a module (or object) with the package's pluggy hooks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import pluggy

from tent_core import hookspecs, models
from tent_core.errors import PluginError
from tent_core.mistakes import nearest
from tent_core.policy import DEFAULT_ORDER
from tent_core.transport import API_VERSION, TransportDeclaration
from tent_core.types import PRIVATE_NUMBERS, Capabilities, transport_number

GROUP = "tent.transports"
HOOKS = frozenset(name for name in vars(hookspecs) if name.startswith("tent_"))
"""The names of all hooks."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Offer:
    """A transport that an installed package offers; `load` imports its hooks, and nothing did so before."""

    name: str
    package: str
    version: str
    target: str
    load: Callable[[], object]

    def __str__(self) -> str:
        return f"{self.package} {self.version}".strip()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A transport whose package was imported and whose declaration has been checked."""

    name: str
    declaration: TransportDeclaration
    package: str
    version: str
    module: object
    """The module, or object, that holds the package's hooks."""


@dataclass(frozen=True, slots=True)
class PluginReport:
    """One row of `tent plugins`: what is installed, and `reason` why it cannot be used ("" if it can).

    One that cannot be loaded has no number either; one that can has an obstacle on this machine.
    """

    name: str
    package: str
    version: str
    target: str
    reason: str = ""
    number: int | None = None
    api_version: tuple[int, int] | None = None
    summary: str = ""
    capabilities: Capabilities | None = None


class Registry:
    """The transports that can be had, and those that have been loaded. For one thread at a time.

    `hooks` is the plugin manager with the hooks of every package that has been loaded.
    """

    def __init__(self, offers: Iterable[Offer]) -> None:
        self.hooks = _manager()
        self._offers: dict[str, list[Offer]] = {}
        self._outcomes: dict[str, Loaded | PluginError] = {}
        for offer in sorted(offers, key=lambda offer: (offer.name, offer.package)):
            self._offers.setdefault(offer.name, []).append(offer)

    @classmethod
    def of(cls, *plugins: TransportDeclaration | object) -> Registry:
        """A registry of transports that need not be installed: declarations, or objects with hooks."""
        return cls([_given(plugin) for plugin in plugins])

    def names(self) -> tuple[str, ...]:
        """The names of all transports that are offered, sorted."""
        return tuple(self._offers)

    def load(self, name: str) -> Loaded:
        """Import and check the transport `name`, once; later calls answer the same.

        Raises PluginError with the reason: not installed, offered by two packages, failing to import, of
        another API version, or a declaration that is wrong or has the number of another one. In the last
        case neither can be loaded from then on, since peers could not tell them apart.
        """
        if name not in self._outcomes:
            try:
                self._outcomes[name] = self._load(name)
            except PluginError as error:
                self._outcomes[name] = error
        outcome = self._outcomes[name]
        if isinstance(outcome, PluginError):
            raise outcome
        return outcome

    def report(self) -> tuple[PluginReport, ...]:
        """Load everything that is offered, and say what came of it."""
        for name in self._offers:
            try:
                self.load(name)
            except PluginError:
                continue
        return tuple(self._row(offer) for offers in self._offers.values() for offer in offers)

    def _row(self, offer: Offer) -> PluginReport:
        what = (offer.name, offer.package, offer.version, offer.target)
        outcome = self._outcomes[offer.name]
        if isinstance(outcome, PluginError):
            return PluginReport(*what, reason=str(outcome))
        d = outcome.declaration
        return PluginReport(*what, _obstacle(d), d.number, d.api_version, d.summary, d.capabilities)

    def _load(self, name: str) -> Loaded:
        offers = self._offers.get(name, [])
        if not offers:
            hint = (
                f": install tent-{name}" if name in DEFAULT_ORDER else ""
            )  # those are this project's own
            raise PluginError(f"no installed package offers the transport {name!r}{hint}")
        if len(offers) > 1:
            both = " and by ".join(map(str, offers))
            raise PluginError(f"the transport {name!r} is offered by {both}: uninstall all but one")
        (offer,) = offers
        try:
            _check_name(name)
            module = _guarded("cannot be imported", offer.load)
            declaration = _declaration(_checked_hooks(module))
            _check(declaration, name)
        except PluginError as error:
            raise PluginError(f"{offer} {error}") from error.__cause__
        for other in self._outcomes.values():
            if isinstance(other, Loaded) and other.declaration.number == declaration.number:
                raise self._clash(other, offer, declaration.number)
        self.hooks.register(module, name)
        return Loaded(name, declaration, offer.package, offer.version, module)

    def _clash(self, other: Loaded, offer: Offer, number: int) -> PluginError:
        clash = PluginError(
            f"the transports {other.name!r} of {other.package} {other.version} and {offer.name!r} of "
            f"{offer} have the same number {number}: enable only one of them"
        )
        self._outcomes[other.name] = clash
        self.hooks.unregister(other.module)
        return clash


def discover() -> Registry:
    """All transports that installed packages offer, read from their metadata; nothing is imported."""
    return Registry(
        Offer(point.name, point.dist.name, point.dist.version, point.value, point.load)
        for point in metadata.entry_points(group=GROUP)
        if point.dist is not None
    )


@dataclass(frozen=True, slots=True)
class _Declared:
    """Hooks of a package that consists of a declaration."""

    declaration: TransportDeclaration

    @hookspecs.hookimpl
    def tent_transport(self) -> TransportDeclaration:
        return self.declaration


def _given(plugin: object) -> Offer:
    """What a program hands over instead of installing it."""
    holder = _Declared(plugin) if isinstance(plugin, TransportDeclaration) else plugin
    name = _declaration(_checked_hooks(holder)).name
    return Offer(name, f"{name} (given directly)", "", "", lambda: holder)


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


# What follows raises PluginErrors whose text goes on after the name of the package.


def _guarded(failing: str, call: Callable[[], Any]) -> Any:
    """The result of a package's code; whatever that raises, short of an interrupt, becomes a PluginError."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise PluginError(f"{failing}: {type(error).__name__}: {error}") from error


def _checked_hooks(holder: object) -> pluggy.PluginManager:
    """A manager with the hooks of one package alone, all of which exist and take what is passed to them."""
    manager = _manager()
    _guarded("has hooks that do not fit", lambda: manager.register(holder))
    for caller in manager.get_hookcallers(holder) or ():
        if caller.name not in HOOKS:
            close = nearest(caller.name, HOOKS)
            hint = f"did you mean {close!r}?" if close else f"hooks are {', '.join(sorted(HOOKS))}"
            raise PluginError(f"implements {caller.name!r}, which is no hook; {hint}")
        if any(impl.wrapper or impl.hookwrapper for impl in caller.get_hookimpls()):
            raise PluginError(f"wraps the hook {caller.name!r}; each package is called by itself")
    return manager


def _obstacle(declaration: TransportDeclaration) -> str:
    try:
        return "" if declaration.obstacle is None else str(declaration.obstacle())
    except (Exception, SystemExit) as error:
        return f"fails when it is asked whether it can run: {type(error).__name__}: {error}"


def _declaration(manager: pluggy.PluginManager) -> TransportDeclaration:
    found = _guarded("fails in its hook 'tent_transport'", manager.hook.tent_transport)
    if not found or not isinstance(found[0], TransportDeclaration):
        what = type(found[0]).__name__ if found else "nothing"
        raise PluginError(
            f"declares {what} in its hook 'tent_transport', not a TransportDeclaration"
        )
    declaration: TransportDeclaration = found[0]
    return declaration


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name == "unspec":
        raise PluginError(
            f"offers a transport named {name!r}; a name is lower-case letters, digits and _, and not 'unspec'"
        )


def _check(declaration: TransportDeclaration, name: str) -> None:
    """Raise PluginError for a declaration that does not fit this version, its entry point or the numbers."""
    wanted, offered = declaration.api_version, API_VERSION
    if wanted[0] != offered[0]:
        raise PluginError(
            f"is written for version {wanted[0]}.{wanted[1]} of the plugin API, and this tent-core has "
            f"{offered[0]}.{offered[1]}: install versions of both that fit"
        )
    if declaration.name != name:
        raise PluginError(
            f"declares the transport {declaration.name!r} under the entry point {name!r}: "
            "both must have one name"
        )
    number, known = declaration.number, transport_number(name)
    if known is not None and number != known:
        raise PluginError(
            f"declares the number {number} for {name!r}, which has the number {known}"
        )
    if known is None and number not in PRIVATE_NUMBERS:
        raise PluginError(
            f"declares the number {number} for {name!r}; "
            f"private numbers are {PRIVATE_NUMBERS[0]} to {PRIVATE_NUMBERS[-1]}"
        )
    if reason := models.fault(declaration.settings):
        raise PluginError(reason)
