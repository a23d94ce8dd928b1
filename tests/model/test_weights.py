"""Initial weights are a function of the seed and the name, on any number of ranks."""

from __future__ import annotations

import math
import resource
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flava_tnt.model import weights
from flava_tnt.model.flava import FlavaForPretraining, build_model
from flava_tnt.model.losses import loss_counts
from flava_tnt.model.weights import canonical_name, initial_distribution, materialise
from flava_tnt.recipes.schema import ModelSection
from tests.distributed import run_ranks
from tests.model.helpers import GLOBAL, SMALL, library_model, make_batch, make_model, means

# Dimensions that 2 and 3 ranks do not divide, and blocks smaller than a parameter.
ODD = replace(SMALL, hidden_size=60, mlp_size=130, vocab_size=301, projection_size=50)
BLOCK = 1000
BATCH = 12


@pytest.fixture
def _small_blocks(monkeypatch):
    monkeypatch.setattr(weights, "BLOCK_NUMEL", BLOCK)


# -------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_orig_mod.module.a._checkpoint_wrapped_module.b", "a.b"),
        ("a._checkpoint_wrapped_module._orig_mod.weight", "a.weight"),
        ("my_module.weight", "my_module.weight"),
        ("loss.mlm_loss.cls.bias", "loss.mlm_loss.cls.bias"),
    ],
)
def test_canonical_names_have_no_wrapper_prefixes(name, expected):
    assert canonical_name(name) == expected


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = make_model(seed=3), make_model(seed=3), make_model(seed=4)
    for name, value in first.state_dict().items():
        assert value.equal(again.state_dict()[name]), name
    drawn = [n for n, v in first.state_dict().items() if v.min() < v.max()]
    assert len(drawn) > 80
    for name in drawn:
        assert not first.state_dict()[name].equal(other.state_dict()[name]), name


def test_a_wrapped_layer_gets_the_weights_of_its_own_name():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    with torch.device("meta"):
        model = build_model(SMALL, GLOBAL)
    for name, layer in model.layers().items():
        model.replace_layer(name, checkpoint_wrapper(layer))
    materialise(model, device="cpu", seed=0, token_init_std=0.02)
    wrapped = {canonical_name(name): value for name, value in model.state_dict().items()}
    for name, value in make_model().state_dict().items():
        assert value.equal(wrapped[name]), name


def test_distributions_are_those_of_the_library_that_built_the_module():
    """Against torchmultimodal's own initial weights: same spread, same range, same constants."""
    ours = make_model(token_init_std=0.0)
    torch.manual_seed(0)
    theirs = library_model(ours, load=False)
    for name, mine in ours.state_dict().items():
        other = theirs.state_dict()[name]
        spread = max(4 / math.sqrt(2 * mine.numel()), 1e-6) if mine.numel() > 1 else 1e-6
        if other.numel() > 1 and other.std() > 0:
            assert (mine.std() / other.std()).item() == pytest.approx(1, rel=2 * spread), name
            assert abs(mine.mean()) < 6 * mine.std() / math.sqrt(mine.numel()), name
        else:
            assert mine.allclose(other), name


def test_padding_has_a_zero_embedding_and_tokens_follow_their_option():
    model = make_model(token_init_std=0.05)
    embeddings = model.model.text_encoder.embeddings.word_embeddings.weight
    assert embeddings[0].eq(0).all()
    assert embeddings[1:].ne(0).all()
    image = model.model.image_encoder.embeddings
    for token in (
        image.cls_token,
        image.mask_token,
        image.position_embeddings,
        model.model.mm_encoder.cls_token,
    ):
        assert token.std().item() == pytest.approx(0.05, rel=0.3)
    assert make_model(token_init_std=0.0).model.mm_encoder.cls_token.eq(0).all()


def first_gradient_norm(token_init_std: float) -> float:
    model = make_model(token_init_std=token_init_std)
    torch.stack(list(means(model, make_batch("image")).values())).sum().backward()
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()


def test_tokens_of_zeros_make_a_huge_first_gradient_and_the_default_does_not():
    """The norms' eps of 1e-12 multiplies by up to 1e6 where a token is exactly zero."""
    assert first_gradient_norm(0.0) > 1e5
    assert first_gradient_norm(ModelSection().token_init_std) < 200


@pytest.mark.usefixtures("_small_blocks")
def test_a_range_of_a_parameter_is_the_same_alone_as_in_the_whole():
    layer = nn.Linear(70, 90)
    distribution = initial_distribution("loss.x.weight", layer, 0.0)
    whole = torch.empty(6300)
    weights._fill_range(whole, 0, 6300, "x", distribution, 0)
    for start, end in ((0, 10), (995, 1005), (1000, 3000), (2500, 6300)):
        part = torch.empty(end - start)
        weights._fill_range(part, start, 6300, "x", distribution, 0)
        assert part.equal(whole[start:end])


