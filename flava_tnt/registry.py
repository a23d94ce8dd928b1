"""Finds plugins through entry points: lists and checks them without importing any, loads what is used.

One entry-point group for each kind (``flava_tnt.callback``). The order in which distributions were installed
never decides anything: two with the same kind and name are an error that names both.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distributions,
    packages_distributions,
    version,
)
from typing import Any

from flava_tnt.contract import fatal_fault
from flava_tnt.errors import PluginError
from flava_tnt.health import find_fault
from flava_tnt.nearest import did_you_mean
from flava_tnt.plugin import KINDS, Plugin

GROUP_PREFIX = "flava_tnt."
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, kw_only=True)
class PluginEntry:
    """A plugin as it is registered."""

    kind: str
    name: str
    target: str
    """``module:attribute``."""
    distribution: str | None
    version: str | None
    status: str = "ok"
    """``ok``, ``broken: ...`` or ``conflict: ...``."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def owner(self) -> str:
        """The distribution and its version, for messages."""
        return " ".join(part for part in (self.distribution, self.version) if part) or "no distribution"

    def __str__(self) -> str:
        return f"{self.kind} plugin {self.name!r} ({self.owner}, {self.target})"


def list_plugins(kind: str | None = None) -> list[PluginEntry]:
    """All registered plugins, of one kind or of every kind, in the order of the phases, then by name.

    No plugin module is imported; ``status`` says what their sources show to be wrong.
    """
    order = {name: number for number, name in enumerate(KINDS)}
    entries = [entry for entry in _scan() if kind is None or entry.kind == kind]
    entries.sort(key=lambda entry: (order.get(entry.kind, len(order)), entry.name, entry.owner))
    return [_with_status(entry, entries) for entry in entries]


def load_plugin(kind: str, use: str) -> tuple[type[Plugin], PluginEntry]:
    """Import the one plugin that a recipe uses.

    Args:
        use: a name, ``distribution/name``, or ``module:attribute``, which needs no packaging.

    Raises:
        PluginError: unknown, registered twice, broken (with distribution, version and the original error),
            not a plugin of this kind, or written for another version of the contract.
    """
    entry = _entry_of_target(kind, use) if ":" in use else find_entry(kind, use)
    found = import_entry(entry)
    fault = fatal_fault(found, kind)
    if fault is not None:
        raise PluginError(f"{entry}: {fault}")
    return found, entry


def find_entry(kind: str, use: str) -> PluginEntry:
    """The entry that a name or ``distribution/name`` stands for.

    Raises:
        PluginError: there is none, or more than one.
    """
    entries = sorted((entry for entry in _scan() if entry.kind == kind), key=lambda entry: entry.owner)
    owner, _, name = use.rpartition("/")
    named = [entry for entry in entries if entry.name == name]
    found = [entry for entry in named if not owner or _same_distribution(entry, owner)]
    if len(found) == 1:
        return found[0]
    if found:
        owners = " and ".join(f"{entry.owner} ({entry.target})" for entry in found)
        choices = " or ".join(dict.fromkeys(f"{entry.distribution}/{name}" for entry in found))
        raise PluginError(
            f"two {kind} plugins are registered as {name!r}: by {owners}; choose with {choices}"
        )
    if named:
        owners = " and ".join(entry.owner for entry in named)
        raise PluginError(f"the {kind} plugin {name!r} is not registered by {owner} but by {owners}")
    raise PluginError(f"unknown {kind} plugin {use!r}{_hint(kind, name, entries)}")


def import_entry(entry: PluginEntry) -> Any:
    """The object that an entry stands for.

    Raises:
        PluginError: it cannot be imported; the message has distribution, version and the original error.
    """
    module, _, attribute = entry.target.partition(":")
    if not _TARGET.fullmatch(entry.target):
        raise PluginError(f"{entry}: {entry.target!r} is not of the form module:attribute")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # foreign code may raise anything; the original stays chained
        text = " ".join(str(error).split())
        raise PluginError(f"{entry} cannot be loaded: {type(error).__name__}: {text}") from error
    return found


