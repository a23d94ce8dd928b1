"""The same plugins around FLAVA itself: gradients of one process, names of the model, bf16."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flava_tnt.model.flava import build_model
from flava_tnt.model.losses import loss_counts
from flava_tnt.model.weights import canonical_name, materialise
from flava_tnt.plugin import MODALITIES, Plugin
from flava_tnt_plugins.activation_checkpointing import Full, Selective
from flava_tnt_plugins.attention import Sdpa
from flava_tnt_plugins.ddp import Ddp
from flava_tnt_plugins.fsdp import Fsdp
from flava_tnt_plugins.precision import Bf16, Fp32
from flava_tnt_plugins.single import Single
from tests.distributed import run_ranks
from tests.model.helpers import GLOBAL, SMALL, make_batch
from tests.plugins import toy

SCENARIOS: dict[str, list[Plugin]] = {
    "ddp": [Ddp(), Fp32()],
    "fsdp": [Fsdp(), Fp32()],
    "fsdp, AC by operation": [Fsdp(), Selective(operations=["matmul", "attention"]), Fp32()],
}
BF16: dict[str, list[Plugin]] = {
    "ddp": [Ddp(), Bf16()],
    "fsdp, AC": [Fsdp(reduce_dtype="bf16"), Full(), Bf16()],
}


def step(plugins: Sequence[Plugin], said: list[str]) -> dict[str, dict[str, Any]]:
    """By modality, the loss and the gradients of a step over 12 samples that the ranks share."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    run = toy.make_run(toy.make_setup(plugins, world_size=world_size))
    parallelism, precision = run.setup.one("parallelism"), run.setup.one("precision")
    with torch.device("meta"):
        model = build_model(SMALL, GLOBAL)
    checkpointing = run.setup.one("activation_checkpointing")
    transforms = [Sdpa().apply(model, run)]
    transforms += [checkpointing.apply(model, run)] if checkpointing else []
    transforms += [parallelism.shard(model, run)]
    said += [str(applied) for applied in transforms if applied]
    device = parallelism.parameter_device(run)
    materialise(model, device=run.device, sharded_device=device, seed=0, token_init_std=0.02)
    module = parallelism.wrap(model, run)

    found = {}
    for modality in MODALITIES:
        batch = make_batch(modality, size=12, mismatched=(2, 7, 8))
        counts = loss_counts(batch, GLOBAL)
        part = batch.split(12 // world_size)[run.rank]
        module.zero_grad()
        dtype = precision.compute_dtype()
        autocast = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
        with parallelism.micro_batch(module, is_last=True):
            with autocast:
                means = [value / counts[name] for name, value in module(part).items()]
                loss = world_size * torch.stack(means).sum()
            loss.backward()
        gradients = {
            canonical_name(name): toy.whole(p.grad)
            for name, p in module.named_parameters()
            if p.grad is not None
        }
        found[modality] = {
            "loss": toy.sum_over_ranks(float(loss.detach()) / world_size),
            "gradients": gradients,
        }
    return found


def steps(scenarios: dict[str, list[Plugin]]) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said: list[str] = []
        results: dict[str, Any] = {name: step(plugins, said) for name, plugins in scenarios.items()}
    messages = sorted({str(warning.message) for warning in caught})
    return {"results": results, "warnings": messages, "said": set(said)}


@pytest.fixture(scope="module")
def reference() -> dict[str, dict[str, Any]]:
    return step([Single(), Fp32()], [])


@pytest.fixture(scope="module")
def fp32_ranks() -> list[dict[str, Any]]:
    return run_ranks(steps, 2, SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_give_the_losses_and_gradients_of_one(
    fp32_ranks: list[dict[str, Any]], reference: dict[str, dict[str, Any]], name: str
) -> None:
    for rank in fp32_ranks:
        for modality, expected in reference.items():
            result = rank["results"][name][modality]
            assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert result["gradients"].keys() == expected["gradients"].keys()
            whole = norm(expected["gradients"])
            differences = {
                key: result["gradients"][key] - value for key, value in expected["gradients"].items()
            }
            assert norm(differences) < 1e-5 * whole


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def test_nothing_warns(fp32_ranks: list[dict[str, Any]]) -> None:
    assert fp32_ranks[0]["warnings"] == []


def test_every_layer_is_matched(fp32_ranks: list[dict[str, Any]]) -> None:
    assert fp32_ranks[0]["said"] >= {
        "FSDP shards 6 of 6 TransformerEncoderLayer",
        "AC (keeps matmul, attention) wraps 6 of 6 TransformerEncoderLayer",
    }


def test_bf16_gives_the_losses_of_fp32_to_its_rounding(reference: dict[str, dict[str, Any]]) -> None:
    results = {"single": step([Single(), Bf16()], []), **run_ranks(steps, 2, BF16)[0]["results"]}
    for name, result in results.items():
        for modality, expected in reference.items():
            assert result[modality]["loss"] != expected["loss"], name
            assert result[modality]["loss"] == pytest.approx(expected["loss"], rel=0.01), name
            gradients = result[modality]["gradients"]
            assert gradients.keys() == expected["gradients"].keys()
            assert all(gradient.isfinite().all() for gradient in gradients.values()), name
