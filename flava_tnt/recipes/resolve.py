"""From a recipe's name and overrides to checked values and plugin instances; still no torch, no process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flava_tnt.errors import PluginError
from flava_tnt.plugin import KINDS, Plugin
from flava_tnt.recipes import yaml
from flava_tnt.recipes.checks import check_setup
from flava_tnt.recipes.compose import DEFAULT, compose
from flava_tnt.recipes.problems import Problem, raise_problems, validate
from flava_tnt.recipes.schema import PluginChoice, Recipe
from flava_tnt.recipes.yaml import Node
from flava_tnt.registry import PluginEntry, load_plugin

__all__ = ["Resolved", "check_setup", "resolve"]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A recipe whose every key and option has been checked by type. Equal where the values are equal."""

    recipe: Recipe
    """`recipe.plugins` holds all options of each plugin, defaults among them."""
    plugins: dict[str, dict[str, Plugin]]
    """Kind, then label, then plugin; kinds without a plugin are left out."""
    entries: dict[str, dict[str, PluginEntry]]
    tree: Node = field(compare=False, repr=False)
    """What was given, with origins."""

    def origin(self, key: str) -> str:
        """Where a value came from: ``recipes/x.yaml:12``, ``command line`` or ``default``.

        Args:
            key: dotted, as in an override: ``batch.local``, ``plugins.precision.tf32``,
                ``plugins.callback.throughput.skip_steps``.
        """
        return _origin(self.tree, key)

    def to_yaml(self, *, with_origins: bool = False) -> str:
        """The recipe in full, runnable as it is.

        Args:
            with_origins: say behind each value where it came from.
        """
        values = self._values()
        if not with_origins:
            return yaml.dump(values)
        return "".join(f"{line}\n" for line in _annotated(values, self.tree, ()))

    def plugins_json(self) -> list[dict[str, Any]]:
        """What `plugins.json` holds: each plugin that is used and the distribution it comes from."""
        return [
            {
                "kind": kind,
                "label": label,
                "name": entry.name,
                "target": entry.target,
                "distribution": entry.distribution,
                "version": entry.version,
            }
            for kind, label, entry in _iterate(self.entries)
        ]

    def digest(self) -> str:
        """A digest of the resolved recipe and the plugins' versions: equal on ranks that agree."""
        text = json.dumps([self._values(), self.plugins_json()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _values(self) -> dict[str, Any]:
        values = self.recipe.model_dump(mode="json", by_alias=True, exclude={"plugins"})
        values = {section: _without_null_choice(section, value) for section, value in values.items()}
        plugins: dict[str, Any] = {}
        for kind, choices in self.recipe.plugins.items():
            shown = {label: {"use": choice.use, **choice.options} for label, choice in choices.items()}
            plugins[kind] = shown if KINDS[kind].takes_many else next(iter(shown.values()))
        return {**values, "plugins": plugins}


def resolve(recipe: str, overrides: Sequence[str] = ()) -> Resolved:
    """Compose a recipe, check every key, and make its plugins.

    Args:
        recipe: the name of one that comes along, or the path of a ``.yaml`` file.
        overrides: ``KEY=VALUE`` each, the later over the earlier.

    Raises:
        RecipeError: whatever is wrong, a line each, with file, line and key.
        PluginError: a plugin is unknown, broken, registered twice, or of another version of the contract.
    """
    tree = compose(recipe, overrides)
    sections = replace(tree, value={key: node for key, node in tree.value.items() if key != "plugins"})
    checked, sections, problems = validate(Recipe, sections)
    plugins: dict[str, dict[str, Plugin]] = {}
    entries: dict[str, dict[str, PluginEntry]] = {}
    choices: dict[str, dict[str, PluginChoice]] = {}
    for key, kind, label, node in _chosen(tree):
        plugin, entry, found = _make_plugin(key, kind, label, node)
        problems += found
        if plugin is not None and entry is not None:
            use = _use_of(node, label)
            label = label or use
            plugins.setdefault(kind, {})[label] = plugin
            entries.setdefault(kind, {})[label] = entry
            options = plugin.model_dump(mode="json", by_alias=True)
            choices.setdefault(kind, {})[label] = PluginChoice(use=use, **options)
    raise_problems(problems)
    assert checked is not None
    return Resolved(
        recipe=checked.model_copy(update={"plugins": choices}), plugins=plugins, entries=entries, tree=tree
    )


def _chosen(tree: Node) -> Iterator[tuple[str, str, str | None, Node]]:
    """The plugins that are switched on, as (key, kind, label, node), in the order of the phases.

    The label is None for a kind that a recipe takes one of.
    """
    for kind, rule in KINDS.items():
        node = tree.get("plugins", kind)
        if node is None or node.value is None:
            continue
        if not rule.takes_many:
            yield f"plugins.{kind}", kind, None, node
            continue
        for label, choice in node.value.items():
            if choice.value is not None:
                yield f"plugins.{kind}.{label}", kind, label, choice


def _use_of(node: Node, label: str | None) -> str:
    use = node.get("use")
    return str(use.value) if use is not None else str(label)


def _make_plugin(
    key: str, kind: str, label: str | None, node: Node
) -> tuple[Plugin | None, PluginEntry | None, list[Problem]]:
    use = node.get("use")
    if use is None and label is None:
        return None, None, [Problem(_no_use(key, node), key, node.origin)]
    try:
        plugin_class, entry = load_plugin(kind, _use_of(node, label))
    except PluginError as error:
        origin = (use or node).origin
        return None, None, [Problem(str(error), key, origin, is_plugin=True)]
    options = replace(node, value={name: value for name, value in node.value.items() if name != "use"})
    plugin, _, problems = validate(plugin_class, options, prefix=f"{key}.")
    return plugin, entry, problems


def _no_use(key: str, node: Node) -> str:
    names = list(node.value)
    if len(names) == 1 and (node.value[names[0]].is_map or node.value[names[0]].value is None):
        return f"names no plugin; did you mean {key}: {{use: {names[0]}, ...}}?"
    return f"names no plugin; write {key}: NAME, or {{use: NAME, option: value}}"


# --------------------------------------------------------------------------------------------- shown


def _iterate(entries: dict[str, dict[str, PluginEntry]]) -> Iterator[tuple[str, str, PluginEntry]]:
    for kind, by_label in entries.items():
        for label, entry in by_label.items():
            yield kind, label, entry


def _without_null_choice(section: str, value: Any) -> Any:
    """Of `batch.local` and `batch.global`, only the one that was given."""
    if section != "batch":
        return value
    return {key: item for key, item in value.items() if item is not None or key == "micro"}


def _origin(node: Node, key: str) -> str:
    if not key:
        return node.origin
    children: list[tuple[str, Node]] = []
    if node.is_map:
        children = list(node.value.items())
    elif isinstance(node.value, list):
        children = [(str(number), item) for number, item in enumerate(node.value)]
    for name, child in sorted(children, key=lambda item: -len(item[0])):  # a label may have dots in it
        if key == name or key.startswith(f"{name}."):
            return _origin(child, key[len(name) + 1 :])
    return DEFAULT


def _annotated(value: Any, tree: Node, path: tuple[str, ...]) -> Iterator[str]:
    """Lines of YAML with origins as comments."""
    for name, item in value.items():
        indent = "  " * len(path)
        shown = yaml.dump([name], flow=True)[1:-1] + ":"
        here = (*path, name)
        if isinstance(item, dict) and item:
            yield f"{indent}{shown}"
            yield from _annotated(item, tree, here)
        else:
            origin = _origin(tree, ".".join(here))
            yield f"{indent}{shown} {yaml.dump(item, flow=True)}  # {origin}"
