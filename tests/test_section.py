"""Sections: what they hold, what is refused of plain data, and that pydantic sees them as they are read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt, MinLen
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tent_core import models, section
from tent_core.errors import ConfigError
from tent_core.mistakes import NotAllowed
from tent_core.section import Check, Complaint, Section
from tent_core.settings import Sections
from tent_core.units import Size


def even(value: int) -> int:
    if value % 2:
        raise NotAllowed("an even number", str(value + 1))
    return value


@dataclass(frozen=True)
class Inner(Section):
    name: Annotated[str, MinLen(1)]
    weight: Annotated[int, Ge(1)] = 1


@dataclass(frozen=True)
class Outer(Section):
    flag: bool = False
    count: Annotated[int, Interval(ge=0, lt=10)] = 0
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    word: Literal["fast", "slow"] = "fast"
    size: Annotated[Size, Lt(1 << 20)] = 4096
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    names: Annotated[tuple[str, ...], MinLen(1)] = ("a",)
    pair: Annotated[int, Check(even)] = 2
    either: int | Literal["none"] | None = None


def read(data: object) -> Outer:
    made, complaints = section.read(Outer, data)
    assert made is not None, complaints
    return made


def complaints(data: object, model: Any = Outer) -> list[Complaint]:
    made, found = section.read(model, data)
    assert made is None
    return found


def test_all_that_a_section_can_hold_is_read() -> None:
    assert read({}) == Outer()
    made = read(
        {
            "flag": True,
            "count": 9,
            "share": 1,
            "word": "slow",
            "size": "64KiB",
            "inner": {"name": "one"},
            "inners": [{"name": "two", "weight": 2}],
            "names": ["x", "y"],
            "pair": 4,
            "either": "none",
        }
    )
    assert made == Outer(
        True, 9, 1.0, "slow", 65536, Inner("one"), (Inner("two", 2),), ("x", "y"), 4, "none"
    )
    assert type(made.share) is float


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (5, Complaint((), "5", "a mapping")),
        ({"flag": 1}, Complaint(("flag",), "1", "true or false")),
        ({"count": True}, Complaint(("count",), "true", "a whole number")),
        ({"count": 1.0}, Complaint(("count",), "1.0", "a whole number")),
        ({"count": "1"}, Complaint(("count",), "'1'", "a whole number")),
        ({"count": None}, Complaint(("count",), "nothing", "a whole number")),
        ({"count": -1}, Complaint(("count",), "-1", "at least 0")),
        ({"count": 10}, Complaint(("count",), "10", "less than 10")),
        ({"share": 0}, Complaint(("share",), "0", "more than 0")),
        ({"share": 1.5}, Complaint(("share",), "1.5", "at most 1")),
        ({"share": 10**400}, Complaint(("share",), "1" + "0" * 79 + "...", "a number")),
        ({"word": "fats"}, Complaint(("word",), "'fats'", "fast, slow", "fast")),
        ({"size": "1MiB"}, Complaint(("size",), "'1MiB'", "less than 1048576")),
        ({"inner": 5}, Complaint(("inner",), "5", "a mapping")),
        ({"inner": {}}, Complaint(("inner", "name"), "nothing", "this key is required")),
        ({"names": "x"}, Complaint(("names",), "'x'", "a list")),
        ({"names": []}, Complaint(("names",), "an empty list", "a list of at least 1")),
        ({"names": ["x", 5]}, Complaint(("names", 1), "5", "text")),
        ({"pair": 3}, Complaint(("pair",), "3", "an even number", "4")),
        ({"either": "non"}, Complaint(("either",), "'non'", "a whole number or none", "none")),
        (
            {"inners": [{"name": ""}]},
            Complaint(("inners", 0, "name"), "''", "text of at least 1 characters"),
        ),
        (
            {"inners": [{"name": "a", "wieght": 1}]},
            Complaint(("inners", 0, "wieght"), "an unknown key", "name, weight", "weight"),
        ),
    ],
)
def test_a_value_that_is_refused_is_one_complaint(data: object, complaint: Complaint) -> None:
    assert complaints(data) == [complaint]


def test_all_that_is_wrong_is_told_at_once() -> None:
    found = complaints({"count": "x", "names": [1, 2], "inner": {"weight": 0}, "wrd": 1})
    assert [each.path for each in found] == [
        ("count",),
        ("inner", "weight"),
        ("inner", "name"),
        ("names", 0),
        ("names", 1),
        ("wrd",),
    ]


def test_keys_of_others_are_allowed_and_named() -> None:
    made, found = section.read(Inner, {"name": "a", "enable": True}, foreign=("enable",))
    assert (made, found) == (Inner("a"), [])
    _, found = section.read(Inner, {"name": "a", "enabel": True}, foreign=("enable",))
    assert found == [Complaint(("enabel",), "an unknown key", "enable, name, weight", "enable")]


@dataclass(frozen=True)
class Range(Section):
    least: int = 0
    most: int = 10
    other: int = 0

    @classmethod
    def conflicts(cls, read: Mapping[str, Any]) -> Iterator[tuple[str, NotAllowed]]:
        if read.get("most", 10) < read.get("least", 0):
            yield "most", NotAllowed(f"at least {read['least']}")


def test_what_does_not_go_together_is_told_although_something_else_is_wrong() -> None:
    assert complaints({"least": 5, "most": 4, "other": "x"}, Range) == [
        Complaint(("other",), "'x'", "a whole number"),
        Complaint(("most",), "4", "at least 5"),
    ]
    assert complaints({"least": "x", "most": 4}, Range) == [
        Complaint(("least",), "'x'", "a whole number")
    ]


def test_a_section_that_refuses_itself_is_a_complaint() -> None:
    @dataclass(frozen=True)
    class Whole(Section):
        value: int = 0

        def __post_init__(self) -> None:
            raise ValueError("a better one")

    assert complaints({"value": 1}, Whole) == [Complaint((), "a mapping of 1", "a better one")]


class Holder:
    @dataclass(frozen=True)
    class Unreadable(Section):
        value: complex = 0j


def test_a_type_that_no_section_can_have_is_an_error_of_who_wrote_it() -> None:
    with pytest.raises(TypeError, match="complex"):
        section.read(Holder.Unreadable, {"value": 1})


def test_settings_are_made_of_what_yaml_would_say_with_all_mistakes_in_one_error() -> None:
    assert models.make(Outer, size="64KiB") == Outer(size=65536)
    with pytest.raises(ConfigError) as caught:
        models.make(Outer, size="64K", count=-1)
    assert len(caught.value.mistakes) == 2


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.floats(-2, 2)
    | st.sampled_from(["fast", "none", "", "64KiB", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "weight", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(
    st.dictionaries(
        st.sampled_from(sorted(Outer.__dataclass_fields__.keys() - {"pair"})), VALUES, max_size=4
    )
)
def test_pydantic_makes_the_same_of_it_so_that_its_json_schema_is_right(
    data: dict[str, Any],
) -> None:
    made, _ = section.read(Outer, data)
    try:
        expected = TypeAdapter(Outer).validate_json(TypeAdapter(Any).dump_json(data))
    except ValidationError:
        assert made is None
    else:
        assert made == expected


def test_the_sections_of_an_engine_describe_all_their_settings() -> None:
    schema = TypeAdapter(Sections).json_schema()
    described = [
        (name, key)
        for name, definition in schema["$defs"].items()
        for key, value in definition["properties"].items()
        if "description" in value
    ]
    assert len(described) == sum(len(each["properties"]) for each in schema["$defs"].values())


def test_reading_a_section_does_not_import_pydantic() -> None:
    code = "import tent_core.config, tent_core.models, sys; print('pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
