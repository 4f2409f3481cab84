"""YAML with lines: the core schema, mistakes that are collected, and bounds on what is hostile."""

from __future__ import annotations

import json
import math
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.document import MAX_DEPTH, MAX_NODES, Document, of_mapping
from tent_core.yamldoc import MAX_BYTES, parse, read

TEXT = """\
# a comment
control:
  listen: 127.0.0.1:0   # no number, though YAML 1.1 reads some of these as base 60
policy:
  - name: first
    transports: [shm,
                 tcp]
  - {name: second, transports: [tcp]}
"""


def found(document: Document) -> list[str]:
    return [str(mistake) for mistake in document.mistakes]


def test_every_key_and_value_has_its_line() -> None:
    document = parse(TEXT)
    assert not document.mistakes
    assert document.line(("control",)) == 2
    assert document.line(("control", "listen")) == 3
    assert document.line(("policy", 0)) == 5
    assert document.line(("policy", 0, "transports")) == 6
    assert document.line(("policy", 0, "transports", 1)) == 7
    assert document.line(("policy", 1, "name")) == 8


def test_what_is_not_there_has_the_line_of_what_is_around_it() -> None:
    document = parse(TEXT)
    assert document.line(("policy", 1, "devices", 0)) == 8
    assert document.line(("nothing",)) == 2
    assert not document.has(("policy", 1, "devices"))
    assert document.get(("policy", 1, "devices"), "none") == "none"
    assert document.get(("policy", 1)) == {"name": "second", "transports": ["tcp"]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("on", "on"),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0777", 777),
        ("0o17", 15),
        ("0xFf", 255),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-7", -7),
        ("5.", 5.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("'5'", "5"),
        ('"true"', "true"),
        ("64KiB", "64KiB"),
        ("1" * 50, "1" * 50),
    ],
)
def test_plain_values_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    document = parse(f"key: {text}\n")
    assert not document.mistakes
    got = document.get(("key",))
    assert got == value
    assert type(got) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(parse("key: .nan").get(("key",)))


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "\n\n"])
def test_an_empty_document_is_null(text: str) -> None:
    document = parse(text)
    assert document.root.data is None
    assert not document.mistakes


def test_a_key_that_is_there_twice_is_a_mistake_with_both_lines() -> None:
    document = parse("a: 1\nb: {c: 1,\n c: 2}\na: 3\n")
    assert document.root.data == {"a": 1, "b": {"c": 1}}
    assert found(document) == [
        "line 3, b.c: found this key for the second time, after line 2; allowed: each key once",
        "line 4, a: found this key for the second time, after line 1; allowed: each key once",
    ]


def test_tags_make_nothing_and_are_mistakes() -> None:
    document = parse("a: !!python/object/apply:os.system [ls]\nb: !!int 5\nc: !own x\n")
    assert document.root.data == {"a": ["ls"], "b": "5", "c": "x"}
    assert [mistake.line for mistake in document.mistakes] == [1, 2, 3]
    assert all("no tags" in text for text in found(document))


def test_a_key_that_is_no_text_is_a_mistake() -> None:
    document = parse("? [a, b]\n: 1\nc: 2\n1: one\n")
    assert document.root.data == {"c": 2, "1": "one"}
    assert found(document) == ["line 1: found a key that is no text; allowed: text as a key"]


def test_a_second_document_is_a_mistake() -> None:
    assert found(parse("a: 1\n---\nb: 2\n")) == [
        "line 2: found a second document; allowed: one document in a file"
    ]


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("a: 1\nb: [1,\n", 3, "no YAML"),
        ("a: 1\n\tb: 2\n", 2, "no YAML"),
        ("ok: 1\nlocal_memory: *\n", 2, "quote text that begins with *"),
        ("ok: 1\nlocal_memory: *cpu\n", 2, "quote text that begins with *"),
        ("a: b: c\n", 1, "no YAML"),
        ("a: 1\nb: \x07\n", 2, "U+0007"),
    ],
)
def test_what_is_no_yaml_is_one_mistake_with_its_line(text: str, line: int, part: str) -> None:
    (mistake,) = parse(text).mistakes
    assert mistake.line == line
    assert part in str(mistake)


def test_an_alias_repeats_its_value_with_the_lines_of_the_anchor() -> None:
    document = parse("base: &b\n  x: 1\nother: *b\n")
    assert document.root.data == {"base": {"x": 1}, "other": {"x": 1}}
    assert document.line(("other",)) == 3
    assert document.line(("other", "x")) == 2


@pytest.mark.parametrize("text", ["a: &a [1, *a]\n", "x: &a 5\na: &a [1, *a]\n"])
def test_an_alias_of_itself_is_a_mistake(text: str) -> None:
    (mistake,) = parse(text).mistakes
    assert mistake.key == "a[1]"


def test_an_alias_bomb_stops_at_the_bound_on_values() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 40)]
    document = parse("\n".join(lines))
    assert document.root.data is None
    assert f"more than {MAX_NODES:,} values" in found(document)[-1]


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "a:\n"])
def test_deep_nesting_stops_at_the_bound_on_depth(opening: str) -> None:
    text = "".join(" " * i + "a:\n" for i in range(200)) if opening == "a:\n" else opening * 10_000
    (mistake,) = parse(text).mistakes
    assert f"{MAX_DEPTH} levels" in str(mistake)
    assert len(str(mistake)) < 500


@pytest.mark.parametrize(
    "text",
    [
        "[" + "a," * MAX_NODES + "]",
        "x" * (MAX_BYTES + 1),
        "!" * 50_000,
        "!t%" + "z" * 50_000 + " x",
    ],
    ids=["values", "bytes", "tag", "handle"],
)
def test_whatever_is_too_large_gives_a_short_mistake(text: str) -> None:
    mistakes = parse(text).mistakes
    assert mistakes
    assert all(len(str(mistake)) < 500 for mistake in mistakes)


@given(st.text(st.sampled_from(string.printable + "é*&!%@\x00\u2028"), max_size=200))
def test_any_text_is_a_document_or_mistakes(text: str) -> None:
    document = parse(text)
    if document.root.data is None:
        return
    assert document.line(()) is not None


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.text(string.printable, max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("abc_", min_size=1), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_what_was_written_is_read_back(data: object) -> None:
    document = parse(json.dumps(data))
    assert not document.mistakes
    assert document.root.data == data


@given(st.dictionaries(st.text("abc_", min_size=1), PLAIN, max_size=4))
def test_a_mapping_is_read_like_its_text(data: dict[str, object]) -> None:
    assert of_mapping(data).root.data == parse(json.dumps(data)).root.data


def test_a_mapping_has_no_lines_but_the_same_rules() -> None:
    document = of_mapping({"a": {5: 1, "b": (1, 2)}})
    assert document.root.data == {"a": {"b": [1, 2]}}
    assert found(document) == ["a: found the key 5; allowed: text as a key"]
    endless: list[object] = []
    endless.append(endless)
    assert "levels" in found(of_mapping({"a": endless}))[0]


def test_a_file_is_read_with_its_path_as_source(tmp_path: Path) -> None:
    path = tmp_path / "tent.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: \xc3\xa9\r\nb: 2\r\n")
    document = read(path)
    assert document.source == str(path)
    assert document.root.data == {"a": "é", "b": 2}


def test_a_file_that_cannot_be_read_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "latin1.yaml").write_bytes(b"a: \xe9\n")
    for path, reason in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "latin1.yaml", "utf-8"),
        (f"{tmp_path}/a\0b", "null"),
    ):
        (mistake,) = read(path).mistakes
        assert reason in str(mistake)
