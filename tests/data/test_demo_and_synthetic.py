from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from PIL import Image

from flava_tnt.data.loader import make_loader
from flava_tnt.data.sources import open_readers
from flava_tnt.plugin import Sample
from flava_tnt_plugins.demo import BACKGROUND, COLOURS, PHRASINGS, PLACES, SHAPES, SIZES, Demo
from flava_tnt_plugins.synthetic import Synthetic
from tests.data.helpers import make_setup


def demo_samples(indices: range, **options: int) -> list[Sample]:
    source = Demo(**options)
    reader = source.open(make_setup({"demo": source}))
    return [reader.read(index) for index in indices]


def pixels(sample: Sample) -> np.ndarray:
    assert isinstance(sample.image, Image.Image)
    return np.asarray(sample.image)


def test_a_demo_sample_is_a_function_of_its_index() -> None:
    for one, other in zip(demo_samples(range(30)), demo_samples(range(30), num_samples=99), strict=True):
        assert (one.id, one.text) == (other.id, other.text)
        assert (pixels(one) == pixels(other)).all()


def test_demo_options_say_how_many_and_how_large() -> None:
    source = Demo(num_samples=77, image_size=48)
    reader = source.open(make_setup({"demo": source}))
    assert len(reader) == 77
    assert pixels(reader.read(0)).shape == (48, 48, 3)


def test_captions_of_different_attributes_are_different() -> None:
    places = [place for row in PLACES for place in row]
    names = ("shape", "colour", "size", "place")
    captions = [
        phrasing.format(**dict(zip(names, values, strict=True)))
        for phrasing in PHRASINGS
        for values in itertools.product(SHAPES, COLOURS, SIZES, places)
    ]
    assert len(set(captions)) == len(captions)


def test_demo_pictures_show_what_their_captions_say() -> None:
    for sample in demo_samples(range(300)):
        picture, text = pixels(sample).astype(int), sample.text or ""
        corners = picture[[0, 0, -1, -1], [0, -1, 0, -1]]
        corner = corners[corners.min(axis=1).argmax()]  # a large shape may lie over one of them
        assert BACKGROUND[0] <= corner.min() <= corner.max() <= BACKGROUND[1]
        colour = next(name for name in COLOURS if name in text.split() or f"{name}," in text)
        shape_YX = np.abs(picture - corner).max(axis=2) > 20
        assert shape_YX.any()
        drawn = picture[shape_YX].mean(axis=0)
        nearest = min(COLOURS, key=lambda name: np.abs(drawn - COLOURS[name]).sum())
        assert nearest == colour
        y, x = (places.mean() / len(picture) for places in np.nonzero(shape_YX))
        rows = {"top": 0, "bottom": 2}
        columns = {"left": 0, "right": 2}
        assert int(y * 3) == next((rows[word] for word in rows if word in text), 1)
        assert int(x * 3) == next((columns[word] for word in columns if word in text), 1)


def test_demo_attributes_all_occur() -> None:
    text = " ".join(sample.text or "" for sample in demo_samples(range(400)))
    for word in (*SHAPES, *COLOURS, *SIZES, "centre", "bottom left"):
        assert word in text


def test_drawing_costs_under_a_millisecond() -> None:
    source = Demo()
    reader = source.open(make_setup({"demo": source}))
    start = time.process_time()
    for index in range(500):
        reader.read(index)
    assert (time.process_time() - start) / 500 < 1e-3


# ----------------------------------------------------------------------------------------- synthetic


@pytest.mark.parametrize("size", ["tiny", "350m"])
def test_synthetic_batches_need_no_tokenizer_and_fill_the_text(size: str) -> None:
    setup = make_setup(
        {"synthetic": Synthetic()},
        model={"size": size},
        text={},
        batch={"local": 3},
        train={"max_steps": 8, "data_workers": 0},
    )
    readers = open_readers(setup)
    assert all(reader.gives_tokens for reader in readers.values())
    seen = {}
    for batch in make_loader(setup, rank=0, start_step=0, tokenizer=None, readers=readers):
        seen[batch.modality] = batch
    pairs, text = seen["pairs"], seen["text"]
    assert pairs.image_B3HW is not None
    assert pairs.text_BT is not None
    assert text.text_BT is not None
    image_size = {"tiny": 48, "350m": 224}[size]
    assert pairs.image_B3HW.shape == (3, 3, image_size, image_size)
    assert pairs.text_BT.shape == (3, 77)
    assert text.text_BT.shape == (3, 512)
    assert (text.text_BT != 0).all()
    assert int(text.text_BT.max()) < 30_522
    assert torch.isin(text.text_BT[:, 1:-1], torch.arange(5)).sum() == 0


def test_a_synthetic_sample_costs_next_to_nothing() -> None:
    source = Synthetic()
    reader = source.open(make_setup({"synthetic": source}, model={"size": "350m"}))
    assert len(reader) == 1_000_000
    start = time.process_time()
    for index in range(5000):
        reader.read(index)
    assert (time.process_time() - start) / 5000 < 1e-4
