"""The command ``flava-tnt``: ``run``, ``plugins list|show|check``, ``recipes list|show``.

Listing and help import no torch and no plugin; ``show``, ``check`` and ``list --load`` import the plugins
that they are about. Exit codes: 0, 1 (a check failed), 2 (wrong input).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from flava_tnt import __version__
from flava_tnt.errors import PluginError, UserError

if TYPE_CHECKING:
    from flava_tnt.registry import PluginEntry

PIPED_WIDTH = 200
"""Columns of a table that goes to a file or another program."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _use_current_folder()
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _use_current_folder() -> None:
    """Find modules of the current folder (``module:attribute``), as ``python -m`` does."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        from flava_tnt.recipes.run import main as run

        return run(arguments[1:])
    options = make_parser().parse_args(arguments)
    command: Any = options.command
    return int(command(options))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flava-tnt", description="Pretrain FLAVA from plugins and a recipe, from a laptop to many nodes."
    )
    parser.add_argument("--version", action="version", version=f"flava-tnt {__version__}")
    rooms = parser.add_subparsers(metavar="COMMAND", required=True)
    rooms.add_parser("run", help="train; the same as python -m flava_tnt.recipes.run", add_help=False)
    _add_plugins(rooms)
    _add_recipes(rooms)
    return parser


def _add_plugins(rooms: Any) -> None:
    parser = rooms.add_parser("plugins", help="list, show and check plugins")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="all registered plugins; imports none of them")
    listing.add_argument("--kind", metavar="KIND", help="of one kind only, e.g. callback")
    listing.add_argument("--load", action="store_true", help="import each, and say what fails")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(command=_plugins_list)
    show = commands.add_parser("show", help="a plugin's description and options")
    show.add_argument("name", metavar="NAME", help="NAME, KIND:NAME, or DIST/NAME")
    show.set_defaults(command=_plugins_show)
    check = commands.add_parser("check", help="hold a distribution's plugins against the contract")
    check.add_argument("distribution", metavar="DIST", help="name of an installed distribution")
    check.set_defaults(command=_plugins_check)


def _add_recipes(rooms: Any) -> None:
    parser = rooms.add_parser("recipes", help="list and show recipes")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="the recipes that come along")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(command=_recipes_list)
    show = commands.add_parser("show", help="a recipe's file, or all its values and where they come from")
    show.add_argument("recipe", metavar="RECIPE", help="a name or the path of a .yaml file")
    show.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="overrides; they imply --resolved")
    show.add_argument("--resolved", action="store_true", help="all values, after extends and overrides")
    show.set_defaults(command=_recipes_show)


# ------------------------------------------------------------------------------------------- plugins


def _plugins_list(options: argparse.Namespace) -> int:
    from flava_tnt.registry import list_plugins

    if options.kind is not None:
        _check_kind(options.kind)
    entries = list_plugins(options.kind)
    if options.load:
        entries = [_loaded(entry) for entry in entries]
    if options.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return 0
    rows = [(entry.kind, entry.name, entry.owner, entry.target, entry.status) for entry in entries]
    _print_table(("kind", "name", "distribution", "target", "status"), rows)
    return 0


def _loaded(entry: PluginEntry) -> PluginEntry:
    """The entry with what importing it brings up as its status."""
    from flava_tnt.contract import fatal_fault
    from flava_tnt.registry import import_entry

    if not entry.is_ok:
        return entry
    try:
        fault = fatal_fault(import_entry(entry), entry.kind)
    except PluginError as error:
        fault = str(error)
    return entry if fault is None else replace(entry, status=f"broken: {fault}")


def _plugins_show(options: argparse.Namespace) -> int:
    import inspect

    from flava_tnt.registry import load_plugin

    kind, use = _kind_and_use(options.name)
    plugin, entry = load_plugin(kind, use)
    print(f"{entry.name}: {kind} plugin of {entry.owner} ({entry.target})\n")
    print(inspect.getdoc(plugin) or "(no description)", end="\n\n")
    for word, others in (("requires", plugin.requires), ("conflicts with", plugin.conflicts)):
        if others:
            print(f"{word} {', '.join(others)}\n")
    rows = []
    for name, field in plugin.model_fields.items():
        default = (
            "(must be given)" if field.is_required() else repr(field.get_default(call_default_factory=True))
        )
        about = " ".join((field.description or "").split())
        rows.append((field.alias or name, _type_name(field.annotation), default, about))
    if rows:
        _print_table(("option", "type", "default", "description"), rows)
    else:
        print("It has no options.")
    return 0


def _check_kind(kind: str) -> None:
    from flava_tnt.nearest import did_you_mean
    from flava_tnt.plugin import KINDS

    if kind not in KINDS:
        raise PluginError(f"unknown kind of plugin {kind!r}{did_you_mean(kind, KINDS, listed=True)}")


def _kind_and_use(name: str) -> tuple[str, str]:
    """What NAME, KIND:NAME or DIST/NAME stands for.

    Raises:
        PluginError: nothing, or plugins of several kinds.
    """
    from flava_tnt.nearest import did_you_mean
    from flava_tnt.plugin import KINDS
    from flava_tnt.registry import list_plugins

    kind, colon, rest = name.partition(":")
    if colon:
        _check_kind(kind)
        return kind, rest
    plain = name.rpartition("/")[2]
    entries = list_plugins()
    kinds = list(
        dict.fromkeys(entry.kind for entry in entries if entry.name == plain and entry.kind in KINDS)
    )
    if not kinds:
        names = sorted({entry.name for entry in entries})
        raise PluginError(f"unknown plugin {name!r}{did_you_mean(plain, names, listed=True)}")
    if len(kinds) > 1:
        choices = " or ".join(f"{kind}:{name}" for kind in kinds)
        raise PluginError(f"{name!r} is of several kinds; choose {choices}")
    return kinds[0], name


def _type_name(annotation: Any) -> str:
    """A type as one would write it, without what bounds its values."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type_name, arguments))
    if annotation is type(None):
        return "None"
    name = getattr(annotation, "__name__", str(annotation))
    if not arguments:
        return str(name)
    inner = ", ".join("..." if argument is ... else _type_name(argument) for argument in arguments)
    return f"{name}[{inner}]"


