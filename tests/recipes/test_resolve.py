"""A resolved recipe is checked in full, says where things came from, and runs again as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flava_tnt.errors import PluginError, RecipeError
from flava_tnt.recipes import yaml
from flava_tnt.recipes.files import shipped_recipes
from flava_tnt.recipes.resolve import Resolved, resolve
from tests.recipes.conftest import WriteRecipe
from tests.recipes.plugins_for_tests import Colour, Inner, Many, NeedsUrl

HERE = "tests.recipes.plugins_for_tests"
MANY = f"plugins.callback.many.use={HERE}:Many"
RUNNABLE = sorted({recipe.name for recipe in shipped_recipes()} - {"base", "article", "emoji"})


def many(*overrides: str) -> Many:
    plugin = resolve("demo", [MANY, *overrides]).plugins["callback"]["many"]
    assert isinstance(plugin, Many)
    return plugin


# ------------------------------------------------------------------------------------ what comes along


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_recipe_resolves_and_runs_again_from_what_it_resolved_to(name: str, tmp_path: Path) -> None:
    resolved = resolve(name)
    again = reread(resolved, tmp_path)
    assert again == resolved
    assert again.digest() == resolved.digest()
    assert again.recipe.name == name


def test_the_design_s_recipes_are_all_there() -> None:
    names = {"demo", "emoji"}
    names |= {f"{size}_ddp" for size in ("350m", "900m")}
    names |= {f"{size}_fsdp" for size in ("350m", "900m", "1.8b", "2.7b", "4.8b")}
    names |= {f"{size}_fsdp_ac" for size in ("350m", "900m", "1.8b", "2.7b", "4.8b", "10b")}
    assert names <= {recipe.name for recipe in shipped_recipes()}


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name != "demo"])
def test_the_article_s_recipes_say_what_the_article_ran(name: str) -> None:
    resolved = resolve(name)
    recipe, plugins = resolved.recipe, resolved.plugins
    size, _, strategy = name.partition("_")
    assert recipe.model.size == size
    assert (recipe.batch.local, recipe.train.max_steps) == (8, 1000)
    assert list(plugins["parallelism"]) == [strategy.removesuffix("_ac")]
    assert list(plugins.get("activation_checkpointing", [])) == (["full"] if strategy.endswith("_ac") else [])
    assert recipe.plugins["precision"]["bf16"].options == {"tf32": True}
    assert recipe.plugins["callback"]["throughput"].options["skip_steps"] == 100
    assert list(plugins["data"]) == ["synthetic"]


def test_the_optimizer_of_the_paper_is_the_default() -> None:
    options = resolve("350m_ddp").recipe.plugins["optimizer"]["adamw"].options
    found = (options["learning_rate"], options["betas"], options["weight_decay"], options["schedule"])
    assert found == (1e-3, [0.9, 0.999], 0.1, "cosine")


def test_emoji_says_that_it_needs_urls_and_takes_them() -> None:
    with pytest.raises(
        RecipeError, match=r"^recipes/emoji\.yaml:\d+: plugins\.data\.shards\.urls: must be given"
    ):
        resolve("emoji")
    resolved = resolve("emoji", ["plugins.data.shards.urls=data/{000000..000003}.tar"])
    urls = resolved.recipe.plugins["data"]["shards"].options["urls"]
    assert urls == f"{Path.cwd()}/data/{{000000..000003}}.tar", "a resolved recipe runs from anywhere"


# ---------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("text=1e3", "text", "1e3"),
        ("text=010", "text", "010"),
        ("text=12", "text", "12"),
        ("text=yes", "text", "yes"),
        ("ratio=1e-3", "ratio", 0.001),
        ("ratio=1e3", "ratio", 1000.0),
        ("ratio=3", "ratio", 3.0),
        ("ratio=.inf", "ratio", float("inf")),
        ("pair=[2, 3]", "pair", (2, 3.0)),
        ("names=[1e3, 010, a]", "names", ["1e3", "010", "a"]),
        ("limits={1e3: 1e3}", "limits", {"1e3": 1000.0}),
        ("colour=blue", "colour", Colour.BLUE),
        ("path=1e3", "path", Path("1e3")),
        ("mode=1e3", "mode", "1e3"),
        ("either=5", "either", 5),
        ("either=5x", "either", "5x"),
        ("inner.label=1e3", "inner", Inner(label="1e3")),
    ],
)
def test_values_take_the_type_of_their_option(override: str, field: str, value: object) -> None:
    found = getattr(many(f"plugins.callback.many.{override}"), field)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.locl=3", "batch.locl: unknown key; did you mean batch.local?"),
        ("bach.local=3", "bach: unknown key; did you mean batch?"),
        ("max_steps=3", "max_steps: unknown key; did you mean train.max_steps?"),
        ("xyzzy=3", "xyzzy: unknown key; there are: name, seed, model"),
        ("train.max_steps=abc", "train.max_steps: expected an integer, found 'abc'"),
        ("train.max_steps=1e3", "train.max_steps: expected an integer, found 1e3"),
        ("train.max_steps=010", "train.max_steps: expected an integer, found '010'"),
        ("train.max_steps=true", "train.max_steps: expected an integer, found true"),
        ("train.max_steps=", "train.max_steps: expected an integer, found null"),
        ("train.max_steps=0", "train.max_steps: expected a number at least 1, found 0"),
        ("train.max_steps.x=1", "train.max_steps: expected an integer, found a map"),
        ("train.clip_grad_norm=0", "train.clip_grad_norm: expected a number above 0"),
        ("model=tiny", "model: expected a map, found 'tiny'"),
        ("model.size=tinny", "found 'tinny'; did you mean tiny?"),
        ("loss.reduction=globl", "loss.reduction: expected one of 'global' or 'per_rank'"),
        ("batch={local: 1, global: 2}", "batch: give one of batch.local and batch.global"),
        (
            "train.modalities={pairs: 0, image: 0, text: 0}",
            "train.modalities: at least one share must be above 0",
        ),
        ("text.tokenizer=true", "text.tokenizer: expected a string, found true"),
        ("text.tokenizer=[a]", "text.tokenizer: expected a string, found a list"),
        ("plugins.callback.many.cuont=3", "plugins.callback.many.cuont: unknown option; did you mean"),
        (
            "plugins.callback.many.count=11",
            "plugins.callback.many.count: expected a number at most 10, found 11",
        ),
        ("plugins.callback.many.count=[1]", "plugins.callback.many.count: expected an integer, found a list"),
        ("plugins.callback.many.flag=true", "plugins.callback.many: flag needs names"),
        ("plugins.callback.many.flag=yes", "plugins.callback.many.flag: expected true or false, found 'yes'"),
        ("plugins.callback.many.pair=[1]", "plugins.callback.many.pair.1: must be given"),
        ("plugins.callback.many.names=a", "plugins.callback.many.names: expected a list, found 'a'"),
        (
            "plugins.callback.many.names=[a, {b: 1}]",
            "plugins.callback.many.names.1: expected a string, found a map",
        ),
        (
            "plugins.callback.many.colour=rad",
            "expected one of 'red' or 'blue', found 'rad'; did you mean red?",
        ),
        ("plugins.callback.many.either=[1]", "expected an integer or a string, found a list"),
        (
            "plugins.callback.many.inner.deth=1",
            "unknown option; did you mean plugins.callback.many.inner.depth?",
        ),
        ("plugins.callback.many.inner=3", "plugins.callback.many.inner: expected a map, found 3"),
        ("plugins.parallelism={fsdp: {mesh: [1, 1]}}", "plugins.parallelism.fsdp: unknown option"),
        (
            "plugins.activation_checkpointing={full: {}}",
            "did you mean plugins.activation_checkpointing: {use: full",
        ),
        (
            "plugins.activation_checkpointing.every=2",
            "plugins.activation_checkpointing: names no plugin; write",
        ),
        (
            "plugins.parallelism=fdsp",
            "plugins.parallelism: unknown parallelism plugin 'fdsp'; did you mean fsdp?",
        ),
        (
            "plugins.callback.progres={}",
            "plugins.callback.progres: unknown callback plugin 'progres'; did you mean",
        ),
        ("plugins.precision=nowhere:X", "plugins.precision: precision plugin 'nowhere:X' (no distribution"),
    ],
)
def test_what_is_wrong_is_one_line_with_origin_and_key(override: str, message: str) -> None:
    with pytest.raises((RecipeError, PluginError)) as caught:
        resolve("demo", [MANY, override])
    text = str(caught.value)
    assert text.startswith("command line: ")
    assert message in text
    assert "\n" not in text


def test_a_wrong_value_in_a_file_is_told_with_file_and_line(write_recipe: WriteRecipe) -> None:
    path = write_recipe("extends: demo\n\ntrain:\n  max_steps: 1x\n")
    with pytest.raises(RecipeError) as caught:
        resolve(path)
    assert str(caught.value) == "mine.yaml:4: train.max_steps: expected an integer, found '1x'"
    assert (caught.value.key, caught.value.origin) == ("train.max_steps", "mine.yaml:4")


def test_all_problems_are_told_a_line_each(write_recipe: WriteRecipe) -> None:
    path = write_recipe(
        """\
        extends: demo
        sed: 1
        batch: {local: x}
        plugins:
          parallelism: {use: fsdp, mehs: 3}
          callback: {nowhere: {}}
        """
    )
    with pytest.raises(RecipeError) as caught:
        resolve(path)
    lines = sorted(str(caught.value).splitlines())
    assert [line.split(": ")[:2] for line in lines] == [
        ["mine.yaml:2", "sed"],
        ["mine.yaml:3", "batch.local"],
        ["mine.yaml:5", "plugins.parallelism.mehs"],
        ["mine.yaml:6", "plugins.callback.nowhere"],
    ]


def test_a_recipe_without_a_batch_says_so() -> None:
    with pytest.raises(RecipeError, match=r"^recipes/base\.yaml: batch: must be given"):
        resolve("base")


def test_an_empty_recipe_says_what_it_needs(write_recipe: WriteRecipe) -> None:
    with pytest.raises(RecipeError, match=r"^mine\.yaml: batch: must be given"):
        resolve(write_recipe(""))


def test_a_plugin_at_fault_is_a_plugin_error() -> None:
    with pytest.raises(PluginError, match="^command line: plugins.parallelism: unknown"):
        resolve("demo", ["plugins.parallelism=fdsp"])


# -------------------------------------------------------------------------------------------- origins


def test_origins_by_key(write_recipe: WriteRecipe) -> None:
    path = write_recipe(
        f"""\
        extends: demo
        train: {{max_steps: 7}}
        plugins:
          callback:
            a.b: {{use: "{HERE}:Many", names: [x,
                y]}}
        """
    )
    origin = resolve(path, ["plugins.precision.tf32=true"]).origin
    assert origin("train.max_steps") == "mine.yaml:2"
    assert origin("batch.global").startswith("recipes/demo.yaml:")
    assert origin("plugins.precision.use").startswith("recipes/base.yaml:")
    assert origin("plugins.precision.tf32") == "command line"
    assert origin("plugins.callback.a.b.use") == "mine.yaml:5"
    assert origin("plugins.callback.a.b.names.1") == "mine.yaml:6"
    assert origin("seed").startswith("recipes/base.yaml:")
    assert origin("model.dropout") == origin("launch") == origin("nowhere.at.all") == "default"


# ----------------------------------------------------------------------------------------- round trip


def reread(resolved: Resolved, folder: Path, *, with_origins: bool = False) -> Resolved:
    path = folder / "recipe.yaml"
    path.write_text(resolved.to_yaml(with_origins=with_origins), encoding="utf-8")
    return resolve(str(path))


def test_strings_that_look_like_numbers_stay_quoted() -> None:
    text = resolve("demo", [MANY, "plugins.callback.many.text=1e3", "name=010"]).to_yaml()
    assert "text: '1e3'" in text
    assert "name: '010'" in text
    assert "extends" not in text


def test_a_resolved_recipe_switches_off_what_was_off(tmp_path: Path) -> None:
    overrides = ["plugins.callback.tensorboard=null", "plugins.attention=null"]
    resolved = resolve("demo", overrides)
    assert "tensorboard" not in resolved.plugins["callback"]
    assert "attention" not in resolved.plugins
    assert reread(resolved, tmp_path) == resolved


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(),
        "ratio": st.floats(allow_nan=False),
        "count": st.integers(1, 10),
        "pair": st.tuples(st.integers(-(2**40), 2**40), st.floats(allow_nan=False)).map(list),
        "names": st.lists(
            st.sampled_from(["1e3", "010", "null", "", "a: b", "~", "é", "x"]) | st.text(max_size=4)
        ),
        "limits": st.dictionaries(
            st.text(min_size=1, max_size=3).filter(lambda key: key != "~"), st.floats(-9, 9)
        ),
        "colour": st.sampled_from(["red", "blue"]),
        "mode": st.sampled_from(["fast", "1e3"]),
        "either": st.none() | st.integers(-9, 9) | st.sampled_from(["1e3", "5", "x"]),
        "inner": st.fixed_dictionaries({"depth": st.integers(0, 3), "label": st.text(max_size=4)}),
    },
)


@pytest.mark.parametrize("with_origins", [False, True])
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@example(options={"limits": {"\x85": 0.0, "a: b": 1.0, "<<": 2.0, "- ": 3.0}})
@given(options=OPTIONS)
def test_resolved_recipes_round_trip(
    tmp_path_factory: pytest.TempPathFactory, with_origins: bool, options: dict[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("round-trip")
    choice = {"use": f"{HERE}:Many", **options}
    path = folder / "given.yaml"
    path.write_text(
        yaml.dump({"extends": "demo", "plugins": {"callback": {"many": choice}}}), encoding="utf-8"
    )
    resolved = resolve(str(path))
    again = reread(resolved, folder, with_origins=with_origins)
    assert again == resolved
    assert again.digest() == resolved.digest()


# ---------------------------------------------------------------------------------- plugins and digest


def test_plugins_json_names_kind_name_distribution_and_version() -> None:
    rows = resolve("demo", [MANY]).plugins_json()
    assert json.loads(json.dumps(rows)) == rows
    by_label = {(row["kind"], row["label"]): row for row in rows}
    assert by_label["parallelism", "single"]["distribution"] == "flava-tnt"
    assert by_label["parallelism", "single"]["version"] == "0.1.0"
    assert by_label["callback", "many"]["version"] is None


def test_the_digest_changes_with_a_value_and_with_a_plugin_s_version() -> None:
    resolved = resolve("demo")
    assert resolved.digest() == resolve("demo").digest()
    assert resolved.digest() != resolve("demo", ["seed=1"]).digest()
    assert resolved.digest() != resolve("demo", ["plugins.callback.throughput.skip_steps=1"]).digest()
    newer = replace(resolved.entries["parallelism"]["single"], version="9.9")
    other = replace(resolved, entries={**resolved.entries, "parallelism": {"single": newer}})
    assert resolved.digest() != other.digest()


def test_one_plugin_can_stand_under_two_labels() -> None:
    resolved = resolve(
        "demo",
        ["plugins.data=null"]
        + [f"plugins.data.{label}={{use: '{HERE}:NeedsUrl', urls: {label}}}" for label in ("train", "more")],
    )
    assert [plugin.urls for plugin in resolved.plugins["data"].values() if isinstance(plugin, NeedsUrl)] == [
        "train",
        "more",
    ]
