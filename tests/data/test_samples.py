from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flava_tnt.data.samples import MAX_ATTEMPTS, Prepared, SampleMaker
from flava_tnt.data.tokenizer import Tokenizer, frame, learn_tokenizer
from flava_tnt.errors import DataError
from flava_tnt.model.sizes import resolve_dims
from flava_tnt.plugin import BadSample, Modality, Sample, SampleReader
from flava_tnt.recipes.schema import ModelSection, TextSection
from tests.data.helpers import ListReader, caption_of

TEXT = TextSection(length=32, pair_length=16, vocab_size=500)
MODEL = ModelSection(size="tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_tokenizer([caption_of(i) for i in range(1000)], 500)


def maker(
    modality: Modality, reader: SampleReader, tokenizer: Tokenizer | None, **changes: Any
) -> SampleMaker:
    values: dict[str, Any] = {"seed": 0, "dims": resolve_dims(MODEL, TEXT), "text": TEXT, **changes}
    return SampleMaker(modality=modality, reader=reader, tokenizer=tokenizer, **values)


def make(sample_maker: SampleMaker, num_samples: int, start: int = 0) -> list[Prepared]:
    positions = range(start, start + num_samples)
    indices = sample_maker.indices(positions)
    return [sample_maker.make(p, i) for p, i in zip(positions, indices, strict=True)]


def test_a_pair_has_everything_in_its_shape(tokenizer: Tokenizer) -> None:
    (sample,) = make(maker("pairs", ListReader(50), tokenizer), 1)
    shapes = {
        name: (value.shape, str(value.dtype))
        for name, value in vars(sample).items()
        if isinstance(value, np.ndarray)
    }
    assert shapes == {
        "image_3HW": ((3, 48, 48), "uint8"),
        "codebook_image_3hw": ((3, 48, 48), "uint8"),
        "image_mask_P": ((36,), "bool"),
        "image_mask_positions_I": ((14,), "int64"),
        "text_T": ((16,), "int64"),
        "text_masked_T": ((16,), "int64"),
        "text_mask_positions_M": ((2,), "int64"),
        "text_mask_labels_M": ((2,), "int64"),
    }


def test_text_only_has_no_picture_and_image_only_no_text(tokenizer: Tokenizer) -> None:
    (text,) = make(maker("text", ListReader(50), tokenizer), 1)
    assert text.image_3HW is None
    assert text.image_mask_P is None
    assert text.matched is None
    assert text.text_T is not None
    assert text.text_T.shape == (32,)
    (image,) = make(maker("image", ListReader(50), None), 1)
    assert image.text_T is None
    assert image.matched is None
    assert image.image_3HW is not None


def test_masked_positions_are_those_of_the_mask() -> None:
    for sample in make(maker("image", ListReader(50), None), 20):
        assert sample.image_mask_P is not None
        assert sample.image_mask_positions_I is not None
        positions = sample.image_mask_positions_I[sample.image_mask_positions_I >= 0]
        assert positions.tolist() == np.flatnonzero(sample.image_mask_P).tolist()


def test_the_second_epoch_sees_other_crops_and_masks_of_the_same_samples(tokenizer: Tokenizer) -> None:
    sample_maker = maker("pairs", ListReader(30), tokenizer)
    first, second = ({s.id: s for s in make(sample_maker, 30, start)} for start in (0, 30))
    assert first.keys() == second.keys()
    same_mask = [np.array_equal(first[id].image_mask_P, second[id].image_mask_P) for id in first]
    same_crop = [np.array_equal(first[id].image_3HW, second[id].image_3HW) for id in first]
    assert sum(same_mask) < 3
    assert sum(same_crop) < 10


def test_streams_of_modalities_and_seeds_differ(tokenizer: Tokenizer) -> None:
    reader = ListReader(200)
    orders = [
        tuple(sample.id for sample in make(maker(modality, reader, tokenizer, seed=seed), 20))
        for modality, seed in (("pairs", 0), ("image", 0), ("text", 0), ("pairs", 1))
    ]
    assert len(set(orders)) == 4


# ------------------------------------------------------------------------------------------ mismatch


def test_a_tenth_of_the_captions_are_anothers(tokenizer: Tokenizer) -> None:
    samples = make(maker("pairs", ListReader(500), tokenizer), 1500)
    mismatched = [sample for sample in samples if not sample.matched]
    assert len(mismatched) / len(samples) == pytest.approx(0.1, abs=0.025)
    for sample in samples:
        own = frame(tokenizer.encode(caption_of(int(sample.id[1:]))), 16, tokenizer.table)
        assert np.array_equal(own, sample.text_T) == sample.matched


def test_a_mismatched_caption_differs_for_the_model_not_only_in_case(tokenizer: Tokenizer) -> None:
    captions = ["a red dog", "A Red DOG", "a red  dog"] * 20 + ["the blue tree"]
    samples = make(maker("pairs", ListReader(61, captions=captions), tokenizer), 2000)
    dog = frame(tokenizer.encode("a red dog"), 16, tokenizer.table)
    mismatched = [sample for sample in samples if not sample.matched]
    assert mismatched
    for sample in mismatched:
        assert np.array_equal(sample.text_T, dog) == (sample.id == "s60")


def test_where_all_captions_are_the_same_every_pair_is_matched(tokenizer: Tokenizer) -> None:
    samples = make(maker("pairs", ListReader(20, captions=["a dog"] * 20), tokenizer), 200)
    assert all(sample.matched for sample in samples)


def test_a_mismatched_caption_is_never_that_of_a_bad_sample(tokenizer: Tokenizer) -> None:
    bad = list(range(0, 60, 2))
    samples = make(maker("pairs", ListReader(60, bad=bad), tokenizer), 600)
    good_texts = {
        frame(tokenizer.encode(caption_of(i)), 16, tokenizer.table).tobytes() for i in range(1, 60, 2)
    }
    assert sum(not sample.matched for sample in samples) > 20
    assert {sample.text_T.tobytes() for sample in samples if sample.text_T is not None} <= good_texts


# --------------------------------------------------------------------------------------- bad samples


def test_a_bad_sample_is_replaced_and_named(tokenizer: Tokenizer) -> None:
    samples = make(maker("pairs", ListReader(50, bad=[3, 4]), tokenizer), 50)
    assert not {"s3", "s4"} & {sample.id for sample in samples}
    named = [bad for sample in samples for bad in sample.bad_samples]
    assert {("s3", "is bad"), ("s4", "is bad")} <= set(named)
    assert set(named) == {("s3", "is bad"), ("s4", "is bad")}
    assert len(samples) == 50


def test_good_samples_are_the_same_beside_bad_ones(tokenizer: Tokenizer) -> None:
    with_bad = make(maker("image", ListReader(50, bad=[3]), tokenizer), 50)
    without = make(maker("image", ListReader(50), tokenizer), 50)
    for one, other in zip(with_bad, without, strict=True):
        if other.id != "s3":
            assert one.id == other.id
            assert np.array_equal(one.image_3HW, other.image_3HW)


def test_a_source_of_bad_samples_is_given_up() -> None:
    with pytest.raises(DataError, match=rf"^{MAX_ATTEMPTS} samples in a row .* batch of image; .* is bad$"):
        make(maker("image", ListReader(20, bad=range(20)), None), 1)


class OneSample(SampleReader):
    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 1

    def read(self, index: int) -> Sample:
        return self.sample


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (Sample(id="x", text="a"), "x: has no picture"),
        (Sample(id="x", image=np.zeros((9, 9, 3), np.uint8)), "x: has no text"),
        (Sample(id="x", image=np.zeros((9, 9, 3), np.uint8), text="\ud800"), "x: its text is not valid"),
        (
            Sample(id="x", image=np.zeros((9, 9, 3), np.uint8), token_ids=np.array([7, 5000])),
            "x: has token ids outside 0 to",
        ),
    ],
)
def test_a_pair_that_lacks_a_part_is_a_bad_sample(tokenizer: Tokenizer, sample: Sample, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        make(maker("pairs", OneSample(sample), tokenizer), 1)
    with pytest.raises(BadSample, match=reason):
        maker("pairs", OneSample(sample), tokenizer)._make(0, 0)


def test_an_empty_caption_trains_without_labels(tokenizer: Tokenizer) -> None:
    sample = Sample(id="x", image=np.zeros((9, 9, 3), np.uint8), text="")
    (prepared,) = make(maker("pairs", OneSample(sample), tokenizer), 1)
    assert prepared.text_T is not None
    assert prepared.text_mask_labels_M is not None
    assert prepared.text_T.tolist() == [2, 3] + [0] * 14
    assert (prepared.text_mask_labels_M == -1).all()
    assert np.array_equal(prepared.text_T, prepared.text_masked_T)


# ------------------------------------------------------------------------- pixels and tokens as given


class ReadySamples(SampleReader):
    gives_tokens = True

    def __len__(self) -> int:
        return 10

    def read(self, index: int) -> Sample:
        return Sample(
            id=f"r{index}",
            image=np.full((3, 48, 48), index, np.uint8),
            codebook_image=np.full((3, 48, 48), index + 100, np.uint8),
            token_ids=np.arange(5 + index, 65 + index),
        )


def test_ready_pixels_and_tokens_are_used_as_they_are_without_a_tokenizer() -> None:
    samples = make(maker("pairs", ReadySamples(), None), 10)
    for sample in samples:
        index = int(sample.id[1:])
        assert sample.image_3HW is not None
        assert sample.codebook_image_3hw is not None
        assert sample.text_T is not None
        assert (sample.image_3HW == index).all()
        assert (sample.codebook_image_3hw == index + 100).all()
        assert (sample.text_T[0], sample.text_T[-1]) == (2, 3)
        if sample.matched:
            assert sample.text_T[1:-1].tolist() == list(range(5 + index, 19 + index))
        assert sample.text_mask_positions_M is not None
        assert (sample.text_mask_positions_M > 0).all()
