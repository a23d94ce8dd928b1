"""Small models and batches for the tests of the model room, and torchmultimodal's own FLAVA beside them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torchmultimodal.models.flava.model import (
    DalleEncoder,
    DalleVAEEncoder,
    FLAVAForPreTraining,
    flava_model,
)
from torchmultimodal.modules.losses.flava import FLAVAPretrainingLoss

from flava_tnt.data.batch import Batch
from flava_tnt.model.attention import SdpaAttention, replace_attention
from flava_tnt.model.flava import IMAGE_MEAN, IMAGE_STD, FlavaForPretraining, build_model
from flava_tnt.model.losses import loss_counts
from flava_tnt.model.sizes import SIZES, ModelDims
from flava_tnt.model.weights import materialise
from flava_tnt.recipes.schema import LossSection, LossWeights

SMALL = replace(SIZES["tiny"], vocab_size=300, max_text_positions=32)
WIDER = replace(SMALL, hidden_size=96, mlp_size=160, num_heads=3, num_multimodal_layers=3, projection_size=48)
IMAGE_CAPACITY = 40
TEXT_LENGTH = 20
TEXT_CAPACITY = 6
GLOBAL = LossSection()
PER_RANK = LossSection(reduction="per_rank")


def make_model(
    dims: ModelDims = SMALL,
    loss: LossSection = GLOBAL,
    *,
    sdpa: bool = True,
    seed: int = 0,
    token_init_std: float = 0.02,
) -> FlavaForPretraining:
    with torch.device("meta"):
        model = build_model(dims, loss)
    if sdpa:
        replace_attention(model, SdpaAttention)
    materialise(model, device="cpu", seed=seed, token_init_std=token_init_std)
    return model


def jolt(model: nn.Module, std: float = 0.02) -> None:
    """Move every weight, so that zeros, ones and ties of the initial state hide nothing."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng) * std)


def make_batch(
    modality: str,
    *,
    dims: ModelDims = SMALL,
    size: int = 6,
    padded: bool = True,
    mismatched: tuple[int, ...] = (),
    seed: int = 0,
) -> Batch:
    """Random pictures, tokens and masks; every sample has other counts."""
    rng = torch.Generator().manual_seed(seed)

    def randint(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=rng)

    parts: dict[str, Tensor] = {}
    if modality != "text":
        parts |= _image_parts(dims, size, randint, rng)
    if modality != "image":
        parts |= _text_parts(dims, size, padded, randint, rng)
    if modality == "pairs":
        parts["matched_B"] = torch.tensor([index not in mismatched for index in range(size)])
    ids = tuple(f"sample-{index}" for index in range(size))
    return Batch(modality=modality, sample_ids=ids, **parts)


def _image_parts(dims, size, randint, rng) -> dict[str, Tensor]:
    positions = torch.full((size, IMAGE_CAPACITY), -1)
    mask = torch.zeros(size, dims.num_patches, dtype=torch.bool)
    for row in range(size):
        chosen = torch.randperm(dims.num_patches, generator=rng)[: 20 + 3 * (row % 7)].sort().values
        positions[row, : len(chosen)] = chosen
        mask[row, chosen] = True
    image_shape = (size, 3, dims.image_size, dims.image_size)
    codebook_shape = (size, 3, dims.codebook_image_size, dims.codebook_image_size)
    return {
        "image_B3HW": randint(0, 256, image_shape).to(torch.uint8),
        "codebook_image_B3hw": randint(0, 256, codebook_shape).to(torch.uint8),
        "image_mask_BP": mask,
        "image_mask_positions_BI": positions,
    }


def _text_parts(dims, size, padded, randint, rng) -> dict[str, Tensor]:
    text = randint(5, dims.vocab_size, (size, TEXT_LENGTH))
    positions = torch.full((size, TEXT_CAPACITY), -1)
    labels = torch.full((size, TEXT_CAPACITY), -1)
    masked = text.clone()
    for row in range(size):
        length = TEXT_LENGTH - (3 * row) % 12 if padded else TEXT_LENGTH
        text[row, length:] = 0
        masked[row, length:] = 0
        chosen = (torch.randperm(length - 2, generator=rng)[: 1 + row % TEXT_CAPACITY] + 1).sort().values
        positions[row, : len(chosen)] = chosen
        labels[row, : len(chosen)] = text[row, chosen]
        masked[row, chosen] = 4
    return {
        "text_BT": text,
        "text_masked_BT": masked,
        "text_mask_positions_BM": positions,
        "text_mask_labels_BM": labels,
    }


