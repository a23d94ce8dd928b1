"""The nearest name to one that is unknown, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_NAMES_SHOWN = 12


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``name``, upper and lower case alike; None where none is near."""
    by_folded = {candidate.casefold(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def did_you_mean(name: str, candidates: Iterable[str], *, prefix: str = "", listed: bool = False) -> str:
    """The end of a message about an unknown name: ``"; did you mean X?"`` and what names there are.

    Args:
        prefix: stands before the name that is proposed, e.g. ``"batch."``.
        listed: give the names also where one is near.
    """
    names = list(candidates)
    near = nearest(name, names)
    end = f"; did you mean {prefix}{near}?" if near is not None else ""
    if names and (listed or near is None):
        shown = ", ".join(names[:MOST_NAMES_SHOWN])
        more = len(names) - MOST_NAMES_SHOWN
        separator = " " if end else "; "
        end += f"{separator}there are: {shown}" + (f" and {more} more" if more > 0 else "")
    return end
