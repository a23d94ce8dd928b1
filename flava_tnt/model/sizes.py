"""FLAVA's sizes and exact parameter counts, as arithmetic: no torch, so a plan or a refusal takes a moment.

The six sizes are those of the article ("Scaling Multimodal Foundation Models in TorchMultimodal with PyTorch
Distributed", its table of model sizes); 350m is FLAVA's own (arXiv 2112.04482). `tiny` is ours, for tests and
demonstrations on a CPU. Tests hold the counts against the modules themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flava_tnt.errors import RecipeError

if TYPE_CHECKING:
    from flava_tnt.recipes.schema import ModelSection, TextSection

CODEBOOK_STRIDE = 8
"""Pixels of the codebook's picture for each code: three 2x poolings of the DALL-E encoder."""
CODEBOOK_VOCAB_SIZE = 8192


@dataclass(frozen=True, kw_only=True)
class ModelDims:
    """All dimensions of a model."""

    hidden_size: int
    mlp_size: int
    num_heads: int
    num_image_layers: int
    num_text_layers: int
    num_multimodal_layers: int
    projection_size: int = 768
    """Contrastive space: 768 at every size in the article's code (the paper's table says 512)."""
    image_size: int = 224
    patch_size: int = 16
    vocab_size: int = 30_522
    max_text_positions: int = 512
    codebook_hidden_size: int = 256
    dropout: float = 0.0
    init_std: float = 0.02
    """Of the encoders' initial weights (FLAVA's)."""

    @property
    def grid_size(self) -> int:
        """Patches along one side of the picture."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.grid_size**2

    @property
    def codebook_image_size(self) -> int:
        """Pixels along one side of the codebook's picture: one code for each patch."""
        return self.grid_size * CODEBOOK_STRIDE


SIZES: dict[str, ModelDims] = {
    "tiny": ModelDims(
        hidden_size=64,
        mlp_size=256,
        num_heads=4,
        num_image_layers=2,
        num_text_layers=2,
        num_multimodal_layers=2,
        projection_size=64,
        image_size=48,
        patch_size=8,
        codebook_hidden_size=8,
        # FLAVA's 0.02 times sqrt(768 / 64): with 0.02 so narrow a layer passes next to nothing on, captions
        # look alike to the contrastive loss, and it stays at ln(global batch) for hundreds of steps.
        init_std=0.07,
    ),
    "350m": ModelDims(
        hidden_size=768,
        mlp_size=3072,
        num_heads=12,
        num_image_layers=12,
        num_text_layers=12,
        num_multimodal_layers=6,
    ),
    "900m": ModelDims(
        hidden_size=1024,
        mlp_size=4096,
        num_heads=16,
        num_image_layers=24,
        num_text_layers=24,
        num_multimodal_layers=12,
    ),
    "1.8b": ModelDims(
        hidden_size=1280,
        mlp_size=5120,
        num_heads=16,
        num_image_layers=32,
        num_text_layers=32,
        num_multimodal_layers=16,
    ),
    "2.7b": ModelDims(
        hidden_size=1408,
        mlp_size=6144,
        num_heads=16,
        num_image_layers=40,
        num_text_layers=40,
        num_multimodal_layers=20,
    ),
    "4.8b": ModelDims(
        hidden_size=1664,
        mlp_size=8192,
        num_heads=16,
        num_image_layers=48,
        num_text_layers=48,
        num_multimodal_layers=24,
    ),
    "10b": ModelDims(
        hidden_size=2048,
        mlp_size=10_240,
        num_heads=16,
        num_image_layers=64,
        num_text_layers=64,
        num_multimodal_layers=40,
    ),
}

SIZE_NAMES = tuple(SIZES)


