"""Makes one sample of a batch, as a function of the seed, the kind of batch, and a position.

The crop, the masks and the mismatched caption are drawn for the *position* in the stream, not for the sample:
the second epoch sees other crops of the same picture. So nothing depends on which rank or worker does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flava_tnt.data.masks import image_mask, image_mask_capacity, padded, text_mask
from flava_tnt.data.order import sample_index, sample_indices
from flava_tnt.data.tokenizer import Tokenizer, TokenTable, frame, table_without_tokenizer
from flava_tnt.data.transforms import crop_twice, random_crop, to_rgb
from flava_tnt.errors import DataError, PluginError
from flava_tnt.model.sizes import ModelDims
from flava_tnt.plugin import BadSample, Modality, Sample, SampleReader
from flava_tnt.position import generator
from flava_tnt.recipes.schema import TextSection

MISMATCH_PROBABILITY = 0.1
"""A pair's caption is another sample's (FLAVA's ITM, arXiv 2112.04482, and the pretraining code)."""
MISMATCH_TRIES = 16
"""Draws for a caption that differs; where all are the same text, the pair stays matched."""
MAX_ATTEMPTS = 100
"""Samples tried for one place of a batch before the source is given up."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One sample, ready to be stacked; the shapes are those of ``batch.Batch`` without B."""

    id: str
    image_3HW: np.ndarray | None = None
    codebook_image_3hw: np.ndarray | None = None
    image_mask_P: np.ndarray | None = None
    image_mask_positions_I: np.ndarray | None = None
    text_T: np.ndarray | None = None
    text_masked_T: np.ndarray | None = None
    text_mask_positions_M: np.ndarray | None = None
    text_mask_labels_M: np.ndarray | None = None
    matched: bool | None = None
    bad_samples: tuple[tuple[str, str], ...] = ()
    """(id, reason) of the samples that were tried for this place before."""


class SampleMaker:
    """Makes the samples of one kind of batch.

    Args:
        reader: the source of this modality.
        tokenizer: None where the source gives token ids and the recipe has no tokenizer.
    """

    def __init__(
        self,
        *,
        seed: int,
        modality: Modality,
        reader: SampleReader,
        dims: ModelDims,
        text: TextSection,
        tokenizer: Tokenizer | None,
    ) -> None:
        assert tokenizer is not None or reader.gives_tokens or modality == "image"
        self._seed = seed
        self._modality = modality
        self._reader = reader
        self._dims = dims
        self._tokenizer = tokenizer
        self._table: TokenTable = tokenizer.table if tokenizer else table_without_tokenizer(text.vocab_size)
        self._length = text.pair_length if modality == "pairs" else text.length

    def indices(self, positions: range) -> list[int]:
        """The source's samples at positions of the stream; at once, which is cheaper than one by one."""
        positions_N = np.array(positions, dtype=np.int64)
        indices_N = sample_indices(self._seed, self._modality, positions_N, len(self._reader))
        return [int(index) for index in indices_N]

    def make(self, position: int, index: int) -> Prepared:
        """The sample ``index`` of the source as it is at a position of the stream.

        A sample that cannot be used is replaced by another, which again depends on the position alone.

        Raises:
            DataError: MAX_ATTEMPTS samples in a row cannot be used.
        """
        bad: list[tuple[str, str]] = []
        for attempt in range(MAX_ATTEMPTS):
            if attempt > 0:
                # Each attempt has an order of its own, so the replacements of neighbours are independent.
                stream = f"{self._modality} attempt {attempt}"
                index = sample_index(self._seed, stream, position, len(self._reader))
            try:
                return replace(self._make(position, index), bad_samples=tuple(bad))
            except BadSample as error:
                bad.append((error.sample_id, error.reason))
        raise DataError(
            f"{MAX_ATTEMPTS} samples in a row cannot be used for a batch of {self._modality};"
            f" the last is {bad[-1][0]}: {bad[-1][1]}"
        )

    def _make(self, position: int, index: int) -> Prepared:
        sample = self._reader.read_for(index, self._modality)
        prepared = Prepared(id=sample.id)
        if self._modality != "image":
            prepared = self._add_text(prepared, sample, position, index)
        if self._modality != "text":
            prepared = self._add_image(prepared, sample, position)
        return prepared

    def _rng(self, use: str, position: int) -> np.random.Generator:
        return generator(self._seed, use, self._modality, position)

    # ----------------------------------------------------------------------------------------- image

    def _add_image(self, prepared: Prepared, sample: Sample, position: int) -> Prepared:
        image_3HW, codebook_image_3hw = self._pixels(sample, position)
        mask_P = image_mask(self._rng("image mask", position), self._dims.grid_size)
        capacity = image_mask_capacity(self._dims.grid_size)
        return replace(
            prepared,
            image_3HW=image_3HW,
            codebook_image_3hw=codebook_image_3hw,
            image_mask_P=mask_P,
            image_mask_positions_I=padded(np.flatnonzero(mask_P), capacity),
        )

    def _pixels(self, sample: Sample, position: int) -> tuple[np.ndarray, np.ndarray]:
        size, codebook_size = self._dims.image_size, self._dims.codebook_image_size
        if sample.image is None:
            raise BadSample(sample.id, "has no picture")
        if sample.codebook_image is not None:
            assert isinstance(sample.image, np.ndarray)
            shapes = sample.image.shape, sample.codebook_image.shape
            needed = (3, size, size), (3, codebook_size, codebook_size)
            if shapes != needed:
                raise PluginError(
                    f"sample {sample.id} has ready pictures of {shapes[0]} and {shapes[1]}, and the model"
                    f" needs {needed[0]} and {needed[1]}"
                )
            return sample.image, sample.codebook_image
        image = to_rgb(sample.image, sample.id)
        box = random_crop(self._rng("crop", position), image.width, image.height)
        return crop_twice(image, box, size, codebook_size)

    # ------------------------------------------------------------------------------------------ text

    def _add_text(self, prepared: Prepared, sample: Sample, position: int, index: int) -> Prepared:
        text_T, matched = self._framed(sample), None
        if self._modality == "pairs":
            rng = self._rng("mismatch", position)
            other_T = None
            if rng.random() < MISMATCH_PROBABILITY:
                other_T = self._other_text(text_T, index, lambda: int(rng.integers(len(self._reader))))
            matched = other_T is None
            text_T = text_T if other_T is None else other_T
        mask = text_mask(
            self._rng("text mask", position),
            text_T,
            word_starts_T=~self._table.continues_V[text_T],
            special_ids=self._table.special_ids,
            mask_id=self._table.mask_id,
            ordinary_ids=self._table.ordinary_ids,
            whole_words=self._modality == "pairs",
        )
        return replace(
            prepared,
            text_T=text_T,
            text_masked_T=mask.masked_T,
            text_mask_positions_M=mask.positions_M,
            text_mask_labels_M=mask.labels_M,
            matched=matched,
        )

    def _other_text(self, text_T: np.ndarray, index: int, draw: Callable[[], int]) -> np.ndarray | None:
        """The ids of another sample's caption that the model can tell from this one, if draws find one."""
        for _ in range(MISMATCH_TRIES):
            other = draw()
            if other == index:
                continue
            try:
                other_T = self._framed(self._reader.read_for(other, "text"))
            except BadSample:
                continue  # counted when it is drawn for a place of its own
            if not np.array_equal(other_T, text_T):
                return other_T
        return None

    def _framed(self, sample: Sample) -> np.ndarray:
        """[CLS] tokens [SEP] [PAD]..., cut to the length."""
        if sample.token_ids is not None:
            ids_N = np.asarray(sample.token_ids, dtype=np.int64)
            if ids_N.size and not 0 <= ids_N.min() <= ids_N.max() < self._table.vocab_size:
                raise BadSample(sample.id, f"has token ids outside 0 to {self._table.vocab_size - 1}")
        elif sample.text is None:
            raise BadSample(sample.id, "has no text")
        else:
            assert self._tokenizer is not None
            try:
                ids_N = self._tokenizer.encode(sample.text)
            except (TypeError, UnicodeEncodeError) as error:  # lone surrogates
                raise BadSample(sample.id, "its text is not valid Unicode") from error
        return frame(ids_N, self._length, self._table)
