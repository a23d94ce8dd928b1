"""Layers merge by stated rules, and each value keeps its origin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flava_tnt.errors import RecipeError
from flava_tnt.recipes import yaml
from flava_tnt.recipes.compose import compose, merge, normalise_plugins, parse_override
from flava_tnt.recipes.files import find_recipe, shipped_recipes
from flava_tnt.recipes.yaml import Node
from tests.recipes.conftest import WriteRecipe


def layer(text: str, source: str = "x.yaml") -> Node:
    return normalise_plugins(yaml.load(text, source=source))


def merged(*texts: str) -> Any:
    tree = layer(texts[0])
    for text in texts[1:]:
        tree = merge(tree, layer(text) if "\n" in text or ": " in text else parse_override(text))
    return tree.plain()


# ------------------------------------------------------------------------------------------- finding


def test_shipped_recipes_are_found_by_name_and_say_what_they_are() -> None:
    recipes = {recipe.name: recipe for recipe in shipped_recipes()}
    assert {"demo", "emoji", "350m_ddp", "10b_fsdp_ac"} <= set(recipes)
    assert all(recipe.description for recipe in recipes.values())
    assert find_recipe("demo").shown == "recipes/demo.yaml"


def test_an_unknown_recipe_gives_the_nearest_names() -> None:
    with pytest.raises(
        RecipeError, match=r"unknown recipe '10b_fsdpac'; did you mean 10b_fsdp_ac\? there are: "
    ):
        compose("10b_fsdpac")


def test_a_missing_file_gives_the_nearest_file(write_recipe: WriteRecipe) -> None:
    write_recipe("seed: 1", "sub/mine")
    with pytest.raises(RecipeError, match=r"no recipe file sub/mein\.yaml; did you mean mine\.yaml\?"):
        compose("sub/mein.yaml")


def test_a_recipe_that_is_not_utf8_or_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xe9\n")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(RecipeError, match=r"latin\.yaml:2: not UTF-8"):
        compose("latin.yaml")
    with pytest.raises(RecipeError, match=r"cannot read folder\.yaml: "):
        compose("folder.yaml")


def test_the_name_is_that_of_the_recipe_unless_given(write_recipe: WriteRecipe) -> None:
    path = write_recipe("extends: demo\n")
    assert compose(path).get("name").value == "mine"
    assert compose(path, ["name=010"]).get("name").value == "010"


# ------------------------------------------------------------------------------------------- extends


def test_extends_merges_maps_and_replaces_the_rest_with_origins(write_recipe: WriteRecipe) -> None:
    write_recipe("train: {max_steps: 5, data_workers: 2}\nseed: 1\nextra: [1, 2]\n", "parent")
    path = write_recipe("extends: parent.yaml\ntrain:\n  max_steps: 7\nextra: [3]\n")
    tree = compose(path, ["seed=9"])
    assert tree.plain() == {
        "name": "mine",
        "train": {"max_steps": 7, "data_workers": 2},
        "seed": 9,
        "extra": [3],
    }
    assert tree.get("train", "max_steps").origin == "mine.yaml:3"
    assert tree.get("train", "data_workers").origin == "parent.yaml:1"
    assert tree.get("seed").origin == "command line"


def test_relative_parents_start_from_the_file_that_names_them(write_recipe: WriteRecipe) -> None:
    write_recipe("seed: 3", "a/common")
    write_recipe("extends: ../a/common.yaml", "b/child")
    assert compose("b/child.yaml").get("seed").value == 3


def test_a_common_parent_of_two_parents_undoes_neither(write_recipe: WriteRecipe) -> None:
    write_recipe("a: 0\nb: 0\nc: 0", "base")
    write_recipe("extends: base.yaml\na: 1", "left")
    write_recipe("extends: base.yaml\nb: 2", "right")
    path = write_recipe("extends: [left.yaml, right.yaml]\nc: 3")
    assert compose(path).plain() == {"name": "mine", "a": 1, "b": 2, "c": 3}


def test_the_later_parent_wins(write_recipe: WriteRecipe) -> None:
    write_recipe("a: 1", "left")
    write_recipe("a: 2", "right")
    assert compose(write_recipe("extends: [left.yaml, right.yaml]")).get("a").value == 2


def test_a_cycle_is_an_error(write_recipe: WriteRecipe) -> None:
    write_recipe("extends: two.yaml", "one")
    write_recipe("seed: 1\nextends: ./one.yaml", "two")
    with pytest.raises(
        RecipeError, match=r"two\.yaml:2: extends: a cycle: one\.yaml -> two\.yaml -> one\.yaml"
    ):
        compose("one.yaml")


@pytest.mark.parametrize("value", ["3.5.yaml", "{a: 1}", "[demo, [base]]", "nowhere", "true"])
def test_a_bad_parent_is_told_with_its_line(write_recipe: WriteRecipe, value: str) -> None:
    with pytest.raises(RecipeError, match=r"^mine\.yaml:2: "):
        compose(write_recipe(f"seed: 1\nextends: {value}"))


# ----------------------------------------------------------------------------------------- overrides


def test_overrides_split_at_the_first_equals_sign_and_are_yaml() -> None:
    tree = parse_override("text.tokenizer=s3://x?a=b")
    assert tree.plain() == {"text": {"tokenizer": "s3://x?a=b"}}
    assert parse_override("a.b=[1, 1e-3, x]").plain() == {"a": {"b": [1, 0.001, "x"]}}
    assert parse_override("a=").plain() == {"a": None}
    assert (
        parse_override("plugins.data.shards.urls=d/{000000..000003}.tar")
        .get("plugins", "data", "shards", "urls")
        .value
        == "d/{000000..000003}.tar"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.max_steps", "command line: an override is KEY=VALUE, found 'train.max_steps'"),
        ("=3", "command line: '' is no key"),
        ("a..b=3", "command line: 'a..b' is no key"),
        (".a=3", "command line: '.a' is no key"),
        ("a.~=3", "command line: 'a.~' is no key"),
        ("~=3", "command line: '~' is no key"),
        ("a. b=3", "command line: 'a. b' is no key"),
        ("extends=base", "command line: extends: stands in files only"),
        ("a.b=[1", "command line: a.b: not valid YAML: "),
        ("a={b: 1, b: 2}", "command line: a: "),
        ("a=*.tar", "to give it as text, quote it: a='*.tar'"),
        ("plugins.nonsense=3", "command line: plugins.nonsense: unknown kind of plugin"),
        ("plugins.precison=fp32", "did you mean plugins.precision?"),
        ("plugins=fsdp", "command line: plugins: takes a map by kind"),
        ("plugins.parallelism=[fsdp]", "command line: plugins.parallelism: takes a plugin's name or a map"),
        ("plugins.parallelism.use=[1]", "command line: plugins.parallelism.use: takes a plugin's name"),
        ("plugins.parallelism.use=", "command line: plugins.parallelism.use: takes a plugin's name"),
        ("plugins.callback=true", "command line: plugins.callback: takes names of plugins"),
    ],
)
def test_a_bad_override_is_one_clear_line(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_override(override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_later_override_wins() -> None:
    assert compose("demo", ["seed=1", "seed=2"]).get("seed").value == 2


# --------------------------------------------------------------------------------------------- batch


def test_naming_one_of_local_and_global_removes_the_other() -> None:
    assert merged("batch: {local: 8, micro: 2}", "batch: {global: 64}") == {
        "batch": {"micro": 2, "global": 64}
    }
    assert merged("batch: {global: 64}", "batch.local=4") == {"batch": {"local": 4}}
    assert merged("batch: {global: 64}", "batch: {local: 1, global: 2}") == {
        "batch": {"global": 2, "local": 1}
    }
    assert merged("batch: {global: 64}", "batch.local=null") == {"batch": {"global": 64, "local": None}}


# ------------------------------------------------------------------------------------------- plugins


def plugins(*texts: str) -> Any:
    return merged(*texts)["plugins"]


def test_a_name_is_short_for_a_map_with_use() -> None:
    assert plugins(
        "plugins: {parallelism: fsdp, callback: progress, data: [demo, {s: {use: shards, x: 1}}]}"
    ) == {
        "parallelism": {"use": "fsdp"},
        "callback": {"progress": {}},
        "data": {"demo": {}, "s": {"use": "shards", "x": 1}},
    }


def test_a_number_can_name_a_plugin() -> None:
    assert plugins("plugins: {parallelism: 1e3, callback: [010]}") == {
        "parallelism": {"use": "1e3"},
        "callback": {"010": {}},
    }


BF16 = "plugins: {precision: {use: bf16, tf32: true}}"


def test_another_plugin_drops_the_options_of_the_one_before() -> None:
    assert plugins(BF16, "plugins.precision=fp32") == {"precision": {"use": "fp32"}}
    assert plugins(BF16, "plugins: {precision: {use: fp32, a: 1}}") == {"precision": {"use": "fp32", "a": 1}}


def test_options_alone_and_the_same_plugin_merge() -> None:
    expected = {"precision": {"use": "bf16", "tf32": False}}
    assert plugins(BF16, "plugins.precision.tf32=false") == expected
    assert plugins(BF16, "plugins: {precision: {use: bf16, tf32: false}}") == expected
    assert plugins(BF16, "plugins.precision=bf16") == {"precision": {"use": "bf16", "tf32": True}}


def test_null_switches_a_plugin_off_and_a_later_layer_on_again() -> None:
    assert plugins(BF16, "plugins.precision=null") == {"precision": None}
    assert plugins(BF16, "plugins.precision=null", "plugins.precision=bf16") == {"precision": {"use": "bf16"}}
    on = "plugins: {callback: {throughput: {skip_steps: 5}, progress: {}}}"
    off = plugins(on, "plugins.callback.throughput=null")
    assert off == {"callback": {"throughput": None, "progress": {}}}
    again = plugins(on, "plugins.callback.throughput=null", "plugins: {callback: {throughput: {}}}")
    assert again == {"callback": {"throughput": {}, "progress": {}}}


def test_labels_merge_and_another_plugin_under_a_label_starts_afresh() -> None:
    base = "plugins: {callback: {throughput: {skip_steps: 5}, mine: {use: m:A, x: 1}}}"
    assert plugins(base, "plugins.callback.mine.y=2")["callback"]["mine"] == {"use": "m:A", "x": 1, "y": 2}
    assert plugins(base, "plugins.callback.mine.use=m:B")["callback"]["mine"] == {"use": "m:B"}
    assert plugins(base, "plugins.callback.throughput.use=throughput")["callback"]["throughput"] == {
        "skip_steps": 5,
        "use": "throughput",
    }


def test_a_list_names_all_plugins_of_a_kind() -> None:
    base = "plugins: {callback: {throughput: {skip_steps: 5}, progress: {}}}"
    assert plugins(base, "plugins.callback=[throughput, tensorboard]") == {
        "callback": {"throughput": {"skip_steps": 5}, "tensorboard": {}}
    }
    assert plugins(base, "plugins.callback=null") == {"callback": {}}
    assert plugins("plugins: {data: {demo: {x: 1}}}", "plugins.data=synthetic") == {"data": {"synthetic": {}}}


# -------------------------------------------------------------------------------------------- merging

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
MAPS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


def tree_of(value: Any, origin: str) -> Node:
    if isinstance(value, dict):
        return Node({key: tree_of(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list):
        return Node([tree_of(item, origin) for item in value], origin)
    return Node(value, origin)


def expected_merge(base: Any, layer: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(layer, dict)):
        return layer
    both = {key: expected_merge(base[key], layer[key]) for key in base.keys() & layer.keys()}
    return {**base, **layer, **both}


@settings(deadline=None)
@given(MAPS, MAPS)
def test_maps_merge_and_everything_else_is_replaced(base: Any, layer: Any) -> None:
    result = merge(tree_of(base, "base"), tree_of(layer, "layer"))
    assert result.plain() == expected_merge(base, layer)


@settings(deadline=None)
@given(MAPS, MAPS, MAPS)
def test_merging_is_associative(a: Any, b: Any, c: Any) -> None:
    one, two, three = (tree_of(value, origin) for value, origin in ((a, "a"), (b, "b"), (c, "c")))
    # A scalar between two maps hides the first of them only from the left.
    assume(expected_merge(expected_merge(a, b), c) == expected_merge(a, expected_merge(b, c)))
    assert merge(merge(one, two), three).plain() == merge(one, merge(two, three)).plain()


@settings(deadline=None)
@given(MAPS, MAPS)
def test_each_leaf_keeps_the_origin_of_the_layer_that_gave_it(base: Any, layer: Any) -> None:
    result = merge(tree_of(base, "base"), tree_of(layer, "layer"))

    def check(node: Node, given: Any) -> None:
        if node.is_map:
            for key, child in node.value.items():
                inner = given[key] if isinstance(given, dict) and key in given else None
                is_given = isinstance(given, dict) and key in given
                if not child.is_map:
                    assert child.origin == ("layer" if is_given else "base")
                check(child, inner)

    check(result, layer)
