"""Settings as frozen dataclasses, and reading them: plain data to one of them, with all mistakes at once.

Written for what an engine reads when it starts: pydantic, which makes a JSON Schema of the same classes for
editors, would take a third of the memory of an engine and of the time of its start. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt, MinLen

from tent_core.mistakes import NotAllowed, Path, described, nearest

Made = TypeVar("Made", bound="Section")


class Section:
    """What settings derive from; a subclass is a frozen dataclass.

    A field is a `bool`, `int`, `float`, `str`, `Literal`, `StrEnum`, another section, `tuple[X, ...]` or
    `dict[str, X]` of these, or a union of them, such as with None. `Annotated` adds bounds of
    `annotated_types` (`Ge`, `Gt`, `Le`, `Lt`, `Interval`, `MinLen`), a `Check`, or a unit
    (`tent_core.units`). Nothing else is converted, and unknown keys are mistakes. The text under a field is
    its description in the JSON Schema.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "use_attribute_docstrings": True,
    }

    @classmethod
    def conflicts(cls, read: Mapping[str, Any]) -> Iterable[tuple[str, NotAllowed]]:
        """Fields whose value does not go with that of others. None, unless a section says otherwise.

        `read` has the fields that are given and could be read, and the defaults of what is not given.
        """
        return ()


