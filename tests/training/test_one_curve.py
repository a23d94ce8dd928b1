"""The same recipe gives the same curve on every layout of ranks and workers."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from flava_tnt.testing import Result, assert_same_curve

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


def test_the_original_reduction_depends_on_the_layout(alone, run_short):
    two = run_short("loss.reduction=per_rank", "plugins.parallelism=ddp", nproc=2)
    first, other = alone.metrics[0]["losses"], two.metrics[0]["losses"]
    assert first.keys() == other.keys()
    assert any(abs(first[name] - other[name]) > 1e-6 for name in first), "counts differ between the ranks"
