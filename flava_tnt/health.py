"""Looks at a plugin's source without importing it: listing must neither run foreign code nor load torch."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_CATCHES_MISSING = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


def find_fault(target: str) -> str | None:
    """What is wrong with ``module:attribute``, as far as the source shows it; None where nothing is.

    A module that cannot be found, a syntax error, an import of a package that is not installed, an
    attribute that the module does not define. What only running the module would show stays unseen.
    """
    module, _, attribute = target.partition(":")
    if not module or not attribute or not all(part.isidentifier() for part in module.split(".")):
        return f"{target!r} is not of the form module:attribute"
    tree: ast.Module | None = None
    for name, spec in _specs(module):
        if spec is None:
            return f"there is no module {name}"
        try:
            tree = _parse(spec)
        except SyntaxError as error:
            return f"{Path(str(spec.origin)).name}:{error.lineno}: {error.msg}"
        except (OSError, UnicodeDecodeError, ValueError) as error:
            return f"cannot read {spec.origin}: {error}"
        missing = _first_missing_import(tree) if tree is not None else None
        if missing is not None:
            return f"{name} imports {missing}, which is not installed"
    defined = _names_defined(tree) if tree is not None else None
    first = attribute.partition(".")[0]
    if defined is not None and first not in defined:
        return f"module {module} does not define {first}"
    return None


def _specs(module: str) -> Iterator[tuple[str, ModuleSpec | None]]:
    """The packages on the way to a module, then the module; none of them is imported."""
    parts = module.split(".")
    spec = _top_level(parts[0])
    yield parts[0], spec
    for number in range(2, len(parts) + 1):
        name = ".".join(parts[:number])
        where = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(name, list(where)) if where is not None else None
        yield name, spec
        if spec is None:
            return


def _top_level(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ValueError, ImportError):  # a module that was made by hand has no spec
        return sys.modules[name].__spec__ if name in sys.modules else None


def _parse(spec: ModuleSpec) -> ast.Module | None:
    """None for what has no source: namespace packages and extension modules."""
    if not spec.has_location or not str(spec.origin).endswith(".py"):
        return None
    return ast.parse(Path(str(spec.origin)).read_bytes(), filename=str(spec.origin))


def _first_missing_import(tree: ast.Module) -> str | None:
    for name in _imports(tree.body):
        if name not in sys.modules and _top_level(name) is None:
            return name
    return None


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    """Top-level packages that running the module imports for certain; guarded imports are left out."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            yield statement.module.partition(".")[0]
        elif isinstance(statement, ast.With | ast.ClassDef | ast.Try) and not _catches_missing(statement):
            yield from _imports(statement.body)


def _catches_missing(statement: ast.stmt) -> bool:
    handlers = statement.handlers if isinstance(statement, ast.Try) else []
    for handler in handlers:
        if handler.type is None:
            return True
        names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
        if names & _CATCHES_MISSING:
            return True
    return False


def _names_defined(tree: ast.Module) -> set[str] | None:
    """Names at the top level of a module; None where they cannot be known (``import *``, ``__getattr__``)."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        pending += ast.iter_child_nodes(node)
    return None if names & {"*", "__getattr__"} else names
