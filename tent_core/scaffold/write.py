"""Write the package of a new transport: what lies under `package/`, under another name and number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from tent_core.errors import UsageError
from tent_core.plugins import PluginReport
from tent_core.types import PRIVATE_NUMBERS, transport_number

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_OURS, _NUMBER = "newname", "1999"


def check(name: str, number: int, installed: tuple[PluginReport, ...]) -> None:
    """Raise UsageError if a transport of this name and number could not be loaded beside those."""
    if not _NAME.fullmatch(name) or name == "unspec":
        raise UsageError(
            f"{name!r} cannot be a transport's name: those are lower-case letters, digits and _"
        )
    if transport_number(name) is not None:
        raise UsageError(
            f"{name!r} is a name with a number of its own ({transport_number(name)}): take another"
        )
    taken = {row.number: row for row in installed if row.number is not None}
    if number not in PRIVATE_NUMBERS:
        raise UsageError(
            f"{number} is no private number; those are {PRIVATE_NUMBERS[0]} to {PRIVATE_NUMBERS[-1]}, "
            f"and {_free(taken)} is free here"
        )
    for row in installed:
        what = f"{row.name!r} of {row.package} {row.version}"
        if row.name == name:
            raise UsageError(f"there is a transport of that name installed: {what}; take another")
        if row.number == number:
            raise UsageError(f"{number} is the number of {what}; {_free(taken)} is free here")


def write(name: str, number: int, into: Path) -> list[Path]:
    """Write the package into the directory `into`, which must not exist; its files. Raises UsageError."""
    try:
        into.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"{into} exists; move it away, or name another with --into") from None
    words = {
        f"tent-{_OURS}": f"tent-{name.replace('_', '-')}",
        _OURS: name,
        _OURS.title(): "".join(part.title() for part in name.split("_")),
        _NUMBER: str(number),
    }
    written = []
    for parts, text in _files(resources.files(__package__) / "package", ()):
        file = into / _renamed("/".join(parts), words)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_renamed(text, words), "utf-8")
        written.append(file)
    return written


def _free(taken: dict[int, PluginReport]) -> int:
    return next(n for n in PRIVATE_NUMBERS if n not in taken)


def _renamed(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def _files(directory: Traversable, parts: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name != "__pycache__" and not entry.name.startswith("."):
            yield from _files(entry, (*parts, entry.name))
        elif entry.is_file():
            yield (*parts, entry.name), entry.read_text("utf-8")