def means(model: FlavaForPretraining, batch: Batch) -> dict[str, Tensor]:
    """Each loss as its mean; 0 where nothing counts."""
    counts = loss_counts(batch, model.loss_section)
    return {name: value / max(counts[name], 1) for name, value in model(batch).items()}


def weights(**changed: float) -> LossSection:
    return LossSection(weights=LossWeights(**changed))


# --------------------------------------------------------------------------------- torchmultimodal


def library_model(ours: FlavaForPretraining, *, load: bool = True) -> FLAVAForPreTraining:
    """torchmultimodal's FLAVA, put together from its parts, with the weights of ``ours`` or its own."""
    dims = ours.dims
    sizes = {}
    for prefix, layers in (
        ("image", dims.num_image_layers),
        ("text", dims.num_text_layers),
        ("multimodal", dims.num_multimodal_layers),
    ):
        sizes |= {
            f"{prefix}_hidden_size": dims.hidden_size,
            f"{prefix}_num_attention_heads": dims.num_heads,
            f"{prefix}_num_hidden_layers": layers,
            f"{prefix}_intermediate_size": dims.mlp_size,
        }
    model = flava_model(
        **sizes,
        image_size=dims.image_size,
        patch_size=dims.patch_size,
        vocab_size=dims.vocab_size,
        max_position_embeddings=dims.max_text_positions,
        text_and_image_proj_size=dims.projection_size,
    )
    with torch.device("meta"):
        codebook = DalleVAEEncoder(pretrained=False)
    codebook.encoder = DalleEncoder(n_hid=dims.codebook_hidden_size)
    losses = FLAVAPretrainingLoss(
        logit_scale=nn.Parameter(torch.full((1,), math.log(1 / 0.07))),
        hidden_size=dims.hidden_size,
        text_vocab_size=dims.vocab_size,
    )
    library = FLAVAForPreTraining(model, codebook, losses)
    if load:
        library.load_state_dict(ours.state_dict(), strict=True)
    return library


LIBRARY_NAMES = {
    "mim": "mim_loss",
    "mlm": "mlm_loss",
    "itm": "itm_loss",
    "mmm_text": "mmm_text_loss",
    "mmm_image": "mmm_image_loss",
    "contrastive": "global_contrastive_loss",
}


def normalised(image_B3HW: Tensor) -> Tensor:
    mean, std = torch.tensor(IMAGE_MEAN)[:, None, None], torch.tensor(IMAGE_STD)[:, None, None]
    return (image_B3HW / 255 - mean) / std


def full_text_labels(batch: Batch) -> Tensor:
    """Labels [B, T] from positions and labels [B, M]."""
    labels = torch.full_like(batch.text_BT, -1)
    for row, (positions, values) in enumerate(
        zip(batch.text_mask_positions_BM, batch.text_mask_labels_BM, strict=True)
    ):
        labels[row, positions[positions >= 0]] = values[positions >= 0]
    return labels


def library_losses(library: FLAVAForPreTraining, batch: Batch) -> dict[str, Tensor]:
    """What torchmultimodal computes from the same batch."""
    inputs = {}
    if batch.image_B3HW is not None:
        inputs |= {
            "image": normalised(batch.image_B3HW),
            "image_for_codebook": batch.codebook_image_B3hw / 255 * 0.8 + 0.1,
            "image_patches_mask": batch.image_mask_BP,
        }
    if batch.text_BT is not None:
        inputs |= {
            "text": batch.text_BT,
            "text_masked": batch.text_masked_BT,
            "mlm_labels": full_text_labels(batch),
        }
    if batch.matched_B is not None:
        inputs["itm_labels"] = batch.matched_B.long()
    losses = library(**inputs).losses
    return {name: losses[theirs] for name, theirs in LIBRARY_NAMES.items() if losses[theirs] is not None}
