"""What is done with pydantic: settings that packages declare as its models, and the JSON Schema of all."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from tent_core.mistakes import Path, described, nearest
from tent_core.section import Complaint, Section, one_for_each

_PHRASES = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "string_too_short": "text of at least {min_length} characters",
    "string_type": "text",
    "too_short": "a list of at least {min_length}",
    "tuple_type": "a list",
}
"""What pydantic says, in the words of this project."""


def fault(model: type) -> str:
    """Why packages cannot declare this class for their settings, or nothing."""
    if not issubclass(model, BaseModel):
        return f"declares the settings {model!r}, which are neither a section nor a pydantic model"
    if model.model_config.get("extra") != "forbid":
        return f'has settings, {model.__name__}, that do not say extra="forbid"'
    return ""


def keys(model: Any) -> list[str]:
    """The names of its fields, sorted."""
    return sorted(model.model_fields)


def read(
    model: type[BaseModel], data: Mapping[str, Any], foreign: Collection[str] = ()
) -> tuple[BaseModel | None, list[Complaint]]:
    """The same as `section.read`, of a pydantic model."""
    own = {key: value for key, value in data.items() if key not in foreign}
    try:
        return model.model_validate(own), []
    except ValidationError as error:
        return None, list(one_for_each(_complaints(error, model, own, foreign)))


def json_schema(model: type, references: str) -> dict[str, Any]:
    """A JSON Schema of a section or a model; `references` says how it refers to its `$defs`."""
    return TypeAdapter(model).json_schema(ref_template=references, schema_generator=_Schema)


class _Schema(GenerateJsonSchema):
    """Writes the defaults of a section as YAML would, with units."""

    def get_default_value(self, schema: Any) -> Any:
        if "default_factory" in schema:  # of a section, where it takes nothing
            return schema["default_factory"]()
        return super().get_default_value(schema)

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, Section):
            return TypeAdapter(type(dft)).dump_python(dft, mode="json")
        return super().encode_default(dft)


def _complaints(
    error: ValidationError, model: type[BaseModel], data: object, foreign: Collection[str]
) -> Iterator[Complaint]:
    """What a model refused, and why: several complaints about a value, where it has several reasons."""
    for detail in error.errors(include_url=False, include_input=False):
        path = _path(data, detail["loc"], detail["type"])
        least = detail["ctx"]["min_length"] if detail["type"] == "too_short" else None
        if least is not None and len(_get(data, path)) >= least:
            continue  # pydantic counts only items without mistakes
        yield _complaint(detail, model, data, path, foreign)


def _complaint(
    detail: Any, model: type[BaseModel], data: object, path: Path, foreign: Collection[str]
) -> Complaint:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        return Complaint(path, "nothing", "this key is required")
    value = _get(data, path)
    if kind == "extra_forbidden":
        known = _keys(model, detail["loc"][:-1])
        if len(path) == 1:
            known = [*foreign, *known]
        return Complaint(path, "an unknown key", ", ".join(known), nearest(path[-1], known))
    if kind in ("literal_error", "enum"):
        choices = re.findall(r"'([^']*)'", str(context["expected"])) or [str(context["expected"])]
        return Complaint(path, described(value), ", ".join(choices), nearest(value, choices))
    cause = context.get("error")
    message = str(detail["msg"]).removeprefix("Input should be ")
    allowed = str(cause) if cause is not None else _PHRASES.get(kind, message).format_map(context)
    return Complaint(path, described(value), allowed, getattr(cause, "nearest", None))


def _path(data: object, loc: Sequence[str | int], kind: str) -> Path:
    """Where in the data pydantic's location is: it also names members of unions and other steps."""
    path: Path = ()
    for i, step in enumerate(loc):
        if (kind == "missing" and i == len(loc) - 1) or _has(_get(data, path), step):
            path = (*path, step)
    return path


def _has(data: object, step: str | int) -> bool:
    if isinstance(data, Mapping):
        return step in data
    return isinstance(data, (list, tuple)) and isinstance(step, int) and step < len(data)


def _get(data: Any, path: Path) -> Any:
    for step in path:
        data = data[step]
    return data


def _keys(model: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    """The keys that are allowed in the mapping at `loc` inside a model."""
    models = [model]
    for step in loc:
        found = [owner.model_fields[step] for owner in models if step in owner.model_fields]
        models = [inner for field in found for inner in _models(field.annotation)] or models
    fields = [item for owner in models for item in owner.model_fields.items()]
    return sorted({field.alias or name for name, field in fields})


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
