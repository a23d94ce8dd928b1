"""Random tensors of the right shapes, for measuring: pictures and tokens cost next to nothing."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from flava_tnt.model.sizes import resolve_dims
from flava_tnt.plugin import DataSource, Sample, SampleReader, Setup
from flava_tnt.position import generator

POOL_SIZE = 32
"""Pictures and texts that are made once and given again and again."""
FIRST_ORDINARY_ID = 5
"""Ids below are special where a recipe has no tokenizer."""


class Synthetic(DataSource):
    """Random pixels at the model's sizes and random token ids that fill the text; needs no tokenizer."""

    api_version = 1

    num_samples: int = Field(default=1_000_000, ge=1)
    """Samples of an epoch."""

    def open(self, setup: Setup) -> SampleReader:
        recipe = setup.recipe
        dims = resolve_dims(recipe.model, recipe.text)
        return SyntheticReader(
            num_samples=self.num_samples,
            image_size=dims.image_size,
            codebook_image_size=dims.codebook_image_size,
            num_tokens=max(recipe.text.length, recipe.text.pair_length) - 2,
            vocab_size=dims.vocab_size,
        )


class SyntheticReader(SampleReader):
    """Gives the members of a small pool in turn."""

    gives_tokens: ClassVar[bool] = True

    def __init__(
        self,
        *,
        num_samples: int,
        image_size: int,
        codebook_image_size: int,
        num_tokens: int,
        vocab_size: int,
    ) -> None:
        rng = generator(0, "synthetic")
        self._num_samples = num_samples
        self._images = _pixels(rng, image_size)
        self._codebook_images = _pixels(rng, codebook_image_size)
        self._token_ids = rng.integers(FIRST_ORDINARY_ID, vocab_size, (POOL_SIZE, num_tokens))

    def __len__(self) -> int:
        return self._num_samples

    def read(self, index: int) -> Sample:
        member = index % POOL_SIZE
        return Sample(
            id=f"synthetic-{index}",
            image=self._images[member],
            codebook_image=self._codebook_images[member],
            token_ids=self._token_ids[member],
        )


def _pixels(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 256, (POOL_SIZE, 3, size, size), dtype=np.uint8)
