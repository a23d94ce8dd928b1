"""Stacks the samples of one rank's part of a step into a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flava_tnt.data.batch import Batch
from flava_tnt.data.samples import Prepared
from flava_tnt.plugin import Modality

_FIELDS = {
    "image_3HW": "image_B3HW",
    "codebook_image_3hw": "codebook_image_B3hw",
    "image_mask_P": "image_mask_BP",
    "image_mask_positions_I": "image_mask_positions_BI",
    "text_T": "text_BT",
    "text_masked_T": "text_masked_BT",
    "text_mask_positions_M": "text_mask_positions_BM",
    "text_mask_labels_M": "text_mask_labels_BM",
}
"""Field of a sample, field of the batch."""


def collate(modality: Modality, samples: Sequence[Prepared]) -> Batch:
    """A batch of at least one sample, in the order given; all samples have the same fields."""
    tensors: dict[str, Tensor] = {
        batch_name: torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name, batch_name in _FIELDS.items()
        if getattr(samples[0], name) is not None
    }
    if modality == "pairs":
        tensors["matched_B"] = torch.tensor([sample.matched for sample in samples], dtype=torch.bool)
    bad_samples = tuple(bad for sample in samples for bad in sample.bad_samples)
    return Batch(
        modality=modality,
        sample_ids=tuple(sample.id for sample in samples),
        num_samples_read=len(samples) + len(bad_samples),
        bad_samples=bad_samples,
        **tensors,
    )
