"""Plugins with options of many types, used as ``tests.recipes.plugins_for_tests:NAME``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, model_validator

from flava_tnt.errors import RecipeError
from flava_tnt.plugin import Callback, DataSource, Parallelism, SampleReader, Setup


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    model_config = {"extra": "forbid", "strict": True, "frozen": True}

    depth: int = 1
    label: str = "x"


class Many(Callback):
    """Options of many types."""

    api_version = 1

    text: str = "plain"
    """Text."""
    ratio: float = 0.5
    """A number."""
    count: int = Field(default=1, ge=1, le=10)
    """An integer from 1 to 10."""
    flag: bool = False
    """A switch."""
    pair: tuple[int, float] = (1, 2.0)
    """Two numbers."""
    names: list[str] = []
    """Names."""
    limits: dict[str, float] = {}
    """Numbers by name."""
    colour: Colour = Colour.RED
    """A colour."""
    path: Path = Path("a")
    """A path."""
    mode: Literal["fast", "1e3"] = "fast"
    """A mode."""
    either: int | str | None = None
    """A number or a name."""
    inner: Inner = Inner()
    """Options of options."""

    @model_validator(mode="after")
    def _flag_needs_names(self) -> Many:
        if self.flag and not self.names:
            raise ValueError("flag needs names")
        return self


class NeedsUrl(DataSource):
    """Has an option without a default."""

    api_version = 1

    urls: str | list[str]
    """Where the samples are."""

    def open(self, setup: Setup) -> SampleReader:
        return SampleReader()


class NeedsFull(Callback):
    """Cannot do without full activation checkpointing."""

    api_version = 1
    requires = ("activation_checkpointing:full",)


class HatesFsdp(Callback):
    """Cannot work beside fsdp."""

    api_version = 1
    conflicts = ("parallelism:fsdp",)


class Picky(Callback):
    """Refuses to work."""

    api_version = 1

    wish: int = 0
    """What it wishes for."""

    def check(self, setup: Setup) -> None:
        raise RecipeError(f"{setup.world_size} ranks are not to my taste", key="plugins.callback.picky.wish")


class Halves(Parallelism):
    """Shards over two ranks."""

    api_version = 1

    def num_shards(self, world_size: int) -> int:
        return 2
