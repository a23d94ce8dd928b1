"""One rank's part of a global batch, as tensors of fixed shapes.

Shape letters: B samples, P patches (grid * grid), I masked-patch capacity, T text tokens, M masked-token
capacity. Padding of positions and labels is -1. The shapes depend on the recipe alone, so a step can be
traced and compiled, and no count has to be fetched from the device: ``counts`` are known on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flava_tnt.plugin import Modality


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of one modality; what the modality does not have is None."""

    modality: Modality
    sample_ids: tuple[str, ...]
    image_B3HW: Tensor | None = None
    """uint8; normalised on the device."""
    codebook_image_B3hw: Tensor | None = None
    """uint8; the same crop at the codebook's size."""
    image_mask_BP: Tensor | None = None
    """bool; patches that the masked view hides, at most I of a sample."""
    image_mask_positions_BI: Tensor | None = None
    """int64; the hidden patches in ascending order, then -1."""
    text_BT: Tensor | None = None
    """int64; [CLS] tokens [SEP] [PAD]... without masks. PAD is id 0."""
    text_masked_BT: Tensor | None = None
    """int64; the same with masked tokens replaced."""
    text_mask_positions_BM: Tensor | None = None
    """int64; the chosen tokens in ascending order, then -1."""
    text_mask_labels_BM: Tensor | None = None
    """int64; their true ids, then -1."""
    matched_B: Tensor | None = None
    """bool; pairs only: False where the caption is another sample's (ITM label 0)."""
    counted_B: Tensor | None = None
    """bool; pairs only: the pairs whose rows MMM and the contrastive loss count (``losses.mark_counted``)."""
    num_samples_read: int = 0
    """Samples that were read to fill this batch, the unusable ones included."""
    bad_samples: tuple[tuple[str, str], ...] = ()
    """(id, reason) of each sample that could not be used."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that this batch has, by field name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        """A copy on ``device``."""
        moved: dict[str, Any] = {
            name: x.to(device, non_blocking=non_blocking) for name, x in self.tensors().items()
        }
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory; ``DataLoader`` calls it."""
        pinned: dict[str, Any] = {name: x.pin_memory() for name, x in self.tensors().items()}
        return replace(self, **pinned)

    def split(self, micro_batch: int) -> list[Batch]:
        """Micro-batches of ``micro_batch`` samples, in order; it divides the batch."""
        assert len(self) % micro_batch == 0
        return [self._rows(slice(start, start + micro_batch)) for start in range(0, len(self), micro_batch)]

    def _rows(self, rows: slice) -> Batch:
        values: dict[str, Any] = {name: x[rows] for name, x in self.tensors().items()}
        return replace(self, sample_ids=self.sample_ids[rows], **values)
