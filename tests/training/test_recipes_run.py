"""The recipes that come along run on a CPU at the tiny size, with the same plugins.

A run takes ten seconds to start, so `make test` has one of each layout; the rest is marked slow, and the same
claims are tested closer to the plugins in `tests/plugins`.
"""

from __future__ import annotations

import math

import pytest

from flava_tnt.recipes.files import shipped_recipes
from flava_tnt.recipes.resolve import resolve
from flava_tnt.testing import assert_same_curve, run_recipe

from .conftest import EXAMPLE_ENVIRONMENT

SIZES_OF_LAYOUT = {
    "ddp": ("350m", "900m"),
    "fsdp": ("350m", "900m", "1.8b", "2.7b", "4.8b"),
    "fsdp_ac": ("350m", "900m", "1.8b", "2.7b", "4.8b", "10b"),
}
"""What the article ran."""
SMALL = ("model.size=tiny", "train.max_steps=3", "train.log_every_steps=1", "batch.local=2", "text.length=64")


def test_every_recipe_of_the_article_comes_along():
    names = {f"{size}_{layout}" for layout, sizes in SIZES_OF_LAYOUT.items() for size in sizes}
    assert names | {"demo", "emoji"} <= {recipe.name for recipe in shipped_recipes()}


@pytest.mark.parametrize("layout", SIZES_OF_LAYOUT)
def test_the_tiny_size_makes_all_sizes_of_a_layout_the_same_run(layout):
    """So that running one of them shows that all of them run."""
    digests = set()
    for size in SIZES_OF_LAYOUT[layout]:
        resolved = resolve(f"{size}_{layout}", SMALL)
        assert resolved.recipe.model.size == "tiny"
        digests.add(resolved.to_yaml().replace(f"{size}_{layout}", "NAME"))
    assert len(digests) == 1


@pytest.mark.parametrize("layout", SIZES_OF_LAYOUT)
def test_each_layout_of_the_article_runs_on_two_cpu_ranks(layout, tmp_path):
    size = SIZES_OF_LAYOUT[layout][-1]
    result = run_recipe(f"{size}_{layout}", *SMALL, nproc=2, run_dir=tmp_path / "run")
    assert [m["step"] for m in result.metrics] == [1, 2, 3]
    assert ("FSDP shards 6 of 6" in result.output) == ("fsdp" in layout)
    assert ("AC wraps 6 of 6" in result.output) == ("ac" in layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [f"{size}_{layout}" for layout, sizes in SIZES_OF_LAYOUT.items() for size in sizes]
)
def test_every_recipe_of_the_article_runs_on_two_cpu_ranks(recipe, tmp_path):
    result = run_recipe(recipe, *SMALL, nproc=2, run_dir=tmp_path / "run")
    assert [m["step"] for m in result.metrics] == [1, 2, 3]


@pytest.mark.slow
def test_the_demo_learns(tmp_path):
    """The contrastive loss ends under half of ln(global batch), as the final table counts it."""
    result = run_recipe("demo", run_dir=tmp_path / "run")
    values = [m["losses"]["contrastive"] for m in result.metrics if "contrastive" in m["losses"]]
    assert sum(values[-5:]) / 5 < math.log(32) / 2
    assert "contrastive (pairs)" in result.output
    assert f"run folder: {tmp_path / 'run'}" in result.output.replace("\n", "")


@pytest.mark.parametrize(
    ("parallelism", "nproc"),
    [
        pytest.param("single", 1, marks=pytest.mark.slow),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        ("fsdp", 2),
    ],
)
def test_bf16_trains_within_a_band_around_fp32(alone, run_short, parallelism, nproc):
    """The loss falls, and every loss of every step is within 5% of fp32's."""
    result = run_short("plugins.precision=bf16", f"plugins.parallelism={parallelism}", nproc=nproc)
    for exact, rounded in zip(alone.metrics, result.metrics, strict=True):
        for name, value in exact["losses"].items():
            assert rounded["losses"][name] == pytest.approx(value, rel=0.05)
    pairs = [m["loss"] for m in result.metrics if m["modality"] == "pairs"]
    assert pairs[-1] < 0.9 * pairs[0]


def test_fp16_on_a_cpu_is_refused_with_the_alternative(tmp_path):
    result = run_recipe("demo", "plugins.precision=fp16", run_dir=tmp_path / "run", expect_exit_code=2)
    assert "bf16" in result.output
    assert not result.run_dir.exists()


def test_the_recipe_in_a_run_folder_runs_as_it_is(alone, tmp_path):
    again = run_recipe(
        str(alone.run_dir / "recipe.yaml"), run_dir=tmp_path / "run", environment=EXAMPLE_ENVIRONMENT
    )
    assert_same_curve(alone, again, relative=1e-6)
