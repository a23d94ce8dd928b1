"""A folder with recipe files of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

WriteRecipe = Callable[..., str]


@pytest.fixture
def write_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteRecipe:
    """Writes ``NAME.yaml`` in the current folder and returns its relative path."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "mine") -> str:
        path = Path(f"{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
        return str(path)

    return write
