"""The numbers are torchmultimodal's own: losses within 1e-5, gradients within 1e-4, relative, in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.model.helpers import (
    GLOBAL,
    PER_RANK,
    SMALL,
    WIDER,
    jolt,
    library_losses,
    library_model,
    loss_counts,
    make_batch,
    make_model,
    means,
)

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4

CASES = [
    pytest.param("image", False, (), id="image"),
    pytest.param("text", True, (), id="text-padded"),
    pytest.param("text", False, (), id="text-full"),
    pytest.param("pairs", True, (), id="pairs-padded-all-matched"),
    pytest.param("pairs", True, (1, 4), id="pairs-padded-some-mismatched"),
    pytest.param("pairs", False, (0,), id="pairs-full-some-mismatched"),
]


def gradients(model: nn.Module, losses: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.stack([loss.reshape(()) for loss in losses.values()]).sum().backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not name.startswith("image_codebook")
    }


def assert_same_losses(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].item() == pytest.approx(theirs[name].item(), rel=LOSS_TOLERANCE), name


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Relative to each parameter's norm; the floor is for gradients that are zero but for rounding
    (a key's bias shifts all scores of a query alike)."""
    assert ours.keys() == theirs.keys()
    total = torch.stack([g.norm() for g in theirs.values()]).norm()
    for name in ours:
        error = (ours[name] - theirs[name]).norm()
        assert error <= GRADIENT_TOLERANCE * theirs[name].norm() + 1e-7 * total, name


@pytest.mark.parametrize(("dims", "sdpa"), [(SMALL, False), (WIDER, True)], ids=["small-eager", "wider-sdpa"])
@pytest.mark.parametrize(("modality", "padded", "mismatched"), CASES)
def test_losses_and_gradients_are_those_of_torchmultimodal(modality, padded, mismatched, dims, sdpa):
    model = make_model(dims, sdpa=sdpa)
    jolt(model)
    library = library_model(model)
    batch = make_batch(modality, dims=dims, padded=padded, mismatched=mismatched)
    ours, theirs = means(model, batch), library_losses(library, batch)
    assert_same_losses(ours, theirs)
    assert_same_gradients(gradients(model, ours), gradients(library, theirs))


@pytest.mark.parametrize("mismatched", [(), (2, 3), range(6)], ids=["none", "some", "all"])
def test_per_rank_reduction_takes_over_the_original_fallback(mismatched):
    model = make_model(WIDER, PER_RANK)
    jolt(model)
    library = library_model(model)
    batch = make_batch("pairs", dims=WIDER, mismatched=tuple(mismatched))
    ours, theirs = means(model, batch), library_losses(library, batch)
    assert_same_losses(ours, theirs)
    assert_same_gradients(gradients(model, ours), gradients(library, theirs))


def test_global_reduction_counts_nothing_where_all_pairs_are_mismatched():
    model = make_model(SMALL)
    jolt(model)
    batch = make_batch("pairs", mismatched=tuple(range(6)))
    counts, sums = loss_counts(batch, GLOBAL), model(batch)
    assert counts == {"itm": 6, "mmm_text": 0, "mmm_image": 0, "contrastive": 0}
    assert sums["itm"].item() / 6 == pytest.approx(
        library_losses(library_model(model), batch)["itm"].item(), rel=LOSS_TOLERANCE
    )
    for name in ("mmm_text", "mmm_image", "contrastive"):
        assert sums[name].item() == 0
        assert sums[name].requires_grad
    torch.stack(list(sums.values())).sum().backward()
    for name, parameter in model.loss.mmm_loss.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.eq(0).all(), name


def test_counts_are_those_of_the_matched_pairs():
    batch = make_batch("pairs", mismatched=(0, 5))
    matched = batch.matched_B
    assert loss_counts(batch, GLOBAL) == {
        "itm": 6,
        "mmm_text": int((batch.text_mask_labels_BM[matched] >= 0).sum()),
        "mmm_image": int(batch.image_mask_BP[matched].sum()),
        "contrastive": 4,
    }
