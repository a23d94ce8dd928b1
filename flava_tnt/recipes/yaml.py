"""Recipe files as trees of values that know where they stand.

A small reading of YAML, so that a recipe means what it looks like: numbers as in YAML 1.2 (``1e-3`` is one;
``010``, ``1:30``, ``yes`` and dates are strings), keys are always text, a key given twice is an error. Each
plain scalar keeps its text, so a field of type string gets ``1e3`` as it was written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import yaml

from flava_tnt.errors import RecipeError

MOST_DIGITS = 300
"""Of a number; what is longer is a string (Python refuses to convert some thousands)."""

_DEFAULT_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "map", "seq")}
_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
# YAML 1.2's core schema, but a leading zero makes a string: octal to some readers, decimal to others.
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_BASED_INTEGER = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_LINE_BREAKS = "\n\r\x85\u2028\u2029"
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Node:
    """One value of a recipe and where it came from."""

    value: Any
    """A scalar, a list of nodes, or a dict of nodes by key."""
    origin: str
    """``recipes/x.yaml:12``, ``command line`` or ``default``."""
    text: str | None = None
    """A plain scalar as it was written; None for everything else."""
    names_all: bool = False
    """A map of plugins that was written as a list: the plugins which it does not name are switched off."""

    @property
    def is_map(self) -> bool:
        return isinstance(self.value, dict)

    def get(self, *keys: str) -> Node | None:
        """The node under a path of keys, or None."""
        node: Node | None = self
        for key in keys:
            node = node.value.get(key) if node is not None and node.is_map else None
        return node

    def with_entries(self, **entries: Node) -> Node:
        """A copy of this map with entries added or replaced."""
        return replace(self, value={**self.value, **entries})

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def as_text(self) -> str | None:
        """The text of a scalar that stands for a name; None where it is no text and no number."""
        if isinstance(self.value, str):
            return self.value
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        return self.text if is_number else None

    def show(self) -> str:
        """The value for a message."""
        if self.is_map:
            return "a map"
        if isinstance(self.value, list):
            return "a list"
        if self.value is None:
            return "null"
        return repr(self.value) if self.text is None or isinstance(self.value, str) else self.text


def load(text: str, *, source: str) -> Node:
    """Read a recipe file.

    Args:
        source: how messages call the file; values get the origin ``source:line``.

    Raises:
        RecipeError: not YAML, not a map, a key given twice.
    """
    node = _compose(text, source=source)
    if node is None:
        return Node({}, f"{source}:1")
    tree = _Builder(source).build(node)
    if tree.value is None:
        return replace(tree, value={})
    if not tree.is_map:
        raise RecipeError(f"a recipe is a map of keys, found {tree.show()}", origin=tree.origin)
    return tree


def load_value(text: str, *, origin: str) -> Node:
    """Read the value of an override; every part of it gets the same origin.

    Raises:
        RecipeError: not YAML.
    """
    node = _compose(text, source=None)
    return Node(None, origin, text="") if node is None else _Builder(None, origin).build(node)


def resolve_scalar(text: str) -> Any:
    """What a plain scalar stands for: null, a bool, an int, a float, or the text itself."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text) and len(text) < MOST_DIGITS:
        return int(text)
    if _BASED_INTEGER.fullmatch(text) and len(text) < MOST_DIGITS:
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes each string that :func:`resolve_scalar` would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(resolve_scalar(text), str) else "'"
    if any(character in _LINE_BREAKS for character in text):
        style = '"'  # escaped; else PyYAML folds some of them to spaces
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_string)


def dump(value: Any, *, flow: bool = False) -> str:
    """YAML that :func:`load` reads back to the same value. ``flow``: on one line."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=float("inf") if flow else 100,
    )
    # Only the line's end: a string may begin or end with spaces of other kinds, which stand unquoted.
    return text.removesuffix("...\n").rstrip("\n") if flow else text


def _compose(text: str, *, source: str | None) -> yaml.Node | None:
    try:
        loader = yaml.BaseLoader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        origin = f"{source}:{mark.line + 1}" if source and mark else source
        raise RecipeError(f"not valid YAML: {error.problem or error.context}", origin=origin) from None
    except RecursionError:
        raise RecipeError("nested too deeply", origin=source) from None
    except yaml.YAMLError as error:
        raise RecipeError(f"not valid YAML: {' '.join(str(error).split())}", origin=source) from None


class _Builder:
    """Turns PyYAML's nodes (without any types resolved) into ours."""

    def __init__(self, source: str | None, origin: str | None = None) -> None:
        self.source = source
        self.origin = origin
        self.open: list[int] = []

    def where(self, node: yaml.Node) -> str:
        return self.origin or f"{self.source}:{node.start_mark.line + 1}"

    def build(self, node: yaml.Node, at: str | None = None) -> Node:
        """``at``: the origin, where it is that of the key that stands before the value."""
        if node.tag not in _DEFAULT_TAGS:
            raise RecipeError(f"the tag {node.tag} has no meaning in a recipe", origin=self.where(node))
        if id(node) in self.open:
            raise RecipeError("an alias stands for something that contains it", origin=self.where(node))
        origin = at or self.where(node)
        if isinstance(node, yaml.ScalarNode):
            if node.style is not None:
                return Node(node.value, origin)
            return Node(resolve_scalar(node.value), origin, text=node.value)
        self.open.append(id(node))
        value: Any = (
            self._map(node)
            if isinstance(node, yaml.MappingNode)
            else [self.build(item) for item in node.value]
        )
        self.open.pop()
        return Node(value, origin)

    def _map(self, node: yaml.MappingNode) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            at = self.where(key_node)
            if self._is_merge(key_node):
                merged = {**self._merged(value_node, at), **merged}
                continue
            key = self._key(key_node)
            if key in entries:
                raise RecipeError(
                    f"the key {key!r} is given twice (before: {entries[key].origin})", origin=at
                )
            entries[key] = self.build(value_node, at)
        return {**merged, **entries}

    @staticmethod
    def _is_merge(node: yaml.Node) -> bool:
        return isinstance(node, yaml.ScalarNode) and node.style is None and node.value == "<<"

    def _merged(self, node: yaml.Node, at: str) -> dict[str, Node]:
        tree = self.build(node)
        parts = tree.value if isinstance(tree.value, list) else [tree]
        result: dict[str, Node] = {}
        for part in parts:
            if not part.is_map:
                raise RecipeError(f"<< takes a map or a list of maps, found {part.show()}", origin=at)
            result = {**part.value, **result}
        return result

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise RecipeError("a key must be a name", origin=self.where(node))
        text: str = node.value
        if text in ("", "~"):
            raise RecipeError(f"a key must be a name, found {text!r}", origin=self.where(node))
        return text
