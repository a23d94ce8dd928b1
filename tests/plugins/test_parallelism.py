"""One curve: every parallelism gives the losses, gradients and weights of one process on the full batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from flava_tnt.errors import RecipeError
from flava_tnt.plugin import Plugin
from flava_tnt_plugins.activation_checkpointing import Full, Selective
from flava_tnt_plugins.adamw import AdamW
from flava_tnt_plugins.ddp import Ddp
from flava_tnt_plugins.fsdp import Fsdp
from flava_tnt_plugins.precision import Bf16, Fp16, Fp32
from flava_tnt_plugins.single import Single
from tests.distributed import run_ranks
from tests.plugins import toy

KINDS: list[toy.Kind] = ["pairs", "text", "image", "pairs"]
# Adam divides by the root of the squared gradient: a larger eps keeps rounding in gradients that are zero
# on paper (the keys' bias) from moving weights.
OPTIMIZER = AdamW(learning_rate=1e-2, eps=1e-3)
FAST = AdamW(learning_rate=5e-2, eps=1e-3)
UNFUSED = AdamW(learning_rate=1e-2, eps=1e-3, fused=False)

Scenario = tuple[list[Plugin], list[toy.Kind], int]

SCENARIOS: dict[int, dict[str, Scenario]] = {
    1: {
        "ddp on 1": ([Ddp(), Fp32(), OPTIMIZER], KINDS, 1),
        "fsdp on 1": ([Fsdp(), Fp32(), OPTIMIZER], KINDS, 1),
    },
    2: {
        "ddp": ([Ddp(), Fp32(), OPTIMIZER], KINDS, 1),
        "ddp, small buckets, copied, AC": (
            [Ddp(bucket_cap_mb=0.001, gradient_as_bucket_view=False), Full(), Fp32(), OPTIMIZER],
            KINDS,
            1,
        ),
        "ddp, 3 micro-batches": ([Ddp(), Fp32(), OPTIMIZER], KINDS, 3),
        "fsdp": ([Fsdp(), Fp32(), OPTIMIZER], KINDS, 1),
        "fsdp, kept after forward, optimizer not fused": (
            [Fsdp(reshard_after_forward=False), Fp32(), UNFUSED],
            KINDS,
            1,
        ),
        "fsdp, 3 micro-batches": ([Fsdp(sync_every_micro_batch=False), Fp32(), OPTIMIZER], KINDS, 3),
        "fsdp, 3 micro-batches shared, AC by operation": (
            [Fsdp(), Selective(operations=["matmul"]), Fp32(), OPTIMIZER],
            KINDS,
            3,
        ),
    },
    3: {"fsdp on 3, full AC": ([Fsdp(), Full(), Fp32(), OPTIMIZER], KINDS, 1)},
    4: {
        "hybrid 2 x 2, 3 micro-batches": (
            [Fsdp(mesh=[2, 2], sync_every_micro_batch=False), Fp32(), OPTIMIZER],
            KINDS,
            3,
        ),
        "fsdp on 4, resharded to groups of 2": ([Fsdp(reshard_after_forward=2), Fp32(), OPTIMIZER], KINDS, 1),
    },
}
NAMES = [(world_size, name) for world_size, scenarios in SCENARIOS.items() for name in scenarios]


def train_all(scenarios: dict[str, Scenario]) -> dict[str, Any]:
    return {
        name: toy.train(plugins, kinds, num_micro=num_micro)
        for name, (plugins, kinds, num_micro) in scenarios.items()
    }


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return toy.train([Single(), Fp32(), OPTIMIZER], KINDS)


@pytest.fixture(scope="module")
def curves() -> dict[int, list[dict[str, Any]]]:
    """By number of ranks, what each rank got in each scenario."""
    return {world_size: run_ranks(train_all, world_size, runs) for world_size, runs in SCENARIOS.items()}


@pytest.mark.parametrize(("world_size", "name"), NAMES)
def test_ranks_give_the_curve_gradients_and_weights_of_one_process(
    curves: dict[int, list[dict[str, Any]]], reference: dict[str, Any], world_size: int, name: str
) -> None:
    for result in (per_rank[name] for per_rank in curves[world_size]):
        torch.testing.assert_close(result["losses"], reference["losses"], rtol=1e-5, atol=0)
        assert result["gradients"].keys() == reference["gradients"].keys()
        for key, expected in reference["gradients"].items():
            torch.testing.assert_close(result["gradients"][key], expected, rtol=1e-4, atol=2e-5, msg=key)
        assert result["weights"].keys() == reference["weights"].keys()
        for key, expected in reference["weights"].items():
            torch.testing.assert_close(result["weights"][key], expected, rtol=1e-4, atol=2e-5, msg=key)


def test_a_part_of_no_loss_has_no_gradient_and_does_not_decay() -> None:
    start = toy.train([Single(), Fp32(), OPTIMIZER], [])["weights"]
    for result in run_ranks(train_unused_parts, 2):
        for name, trained in result.items():
            used = {key for key in start if key.startswith(("text.", "text_head."))} - {
                "text.pooler.weight",
                "text.pooler.bias",
            }
            assert trained["gradients"].keys() == used, name
            for key, weight in trained["weights"].items():
                assert torch.equal(weight, start[key]) == (key not in used), (name, key)


def train_unused_parts() -> dict[str, Any]:
    """Batches of text only, under DDP and FSDP."""
    return {
        type(parallelism).__name__: toy.train([parallelism, Fp32(), OPTIMIZER], ["text", "text"])
        for parallelism in (Ddp(), Ddp(gradient_as_bucket_view=False), Fsdp())
    }


def test_gradients_are_averaged_over_the_ranks_and_not_summed() -> None:
    module, _ = toy.assemble([Single(), Fp32(), OPTIMIZER])
    parts = [{name: x.chunk(4)[i] for name, x in toy.global_batch("pairs", 1).items()} for i in range(4)]
    (sum(sum(module(part).values()) for part in parts) / 4).backward()
    expected = {name: p.grad for name, p in toy.trainable(module) if p.grad is not None}

    for result in run_ranks(gradients_of_each_ranks_own_loss, 4):
        for name, gradients in result.items():
            assert gradients.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(gradients[key], value, rtol=1e-4, atol=2e-4, msg=f"{name}: {key}")


def gradients_of_each_ranks_own_loss() -> dict[str, dict[str, torch.Tensor]]:
    """Each rank differentiates the plain sum over its own quarter of the batch."""
    found = {}
    for name, parallelism in {"ddp": Ddp(), "fsdp": Fsdp(), "hybrid": Fsdp(mesh=[2, 2])}.items():
        module, run = toy.assemble([parallelism, Fp32(), OPTIMIZER])
        batch = toy.global_batch("pairs", 1)
        with parallelism.micro_batch(module, is_last=True):
            sum(module({key: x.chunk(4)[run.rank] for key, x in batch.items()}).values()).backward()
        found[name] = {key: toy.whole(p.grad) for key, p in toy.trainable(module) if p.grad is not None}
    return found


def test_only_the_last_micro_batch_communicates() -> None:
    results = run_ranks(gradients_after_a_micro_batch_that_is_not_the_last, 2)
    first, second = (result["ddp"] for result in results)
    assert not torch.equal(first, second)  # each rank's own
    assert all(result["fsdp"] is None for result in results)
    assert all(result["fsdp, shared"] is not None for result in results)


def gradients_after_a_micro_batch_that_is_not_the_last() -> dict[str, torch.Tensor | None]:
    found: dict[str, torch.Tensor | None] = {}
    for name, parallelism in {
        "ddp": Ddp(),
        "fsdp": Fsdp(sync_every_micro_batch=False),
        "fsdp, shared": Fsdp(),
    }.items():
        module, run = toy.assemble([parallelism, Fp32(), OPTIMIZER])
        toy.backward(module, run, "text", 1, num_micro=3)
        module.zero_grad()
        batch = toy.global_batch("text", 2)
        with parallelism.micro_batch(module, is_last=False):
            sum(module({key: x.chunk(2)[run.rank] for key, x in batch.items()}).values()).backward()
        gradient = dict(toy.trainable(module))["text.embedding.weight"].grad
        found[name] = None if gradient is None else toy.whole(gradient)
    return found


@pytest.mark.parametrize("precision", [Fp32(), Bf16()], ids=["fp32", "bf16"])
def test_the_first_step_may_use_a_part_of_the_model_in_micro_batches(precision: Plugin) -> None:
    kinds: list[toy.Kind] = ["text", "image", "pairs"]
    whole = toy.train([Single(), precision, OPTIMIZER], kinds)
    (parts, _) = run_ranks(toy.train, 2, [Fsdp(), precision, OPTIMIZER], kinds, 3)
    rounding = 1e-5 if precision == Fp32() else 0.03
    torch.testing.assert_close(parts["losses"], whole["losses"], rtol=rounding, atol=0)
    assert parts["gradients"].keys() == whole["gradients"].keys()


def test_torch_still_needs_a_gathered_unit_before_a_backward_pass_without_communication() -> None:
    """When this fails, torch has mended it, and ``Fsdp.micro_batch`` needs no memory of units."""
    with pytest.raises(AssertionError, match="no attribute '_unsharded_param'"):
        run_ranks(accumulate_before_all_units_were_gathered, 1)


def accumulate_before_all_units_were_gathered() -> None:
    module: Any = toy.assemble([Fsdp(), Bf16(), OPTIMIZER])[0]
    module.set_requires_gradient_sync(False)
    sum(module(toy.global_batch("text", 1)).values()).backward()


def test_fsdp_shards_each_layer_head_and_tower_and_leaves_the_codebook_out() -> None:
    for rank, result in enumerate(run_ranks(describe_shards, 2)):
        assert result["units"] == {
            "",
            "text",
            "image",
            "text_head",
            "image_head",
            *(f"{tower}.layer.{i}" for tower in ("text", "image") for i in range(1)),
        }
        assert result["unsharded"] == {"codebook.weight", "codebook.bias"}
        assert result["logit_scale"] == (1 if rank == 0 else 0)
        assert result["tied"]
        assert result["applied"] == "FSDP shards 6 of 6 Layer"


def describe_shards() -> dict[str, Any]:
    module, run = toy.assemble([Fsdp(), Full(), Fp32(), OPTIMIZER])
    toy.backward(module, run, "pairs", 1)
    with torch.device("meta"):
        again: Any = toy.Toy(num_layers=3)
    return {
        "units": {
            toy.canonical_name(f"{n}.")[:-1] for n, m in module.named_modules() if isinstance(m, FSDPModule)
        },
        "unsharded": {n for n, p in module.named_parameters() if not isinstance(p, DTensor)},
        "logit_scale": module.logit_scale.to_local().numel(),  # type: ignore[union-attr, operator]
        "tied": module.text_head.bias is module.text_head.decoder.bias,  # type: ignore[union-attr]
        "applied": str(Fsdp().shard(again, run)),
    }


def test_bf16_trains_under_every_parallelism_as_fp32_does() -> None:
    kinds: list[toy.Kind] = ["pairs"] * 10
    fp32 = toy.train([Single(), Fp32(), FAST], kinds)["losses"]
    results = {
        "single": toy.train([Single(), Bf16(), FAST], kinds),
        **run_ranks(train_bf16, 2, kinds)[0],
    }
    for name, result in results.items():
        assert result["losses"] != fp32, name
        assert result["losses"][-1] < 0.8 * result["losses"][0], name
        # A mantissa of 8 bits gives 0.4 % a rounding; a few of them in a row stay within 3 %.
        torch.testing.assert_close(result["losses"], fp32, rtol=0.03, atol=0.03, msg=name)
        assert {weight.dtype for weight in result["weights"].values()} == {torch.float32}
        assert {gradient.dtype for gradient in result["gradients"].values()} == {torch.float32}


def train_bf16(kinds: list[toy.Kind]) -> dict[str, Any]:
    return {
        "ddp": toy.train([Ddp(), Bf16(), FAST], kinds),
        "fsdp": toy.train([Fsdp(), Bf16(), FAST], kinds),
        "fsdp, reduced in bf16, AC by operation": toy.train(
            [Fsdp(reduce_dtype="bf16"), Selective(operations=["matmul"]), Bf16(), FAST], kinds
        ),
    }


def test_weights_travel_in_the_dtype_asked_for_and_the_root_in_fp32() -> None:
    (result, _) = run_ranks(dtypes_of_gathered_weights, 2)
    assert result == {
        "as computed": (torch.bfloat16, torch.float32),
        "fp32": (torch.float32, torch.float32),
        "fp32 compute": (torch.float32, torch.float32),
    }


def _note_dtype(seen: dict[str, torch.dtype], key: str, module: Any, _: Any) -> None:
    seen[key] = module.weight.dtype


def dtypes_of_gathered_weights() -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Dtypes of a layer's and of the root's weights, as their forward passes see them."""
    found = {}
    for name, plugins in {
        "as computed": [Fsdp(), Bf16()],
        "fp32": [Fsdp(gather_dtype="fp32"), Bf16()],
        "fp32 compute": [Fsdp(), Fp32()],
    }.items():
        module, run = toy.assemble([*plugins, OPTIMIZER])
        seen: dict[str, torch.dtype] = {}
        layer = module.text.layer[0]  # type: ignore[union-attr, index]
        for key, watched in (("layer", layer.up), ("root", module.projection)):
            watched.register_forward_pre_hook(partial(_note_dtype, seen, key))
        toy.backward(module, run, "pairs", 1)
        found[name] = (seen["layer"], seen["root"])
    return found


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("plugins", "setup", "key", "message"),
    [
        ([Single(), Fp32()], {"world_size": 4}, "plugins.parallelism", "ddp .* or fsdp"),
        ([Fsdp(mesh=[2, 2]), Fp32()], {"world_size": 8}, "plugins.parallelism.mesh", "4 ranks.*has 8"),
        (
            [Fsdp(reshard_after_forward=3), Fp32()],
            {"world_size": 8},
            "plugins.parallelism.reshard_after_forward",
            "groups of 3 ranks do not divide 8 shards",
        ),
        (
            [Fsdp(reshard_after_forward=4, mesh=[4, 2]), Fp32()],
            {"world_size": 8},
            "plugins.parallelism.reshard_after_forward",
            "groups of 4 ranks do not divide 2 shards",
        ),
        (
            [Fsdp(reshard_after_forward=1), Fp32()],
            {"world_size": 8},
            "plugins.parallelism.reshard_after_forward",
            "true, false",
        ),
        ([Fsdp(cpu_offload=True), Fp32()], {}, "plugins.parallelism.cpu_offload", "on a CPU"),
        (
            [Fsdp(gather_dtype="bf16"), Fp32()],
            {},
            "plugins.parallelism.gather_dtype",
            "need the precision bf16",
        ),
        (
            [Fsdp(gather_dtype="bf16"), Fp16()],
            {"device_type": "cuda"},
            "plugins.parallelism.gather_dtype",
            "need the precision bf16",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_any_process(
    plugins: list[Plugin], setup: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        plugins[0].check(toy.make_setup(plugins, **setup))
    assert error.value.key == key


@pytest.mark.parametrize(
    ("plugins", "setup"),
    [
        ([Single(), Fp32()], {}),
        ([Ddp(), Fp32()], {"world_size": 4}),
        ([Fsdp(), Fp32()], {}),
        ([Fsdp(mesh=[2, 4], reshard_after_forward=2), Fp32()], {"world_size": 8}),
        ([Fsdp(cpu_offload=True), Fp32()], {"device_type": "cuda"}),
        ([Fsdp(gather_dtype="bf16"), Bf16()], {"world_size": 2}),
        ([Fsdp(gather_dtype="fp32"), Bf16()], {"world_size": 2}),
    ],
)
def test_what_can_work_is_not_refused(plugins: list[Plugin], setup: dict[str, Any]) -> None:
    plugins[0].check(toy.make_setup(plugins, **setup))


@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        (Fsdp, {"mesh": [4]}),
        (Fsdp, {"mesh": [2, 0]}),
        (Fsdp, {"mesh": "2x2"}),
        (Fsdp, {"reshard_after_forward": "yes"}),
        (Fsdp, {"reshard_after_forward": 2.0}),
        (Fsdp, {"gather_dtype": "bfloat16"}),
        (Fsdp, {"reduce_dtype": "fp16"}),
        (Fsdp, {"cpu_offload": 1}),
        (Ddp, {"bucket_cap_mb": 0}),
        (Ddp, {"bucket_cap_mb": "25"}),
        (Ddp, {"static_graph": True}),
        (Single, {"mesh": [1, 1]}),
    ],
)
def test_wrong_options_are_refused(plugin: type[Plugin], options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        plugin(**options)


def test_shards_are_counted_from_the_mesh() -> None:
    assert [p.num_shards(8) for p in (Single(), Ddp(), Fsdp(), Fsdp(mesh=[4, 2]))] == [1, 1, 8, 2]


def test_a_failing_rank_is_named_and_the_others_do_not_wait() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 failed first:\n(.*\n)*.*ValueError: on purpose"):
        run_ranks(fail_on_rank_1, 2, timeout_seconds=30)


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()