def normalised(distribution: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _same_distribution(entry: PluginEntry, name: str) -> bool:
    return entry.distribution is not None and normalised(entry.distribution) == normalised(name)


def _hint(kind: str, name: str, entries: list[PluginEntry]) -> str:
    elsewhere = sorted({entry.kind for entry in _scan() if entry.name == name})
    if elsewhere:
        return f"; {name!r} is of the kind {' and '.join(elsewhere)}"
    return did_you_mean(name, sorted({entry.name for entry in entries}), listed=True) or (
        f"; no {kind} plugin is installed"
    )


# ---------------------------------------------------------------------------------------------- scan


def _scan() -> tuple[PluginEntry, ...]:
    path = tuple(folder or os.getcwd() for folder in sys.path)
    return _scan_path(path, tuple(map(_time_changed, path)))


def _time_changed(folder: str) -> int:
    """When something was last installed into a folder, or removed."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=8)
def _scan_path(path: tuple[str, ...], _changed: tuple[int, ...]) -> tuple[PluginEntry, ...]:
    """All entries on a path, each distribution once. ``_changed`` makes a newer state of it a new question.

    A distribution may be seen twice: an editable install has its metadata in site-packages, and its build
    leaves an egg-info beside the sources. What was installed stands for it; else what comes first on the
    path, which is what would be imported.
    """
    found: dict[str, tuple[bool, list[PluginEntry]]] = {}
    for distribution in distributions(path=list(path)):
        text = distribution.read_text("entry_points.txt") or ""
        if GROUP_PREFIX not in text:
            continue
        key = normalised(str(distribution.metadata["Name"]))
        is_installed = distribution.read_text("METADATA") is not None
        if key not in found or (is_installed and not found[key][0]):
            found[key] = (is_installed, list(_entries(distribution, text)))
    return tuple(entry for _, entries in found.values() for entry in entries)


def _entries(distribution: Distribution, text: str) -> Iterator[PluginEntry]:
    group = ""
    for line in (line.strip() for line in text.splitlines()):
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("["):
            group = line.strip("[] ")
        elif group.startswith(GROUP_PREFIX):
            name, _, target = line.partition("=")
            yield PluginEntry(
                kind=group.removeprefix(GROUP_PREFIX),
                name=name.strip(),
                target=re.sub(r"\s|\[.*", "", target),
                distribution=str(distribution.metadata["Name"]),
                version=str(distribution.version),
            )


def _with_status(entry: PluginEntry, entries: list[PluginEntry]) -> PluginEntry:
    if entry.kind not in KINDS:
        return replace(
            entry, status=f"broken: no kind of plugin has this name{did_you_mean(entry.kind, KINDS)}"
        )
    fault = find_fault(entry.target)
    if fault is not None:
        return replace(entry, status=f"broken: {fault}")
    others = [other for other in entries if (other.kind, other.name) == (entry.kind, entry.name)]
    if len(others) > 1:
        owners = " and ".join(other.owner for other in others)
        choice = f"{entry.distribution}/{entry.name}"
        return replace(entry, status=f"conflict: registered by {owners}; {choice} means this one")
    return entry


def _entry_of_target(kind: str, target: str) -> PluginEntry:
    """An entry for ``module:attribute``, with the distribution of the module, if one is known."""
    top = target.partition(":")[0].partition(".")[0]
    owners = {
        entry.distribution: entry.version
        for entry in _scan()
        if entry.target.partition(":")[0].partition(".")[0] == top
    }
    if not owners:
        owners = {name: _version(name) for name in _owners_of_packages(tuple(sys.path)).get(top, [])}
    owner, its_version = next(iter(owners.items())) if len(owners) == 1 else (None, None)
    return PluginEntry(kind=kind, name=target, target=target, distribution=owner, version=its_version)


@lru_cache(maxsize=8)
def _owners_of_packages(_path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Distributions by top-level package. Looking through all installed files takes a while."""
    return packages_distributions()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