# -------------------------------------------------------------------------------------- under FSDP2


def sharded(dims) -> FlavaForPretraining:
    with torch.device("meta"):
        model = build_model(dims, GLOBAL)
    ignored = model.frozen_parameters()
    for unit in (*model.layers().values(), *model.heads().values(), *model.towers().values(), model):
        fully_shard(unit, ignored_params=ignored)
    materialise(model, device="cpu", seed=0, token_init_std=0.02)
    return model


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def train_step(model: nn.Module, batch, rank: int, world_size: int) -> dict[str, Tensor]:
    """Forward and backward over this rank's part; gradients of the mean over the global batch."""
    part = batch.split(BATCH // world_size)[rank]
    counts, sums = loss_counts(batch, GLOBAL), model(part)
    loss = world_size * torch.stack([sums[name] / max(counts[name], 1) for name in sums]).sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_tied(model: FlavaForPretraining) -> None:
    for head in (model.loss.mlm_loss, model.loss.mmm_loss["mim"]):
        assert head.cls.bias is head.cls.decoder.bias


def check_under_fsdp() -> None:
    """Same bits as alone; then a step of each kind gives the same gradients, and ties hold."""
    weights.BLOCK_NUMEL = BLOCK
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, alone = sharded(ODD), make_model(ODD, sdpa=False)
    expected = alone.state_dict()
    for name, value in model.state_dict().items():
        assert full(value).equal(expected[name]), name
    assert_tied(model)
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len([name for name, _ in alone.named_parameters()])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for modality in ("pairs", "image", "text"):
        batch = make_batch(modality, dims=ODD, size=BATCH, mismatched=(0, 1, 2, 3, 7))
        mine = {n: full(g) for n, g in train_step(model, batch, rank, world_size).items()}
        reference = train_step(alone, batch, 0, 1)
        assert_close(mine, reference)
        optimizer.step()
        model.clamp_temperature()
        torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.1).step()
        optimizer.zero_grad()
        alone.zero_grad()
    assert_tied(model)
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert all(id(p) in optimized for p in model.parameters() if p.requires_grad)
    bias = model.state_dict()["loss.mlm_loss.cls.decoder.bias"]
    assert full(bias).equal(full(model.loss.mlm_loss.cls.bias))
    assert full(bias).ne(0).any()


def assert_close(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    total = torch.stack([g.norm() for g in reference.values()]).norm()
    for name, expected in reference.items():
        assert (mine[name] - expected).norm() <= 1e-4 * expected.norm() + 1e-6 * total, name
    assert all(mine[name].norm() <= 1e-6 * total for name in mine.keys() - reference.keys())


def check_memory() -> tuple[float, float]:
    """Growth of this rank's peak memory while it initialises a wide sharded model, and the model's size."""
    dims = replace(SMALL, hidden_size=512, mlp_size=2048, vocab_size=20_000)
    rng_warm = make_model(SMALL)  # what the libraries allocate once
    del rng_warm
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    model = sharded(dims)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before
    return growth, sum(p.numel() for p in model.parameters()) * 4 / 2**20


def check_other_shards() -> None:
    """A parameter sharded along its second dimension, and one that is replicated on one mesh axis."""
    weights.BLOCK_NUMEL = BLOCK
    layer = nn.Linear(70, 90)
    distribution = initial_distribution("loss.x.weight", layer, 0.0)
    whole = torch.empty(90, 70)
    weights._fill(whole, "x", distribution, 0)
    part = distribute_tensor(torch.zeros(90, 70), init_device_mesh("cpu", (2,)), [Shard(1)])
    weights._fill(part, "x", distribution, 0)
    assert part.full_tensor().equal(whole)


def test_one_rank_under_fsdp_has_the_same_bits_and_gradients():
    run_ranks(check_under_fsdp, 1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_under_fsdp_have_the_same_bits_and_gradients(world_size):
    run_ranks(check_under_fsdp, world_size, timeout_seconds=90)


def test_other_ways_to_shard_give_the_same_bits():
    run_ranks(check_other_shards, 2)


def test_no_rank_holds_a_whole_model():
    for growth_mib, model_mib in run_ranks(check_memory, 3, timeout_seconds=90):
        assert model_mib > 200
        assert growth_mib < 0.5 * model_mib, f"{growth_mib:.0f} of {model_mib:.0f} MiB"