class Reads:
    """Something in `Annotated` that reads a field in place of its type."""

    __slots__ = ()

    def read(self, value: object) -> Any:
        """The field of a plain value. Raises NotAllowed."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Check:
    """In `Annotated`: answers what a value that was read means, or raises ValueError, such as NotAllowed."""

    function: Callable[[Any], Any]


class Complaint(NamedTuple):
    """A value that may not be used: `path` leads to it, `found` and `allowed` are phrases of a `Mistake`."""

    path: Path
    found: str
    allowed: str
    nearest: str | None = None


def read(
    model: type[Made], data: object, foreign: Collection[str] = ()
) -> tuple[Made | None, list[Complaint]]:
    """A section, or else what is wrong with plain `data`, at most one complaint for each value of it.

    Keys that are `foreign` are somebody else's. Passes on what a `Check` raises that is no ValueError, and
    raises TypeError for a field that no section can have.
    """
    reader = _Reader()
    made = reader.section(model, data, (), foreign)
    return (None if made is _REFUSED else made), reader.complaints


def one_for_each(complaints: Iterable[Complaint]) -> Iterator[Complaint]:
    """One complaint for each value, which allows what any of those about it allows."""
    by_path: dict[Path, list[Complaint]] = {}
    for complaint in complaints:
        by_path.setdefault(complaint.path, []).append(complaint)
    for path, reasons in by_path.items():
        allowed = " or ".join(dict.fromkeys(reason.allowed for reason in reasons))
        near = next((reason.nearest for reason in reasons if reason.nearest), None)
        yield Complaint(path, reasons[0].found, allowed, near)


def keys(model: type[Section]) -> list[str]:
    """The names of its fields, sorted."""
    return sorted(field.name for field in fields(model))  # type: ignore[arg-type]


@cache
def _kinds(model: Any) -> Mapping[str, Any]:
    """Its fields and their types, in order."""
    hints = get_type_hints(model, include_extras=True)
    return {field.name: hints[field.name] for field in fields(model)}


@cache
def _defaults(model: Any) -> Mapping[str, Callable[[], Any]]:
    """What makes the defaults of the fields that need not be given."""
    made: dict[str, Callable[[], Any]] = {}
    for field in fields(model):
        if field.default_factory is not MISSING:
            made[field.name] = field.default_factory
        elif field.default is not MISSING:
            made[field.name] = lambda default=field.default: default  # type: ignore[misc]
    return made


_REFUSED: Any = object()
_PLAIN: Mapping[Any, str] = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    str: "text",
}


class _Reader:
    """Reads one document, and collects what is wrong; what could not be read is `_REFUSED`."""

    def __init__(self) -> None:
        self.complaints: list[Complaint] = []

    def section(self, model: Any, data: object, path: Path, foreign: Collection[str] = ()) -> Any:
        if not isinstance(data, Mapping):
            return self._refuse(path, data, "a mapping")
        kinds, before = _kinds(model), len(self.complaints)
        made = {
            name: self.value(kind, data[name], (*path, name))
            for name, kind in kinds.items()
            if name in data
        }
        for name in kinds:
            if name not in data and name not in _defaults(model):
                self._complain((*path, name), "nothing", "this key is required")
        known = [*foreign, *sorted(kinds)]
        for key in data:
            if key not in known:
                near = nearest(key, known)
                self._complain((*path, key), "an unknown key", ", ".join(known), near)
        made = {name: value for name, value in made.items() if value is not _REFUSED}
        every = made | {
            name: made_of() for name, made_of in _defaults(model).items() if name not in data
        }
        for name, error in model.conflicts(every):
            self._refuse((*path, name), data.get(name, every[name]), error)
        if len(self.complaints) > before:
            return _REFUSED
        try:
            return model(**made)
        except ValueError as error:
            return self._refuse(path, data, error)

    def value(self, kind: Any, value: object, path: Path) -> Any:
        """A value of a field, or of a list in it, of the type `kind`."""
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self._annotated(arguments[0], list(_single(arguments[1:])), value, path)
        if origin in (Union, UnionType):
            return self._union(arguments, value, path)
        if origin is Literal:
            return self._choice(arguments, value, path)
        if origin is tuple and arguments[1:] == (...,):
            return self._items(arguments[0], value, path)
        if origin is dict and arguments[0] is str:
            return self._entries(arguments[1], value, path)
        if isinstance(kind, type) and issubclass(kind, Section):
            return self.section(kind, value, path)
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return self._choice(tuple(kind), value, path)
        if kind is Any:
            return value
        if kind not in _PLAIN:
            raise TypeError(f"settings cannot have a field of the type {kind!r}")
        is_bool = isinstance(value, bool)  # which is an int to Python, and none here
        if isinstance(value, kind) and is_bool == (kind is bool):
            return value
        if kind is float and isinstance(value, int) and not is_bool:
            with suppress(OverflowError):
                return float(value)
        return self._refuse(path, value, _PLAIN[kind])

    def _annotated(self, kind: Any, marks: list[Any], value: object, path: Path) -> Any:
        reads = next((mark.read for mark in marks if isinstance(mark, Reads)), None)
        try:
            made = self.value(kind, value, path) if reads is None else reads(value)
            if made is not _REFUSED:
                for mark in marks:
                    if isinstance(mark, Check):
                        made = mark.function(made)
                    else:
                        _bound(mark, made)
            return made
        except ValueError as error:
            return self._refuse(path, value, error)

    def _union(self, kinds: tuple[Any, ...], value: object, path: Path) -> Any:
        if value is None and NoneType in kinds:
            return None
        refused: list[Complaint] = []
        for kind in kinds:
            if kind is not NoneType:
                attempt = _Reader()
                made = attempt.value(kind, value, path)
                if made is not _REFUSED:
                    return made
                refused += attempt.complaints
        self.complaints += one_for_each(refused)
        return _REFUSED

    def _choice(self, choices: tuple[Any, ...], value: object, path: Path) -> Any:
        for choice in choices:
            if value == choice and type(value) in (type(choice), str):  # 1 is not True
                return choice
        words = [str(choice) for choice in choices]
        return self._refuse(path, value, NotAllowed(", ".join(words), nearest(value, words)))

    def _items(self, kind: Any, value: object, path: Path) -> Any:
        if not isinstance(value, (list, tuple)):
            return self._refuse(path, value, "a list")
        made = [self.value(kind, item, (*path, index)) for index, item in enumerate(value)]
        return _REFUSED if any(item is _REFUSED for item in made) else tuple(made)

    def _entries(self, kind: Any, value: object, path: Path) -> Any:
        if not isinstance(value, Mapping):
            return self._refuse(path, value, "a mapping")
        for key in value:
            if not isinstance(key, str):
                return self._refuse((*path, key), key, "text as a key")
        made = {key: self.value(kind, inner, (*path, key)) for key, inner in value.items()}
        return _REFUSED if any(item is _REFUSED for item in made.values()) else made

    def _refuse(self, path: Path, value: object, why: str | Exception) -> Any:
        self._complain(path, described(value), str(why), getattr(why, "nearest", None))
        return _REFUSED

    def _complain(self, path: Path, found: str, allowed: str, near: str | None = None) -> None:
        self.complaints.append(Complaint(path, found, allowed, near))


def _single(marks: Iterable[Any]) -> Iterator[Any]:
    """`Interval` and the like stand for several bounds."""
    for mark in marks:
        if isinstance(mark, GroupedMetadata):
            yield from mark
        else:
            yield mark


def _bound(mark: object, value: Any) -> None:
    """Raise NotAllowed for a value beyond a bound."""
    match mark:
        case Ge(ge) if not value >= ge:
            raise NotAllowed(f"at least {ge}")
        case Gt(gt) if not value > gt:
            raise NotAllowed(f"more than {gt}")
        case Le(le) if not value <= le:
            raise NotAllowed(f"at most {le}")
        case Lt(lt) if not value < lt:
            raise NotAllowed(f"less than {lt}")
        case MinLen(length) if len(value) < length and isinstance(value, str):
            raise NotAllowed(f"text of at least {length} characters")
        case MinLen(length) if len(value) < length:
            raise NotAllowed(f"a list of at least {length}")
