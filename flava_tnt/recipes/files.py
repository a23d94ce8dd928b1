"""Finds recipe files: those that come along by name, others by path."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from flava_tnt.errors import RecipeError
from flava_tnt.nearest import did_you_mean

SHIPPED = "flava_tnt_recipes"
"""The package that holds the recipes that come along."""
_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class RecipeFile:
    """A recipe file that was found."""

    name: str
    shown: str
    """How messages call it."""
    text: str
    path: Path | None = None
    """None for one that comes along: it is read from its package, which may be an archive."""

    @property
    def identity(self) -> str:
        """The same for two ways to one file."""
        return str(self.path.resolve()) if self.path else self.shown

    @property
    def description(self) -> str:
        """The first comment line, which says what the recipe is."""
        first = next(iter(self.text.splitlines()), "")
        return first.lstrip("# ").strip() if first.startswith("#") else ""


def shipped_recipes() -> list[RecipeFile]:
    """The recipes that come along, by name; those that others only extend are among them."""
    folder = resources.files(SHIPPED)
    files = [item for item in folder.iterdir() if item.name.endswith(".yaml")]
    return [
        RecipeFile(item.name.removesuffix(".yaml"), f"recipes/{item.name}", item.read_text("utf-8"))
        for item in sorted(files, key=lambda item: item.name)
    ]


def find_recipe(name: str, *, beside: Path | None = None, origin: str | None = None) -> RecipeFile:
    """A recipe by name (one that comes along) or by path (a ``.yaml`` file).

    Args:
        beside: the folder from which a relative path starts; None: the current one.
        origin: where the name was given, for messages.

    Raises:
        RecipeError: there is none; the message gives the nearest names.
    """
    if name.endswith(_ENDINGS) or "/" in name or "\\" in name:
        return _read_file(Path(name) if beside is None else beside / name, origin)
    for item in (entry for entry in resources.files(SHIPPED).iterdir() if entry.name == f"{name}.yaml"):
        return RecipeFile(name, f"recipes/{item.name}", item.read_text("utf-8"))
    known = [recipe.name for recipe in shipped_recipes()]
    hint = did_you_mean(name, known, listed=True)
    raise RecipeError(f"unknown recipe {name!r}{hint} (or give the path of a .yaml file)", origin=origin)


def _read_file(path: Path, origin: str | None) -> RecipeFile:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        siblings = [item.name for item in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        shipped = [f"{recipe.name}.yaml" for recipe in shipped_recipes()]
        if path.name in shipped:
            hint = f"; did you mean {path.stem}, which comes along?"
        else:
            hint = did_you_mean(path.name, siblings)
        raise RecipeError(f"there is no recipe file {path}{hint}", origin=origin) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RecipeError("not UTF-8", origin=f"{path}:{line}") from None
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}", origin=origin) from None
    return RecipeFile(path.stem, str(path), text, path)
