"""Sizes, names, and what a step does and does not do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchmultimodal.models.flava.transformer import TransformerEncoderLayer

from flava_tnt.model.codebook import Codebook
from flava_tnt.model.flava import build_model
from flava_tnt.model.losses import active_losses, mark_counted
from flava_tnt.model.sizes import SIZES, count_parameters
from flava_tnt.recipes.schema import LossSection, LossWeights
from tests.model.helpers import (
    GLOBAL,
    SMALL,
    TEXT_LENGTH,
    jolt,
    library_model,
    make_batch,
    make_model,
    means,
    normalised,
    weights,
)

# From the article's table of sizes; trainable is without the codebook's 53,786,240.
TOTALS = {
    "350m": 357_645_303,
    "900m": 933_785_335,
    "1.8b": 1_786_520_567,
    "2.7b": 2_754_991_223,
    "4.8b": 4_869_660_535,
    "10b": 10_192_950_007,
}
CODEBOOK = 53_786_240


@pytest.mark.parametrize("size", SIZES)
def test_every_size_has_the_counted_parameters_and_takes_no_memory_on_meta(size):
    with torch.device("meta"):
        model = build_model(SIZES[size], GLOBAL)
    frozen = model.frozen_parameters()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (trainable, sum(p.numel() for p in frozen)) == count_parameters(SIZES[size])
    assert all(p.is_meta for p in model.parameters())
    if size in TOTALS:
        assert (trainable + CODEBOOK, sum(p.numel() for p in frozen)) == (TOTALS[size], CODEBOOK)


def test_names_are_those_of_torchmultimodal():
    with torch.device("meta"):
        assert len(build_model(SIZES["350m"], GLOBAL).state_dict()) == 618
    model = make_model()
    theirs = library_model(model).state_dict()  # it loads ours, strictly
    assert {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in model.state_dict().items()}


def test_layers_towers_and_heads_are_named_as_in_the_model_and_can_be_replaced():
    model = make_model()
    modules = dict(model.named_modules())
    for group in (model.layers(), model.towers(), model.heads()):
        assert all(modules[name] is module for name, module in group.items())
    assert len(model.layers()) == 6
    assert all(isinstance(layer, TransformerEncoderLayer) for layer in model.layers().values())
    assert len(model.towers()) == 3
    assert len(model.heads()) == 5
    name = "model.mm_encoder.encoder.layer.1"
    wrapped = torch.nn.Sequential(model.layers()[name])
    model.replace_layer(name, wrapped)
    assert model.layers()[name] is wrapped
    assert len(model.layers()) == 6


def test_temperature_is_clamped_to_its_range():
    model = make_model()
    scale = model.loss.contrastive_loss.logit_scale
    assert scale.shape == (1,)
    for value, kept in ((7.0, 4.6052), (-1.0, 0.0), (2.0, 2.0)):
        with torch.no_grad():
            scale.fill_(value)
        model.clamp_temperature()
        assert scale.item() == pytest.approx(kept)


def test_first_losses_are_those_of_guessing():
    """MLM about ln(vocabulary), MIM about ln 8192, ITM about ln 2, contrastive about ln(batch)."""
    model = make_model()
    losses = means(model, make_batch("pairs", size=12))
    losses |= means(model, make_batch("image")) | means(model, make_batch("text"))
    expected = {"mlm": math.log(300), "mmm_text": math.log(300), "mim": math.log(8192)}
    expected |= {"mmm_image": math.log(8192), "itm": math.log(2), "contrastive": math.log(12)}
    assert losses.keys() == expected.keys()
    for name, value in expected.items():
        assert losses[name].item() == pytest.approx(value, abs=0.6), name


@pytest.mark.parametrize("modality", ["pairs", "image", "text"])
def test_a_broken_weight_gives_nan_and_never_a_silent_zero(modality):
    model = make_model()
    with torch.no_grad():
        for tower in (model.model.image_encoder, model.model.text_encoder):
            tower.encoder.layer[0].feedforward_layernorm.weight[0] = float("nan")
    for name, value in model(make_batch(modality)).items():
        assert value.isnan(), name


@pytest.mark.parametrize("modality", ["image", "text"])
def test_labels_all_ignored_give_a_zero_with_zero_gradients(modality):
    model = make_model()
    batch = make_batch(modality)
    field = "image_mask_positions_BI" if modality == "image" else "text_mask_labels_BM"
    batch = replace(batch, **{field: torch.full_like(getattr(batch, field), -1)})
    (value,) = model(batch).values()
    value.backward()
    assert value.item() == 0
    touched = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(touched) > 10
    assert all(grad.eq(0).all() for grad in touched)


# ------------------------------------------------------------------------ losses that are left out


def rows_through_towers(model, batch) -> dict[str, int]:
    """How many sequences pass through the first layer of each tower."""
    seen = {}
    for name, tower in model.towers().items():
        tower.encoder.layer[0].register_forward_pre_hook(
            lambda _module, args, name=name: seen.update({name.split(".")[-1]: len(args[0])})
        )
    model(batch)
    return seen


@pytest.mark.parametrize(
    ("modality", "changed", "expected"),
    [
        ("image", {}, {"image_encoder": 6}),
        ("text", {}, {"text_encoder": 6}),
        ("pairs", {}, {"image_encoder": 12, "text_encoder": 12, "mm_encoder": 6}),
        ("pairs", {"contrastive": 0.0}, {"image_encoder": 6, "text_encoder": 6, "mm_encoder": 6}),
        (
            "pairs",
            {"itm": 0.0, "mmm_text": 0.0, "mmm_image": 0.0},
            {"image_encoder": 6, "text_encoder": 6},
        ),
        ("image", {"mim": 0.0}, {}),
    ],
)
def test_towers_run_once_and_only_over_views_that_a_loss_reads(modality, changed, expected):
    assert rows_through_towers(make_model(loss=weights(**changed)), make_batch(modality)) == expected


@pytest.mark.parametrize("left_out", ["itm", "mmm_text", "mmm_image", "contrastive"])
def test_a_loss_of_weight_zero_is_left_out_and_the_others_do_not_change(left_out):
    full, less = make_model(), make_model(loss=weights(**{left_out: 0.0}))
    batch = make_batch("pairs", mismatched=(1,))
    expected = full(batch)
    del expected[left_out]
    sums = less(batch)
    assert sums.keys() == expected.keys()
    assert tuple(sums) == active_losses("pairs", LossWeights(**{left_out: 0.0}))
    for name in sums:
        assert sums[name].item() == pytest.approx(expected[name].item(), rel=1e-6)


def test_codebook_runs_only_for_losses_that_need_its_codes(monkeypatch):
    calls = []
    original = Codebook.forward
    monkeypatch.setattr(Codebook, "forward", lambda *args: calls.append(1) or original(*args))
    make_model(loss=weights(mmm_image=0.0))(make_batch("pairs"))
    make_model()(make_batch("text"))
    assert not calls
    make_model()(make_batch("pairs"))
    make_model()(make_batch("image"))
    assert len(calls) == 2


def test_codes_do_not_depend_on_the_precision_of_the_step():
    model, image = make_model(), make_batch("image").codebook_image_B3hw
    pixels = image / 255 * 0.8 + 0.1
    exact = model.image_codebook.encoder(pixels).argmax(1).flatten(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        codes = model.image_codebook(image)
        rounded = model.image_codebook.encoder(pixels).argmax(1).flatten(1)
    assert codes.equal(exact)
    assert not rounded.equal(exact)
    assert codes.unique().numel() > 3
    assert not codes.requires_grad


@pytest.mark.parametrize("modality", ["pairs", "image", "text"])
def test_sums_under_bf16_autocast_are_fp32_and_near_those_in_fp32(modality):
    model, batch = make_model(), make_batch(modality, mismatched=(1,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = model(batch)
    for name, value in model(batch).items():
        assert sums[name].dtype == torch.float32
        assert sums[name].item() == pytest.approx(value.item(), rel=0.02), name


# --------------------------------------------------------------------------- memory and traceability


def saved_shapes(model, batch) -> list[tuple[int, ...]]:
    shapes = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            shapes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch.stack(list(model(batch).values())).sum().backward()
    return shapes


@pytest.mark.parametrize("sdpa", [True, False], ids=["sdpa", "eager"])
def test_only_eager_keeps_attention_probabilities(sdpa):
    shapes = saved_shapes(make_model(sdpa=sdpa), make_batch("pairs"))
    lengths = (37, TEXT_LENGTH, 1 + 37 + TEXT_LENGTH)
    squares = [s for s in shapes if len(s) >= 3 and s[-1] == s[-2] and s[-1] in lengths]
    assert len(squares) == 0 if sdpa else len(squares) >= 6


@pytest.mark.parametrize("modality", ["pairs", "image", "text"])
def test_a_step_runs_on_fake_tensors(modality):
    model, batch = make_model(), make_batch(modality, mismatched=(1,))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = replace(batch, **{n: mode.from_tensor(x) for n, x in batch.tensors().items()})
        sums = model(fake)
        torch.stack(list(sums.values())).sum().backward()
    assert all(value.shape == () for value in sums.values())


@pytest.mark.parametrize("modality", ["pairs", "image", "text"])
def test_a_step_is_one_graph_for_the_compiler(modality):
    model, batch = make_model(), make_batch(modality, mismatched=(1,))
    jolt(model)
    torch.compiler.reset()
    sums = torch.compile(model, fullgraph=True, backend="aot_eager")(batch)
    for name, value in model(batch).items():
        assert sums[name].item() == pytest.approx(value.item(), rel=1e-5)
    torch.stack(list(sums.values())).sum().backward()


def test_normalised_floats_are_taken_as_they_are():
    model, batch = make_model(), make_batch("image")
    floats = replace(
        batch,
        image_B3HW=normalised(batch.image_B3HW),
        codebook_image_B3hw=batch.codebook_image_B3hw / 255 * 0.8 + 0.1,
    )
    assert model(floats)["mim"].item() == pytest.approx(model(batch)["mim"].item(), rel=1e-6)


def test_dropout_acts_in_training_only():
    model = make_model(replace(SMALL, dropout=0.3))
    batch = make_batch("text")
    assert model(batch)["mlm"].item() != model(batch)["mlm"].item()
    model.eval()
    assert model(batch)["mlm"].item() == model(batch)["mlm"].item()


def test_which_pairs_count_is_decided_for_a_ranks_whole_part_before_micro_batches():
    """A micro-batch without matched pairs does not fall back to all of its own."""
    without_contrastive = LossSection(reduction="per_rank", weights=LossWeights(contrastive=0.0))
    model = make_model(loss=without_contrastive)
    batch = mark_counted(make_batch("pairs", size=4, mismatched=(1,)), without_contrastive)
    whole = model(batch)
    parts = [model(micro) for micro in batch.split(1)]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value)
