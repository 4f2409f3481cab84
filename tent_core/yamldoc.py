"""YAML read as plain data that remembers the line of every key and value.

The rules are those of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema), which editors
use too: `yes`, `1:30`, `0777` and `2024-01-01` are no booleans, base-60 numbers, octals or dates. Tags are
refused, so a document makes nothing but text, numbers, booleans, null, lists and mappings. Mistakes are
collected, never raised, and whatever the text, reading it takes bounded time and memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import yaml

from tent_core.mistakes import Mistake, Path, described, dotted, shortened

MAX_BYTES = 2**20
MAX_NODES = 10_000
"""Values in a document, each counted as often as aliases repeat it."""
MAX_DEPTH = 32

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"(true|True|TRUE)|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,40}|[0-9]{1,40}(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,4})?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(?:nan|NaN|NAN)")


@dataclass(frozen=True, slots=True)
class Node:
    """One value: its plain `data`, the line where it begins, and the nodes inside it by key or index."""

    data: Any
    line: int | None
    children: Mapping[str | int, Child] = field(default_factory=dict)
    size: int = 1


class Child(NamedTuple):
    """A node inside another, and the line of its key (of the node itself in a list)."""

    node: Node
    line: int | None


@dataclass(frozen=True, slots=True)
class Document:
    """A configuration as it was read; `source` names it in messages, `mistakes` are those of reading it."""

    source: str
    root: Node
    mistakes: tuple[Mistake, ...] = ()

    def line(self, path: Path) -> int | None:
        """The line of the key at `path`, or of the innermost value around it that exists."""
        *_, last = self._walk(path)
        return last.line

    def has(self, path: Path) -> bool:
        """Whether there is a value at `path`."""
        return len(list(self._walk(path))) == len(path) + 1

    def get(self, path: Path, default: Any = None) -> Any:
        """The plain data at `path`, or `default`."""
        steps = list(self._walk(path))
        return steps[-1].node.data if len(steps) == len(path) + 1 else default

    def _walk(self, path: Path) -> Iterator[Child]:
        """The root and each value on the way to `path`, as far as they exist."""
        here = Child(self.root, self.root.line)
        yield here
        for step in path:
            inner = here.node.children.get(step)
            if inner is None:
                return
            here = inner
            yield here


class _Unreadable(Exception):
    def __init__(self, mistake: Mistake) -> None:
        self.mistake = mistake


def parse(text: str, source: str = "configuration") -> Document:
    """Read YAML text. Raises nothing: what is wrong is in `mistakes`."""
    if len(text) > MAX_BYTES:
        mistake = Mistake("", f"{len(text):,} characters", f"at most {MAX_BYTES:,}")
        return Document(source, Node(None, None), (mistake,))
    reader = _Reader(text)
    try:
        root = reader.document()
    except _Unreadable as stop:
        return Document(source, Node(None, None), (*reader.mistakes, stop.mistake))
    return Document(source, root, tuple(reader.mistakes))


def read(path: str | os.PathLike[str]) -> Document:
    """Read a YAML file of UTF-8 text. Raises nothing: what is wrong is in `mistakes`."""
    source = os.fspath(path)
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        return parse(content.decode("utf-8-sig"), source)
    except (OSError, ValueError) as error:  # a ValueError: not UTF-8, or a NUL in the path
        what = error.strerror if isinstance(error, OSError) else str(error)
        mistake = Mistake(
            "", f"a file that cannot be read: {what}", "the path of a YAML file in UTF-8"
        )
        return Document(source, Node(None, None), (mistake,))


def of_mapping(data: Mapping[Any, Any], source: str = "configuration") -> Document:
    """The same for a configuration that a program has put together: no lines, but the same bounds."""
    copier = _Copier()
    try:
        root = copier.node(data, ())
    except _Unreadable as stop:
        return Document(source, Node(None, None), (*copier.mistakes, stop.mistake))
    return Document(source, root, tuple(copier.mistakes))


class _Bounded:
    """Counts what has been made, and collects mistakes."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []
        self._nodes = 0

    def count(self, nodes: int, path: Path, line: int | None) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            self.stop(path, line, f"more than {MAX_NODES:,} values", "fewer values and aliases")
        if len(path) > MAX_DEPTH:
            self.stop(path[:3], line, f"more than {MAX_DEPTH} levels", "less nesting")

    def stop(self, path: Path, line: int | None, found: str, allowed: str) -> NoReturn:
        raise _Unreadable(Mistake(dotted(path), found, allowed, line=line))

    def mistake(self, path: Path, line: int | None, found: str, allowed: str) -> None:
        self.mistakes.append(Mistake(dotted(path), found, allowed, line=line))