def _plugins_check(options: argparse.Namespace) -> int:
    from flava_tnt.contract import contract_faults
    from flava_tnt.nearest import did_you_mean
    from flava_tnt.registry import import_entry, list_plugins, normalised

    entries = list_plugins()
    wanted = normalised(options.distribution)
    mine = [entry for entry in entries if entry.distribution and normalised(entry.distribution) == wanted]
    if not mine:
        known = sorted({entry.distribution for entry in entries if entry.distribution})
        hint = did_you_mean(options.distribution, known, listed=True)
        raise PluginError(f"no distribution {options.distribution!r} registers a plugin{hint}")
    failed = 0
    for entry in mine:
        faults = [] if entry.is_ok else [entry.status]
        if not entry.status.startswith("broken"):
            try:
                faults += contract_faults(import_entry(entry), entry.kind)
            except PluginError as error:
                faults.append(str(error))
        failed += bool(faults)
        print(f"{'FAIL' if faults else 'ok  '} {entry.kind}:{entry.name} ({entry.target})")
        for fault in faults:
            print(f"     {fault}")
    print(f"{len(mine) - failed} of {len(mine)} plugins of {mine[0].owner} keep the contract")
    return 1 if failed else 0


# ------------------------------------------------------------------------------------------- recipes


def _recipes_list(options: argparse.Namespace) -> int:
    from flava_tnt.recipes.files import shipped_recipes

    recipes = shipped_recipes()
    if options.json:
        rows = [{"name": recipe.name, "description": recipe.description} for recipe in recipes]
        print(json.dumps(rows, indent=2))
        return 0
    _print_table(("name", "description"), [(recipe.name, recipe.description) for recipe in recipes])
    return 0


def _recipes_show(options: argparse.Namespace) -> int:
    if options.resolved or options.overrides:
        from flava_tnt.recipes.resolve import resolve

        print(resolve(options.recipe, options.overrides).to_yaml(with_origins=True), end="")
        return 0
    from flava_tnt.recipes.files import find_recipe

    print(find_recipe(options.recipe).text, end="")
    return 0


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    is_terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if is_terminal else PIPED_WIDTH)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


if __name__ == "__main__":
    sys.exit(main())
