"""The settings that packages declare: a section, or a pydantic model, which costs what pydantic costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from tent_core import section
from tent_core.errors import ConfigError
from tent_core.mistakes import Mistake, dotted
from tent_core.section import Complaint, Section

if TYPE_CHECKING:
    from pydantic import BaseModel

    Model = type[Section] | type[BaseModel]


def fault(model: object) -> str:
    """Why packages cannot declare this for their settings, or nothing."""
    if not isinstance(model, type):
        return f"declares the settings {model!r}, which are no class"
    if issubclass(model, Section):
        if "__dataclass_fields__" not in vars(model):
            return f"has settings, {model.__name__}, that are a section and no dataclass"
        names = section.keys(model)
    else:
        # Here and below: an engine whose packages have sections does without pydantic.
        from tent_core import pydantic_models

        if reason := pydantic_models.fault(model):
            return reason
        names = pydantic_models.keys(model)
    if "enable" in names:
        return f"has settings, {model.__name__}, with a field 'enable', which is the core's"
    return ""


def read(
    model: Model, data: Mapping[str, Any], foreign: Collection[str] = ()
) -> tuple[Any, list[Complaint]]:
    """Settings, or None and what is wrong with `data`, one complaint for each value of it.

    Keys that are `foreign` are somebody else's. Passes on what a package's own check raises by mistake.
    """
    if issubclass(model, Section):
        return section.read(model, data, foreign)
    from tent_core import pydantic_models

    return pydantic_models.read(model, data, foreign)


def make(model: Model, **said: Any) -> Any:
    """Settings of what YAML would say. Raises ConfigError with every mistake."""
    made, complaints = read(model, said)
    if complaints:
        mistakes = [Mistake(dotted(each.path), *each[1:]) for each in complaints]
        raise ConfigError([str(mistake) for mistake in mistakes], model.__name__)
    return made


def json_schema(model: Model, references: str) -> dict[str, Any]:
    """A JSON Schema; `references` says how it refers to its `$defs`, such as `#/$defs/{model}`."""
    from tent_core import pydantic_models

    return pydantic_models.json_schema(model, references)
