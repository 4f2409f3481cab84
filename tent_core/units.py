"""Sizes such as `64KiB` and durations such as `50us`: read, written, and usable in settings models.

A settings model, the core's or a plugin's, annotates its fields with `Size` (bytes, int), `Seconds`
(float) or `Microseconds` (float). YAML may then say a number, in the field's own unit, or text with a unit;
bounds (`annotated_types.Gt`, in a pydantic model also `Field(gt=0)`) work on them as usual. Importing this
module does not import pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

from tent_core.mistakes import NotAllowed, nearest
from tent_core.section import Reads

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

SIZE_UNITS: Mapping[str, Decimal] = {
    "B": Decimal(1),
    "KiB": Decimal(2**10),
    "MiB": Decimal(2**20),
    "GiB": Decimal(2**30),
    "TiB": Decimal(2**40),
    "kB": Decimal(10**3),
    "KB": Decimal(10**3),
    "MB": Decimal(10**6),
    "GB": Decimal(10**9),
    "TB": Decimal(10**12),
}
"""Bytes in a unit: powers of 1024 (IEC 80000-13) and, without the `i`, powers of 1000 (SI)."""

DURATION_UNITS: Mapping[str, Decimal] = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
}
"""Seconds in a unit, ascending."""

LARGEST_SIZE = 2**64 - 1
LARGEST_DURATION_S = 10**9

_NUMBER = r"[0-9]{1,20}(\.[0-9]{1,20})?"
_TEXT = re.compile(rf"({_NUMBER}) ?([A-Za-zµμ]*)")  # both code points that look like a micro sign
_SIZES = "a size such as 4096, 64KiB or 1.5GiB"
_DURATIONS = "a duration such as 5s, 50us or 10min"


def parse_size(value: object) -> int:
    """Bytes of a size: a whole number, or text such as `64KiB`. Raises NotAllowed."""
    amount = _amount(value, SIZE_UNITS, "B", _SIZES)
    if amount != amount.to_integral_value():
        raise NotAllowed(f"{_SIZES}; a whole number of bytes")
    if amount > LARGEST_SIZE:
        raise NotAllowed(f"{_SIZES}; less than 2^64 bytes")
    return int(amount)


def parse_duration(value: object, unit: str = "s") -> float:
    """Seconds of a duration: a number of `unit`s, or text such as `50us`. Raises NotAllowed."""
    amount = _amount(value, DURATION_UNITS, unit, _DURATIONS)
    if amount > LARGEST_DURATION_S:
        raise NotAllowed(f"{_DURATIONS}; at most {LARGEST_DURATION_S:,} seconds")
    return float(amount)


def format_size(size: int) -> str:
    """Exact text of a size in the largest binary unit that divides it: `64KiB`, `1000B`, `0B`."""
    unit, factor = "B", 1
    for name in ("KiB", "MiB", "GiB", "TiB"):
        if size and size % int(SIZE_UNITS[name]) == 0:
            unit, factor = name, int(SIZE_UNITS[name])
    return f"{size // factor}{unit}"


def format_duration(seconds: float) -> str:
    """Exact text of a duration: `50us`, `1500ms`, `5min`. `parse_duration` gives the same float back."""
    exact = Decimal(repr(float(seconds)))
    whole = [unit for unit, factor in DURATION_UNITS.items() if exact and exact % factor == 0]
    unit = whole[-1] if whole else "s"  # the units ascend
    return f"{(exact / DURATION_UNITS[unit]).normalize():f}{unit}"


def _amount(value: object, units: Mapping[str, Decimal], unit: str, allowed: str) -> Decimal:
    """The value in base units (bytes, seconds), exactly as it was written."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if 0 <= value <= 1e20:  # and no NaN
            exact = Decimal(value if isinstance(value, int) else repr(float(value)))
            return exact * units[unit]
        raise NotAllowed(allowed)
    text = value.strip() if isinstance(value, str) else ""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise NotAllowed(allowed)
    number, written = match[1], match[3].replace("µ", "u").replace("μ", "u") or unit
    if written not in units:
        short = f"{written}iB".upper().replace("I", "i")  # 64K, 64m: what people write for KiB, MiB
        close = short if short in units else nearest(written, units, 0.5)
        raise NotAllowed(
            f"{allowed}; units are {', '.join(units)}", f"{number}{close}" if close else None
        )
    return Decimal(number) * units[written]


def _parse_microseconds(value: object) -> float:
    return float(Decimal(repr(parse_duration(value, "us"))) / DURATION_UNITS["us"])


def _format_microseconds(value: float) -> str:
    return format_duration(float(Decimal(repr(value)) * DURATION_UNITS["us"]))


@dataclass(frozen=True, slots=True, eq=False)
class _Quantity(Reads):
    """How to read a field that has a unit, and for pydantic also how to write and to describe it."""

    parse: Callable[[object], float]
    format: Callable[[Any], str]
    number: str
    units: Mapping[str, Decimal]

    def read(self, value: object) -> float:
        """The field's number. Raises NotAllowed."""
        return self.parse(value)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(
            self.parse,
            handler(source),
            serialization=core_schema.plain_serializer_function_ser_schema(
                self.format, when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        text = {"type": "string", "pattern": rf"^ *{_NUMBER} ?({'|'.join(self.units)})? *$"}
        return {"anyOf": [{"type": self.number, "minimum": 0}, text]}


Size = Annotated[int, _Quantity(parse_size, format_size, "integer", SIZE_UNITS)]
"""Bytes. YAML says 65536, `64KiB` or `64KB`."""

Seconds = Annotated[float, _Quantity(parse_duration, format_duration, "number", DURATION_UNITS)]
"""Seconds. YAML says 5, 0.5, `5s` or `500ms`."""

Microseconds = Annotated[
    float, _Quantity(_parse_microseconds, _format_microseconds, "number", DURATION_UNITS)
]
"""Microseconds. YAML says 50, `50us` or `1ms`."""
