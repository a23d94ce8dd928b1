"""Files on any storage, named by URLs with braces and wildcards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec

from flava_tnt.errors import DataError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand_urls(urls: Sequence[str]) -> list[str]:
    """The files that URLs name: braces first, then wildcards, in the order given, each once.

    Args:
        urls: paths or fsspec URLs, which may hold ``{000000..000003}``, ``{train,extra}``, ``*``, ``?``
            and ``[...]``; what a wildcard matches comes in alphabetical order.

    Raises:
        DataError: a wildcard matches nothing, a brace is not understood, or the storage is not available.
    """
    found: dict[str, None] = {}
    for url in urls:
        for expanded in expand_braces(url):
            found.update(dict.fromkeys(_match(expanded)))
    return list(found)


def expand_braces(url: str) -> Iterator[str]:
    """The URLs that one with braces stands for, in order; zeros in front of a range's ends are kept."""
    match = _BRACES.search(url)
    if match is None:
        yield url
        return
    for choice in _choices(match[1], url):
        yield from expand_braces(url[: match.start()] + choice + url[match.end() :])


def filesystem_of(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Call it where the file is read: it is kept for each
    process, as connections do not survive a fork.

    Raises:
        DataError: the storage is unknown, or the package for it is not installed.
    """
    try:
        return fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise DataError(f"{url}: {error}") from error


def _choices(inside: str, url: str) -> list[str]:
    if "," in inside:
        return inside.split(",")
    match = _RANGE.fullmatch(inside)
    if match is None or int(match[1]) > int(match[2]):
        raise DataError(f"{url}: {{{inside}}} is neither a range like {{000..012}} nor a list like {{a,b}}")
    width = len(match[1]) if match[1].startswith("0") else 0
    return [f"{number:0{width}d}" for number in range(int(match[1]), int(match[2]) + 1)]


def _match(url: str) -> list[str]:
    is_http = url.startswith(("http:", "https:"))
    if not any(wildcard in url for wildcard in ("*[" if is_http else "*?[")):  # ? starts a query in HTTP
        return [url]
    filesystem, path = filesystem_of(url)
    try:
        found = sorted(filesystem.glob(path))
    except OSError as error:
        raise DataError(f"{url}: {error}") from error
    if not found:
        raise DataError(f"{url} matches no file")
    if "://" not in url:
        return found
    return [filesystem.unstrip_protocol(name) for name in found]
