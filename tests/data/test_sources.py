from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from flava_tnt.data.sources import open_readers
from flava_tnt.errors import DataError
from flava_tnt.plugin import DataSource, Sample, SampleReader, Setup
from tests.data.helpers import ListSource, make_setup


class PicturesOnly(DataSource):
    api_version = 1

    def open(self, setup: Setup) -> SampleReader:
        return PicturesOnlyReader()


class PicturesOnlyReader(SampleReader):
    def __len__(self) -> int:
        return 50

    def read(self, index: int) -> Sample:
        return Sample(id=f"p{index}", image=np.zeros((9, 9, 3), np.uint8))


class NeverOpened(DataSource):
    api_version = 1

    def open(self, setup: Setup) -> SampleReader:
        raise AssertionError("opened without need")


def test_a_source_that_feeds_several_modalities_is_opened_once() -> None:
    readers = open_readers(make_setup())
    assert set(readers) == {"pairs", "image", "text"}
    assert len({id(reader) for reader in readers.values()}) == 1


def test_each_modality_has_its_own_source() -> None:
    sources = {"a": ListSource(modalities=["pairs", "text"]), "b": PicturesOnly(modalities=["image"])}
    readers = open_readers(make_setup(sources))
    assert readers["pairs"] is readers["text"]
    assert isinstance(readers["image"], PicturesOnlyReader)


def test_a_modality_without_a_share_needs_no_source() -> None:
    sources = {"a": ListSource(modalities=["pairs"]), "b": NeverOpened(modalities=["text"])}
    setup = make_setup(sources, shares={"pairs": 1.0, "image": 0.0, "text": 0.0})
    assert set(open_readers(setup)) == {"pairs"}


def test_a_modality_without_a_source_is_named() -> None:
    with pytest.raises(DataError, match=r"feeds batches of modality 'image', whose share is 0\.3"):
        open_readers(make_setup({"a": ListSource(modalities=["pairs", "text"])}))


def test_a_modality_with_two_sources_is_named_with_both() -> None:
    with pytest.raises(DataError, match=r"'pairs' have several sources \(a, b\)"):
        open_readers(make_setup({"a": ListSource(), "b": ListSource()}))


def test_a_source_smaller_than_a_global_batch_is_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"'a' has 11 samples, fewer than one global batch of 12"):
        open_readers(make_setup({"a": ListSource(num_samples=11)}))
    assert open_readers(make_setup({"a": ListSource(num_samples=12)}))


def test_the_global_batch_counts_all_ranks() -> None:
    setup = make_setup({"a": ListSource(num_samples=15)}, world_size=2, batch={"local": 8})
    with pytest.raises(DataError, match="global batch of 16"):
        open_readers(setup)


def test_a_source_without_text_cannot_feed_pairs() -> None:
    with pytest.raises(DataError, match=r"'a' cannot feed .* 'pairs': sample p0 has no text"):
        open_readers(make_setup({"a": PicturesOnly()}))


def test_what_a_source_has_is_seen_behind_bad_samples() -> None:
    assert open_readers(make_setup({"a": ListSource(bad=[0, 1, 2])}))
    assert open_readers(make_setup({"a": ListSource(bad=list(range(50)))}))


def test_opening_sources_and_tokenizers_loads_no_torch() -> None:
    modules = "sources, samples, schedule, order, masks, transforms, tokenizer, tar, urls"
    plugins = "demo, shards, synthetic"
    script = (
        f"from flava_tnt.data import {modules}\n"
        f"from flava_tnt_plugins import {plugins}\n"
        "import sys; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
