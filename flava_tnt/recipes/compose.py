"""Puts a recipe together: files that extend others, then overrides, one layer over the other.

Maps merge, everything else is replaced, and each value keeps the place that it came from. Two rules go
beyond that: naming one of ``batch.local`` and ``batch.global`` removes the other, and naming another plugin
drops the options of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flava_tnt.errors import RecipeError
from flava_tnt.nearest import did_you_mean
from flava_tnt.plugin import KINDS
from flava_tnt.recipes import yaml
from flava_tnt.recipes.files import RecipeFile, find_recipe
from flava_tnt.recipes.yaml import Node

COMMAND_LINE = "command line"
DEFAULT = "default"
_EXCLUSIVE = {"local": "global", "global": "local"}


def compose(recipe: str, overrides: Sequence[str] = ()) -> Node:
    """The tree of a whole recipe; its section ``plugins`` is in normal form (see :func:`normalise_plugins`).

    The key ``name`` is the recipe's, unless a layer sets it.

    Raises:
        RecipeError: unknown recipe, bad YAML, a cycle of ``extends``, a bad override, an unknown kind.
    """
    file = find_recipe(recipe)
    layers: list[Node] = []
    _collect(file, layers, open_files={}, done=set())
    layers += [parse_override(override) for override in overrides]
    tree = Node({"name": Node(file.name, DEFAULT)}, file.shown)
    for layer in layers:
        tree = merge(tree, layer)
    return tree


def _collect(file: RecipeFile, layers: list[Node], open_files: dict[str, str], done: set[str]) -> None:
    """Add a file's layers, parents first. A parent of several files stands once, before all of them, so
    that none of them undoes what another one changed."""
    if file.identity in done:
        return
    open_files = {**open_files, file.identity: file.shown}
    tree = yaml.load(file.text, source=file.shown)
    extends = tree.value.pop("extends", None)
    for name, origin in _parents(extends):
        parent = find_recipe(name, beside=file.path.parent if file.path else None, origin=origin)
        if parent.identity in open_files:
            chain = " -> ".join([*open_files.values(), parent.shown])
            raise RecipeError(f"a cycle: {chain}", key="extends", origin=origin)
        _collect(parent, layers, open_files, done)
    done.add(file.identity)
    layers.append(normalise_plugins(tree))


def _parents(extends: Node | None) -> list[tuple[str, str]]:
    """The names that a file extends, with their origins."""
    if extends is None or extends.value is None:
        return []
    nodes = extends.value if isinstance(extends.value, list) else [extends]
    names = []
    for node in nodes:
        name = node.as_text()
        if name is None:
            raise RecipeError(
                f"takes a recipe's name or a list of them, found {node.show()}",
                key="extends",
                origin=node.origin,
            )
        names.append((name, node.origin))
    return names


def parse_override(override: str) -> Node:
    """``KEY=VALUE`` as a layer. Split at the first ``=``; the value is YAML.

    Raises:
        RecipeError: no ``=``, an empty part in the key, a value that is not YAML.
    """
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator:
        raise RecipeError(f"an override is KEY=VALUE, found {override!r}", origin=COMMAND_LINE)
    parts = key.split(".")
    if not all(part.strip() == part and part not in ("", "~") for part in parts):
        raise RecipeError(f"{key!r} is no key: it takes names with dots between them", origin=COMMAND_LINE)
    if parts[0] == "extends":
        raise RecipeError("stands in files only", key="extends", origin=COMMAND_LINE)
    try:
        node = yaml.load_value(text, origin=COMMAND_LINE)
    except RecipeError as error:
        quoted = "'" + text.replace("'", "''") + "'"
        raise RecipeError(
            f'{error}; to give it as text, quote it: {key}={quoted} (in a shell: "{key}={quoted}")',
            key=key,
            origin=COMMAND_LINE,
        ) from None
    for part in reversed(parts):
        node = Node({part: node}, COMMAND_LINE)
    return normalise_plugins(node)


# ------------------------------------------------------------------------------------------- plugins


def normalise_plugins(layer: Node) -> Node:
    """A layer with its ``plugins`` in normal form.

    A kind that a recipe takes one of is a map with ``use`` and options, or null. A kind that it takes many
    of is a map from label to the same; written as a name or as a list of names it is the whole kind
    (``names_all``).

    Raises:
        RecipeError: an unknown kind, or something else where a plugin should be.
    """
    section = layer.get("plugins")
    if section is None:
        return layer
    if not section.is_map:
        raise RecipeError(
            f"takes a map by kind ({', '.join(KINDS)}), found {section.show()}",
            key="plugins",
            origin=section.origin,
        )
    kinds = {}
    for kind, node in section.value.items():
        key = f"plugins.{kind}"
        if kind not in KINDS:
            hint = did_you_mean(kind, KINDS, prefix="plugins.")
            raise RecipeError(f"unknown kind of plugin{hint}", key=key, origin=node.origin)
        kinds[kind] = _normalise_many(key, node) if KINDS[kind].takes_many else _normalise_one(key, node)
    return layer.with_entries(plugins=replace(section, value=kinds))


def _normalise_one(key: str, node: Node) -> Node:
    """``fsdp`` or ``{use: fsdp, ...}`` or options alone or null, as a map or null."""
    if node.value is None or node.is_map:
        return _with_use_as_text(key, node)
    name = node.as_text()
    if name is None:
        raise RecipeError(
            f"takes a plugin's name or a map {{use: NAME, option: value}}, found {node.show()}",
            key=key,
            origin=node.origin,
        )
    return Node({"use": Node(name, node.origin)}, node.origin)


def _with_use_as_text(key: str, node: Node) -> Node:
    use = node.get("use")
    if use is None:
        return node
    name = use.as_text()
    if not name:
        raise RecipeError(f"takes a plugin's name, found {use.show()}", key=f"{key}.use", origin=use.origin)
    return node.with_entries(use=Node(name, use.origin))


def _normalise_many(key: str, node: Node) -> Node:
    if node.value is None:
        return Node({}, node.origin, names_all=True)
    if node.is_map:
        labels = {label: _normalise_one(f"{key}.{label}", item) for label, item in node.value.items()}
        return replace(node, value=labels)
    items = node.value if isinstance(node.value, list) else [node]
    labels = {}
    for item in items:
        if item.is_map and len(item.value) == 1:
            ((label, options),) = item.value.items()
            labels[label] = _normalise_one(f"{key}.{label}", options)
            continue
        name = item.as_text()
        if name is None:
            raise RecipeError(
                f"takes names of plugins, or a map from name to options, found {item.show()}",
                key=key,
                origin=item.origin,
            )
        labels[name] = Node({}, item.origin)
    return Node(labels, node.origin, names_all=True)


# --------------------------------------------------------------------------------------------- merge


def merge(base: Node, layer: Node) -> Node:
    """One layer over another; both with ``plugins`` in normal form."""
    merged = _merge_maps(base, layer)
    entries = {}
    batch, plugins = layer.get("batch"), layer.get("plugins")
    if batch is not None and batch.is_map and "batch" in base.value:
        entries["batch"] = _merge_batch(base.value["batch"], batch)
    if plugins is not None and "plugins" in base.value:
        entries["plugins"] = _merge_plugins(base.value["plugins"], plugins)
    return replace(merged.with_entries(**entries), origin=base.origin)


def _merge_maps(base: Node, layer: Node) -> Node:
    """Maps merge, everything else is replaced. A map's origin is that of the last layer with a part in it."""
    if not (base.is_map and layer.is_map):
        return layer
    entries = dict(base.value)
    for key, node in layer.value.items():
        entries[key] = _merge_maps(entries[key], node) if key in entries else node
    return Node(entries, layer.origin)


