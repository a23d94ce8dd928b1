"""FLAVA's pretraining losses as sums over the counted rows, of static shape.

A loss module returns the *sum* over its rows; how many rows count is known on the host
(:func:`loss_counts`), so a mean over the global batch needs no count from the device. Rows that do not
count carry the label -1: no boolean indexing, so shapes depend on the recipe alone and a step can be traced.
Where nothing counts the sum is a zero that is connected to the graph; a weight that is not finite gives a
sum that is not finite.

Modules, names and parameters are torchmultimodal's (``FLAVAPretrainingLoss``).

Shape letters: B samples of this rank, G of all ranks, N rows, D hidden size, E contrastive size, I
masked-patch capacity, M masked-token capacity.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F
from torchmultimodal.modules.losses.flava import ITMLoss, MaskedPredictionLoss

from flava_tnt.data.batch import Batch
from flava_tnt.data.masks import IGNORED
from flava_tnt.model.sizes import CODEBOOK_VOCAB_SIZE, ModelDims
from flava_tnt.plugin import LOSSES_OF_MODALITY, Modality
from flava_tnt.recipes.schema import LossSection, LossWeights

INITIAL_LOG_SCALE = math.log(1 / 0.07)
"""Log of the initial inverse temperature (CLIP, section 2.5; FLAVA takes it over)."""
LOG_SCALE_RANGE = (0.0, 4.6052)
"""The log scale is kept in here: a scale from 1 to 100 (torchmultimodal's FLAVA)."""


def active_losses(modality: Modality, weights: LossWeights) -> tuple[str, ...]:
    """The losses of a kind of batch whose weight is above 0."""
    return tuple(name for name in LOSSES_OF_MODALITY[modality] if getattr(weights, name) > 0)


# ----------------------------------------------------------------------------------------- counting


def counted_pairs(matched_B: Tensor, loss: LossSection) -> Tensor:
    """Bool [B]: the pairs whose rows count for MMM and the contrastive loss.

    These are the matched ones. With ``reduction: per_rank``, a rank without any takes all of its pairs, as
    the original trainer does.
    """
    if loss.reduction == "per_rank":
        return matched_B | ~matched_B.any()
    return matched_B


def mark_counted(batch: Batch, loss: LossSection) -> Batch:
    """The same batch with ``counted_B``: which pairs count is decided for a rank's whole part of the global
    batch, before it is split into micro-batches."""
    if batch.matched_B is None or batch.counted_B is not None:
        return batch
    return replace(batch, counted_B=counted_pairs(batch.matched_B, loss))


def loss_counts(batch: Batch, loss: LossSection) -> dict[str, int]:
    """How many rows each loss of this batch counts on this rank; the batch lies in host memory."""
    counted = mark_counted(batch, loss).counted_B

    def labels_in(labels_BN: Tensor | None) -> int:
        assert labels_BN is not None
        is_label_BN = labels_BN != IGNORED
        if counted is not None:
            is_label_BN = is_label_BN & counted[:, None]
        return int(is_label_BN.sum())

    counts = {
        "mim": lambda: labels_in(batch.image_mask_positions_BI),
        "mlm": lambda: labels_in(batch.text_mask_labels_BM),
        "itm": lambda: len(batch),
        "mmm_image": lambda: labels_in(batch.image_mask_positions_BI),
        "mmm_text": lambda: labels_in(batch.text_mask_labels_BM),
        "contrastive": lambda: int(counted.sum()) if counted is not None else 0,
    }
    return {name: counts[name]() for name in active_losses(batch.modality, loss.weights)}


# ----------------------------------------------------------------------------------------- modules


def sum_cross_entropy(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Cross-entropy in fp32, summed over the rows whose label is not -1."""
    return F.cross_entropy(logits_NC.float(), labels_N, ignore_index=IGNORED, reduction="sum")


class MaskedPrediction(MaskedPredictionLoss):
    """MIM, MLM and both parts of MMM: which code or token stood where it was masked."""

    def forward(self, rows_BND: Tensor, labels_BN: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        return sum_cross_entropy(self.cls(rows_BND).flatten(0, 1), labels_BN.flatten())


class ImageTextMatching(ITMLoss):
    """ITM: is this caption this picture's?"""

    def forward(self, cls_BD: Tensor, matched_B: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        logits_B2 = self.cls(self.pooler(cls_BD.unsqueeze(1)))
        return sum_cross_entropy(logits_B2, matched_B.long())


class GlobalContrastive(nn.Module):
    """This rank's counted pairs against the pictures and captions of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        # Of shape [1]: FSDP refuses parameters without dimensions.
        self.logit_scale = nn.Parameter(torch.full((1,), INITIAL_LOG_SCALE))

    def forward(self, image_BE: Tensor, text_BE: Tensor, counted_B: Tensor) -> Tensor:
        """Sum over the counted pairs of the mean of both directions' cross-entropies.

        Args:
            image_BE: projected picture embeddings, not normalised yet.
            text_BE: projected caption embeddings, likewise.
            counted_B: bool; the others stay as columns.
        """
        with torch.autocast(image_BE.device.type, enabled=False):
            image_BE = F.normalize(image_BE.float(), dim=-1)
            text_BE = F.normalize(text_BE.float(), dim=-1)
            both_G2E, rank = _gather(torch.cat((image_BE, text_BE), dim=1))
            image_GE, text_GE = both_G2E.chunk(2, dim=1)
            rows_B = torch.arange(len(image_BE), device=image_BE.device) + rank * len(image_BE)
            labels_B = torch.where(counted_B, rows_B, IGNORED)
            scale = self.logit_scale.float().exp()
            image_sum = sum_cross_entropy(image_BE @ text_GE.T * scale, labels_B)
            text_sum = sum_cross_entropy(text_BE @ image_GE.T * scale, labels_B)
            return (image_sum + text_sum) / 2


def _gather(x_BE: Tensor) -> tuple[Tensor, int]:
    """All ranks' rows [G, E], with gradients back to each, and this rank's place among them."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return x_BE, 0
    return _all_gather_with_gradient(x_BE.contiguous(), 0, dist.group.WORLD), dist.get_rank()


_all_gather_with_gradient: Any = getattr(
    collectives,
    "all_gather_single_autograd",  # its name from torch 2.14 on
    None,
) or getattr(collectives, "all_gather_tensor_autograd")  # noqa: B009


class PretrainingLosses(nn.Module):
    """All losses; attribute names are those of torchmultimodal's ``FLAVAPretrainingLoss``."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()

        def masked(vocab_size: int) -> MaskedPrediction:
            return MaskedPrediction(hidden_size=dims.hidden_size, vocab_size=vocab_size, ignore_index=IGNORED)

        self.contrastive_loss = GlobalContrastive()
        self.mlm_loss = masked(dims.vocab_size)
        self.mim_loss = masked(CODEBOOK_VOCAB_SIZE)
        self.mmm_loss = nn.ModuleDict({"mlm": masked(dims.vocab_size), "mim": masked(CODEBOOK_VOCAB_SIZE)})
        self.itm_loss = ImageTextMatching(hidden_size=dims.hidden_size)
