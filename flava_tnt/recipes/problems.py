"""Turns what pydantic finds wrong into one line each: where, which key, what was expected, what was found."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from flava_tnt.errors import PluginError, RecipeError, UserError
from flava_tnt.nearest import did_you_mean, nearest
from flava_tnt.recipes.yaml import Node

Model = TypeVar("Model", bound=BaseModel)

_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "string_sub_type": "a string",
    "none_required": "null",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
    "dataclass_type": "a map",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
}
_WANTS_TEXT = ("string_type", "literal_error", "enum")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a recipe."""

    message: str
    key: str | None
    origin: str | None
    is_plugin: bool = False
    """The fault lies with a plugin, not with the recipe that names it."""

    def error(self) -> UserError:
        error = RecipeError(self.message, key=self.key, origin=self.origin)
        return PluginError(str(error)) if self.is_plugin else error


def raise_problems(problems: list[Problem]) -> None:
    """One error for all of them, a line each; nothing where there is none.

    Raises:
        UserError: a RecipeError, or a PluginError where only plugins are at fault.
    """
    errors = [problem.error() for problem in problems]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        text = "\n".join(dict.fromkeys(str(error) for error in errors))
        raise PluginError(text) if all(problem.is_plugin for problem in problems) else RecipeError(text)


def validate(model: type[Model], tree: Node, *, prefix: str = "") -> tuple[Model | None, Node, list[Problem]]:
    """Check a map against a model.

    The check goes through JSON: types are strict, but lists fill tuples and integers fill floats. Where the
    model wants a string and a plain number stands there, it gets the text as written (``1e3``).

    Args:
        prefix: stands before the keys in messages, e.g. ``"plugins.precision."``.

    Returns:
        the model (None with problems), the tree with such texts in place, and what is wrong.
    """
    while True:
        try:
            return model.model_validate_json(json.dumps(tree.plain())), tree, []
        except ValidationError as error:
            details = error.errors(include_url=False)
            mended = _with_texts(tree, details)
            if mended == tree:
                return None, tree, list(_problems(model, tree, details, prefix))
            tree = mended


def _with_texts(tree: Node, details: list[Any]) -> Node:
    for detail in details:
        path, node = _locate(tree, detail["loc"])
        if detail["type"] in _WANTS_TEXT and not isinstance(node.value, str):
            text = node.as_text()
            if text is not None:
                tree = _replaced(tree, path, Node(text, node.origin))
    return tree


def _locate(tree: Node, loc: tuple[int | str, ...]) -> tuple[list[int | str], Node]:
    """The path in the tree and the node there.

    pydantic puts the names of union members into its path: what is not in the tree is one of those.
    """
    path: list[int | str] = []
    node = tree
    for part in loc:
        is_item = isinstance(node.value, list) and isinstance(part, int) and part < len(node.value)
        if is_item or (node.is_map and part in node.value):
            node = node.value[part]
            path.append(part)
    return path, node


def _replaced(tree: Node, path: list[int | str], node: Node) -> Node:
    if not path:
        return node
    head, rest = path[0], path[1:]
    value = tree.value.copy()
    value[head] = _replaced(value[head], rest, node)
    return replace(tree, value=value)


def _problems(model: type[BaseModel], tree: Node, details: list[Any], prefix: str) -> Iterator[Problem]:
    """One problem for each key; members of a union that all refuse a value are told together."""
    by_key: dict[str, list[Problem]] = {}
    for detail in details:
        loc = detail["loc"]
        if detail["type"] == "missing":
            path, node = _locate(tree, loc[:-1])
            path = [*path, loc[-1]]
            message = _missing(model, path)
        else:
            path, node = _locate(tree, loc)
            is_unknown = detail["type"] == "extra_forbidden"
            message = _unknown(model, path, prefix) if is_unknown else _message(detail, node)
        key = (prefix + ".".join(str(part) for part in path)).rstrip(".")
        by_key.setdefault(key, []).append(Problem(message, key or None, node.origin))
    for problems in by_key.values():
        yield _united(problems)


def _united(problems: list[Problem]) -> Problem:
    first = problems[0]
    messages = list(dict.fromkeys(problem.message for problem in problems))
    parts = [message.partition(", found ") for message in messages]
    if len(messages) > 1 and all(part[0].startswith("expected ") and part[1] for part in parts):
        wanted = " or ".join(dict.fromkeys(part[0].removeprefix("expected ") for part in parts))
        return replace(first, message=f"expected {wanted}, found {parts[0][2]}")
    return replace(first, message="; or ".join(messages))


def _message(detail: Mapping[str, Any], node: Node) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, found {node.show()}"
    if kind in _BOUNDS:
        return f"expected a number {_BOUNDS[kind].format(**context)}, found {node.show()}"
    if kind in ("literal_error", "enum"):
        expected = str(context.get("expected", ""))
        near = nearest(str(node.plain()), re.findall("'([^']*)'", expected))
        hint = f"; did you mean {near}?" if near else ""
        return f"expected one of {expected}, found {node.show()}{hint}"
    if kind in ("value_error", "assertion_error"):
        return " ".join(str(context.get("error", detail["msg"])).split())
    if kind in ("too_short", "too_long"):
        bound = "at least" if kind == "too_short" else "at most"
        length = context.get("min_length", context.get("max_length"))
        return f"expected {bound} {length} items, found {context.get('actual_length')}"
    message = " ".join(detail["msg"].split())
    return f"{message[:1].lower()}{message[1:]}, found {node.show()}"


def _unknown(model: type[BaseModel], path: list[int | str], prefix: str) -> str:
    *parents, name = path
    section = _model_at(model, parents)
    known = list(_fields(section)) if section is not None else []
    inner = prefix + "".join(f"{part}." for part in parents)
    word = "option" if prefix else "key"
    if nearest(str(name), known) is None:
        elsewhere = [key for key in _all_keys(model) if key.rpartition(".")[2] == name]
        if elsewhere:
            return f"unknown {word}; did you mean {prefix}{elsewhere[0]}?"
    return f"unknown {word}{did_you_mean(str(name), known, prefix=inner) or '; there are none'}"


def _missing(model: type[BaseModel], path: list[int | str]) -> str:
    section = _model_at(model, path[:-1])
    field = _fields(section).get(str(path[-1])) if section is not None and path else None
    about = " ".join((field.description or "").split()) if field is not None else ""
    return f"must be given ({about.rstrip('.')})" if about else "must be given"


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _model_at(model: type[BaseModel], path: list[int | str]) -> type[BaseModel] | None:
    for part in path:
        field = _fields(model).get(str(part))
        found = next(_models_in(field.annotation), None) if field is not None else None
        if found is None:
            return None
        model = found
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in _fields(model).items():
        yield prefix + name
        inner = next(_models_in(field.annotation), None)
        if inner is not None and inner is not model:
            yield from _all_keys(inner, f"{prefix}{name}.")
