"""A recipe means what it looks like, and every value knows its line."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flava_tnt.errors import RecipeError
from flava_tnt.recipes import yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E-3", 0.001),
        ("1e3", 1000.0),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("1.5e+2", 150.0),
        ("12", 12),
        ("-12", -12),
        ("0x1f", 31),
        ("0o17", 15),
        (".inf", math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("010", "010"),
        ("007.5", "007.5"),
        ("yes", "yes"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("2022-11-21", "2022-11-21"),
        ("1_000", "1_000"),
        ("1.2.3", "1.2.3"),
        ("2.7b", "2.7b"),
        ("'1e3'", "1e3"),
        ('"true"', "true"),
    ],
)
def test_scalars_are_read_as_they_look(text: str, value: object) -> None:
    node = yaml.load(f"key: {text}", source="x.yaml").get("key")
    assert node is not None
    assert node.value == value
    assert type(node.value) is type(value)


def test_a_number_keeps_its_text_for_a_field_that_wants_a_name() -> None:
    tree = yaml.load("a: 1e3\nb: 010\nc: '5'\nd: true\n", source="x.yaml")
    assert [tree.value[key].as_text() for key in "abcd"] == ["1e3", "010", "5", None]


def test_keys_are_text() -> None:
    tree = yaml.load("010: 1\nyes: 2\n1e3: 3\n'null': 4\n", source="x.yaml")
    assert list(tree.value) == ["010", "yes", "1e3", "null"]


def test_every_value_knows_the_line_of_its_key() -> None:
    tree = yaml.load("# comment\na: 1\nb:\n  c:\n    - x\n    - y\n  d: {e: 2}\n", source="r/x.yaml")
    assert tree.get("a").origin == "r/x.yaml:2"
    assert tree.get("b", "c").origin == "r/x.yaml:4"
    assert [item.origin for item in tree.get("b", "c").value] == ["r/x.yaml:5", "r/x.yaml:6"]
    assert tree.get("b", "d", "e").origin == "r/x.yaml:7"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: the key 'a' is given twice (before: x.yaml:1)"),
        ("s:\n  a: 1\n  a: 1\n", "x.yaml:3: the key 'a' is given twice (before: x.yaml:2)"),
        ("a: 1\nb: [1, 2\n", "x.yaml:3: not valid YAML: "),
        ("a: 1\n\tb: 2\n", "x.yaml:2: not valid YAML: "),
        ("- a\n- b\n", "x.yaml:1: a recipe is a map of keys, found a list"),
        ("just text", "x.yaml:1: a recipe is a map of keys, found 'just text'"),
        ("a: !!python/object:os.system {}", "x.yaml:1: the tag "),
        ("a: &x [*x]", "x.yaml:1: an alias stands for something that contains it"),
        ("a: *nowhere", "x.yaml:1: not valid YAML: found undefined alias"),
        ("~: 1", "x.yaml:1: a key must be a name"),
        ("[a]: 1", "x.yaml:1: a key must be a name"),
        ("a: 1\n---\nb: 2", "x.yaml:2: not valid YAML"),
        ("a: \x01", "x.yaml: not valid YAML: "),
        ("<<: 3", "x.yaml:1: << takes a map"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        yaml.load(text, source="x.yaml")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "---\n"])
def test_an_empty_file_is_an_empty_recipe(text: str) -> None:
    assert yaml.load(text, source="x.yaml").value == {}


def test_anchors_and_merge_keys_work() -> None:
    tree = yaml.load("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {<<: [{x: 5}, *a]}\n", source="x.yaml")
    assert tree.plain() == {"a": {"x": 1, "y": 2}, "b": {"y": 3, "x": 1}, "c": {"x": 5, "y": 2}}


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(
        [
            "1e3",
            "010",
            "1e-3",
            "null",
            "~",
            "yes",
            "0x1f",
            "<<",
            ".inf",
            "true",
            "1:30",
            "K\x85A",
            "- a",
            "",
            "a: b",
        ]
    )
)
KEYS = st.text(min_size=1).filter(lambda text: text != "~")
TREES = st.dictionaries(
    KEYS, st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=8)
)


@settings(deadline=None)
@given(TREES)
def test_what_is_dumped_reads_back_the_same(value: dict[str, object]) -> None:
    assert yaml.load(yaml.dump(value), source="x.yaml").plain() == value


@settings(deadline=None)
@given(SCALARS | st.lists(SCALARS))
@example("\xa0")
def test_what_is_dumped_on_one_line_reads_back_the_same(value: object) -> None:
    text = yaml.dump(value, flow=True)
    assert "\n" not in text
    assert yaml.load_value(text, origin="command line").plain() == value