def resolve_dims(model: ModelSection, text: TextSection) -> ModelDims:
    """The dimensions that a recipe asks for.

    Raises:
        RecipeError: heads do not divide the hidden size, patches do not divide the picture, or a text is
            longer than there are positions.
    """
    overrides: dict[str, Any] = {
        name: value
        for name, value in (
            ("hidden_size", model.hidden_size),
            ("mlp_size", model.mlp_size),
            ("num_heads", model.num_heads),
            ("num_image_layers", model.num_image_layers),
            ("num_text_layers", model.num_text_layers),
            ("num_multimodal_layers", model.num_multimodal_layers),
            ("projection_size", model.projection_size),
            ("image_size", model.image_size),
            ("patch_size", model.patch_size),
            ("codebook_hidden_size", model.codebook.hidden_size),
            ("init_std", model.init_std),
        )
        if value is not None
    }
    dims = replace(
        SIZES[model.size],
        vocab_size=text.vocab_size,
        max_text_positions=model.max_text_positions,
        dropout=model.dropout,
        **overrides,
    )
    if dims.hidden_size % dims.num_heads:
        raise RecipeError(
            f"{dims.num_heads} heads do not divide the hidden size {dims.hidden_size}",
            key="model.hidden_size" if model.num_heads is None else "model.num_heads",
        )
    if dims.image_size % dims.patch_size:
        raise RecipeError(
            f"patches of {dims.patch_size} pixels do not divide a picture of {dims.image_size}",
            key="model.image_size" if model.patch_size is None else "model.patch_size",
        )
    if dims.codebook_hidden_size % 4:
        raise RecipeError("must be a multiple of 4", key="model.codebook.hidden_size")
    for key, length in (("text.length", text.length), ("text.pair_length", text.pair_length)):
        if length > dims.max_text_positions:
            raise RecipeError(
                f"{length} tokens are more than the {dims.max_text_positions} positions of"
                " model.max_text_positions",
                key=key,
            )
    return dims


def count_parameters(dims: ModelDims) -> tuple[int, int]:
    """Parameters of the model as (trainable, frozen codebook)."""
    hidden, projection = dims.hidden_size, dims.projection_size
    linear = hidden * hidden + hidden
    norm = 2 * hidden
    layer = (
        4 * linear + (hidden * dims.mlp_size + dims.mlp_size) + (dims.mlp_size * hidden + hidden) + 2 * norm
    )
    tower = norm + linear  # the final norm and the pooler

    image = (
        2 * hidden  # CLS and mask token
        + (dims.num_patches + 1) * hidden
        + (3 * dims.patch_size**2 * hidden + hidden)
        + dims.num_image_layers * layer
        + tower
    )
    text = (
        (dims.vocab_size + dims.max_text_positions + 2) * hidden + norm + dims.num_text_layers * layer + tower
    )
    multimodal = hidden + dims.num_multimodal_layers * layer + tower
    projections = 2 * linear + 2 * (hidden * projection + projection)
    text_head = linear + norm + hidden * dims.vocab_size + dims.vocab_size
    image_head = linear + norm + hidden * CODEBOOK_VOCAB_SIZE + CODEBOOK_VOCAB_SIZE
    itm_head = linear + 2 * hidden + 2
    heads = 2 * text_head + 2 * image_head + itm_head + 1  # 1: the temperature
    return image + text + multimodal + projections + heads, _count_codebook(dims.codebook_hidden_size)


def _count_codebook(width: int) -> int:
    """The DALL-E encoder: 4 groups of 2 blocks; widths 1, 2, 4, 8 times the first."""

    def conv(num_in: int, num_out: int, kernel: int) -> int:
        return num_in * num_out * kernel**2 + num_out

    def block(num_in: int, num_out: int) -> int:
        hidden = num_out // 4
        identity = conv(num_in, num_out, 1) if num_in != num_out else 0
        return identity + conv(num_in, hidden, 3) + 2 * conv(hidden, hidden, 3) + conv(hidden, num_out, 1)

    total = conv(3, width, 7) + conv(8 * width, CODEBOOK_VOCAB_SIZE, 1)
    num_in = width
    for factor in (1, 2, 4, 8):
        total += block(num_in, factor * width) + block(factor * width, factor * width)
        num_in = factor * width
    return total
