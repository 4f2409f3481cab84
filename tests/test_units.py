"""Sizes and durations: what is read, what is refused, and that writing is exact."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from tent_core.mistakes import NotAllowed
from tent_core.units import (
    DURATION_UNITS,
    LARGEST_DURATION_S,
    LARGEST_SIZE,
    SIZE_UNITS,
    Microseconds,
    Seconds,
    Size,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)


class Model(BaseModel, extra="forbid", frozen=True):
    size: Size = Field(65536, ge=4096)
    wait: Seconds = Field(5.0, gt=0)
    spin: Microseconds = 50.0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (65536, 65536),
        (4096.0, 4096),
        ("512", 512),
        ("64KiB", 65536),
        ("64 KiB", 65536),
        (" 1MiB ", 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("64KB", 64000),
        ("64kB", 64000),
        ("1GB", 10**9),
        ("7B", 7),
        ("0.5KiB", 512),
        ("18446744073709551615", LARGEST_SIZE),
    ],
)
def test_a_size_is_a_number_of_bytes_or_has_a_unit(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0.0),
        (5, 5.0),
        (0.25, 0.25),
        ("5s", 5.0),
        ("50us", 50e-6),
        ("50µs", 50e-6),
        ("50 μs", 50e-6),
        ("100ms", 0.1),
        ("3ns", 3e-9),
        ("1.5min", 90.0),
        ("2h", 7200.0),
        ("10", 10.0),
    ],
)
def test_a_duration_is_a_number_of_seconds_or_has_a_unit(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "value", [True, None, [], {}, -1, "-1", "", "KiB", "1e6", "1_000", "0x10", b"1"]
)
def test_what_is_no_amount_is_refused_as_either(value: object) -> None:
    with pytest.raises(NotAllowed):
        parse_size(value)
    with pytest.raises(NotAllowed):
        parse_duration(value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e300, "9" * 1000, "1." + "1" * 1000]
)
def test_numbers_without_bounds_are_refused(value: object) -> None:
    with pytest.raises(NotAllowed):
        parse_size(value)
    with pytest.raises(NotAllowed):
        parse_duration(value)


def test_a_size_beyond_64_bits_or_with_part_of_a_byte_is_refused() -> None:
    with pytest.raises(NotAllowed, match=r"2\^64"):
        parse_size(LARGEST_SIZE + 1)
    with pytest.raises(NotAllowed, match=r"2\^64"):
        parse_size("16777216TiB")
    with pytest.raises(NotAllowed, match="whole number of bytes"):
        parse_size("0.3KiB")


def test_a_duration_beyond_30_years_is_refused() -> None:
    with pytest.raises(NotAllowed, match="at most 1,000,000,000 seconds"):
        parse_duration("300000h")


@pytest.mark.parametrize(
    ("text", "meant"), [("64K", "64KiB"), ("64m", "64MiB"), ("64kib", "64KiB"), ("1Gib", "1GiB")]
)
def test_a_size_in_an_unknown_unit_gets_the_nearest_one(text: str, meant: str) -> None:
    with pytest.raises(NotAllowed) as caught:
        parse_size(text)
    assert caught.value.nearest == meant


@pytest.mark.parametrize(("text", "meant"), [("5sec", "5s"), ("5mins", "5min"), ("5 MS", "5ms")])
def test_a_duration_in_an_unknown_unit_gets_the_nearest_one(text: str, meant: str) -> None:
    with pytest.raises(NotAllowed) as caught:
        parse_duration(text)
    assert caught.value.nearest == meant


@given(st.integers(0, LARGEST_SIZE))
def test_writing_a_size_loses_nothing(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(0, 2**20), st.sampled_from(sorted(SIZE_UNITS)))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == number * int(SIZE_UNITS[unit])


@given(st.decimals(0, LARGEST_DURATION_S, places=9).map(float))
def test_writing_a_duration_loses_nothing(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.text(max_size=30))
def test_any_text_is_an_amount_or_refused(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with suppress(NotAllowed):
            assert parse(text) >= 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (50e-6, "50us"),
        (0.5, "500ms"),
        (5, "5s"),
        (90, "90s"),
        (300, "5min"),
        (7200, "2h"),
    ],
)
def test_a_duration_is_written_in_its_largest_whole_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0B"), (1000, "1000B"), (65536, "64KiB"), (3 * 2**40, "3TiB")]
)
def test_a_size_is_written_in_its_largest_whole_unit(size: int, text: str) -> None:
    assert format_size(size) == text


def test_a_model_reads_each_field_in_its_own_unit() -> None:
    model = Model.model_validate({"size": "1MiB", "wait": "250ms", "spin": "1ms"})
    assert (model.size, model.wait, model.spin) == (2**20, 0.25, 1000.0)
    plain = Model.model_validate({"size": 8192, "wait": 2, "spin": 7})
    assert (plain.size, plain.wait, plain.spin) == (8192, 2.0, 7.0)


def test_a_model_writes_text_with_units_as_json_and_numbers_as_python() -> None:
    model = Model(size=2**20, wait=0.25, spin=1000.0)
    assert json.loads(model.model_dump_json()) == {"size": "1MiB", "wait": "250ms", "spin": "1ms"}
    assert model.model_dump() == {"size": 2**20, "wait": 0.25, "spin": 1000.0}
    assert Model.model_validate_json(model.model_dump_json()) == model


@pytest.mark.parametrize(
    "values", [{"size": "1KiB"}, {"wait": "0s"}, {"size": True}, {"spin": "5 mhz"}]
)
def test_bounds_and_units_of_a_model_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Model.model_validate(values)


@pytest.mark.parametrize(
    ("field", "value", "fits"),
    [
        ("size", "64KiB", True),
        ("size", "64K", False),
        ("wait", "50us", True),
        ("wait", "5 s", True),
        ("wait", "5 parsecs", False),
    ],
)
def test_the_json_schema_accepts_the_text_that_is_accepted(
    field: str, value: str, fits: bool
) -> None:
    number, text = Model.model_json_schema()["properties"][field]["anyOf"]
    assert number["type"] in ("integer", "number")
    assert bool(re.search(text["pattern"], value)) is fits


def test_units_are_used_without_importing_pydantic() -> None:
    code = "import tent_core.units, sys; print('pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_units_ascend_so_that_the_largest_whole_one_is_last() -> None:
    assert sorted(DURATION_UNITS.values()) == list(DURATION_UNITS.values())
