"""Small sources, set-ups and shards for the tests of the data room."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flava_tnt.plugin import BadSample, DataSource, Modality, Sample, SampleReader, Setup
from flava_tnt.recipes.schema import Recipe

WORDS = ("red", "green", "blue", "unbelievable", "circle", "square", "dog", "tree", "running", "the")


def caption_of(index: int) -> str:
    """Different for each index below 1,000."""
    digits = [int(digit) for digit in f"{index:03d}"]
    return "a " + " ".join(WORDS[digit] for digit in digits)


class ListReader(SampleReader):
    """Small pictures and captions; samples whose index is in ``bad`` cannot be used."""

    def __init__(
        self, num_samples: int, *, bad: Sequence[int] = (), captions: Sequence[str] | None = None
    ) -> None:
        self.num_samples = num_samples
        self.bad = set(bad)
        self.captions = captions

    def __len__(self) -> int:
        return self.num_samples

    def read(self, index: int) -> Sample:
        if index in self.bad:
            raise BadSample(f"s{index}", "is bad")
        pixels = np.random.default_rng(index).integers(0, 256, (24, 26, 3), dtype=np.uint8)
        text = self.captions[index] if self.captions else caption_of(index)
        return Sample(id=f"s{index}", image=pixels, text=text)


class ListSource(DataSource):
    """A :class:`ListReader` as a plugin."""

    api_version = 1

    num_samples: int = 50
    bad: list[int] = []

    def open(self, setup: Setup) -> SampleReader:
        return ListReader(self.num_samples, bad=self.bad)


def make_setup(
    sources: Mapping[str, DataSource] | None = None,
    *,
    world_size: int = 1,
    shares: Mapping[Modality, float] | None = None,
    **sections: Any,
) -> Setup:
    """A tiny recipe with a global batch of 12; ``sections`` are further top-level keys."""
    values: dict[str, Any] = {
        "name": "test",
        "model": {"size": "tiny"},
        "text": {"length": 32, "pair_length": 16, "vocab_size": 500},
        "batch": {"global": 12},
        "train": {"max_steps": 8, "data_workers": 0},
    }
    values.update(sections)
    shares = shares or {"pairs": 0.4, "image": 0.3, "text": 0.3}
    values["train"] = {**values["train"], "modalities": shares}
    return Setup(
        recipe=Recipe(**values),
        world_size=world_size,
        local_world_size=world_size,
        device_type="cpu",
        plugins={"data": dict(sources or {"list": ListSource()})},
    )


def picture_bytes(
    index: int = 0, *, kind: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (30, 20)
) -> bytes:
    """An encoded picture whose pixels depend on the index."""
    pixels = np.random.default_rng(index).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def tar_bytes(files: Mapping[str, bytes] | Sequence[tuple[str, bytes]]) -> bytes:
    """A tar archive of the files, in order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items() if isinstance(files, Mapping) else files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def pair_files(indices: Sequence[int], *, kind: str = "png") -> dict[str, bytes]:
    """Pictures and captions for a shard."""
    files: dict[str, bytes] = {}
    for index in indices:
        files[f"{index:04d}.{kind}"] = picture_bytes(index, kind={"jpg": "JPEG"}.get(kind, kind.upper()))
        files[f"{index:04d}.txt"] = caption_of(index).encode()
        files[f"{index:04d}.json"] = b"{}"
    return files


def write_shards(folder: Path, *, num_shards: int = 2, per_shard: int = 8) -> list[str]:
    """Shards ``part-000000.tar`` ... of pairs."""
    urls = []
    for shard in range(num_shards):
        path = folder / f"part-{shard:06d}.tar"
        path.write_bytes(tar_bytes(pair_files(range(shard * per_shard, (shard + 1) * per_shard))))
        urls.append(str(path))
    return urls
