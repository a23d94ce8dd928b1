"""The same recipe gives the same curve on every layout of ranks and workers."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch

from flava_tnt.data.loader import Steps
from flava_tnt.data.sources import open_readers
from flava_tnt.data.tokenizer import Tokenizer
from flava_tnt.model.flava import build_model
from flava_tnt.model.losses import loss_counts
from flava_tnt.model.sizes import resolve_dims
from flava_tnt.model.weights import materialise
from flava_tnt.recipes.resolve import check_setup, resolve
from flava_tnt.testing import Result, assert_same_curve

from .conftest import EXAMPLE_SOURCE

LAYOUTS = {
    "ddp_2": (2, ["plugins.parallelism=ddp"]),
    "fsdp_2_and_2_workers": (2, ["plugins.parallelism=fsdp", "train.data_workers=2"]),
    "fsdp_3_with_checkpointing": (
        3,
        ["plugins.parallelism=fsdp", "plugins.activation_checkpointing=full", "train.data_workers=0"],
    ),
    "hybrid_2x2": (4, ["plugins.parallelism={use: fsdp, mesh: [2, 2]}", "train.data_workers=0"]),
}


def samples_of_steps(result: Result) -> dict[int, list[str]]:
    """All ranks' sample ids of each step, in the order of the global batch."""
    steps: dict[int, list[str]] = defaultdict(list)
    for path in sorted(result.run_dir.glob("samples-*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            steps[record["step"]] += record["ids"]
    return dict(steps)


def test_the_oracle_trains_on_all_kinds_of_batch(alone):
    assert {m["modality"] for m in alone.metrics} == {"pairs", "image", "text"}
    assert [m["step"] for m in alone.metrics] == list(range(1, 21))
    assert [m["samples"] for m in alone.metrics] == [12 * step for step in range(1, 21)]
    assert all(len(ids) == 12 for ids in samples_of_steps(alone).values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_curve_of_one_process(alone, run_short, layout):
    nproc, overrides = LAYOUTS[layout]
    other = run_short(*overrides, nproc=nproc)
    assert samples_of_steps(other) == samples_of_steps(alone)
    assert_same_curve(alone, other, relative=1e-4)


CLIP = "train.clip_grad_norm=0.5"


@pytest.fixture(scope="module")
def clipped(alone, run_short) -> Result:
    """One process that clips every step."""
    result = run_short(CLIP)
    assert min(m["grad_norm"] for m in result.metrics) > 0.5, "not every step was clipped"
    assert result.metrics[-1]["loss"] != alone.metrics[-1]["loss"]
    return result


@pytest.mark.parametrize("parallelism", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_clipping_clips_the_norm_of_the_whole_gradient(clipped, run_short, parallelism):
    assert_same_curve(clipped, run_short(CLIP, f"plugins.parallelism={parallelism}", nproc=2), relative=1e-4)


WITHOUT_CONTRASTIVE = "loss.weights.contrastive=0"
"""The contrastive loss has the negatives of its micro-batch, so it is left out where these differ."""


@pytest.fixture(scope="module")
def whole(run_short) -> Result:
    """One process that takes the whole batch at once."""
    return run_short(WITHOUT_CONTRASTIVE)


@pytest.mark.parametrize(
    ("parallelism", "nproc"),
    [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.slow), ("fsdp", 2)],
)
def test_micro_batches_do_not_change_the_curve(whole, run_short, parallelism, nproc):
    layout = [f"batch.micro={12 // nproc // 3}", f"plugins.parallelism={parallelism}"]
    assert_same_curve(whole, run_short(WITHOUT_CONTRASTIVE, *layout, nproc=nproc), relative=1e-4)


def test_the_original_reduction_is_the_mean_of_each_ranks_mean(run_short, monkeypatch):
    """The contrastive loss is left out here: its rows need the columns of the other rank."""
    two = run_short("loss.reduction=per_rank", "plugins.parallelism=ddp", "train.max_steps=1", nproc=2)
    monkeypatch.syspath_prepend(EXAMPLE_SOURCE)  # the recipe names a plugin of there
    resolved = resolve(str(two.run_dir / "recipe.yaml"))
    setup = check_setup(resolved, world_size=2, local_world_size=2, device_type="cpu")
    recipe, dims = resolved.recipe, resolve_dims(resolved.recipe.model, resolved.recipe.text)
    tokenizer = Tokenizer.from_json((two.run_dir / "tokenizer.json").read_text())
    with torch.device("meta"):
        model = build_model(dims, recipe.loss)
    materialise(model, device="cpu", seed=0, token_init_std=0.02, init_std=dims.init_std)
    means = []
    for rank in (0, 1):
        readers = open_readers(setup)
        batch = Steps(setup, rank=rank, tokenizer=tokenizer, readers=readers)[1]
        counts = loss_counts(batch, recipe.loss)
        means.append({name: value.item() / counts[name] for name, value in model(batch).items()})
    logged = two.metrics[0]["losses"]
    assert {"itm", "mmm_text", "mmm_image"} < logged.keys()
    for name in logged.keys() - {"contrastive"}:
        assert logged[name] == pytest.approx((means[0][name] + means[1][name]) / 2, rel=1e-5)
