"""The contents of a tar shard as ranges of bytes, so that its samples can be read in any order."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from flava_tnt.data.urls import filesystem_of
from flava_tnt.errors import DataError

_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Member:
    """A file in a shard: where its bytes are."""

    offset: int
    size: int


@dataclass(frozen=True)
class TarSample:
    """The files of a shard that share a key."""

    key: str
    """The name up to the first dot of its last part."""
    members: dict[str, Member] = field(default_factory=dict)
    """By extension: lower case, without the first dot."""


def scan_tar(url: str) -> list[TarSample]:
    """The samples of a shard, in the order in which their keys first occur.

    Hidden files and webdataset's ``__names__`` are left out.

    Raises:
        DataError: the shard is missing, empty, truncated, damaged, compressed or no tar file, or holds one
            name twice.
    """
    filesystem, path = filesystem_of(url)
    samples: dict[str, TarSample] = {}
    try:
        with filesystem.open(path, "rb") as file:
            for name, member in _members(file, url):
                key, extension = _split(name)
                sample = samples.setdefault(key, TarSample(key))
                if extension in sample.members:
                    raise DataError(f"shard {url} holds {name} twice")
                sample.members[extension] = member
    except FileNotFoundError as error:
        raise DataError(f"shard {url} does not exist") from error
    except IsADirectoryError as error:
        raise DataError(f"shard {url} is a folder; name its files, as in {url.rstrip('/')}/*.tar") from error
    except OSError as error:
        raise DataError(f"shard {url} cannot be read: {error}") from error
    return list(samples.values())


def read_member(url: str, member: Member) -> bytes:
    """The bytes of a file in a shard.

    Raises:
        DataError: the shard cannot be read any more, or is shorter than it was.
    """
    if member.size == 0:
        return b""
    filesystem, path = filesystem_of(url)
    end = member.offset + member.size
    try:
        data: bytes = filesystem.cat_file(path, start=member.offset, end=end)
    except OSError as error:
        raise DataError(f"shard {url} cannot be read: {error}") from error
    if len(data) != member.size:
        raise DataError(f"shard {url} has changed: it ends before byte {end}")
    return data


def _members(file: IO[bytes], url: str) -> Iterator[tuple[str, Member]]:
    """Name and place of each file, once the whole shard is known to be whole."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            infos = tar.getmembers()
            end = tar.offset  # of the header after the last member
    except tarfile.ReadError as error:
        raise DataError(_describe(file, url, str(error))) from error
    # tarfile takes a damaged header, or none at all, for the end; only a block of zeros is one.
    file.seek(end)
    block = file.read(_BLOCK)
    if block != bytes(_BLOCK):
        problem = "is damaged" if len(block) == _BLOCK else "is truncated"
        raise DataError(f"shard {url} {problem}: no end mark at byte {end}, after {len(infos)} files")
    for info in infos:
        if info.isfile() and not _is_hidden(info.name):
            yield info.name, Member(info.offset_data, info.size)


def _describe(file: IO[bytes], url: str, reason: str) -> str:
    file.seek(0)
    start = file.read(_BLOCK)
    if not start:
        return f"shard {url} is empty (0 bytes)"
    if reason.startswith("unexpected end of data") or len(start) < _BLOCK:
        return f"shard {url} is truncated: {reason}"
    return f"shard {url} is no uncompressed tar file ({reason})"


def _is_hidden(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last.startswith(".") or (last.startswith("__") and last.endswith("__"))


def _split(name: str) -> tuple[str, str]:
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return folder + slash + stem, extension.lower()
