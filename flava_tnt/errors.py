"""Errors that people see: one clear line that says what was found, where, and what to do instead.

Everything a user can get wrong raises a subclass of :class:`UserError` before any process group exists;
the command prints its text and ends with exit code 2. Anything else is a bug or a failure of the machine
and ends with exit code 1.
"""

from __future__ import annotations


class FlavaTntError(Exception):
    """The root of all errors that this package raises on purpose."""


class UserError(FlavaTntError):
    """Wrong input: the message is one line for the person who gave it. Exit code 2."""


class RecipeError(UserError):
    """A recipe file or an override is wrong.

    Args:
        message: what is wrong and what to do instead.
        key: dotted key in the recipe (``batch.local``), if one is to blame.
        origin: where the value came from: ``recipes/x.yaml:12`` or ``command line``.
    """

    def __init__(self, message: str, *, key: str | None = None, origin: str | None = None) -> None:
        self.key = key
        self.origin = origin
        where = ": ".join(part for part in (origin, key) if part)
        super().__init__(f"{where}: {message}" if where else message)


class PluginError(UserError):
    """A plugin is unknown, broken, registered twice, of another API version, or does not fit the recipe."""


class DataError(UserError):
    """A data source is missing, empty, truncated, too small, or has too many bad samples."""


class TrainingError(FlavaTntError):
    """Training cannot go on (a loss that is not finite, ranks that disagree). Exit code 1."""
