"""A configuration as plain data that remembers where each value of it is, made from a mapping here.

What is made of YAML text is in `yamldoc`, with the same bounds. Mistakes are collected, never raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from tent_core.mistakes import Mistake, Path, described, dotted

MAX_NODES = 10_000
"""Values in a document, each counted as often as aliases repeat it."""
MAX_DEPTH = 32


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


class Unreadable(Exception):
    """Reading stops here; `mistake` says why."""

    def __init__(self, mistake: Mistake) -> None:
        self.mistake = mistake


def of_mapping(data: Mapping[Any, Any], source: str = "configuration") -> Document:
    """The same for a configuration that a program has put together: no lines, but the same bounds."""
    copier = _Copier()
    try:
        root = copier.node(data, ())
    except Unreadable as stop:
        return Document(source, Node(None, None), (*copier.mistakes, stop.mistake))
    return Document(source, root, tuple(copier.mistakes))


class Bounded:
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
        raise Unreadable(Mistake(dotted(path), found, allowed, line=line))

    def mistake(self, path: Path, line: int | None, found: str, allowed: str) -> None:
        self.mistakes.append(Mistake(dotted(path), found, allowed, line=line))


class _Copier(Bounded):
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
            return mapping_node(children, None)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return list_node([self.node(inner, (*path, i)) for i, inner in enumerate(value)], None)
        return Node(value, None)


def list_node(nodes: list[Node], line: int | None) -> Node:
    """A list of these."""
    children: dict[str | int, Child] = {i: Child(node, node.line) for i, node in enumerate(nodes)}
    return Node([node.data for node in nodes], line, children, 1 + sum(node.size for node in nodes))


def mapping_node(children: dict[str | int, Child], line: int | None) -> Node:
    """A mapping of these."""
    data = {key: child.node.data for key, child in children.items()}
    return Node(data, line, children, 1 + sum(child.node.size for child in children.values()))