def _merge_batch(base: Node, layer: Node) -> Node:
    named = {key for key in _EXCLUSIVE if (node := layer.get(key)) is not None and node.value is not None}
    if len(named) == 1 and base.is_map:
        other = _EXCLUSIVE[named.pop()]
        base = replace(base, value={key: node for key, node in base.value.items() if key != other})
    return _merge_maps(base, layer)


def _merge_plugins(base: Node, layer: Node) -> Node:
    kinds = dict(base.value)
    for kind, node in layer.value.items():
        before = kinds.get(kind)
        if before is None:
            kinds[kind] = node
        elif KINDS[kind].takes_many:
            kinds[kind] = _merge_labels(before, node)
        else:
            kinds[kind] = _merge_choice(before, node, label=None)
    return Node(kinds, layer.origin)


def _merge_labels(base: Node, layer: Node) -> Node:
    labels = {
        label: node for label, node in base.value.items() if not layer.names_all or label in layer.value
    }
    for label, node in layer.value.items():
        labels[label] = _merge_choice(labels[label], node, label=label) if label in labels else node
    return Node(labels, layer.origin)


def _merge_choice(base: Node, layer: Node, *, label: str | None) -> Node:
    """Options merge while the plugin stays the same; another plugin starts afresh."""
    use = layer.get("use")
    before = base.get("use")
    name_before = before.value if before is not None else label
    if use is not None and use.value != name_before:
        return layer
    return _merge_maps(base, layer)
