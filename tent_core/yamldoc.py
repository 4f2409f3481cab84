"""YAML read as plain data that remembers the line of every key and value.

The rules are those of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema), which editors
use too: `yes`, `1:30`, `0777` and `2024-01-01` are no booleans, base-60 numbers, octals or dates. Tags are
refused, so a document makes nothing but text, numbers, booleans, null, lists and mappings. Mistakes are
collected, never raised, and whatever the text, reading it takes bounded time and memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import yaml

from tent_core.document import (
    Bounded,
    Child,
    Document,
    Node,
    Unreadable,
    list_node,
    mapping_node,
)
from tent_core.mistakes import Mistake, Path, described, shortened

MAX_BYTES = 2**20

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"(true|True|TRUE)|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,40}|[0-9]{1,40}(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,4})?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def parse(text: str, source: str = "configuration") -> Document:
    """Read YAML text. Raises nothing: what is wrong is in `mistakes`."""
    if len(text) > MAX_BYTES:
        mistake = Mistake("", f"{len(text):,} characters", f"at most {MAX_BYTES:,}")
        return Document(source, Node(None, None), (mistake,))
    reader = _Reader(text)
    try:
        root = reader.document()
    except Unreadable as stop:
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


class _Reader(Bounded):
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
        return list_node(nodes, line)

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
        return mapping_node(children, line)


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
