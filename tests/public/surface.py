"""The public names, signatures and wire messages, as lines of text.

    python tests/public/surface.py          writes tests/public/recorded.txt anew

Do so with every change that is meant, and say in the changelog what it is: what the difference may be, and in
which version, is in docs/compatibility.md.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

RECORDED = Path(__file__).with_name("recorded.txt")

MODULES = (
    "tent_core.transport",
    "tent_core.work",
    "tent_core.types",
    "tent_core.descriptor",
    "tent_core.hookspecs",
    "tent_core.options",
    "tent_core.errors",
    "tent_core.testing",
    "tent_core.testing.harness",
    "tent_core.testing.conformance",
)
"""Beside what `tent_core` itself exports: what packages with transports are written against."""

FOR_THE_CORE = {
    "tent_core.Batch": "announced carried_by follow hold let_go requests settle settle_failed",
    "tent_core.hookspecs": "TYPE_CHECKING",
}
"""What applications see of what they are given, and do not use."""


def lines() -> list[str]:
    """All of it, in an order that does not depend on anything else."""
    import tent_core

    found = [line for name in tent_core.__all__ for line in _of("tent_core", tent_core, name)]
    for path in MODULES:
        module = importlib.import_module(path)
        for name in getattr(module, "__all__", None) or sorted(vars(module)):
            thing = getattr(module, name)
            own = getattr(thing, "__module__", path).startswith(path)
            if not name.startswith("_") and not inspect.ismodule(thing) and own:
                found += _of(path, module, name)
    return [*found, *_wire(), *_commands()]


def _of(path: str, module: Any, name: str) -> Iterator[str]:
    thing, full = getattr(module, name), f"{path}.{name}"
    if name in FOR_THE_CORE.get(path, "").split():
        return
    if not inspect.isclass(thing):
        yield full + (_signature(thing) if callable(thing) else f": {type(thing).__name__}")
        return
    bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
    yield f"{full}({bases})"
    if issubclass(thing, enum.Enum):
        yield from (f"{full}.{member.name} = {member.value!r}" for member in thing)
        return
    made_by_applications = (
        full in ("tent_core.Engine", "tent_core.AsyncEngine") or path != "tent_core"
    )
    if "__init__" in vars(thing) and made_by_applications and Protocol not in thing.__bases__:
        yield f"{full}.__init__{_signature(thing.__init__)}"
    if hasattr(thing, "__total__"):  # a TypedDict
        for key, kind in sorted(thing.__annotations__.items()):
            yield f"{full}[{key!r}]: {getattr(kind, '__forward_arg__', kind)}"
        return
    for key, value in sorted(vars(thing).items()):
        hidden = key.startswith(("_", "test_")) or key in FOR_THE_CORE.get(full, "").split()
        if not hidden:
            yield from _member(full, key, value)


def _member(full: str, key: str, value: Any) -> Iterator[str]:
    if isinstance(value, property):
        yield f"{full}.{key}: property"
    elif isinstance(value, (classmethod, staticmethod)):
        yield f"{full}.{key}{_signature(value.__func__)}"
    elif inspect.isfunction(value):
        yield f"{full}.{key}{_signature(value)}"
    elif inspect.ismemberdescriptor(value) or dataclasses.is_dataclass(value):
        yield f"{full}.{key}: attribute"


def _signature(call: Any) -> str:
    try:
        return str(inspect.signature(call))
    except (TypeError, ValueError):
        return "(...)"


def _wire() -> Iterator[str]:
    """Messages, fields and calls of the control plane."""
    from tent_core.control import tent_pb2

    file = tent_pb2.DESCRIPTOR
    for message in sorted(file.message_types_by_name.values(), key=lambda m: m.name):
        for field in sorted(message.fields, key=lambda f: f.number):
            kind = field.message_type or field.enum_type
            what = kind.name if kind else f"type {field.type}"
            yield f"wire {message.name}.{field.name} = {field.number}: {what}"
    for service in file.services_by_name.values():
        for call in service.methods:
            yield f"wire {service.name}.{call.name}({call.input_type.name}) -> {call.output_type.name}"


def _commands() -> Iterator[str]:
    """Commands, and their options."""
    from tent_core.cli.app import tent

    for name, command in sorted(tent.commands.items()):
        options = sorted(opt for p in command.params for opt in p.opts)
        yield f"tent {name}: {' '.join(options)}"


if __name__ == "__main__":
    RECORDED.write_text("".join(f"{line}\n" for line in lines()))