class _Reader(_Bounded):
    """Builds nodes from the parser's events, so that nothing is made before it was counted."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._anchors: dict[str, Node | None] = {}

    def document(self) -> Node:
        events = self._events()
        event = next(events)
        if isinstance(event, yaml.StreamEndEvent):
            return Node(None, None)
        root = self._node(next(events), events, ())
        next(events)
        after = next(events)
        if not isinstance(after, yaml.StreamEndEvent):
            self.mistake((), _line(after), "a second document", "one document in a file")
        return root

    def _events(self) -> Iterator[yaml.Event]:
        try:
            events = yaml.parse(self._text, Loader=yaml.SafeLoader)
            next(events)
            yield from events
        except yaml.reader.ReaderError as error:
            line = self._text.count("\n", 0, error.position) + 1
            self.stop((), line, f"the character U+{int(error.character):04X}", "printable text")
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = ", ".join(filter(None, (error.context, error.problem)))
            hint = "; quote text that begins with *" if "alias" in what else ""
            self.stop(
                (), mark.line + 1 if mark else None, f"no YAML {shortened(what)}", f"YAML{hint}"
            )

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], path: Path) -> Node:
        line = _line(event)
        if isinstance(event, yaml.AliasEvent):
            target = self._anchors.get(event.anchor or "")
            if target is None:
                found = f"an alias of {described(event.anchor)}, which no value before it is named"
                self.stop(
                    path, line, found, "aliases of earlier values; quote text that begins with *"
                )
            self.count(target.size, path, line)
            return target
        assert isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent))  # YAML's grammar
        self.count(1, path, line)
        anchor = event.anchor
        if anchor is not None:
            self._anchors[anchor] = None
        if event.tag is not None:
            self.mistake(
                path, line, f"the tag {described(event.tag)}", "no tags; quotes make a value text"
            )
        if isinstance(event, yaml.ScalarEvent):
            node = Node(_resolve(event.value) if event.implicit[0] else event.value, line)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self._sequence(line, events, path)
        else:
            node = self._mapping(line, events, path)
        if anchor is not None:
            self._anchors[anchor] = node
        return node

    def _sequence(self, line: int, events: Iterator[yaml.Event], path: Path) -> Node:
        nodes: list[Node] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            nodes.append(self._node(event, events, (*path, len(nodes))))
        return _list(nodes, line)

    def _mapping(self, line: int, events: Iterator[yaml.Event], path: Path) -> Node:
        children: dict[str | int, Child] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key_line = _line(event)
            key = event.value if isinstance(event, yaml.ScalarEvent) else None
            if key is None:
                self._node(event, events, (*path, "?"))
                self.mistake(path, key_line, "a key that is no text", "text as a key")
            node = self._node(next(events), events, (*path, key or "?"))
            if key is None:
                continue
            if key in children:
                found = f"this key for the second time, after line {children[key].line}"
                self.mistake((*path, key), key_line, found, "each key once")
            else:
                children[key] = Child(node, key_line)
        return _dict(children, line)


class _Copier(_Bounded):
    """Makes nodes of plain data."""

    def node(self, value: Any, path: Path) -> Node:
        self.count(1, path, None)
        if isinstance(value, Mapping):
            children: dict[str | int, Child] = {}
            for key, inner in value.items():
                if isinstance(key, str):
                    children[key] = Child(self.node(inner, (*path, key)), None)
                else:
                    self.mistake(path, None, f"the key {described(key)}", "text as a key")
            return _dict(children, None)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return _list([self.node(inner, (*path, i)) for i, inner in enumerate(value)], None)
        return Node(value, None)


def _list(nodes: list[Node], line: int | None) -> Node:
    children: dict[str | int, Child] = {i: Child(node, node.line) for i, node in enumerate(nodes)}
    return Node([node.data for node in nodes], line, children, 1 + sum(node.size for node in nodes))


def _dict(children: dict[str | int, Child], line: int | None) -> Node:
    data = {key: child.node.data for key, child in children.items()}
    return Node(data, line, children, 1 + sum(child.node.size for child in children.values()))


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return mark.line + 1 if mark is not None else 1


def _resolve(text: str) -> str | int | float | bool | None:
    """What a plain scalar means in the core schema."""
    if _NULL.fullmatch(text):
        return None
    if match := _BOOL.fullmatch(text):
        return match[1] is not None
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _SPECIAL.fullmatch(text):
        return float(f"{match[1]}inf") if match[2] else float("nan")
    return text
