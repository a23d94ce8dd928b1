"""Pictures and captions in webdataset-style tar shards: ``KEY.png`` beside ``KEY.txt``, on any storage.

The headers of each shard are read once, when the source is opened; afterwards a sample is one or two reads of
a range of bytes, so samples can be taken in any order. Compressed shards cannot be read that way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, field_validator

from flava_tnt.data.tar import Member, TarSample, read_member, scan_tar
from flava_tnt.data.transforms import open_image
from flava_tnt.data.urls import expand_urls
from flava_tnt.errors import DataError
from flava_tnt.places import absolute
from flava_tnt.plugin import BadSample, DataSource, Modality, Sample, SampleReader, Setup

_logger = logging.getLogger("flava_tnt.shards")


class Shards(DataSource):
    """Tar shards of pictures (``KEY.png``, ``KEY.jpg``, ...) and captions (``KEY.txt``) on any storage."""

    api_version = 1

    urls: str | list[str] = Field(min_length=1)
    """The shards: paths or fsspec URLs, one or several, with `*` and `{000000..000003}` where wanted."""

    @field_validator("urls")
    @classmethod
    def _from_anywhere(cls, urls: str | list[str]) -> str | list[str]:
        return absolute(urls) if isinstance(urls, str) else [absolute(url) for url in urls]

    image_extensions: list[str] = Field(default=["jpg", "jpeg", "png", "webp", "gif", "bmp"], min_length=1)
    """Which files of a key are its picture; the first that it has is taken."""
    text_extension: str = "txt"
    """Which file of a key is its caption, in UTF-8."""

    def open(self, setup: Setup) -> SampleReader:
        urls = expand_urls([self.urls] if isinstance(self.urls, str) else self.urls)
        names = _short_names(urls)
        entries: list[Entry] = []
        for url, name in zip(urls, names, strict=True):
            entries.extend(self._entries(url, name))
        return ShardReader(entries)

    def _entries(self, url: str, name: str) -> list[Entry]:
        samples = scan_tar(url)
        entries = [entry for sample in samples if (entry := self._entry(sample, url, name)) is not None]
        if not entries:
            raise DataError(f"shard {url} holds no {self._wanted()}; it holds {_contents(samples)}")
        if len(entries) < len(samples):
            left_out = len(samples) - len(entries)
            _logger.warning("shard %s: %d of %d keys are no %s", url, left_out, len(samples), self._wanted())
        return entries

    def _entry(self, sample: TarSample, url: str, name: str) -> Entry | None:
        """The sample's place, or None where it lacks what the source's modalities need."""
        members = sample.members
        image = next((members[e] for e in self._lower_image_extensions() if e in members), None)
        text = members.get(self.text_extension.lower().lstrip("."))
        if (image is None and self._needs_image()) or (text is None and self._needs_text()):
            return None
        return Entry(id=f"{name}/{sample.key}", url=url, image=image, text=text)

    def _lower_image_extensions(self) -> list[str]:
        return [extension.lower().lstrip(".") for extension in self.image_extensions]

    def _needs_image(self) -> bool:
        return bool({"pairs", "image"} & set(self.modalities))

    def _needs_text(self) -> bool:
        return bool({"pairs", "text"} & set(self.modalities))

    def _wanted(self) -> str:
        """What a sample of this source has to be, for messages."""
        picture, caption = (
            "/".join(f".{e}" for e in self._lower_image_extensions()),
            f".{self.text_extension}",
        )
        if self._needs_image() and self._needs_text():
            return f"pairs ({picture} with {caption})"
        return f"pictures ({picture})" if self._needs_image() else f"captions ({caption})"


@dataclass(frozen=True)
class Entry:
    """Where the parts of one sample are."""

    id: str
    url: str
    image: Member | None
    text: Member | None


class ShardReader(SampleReader):
    """Reads samples by their place in the shards: shard after shard, in each the order of its keys."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def read(self, index: int) -> Sample:
        return self.read_for(index, "pairs")

    def read_for(self, index: int, modality: Modality) -> Sample:
        entry = self._entries[index]
        image, text = None, None
        if entry.text is not None and modality != "image":
            text = _decode(read_member(entry.url, entry.text), entry.id)
        if entry.image is not None and modality != "text":
            image = open_image(read_member(entry.url, entry.image), entry.id)
        return Sample(id=entry.id, image=image, text=text)


def _decode(data: bytes, sample_id: str) -> str:
    try:
        return data.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise BadSample(sample_id, f"its caption is not UTF-8 (byte {error.start})") from error


def _short_names(urls: Sequence[str]) -> list[str]:
    """The file names without `.tar` where they differ, else the whole URLs; ids have to be unique."""
    short = [url.rpartition("/")[2].removesuffix(".tar") for url in urls]
    return short if len(set(short)) == len(short) else list(urls)


def _contents(samples: Sequence[TarSample]) -> str:
    counts = Counter(extension for sample in samples for extension in sample.members)
    if not counts:
        return "no files"
    return ", ".join(f"{count} x .{extension}" for extension, count in counts.most_common(8))
