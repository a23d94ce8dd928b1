"""Holds a plugin class against the contract of ``plugin.py``: what makes it unusable, and what is amiss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from flava_tnt.nearest import did_you_mean
from flava_tnt.plugin import API_VERSION, KINDS, Plugin

_MUST_IMPLEMENT = {
    "activation_checkpointing": "apply",
    "attention": "apply",
    "optimizer": "build",
    "data": "open",
}
_RESERVED_OPTIONS = ("use",)


def fatal_fault(found: Any, kind: str) -> str | None:
    """Why an object cannot serve as a plugin of a kind; None where it can."""
    base = KINDS[kind].base
    if not isinstance(found, type) or not issubclass(found, Plugin):
        shown = found.__name__ if isinstance(found, type) else f"an object of type {type(found).__name__}"
        return f"{shown} is not a plugin: it must be a class derived from flava_tnt.plugin.{base.__name__}"
    if not issubclass(found, base):
        its_kind = getattr(found, "kind", None)
        return f"{found.__name__} is a plugin of the kind {its_kind}, not {kind}"
    stated = found.__dict__.get("api_version")
    if stated is None:
        return f"{found.__name__} states no api_version; write `api_version = {API_VERSION}` in the class"
    if stated != API_VERSION:
        return (
            f"{found.__name__} was written for version {stated} of the plugin contract, this is version"
            f" {API_VERSION}; install a release that fits"
        )
    return _unknown_hook(found, base)


def _unknown_hook(plugin: type[Plugin], base: type[Plugin]) -> str | None:
    """A hook that nobody would ever call: a misspelt name."""
    for name in dir(plugin):
        if name.startswith("on_") and callable(getattr(plugin, name)) and not hasattr(base, name):
            hooks = [hook for hook in dir(base) if hook.startswith("on_")]
            hint = did_you_mean(name, hooks, listed=True)
            return f"{plugin.__name__} has {name}, which nothing calls{hint}"
    return None


def contract_faults(found: Any, kind: str) -> list[str]:
    """Everything in which a class falls short of the contract; empty where nothing does."""
    fault = fatal_fault(found, kind)
    return [fault] if fault is not None else list(_faults(found, kind))


def _faults(plugin: type[Plugin], kind: str) -> Iterator[str]:
    if plugin.kind != kind:
        yield f"kind is {plugin.kind!r}; leave it as the base class sets it"
    if not (plugin.__dict__.get("__doc__") or "").strip():
        yield "the class has no docstring"
    method = _MUST_IMPLEMENT.get(kind)
    if method is not None and getattr(plugin, method) is getattr(KINDS[kind].base, method):
        yield f"the method {method} is missing"
    for name, field in plugin.model_fields.items():
        if not (field.description or "").strip():
            yield f"the option {name} is not documented (a docstring under the field)"
        if (field.alias or name) in _RESERVED_OPTIONS:
            yield f"an option cannot be called {name}"
    for needed in (*plugin.requires, *plugin.conflicts):
        if needed.partition(":")[0] not in KINDS or not needed.partition(":")[2]:
            yield f"{needed!r} in requires or conflicts is not of the form kind:name"
    yield from _default_faults(plugin)


def _default_faults(plugin: type[Plugin]) -> Iterator[str]:
    """A resolved recipe holds every option: defaults must survive being written and read."""
    names = [name for name, field in plugin.model_fields.items() if not field.is_required()]
    try:
        defaults = plugin.model_construct().model_dump(
            mode="json", by_alias=True, include=set(names), warnings="none"
        )
        plugin.model_validate_json(json.dumps(defaults))
    except ValidationError as error:
        for detail in error.errors():
            if detail["type"] != "missing":
                yield f"the default of option {'.'.join(map(str, detail['loc']))} is refused: {detail['msg']}"
    except Exception as error:  # a plugin's own serialiser may raise anything
        yield f"the options cannot be written to a recipe: {' '.join(str(error).split())}"
