"""Small pictures drawn on the fly, with captions that describe them: nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field

from flava_tnt.plugin import DataSource, Modality, Sample, SampleReader, Setup
from flava_tnt.position import generator

SHAPES = ("circle", "square", "triangle", "diamond", "ring", "cross")
COLOURS = {
    "red": (215, 40, 40),
    "orange": (245, 140, 20),
    "yellow": (240, 220, 50),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "purple": (140, 50, 170),
    "pink": (245, 130, 180),
    "brown": (120, 75, 40),
}
SIZES = {"small": 0.12, "medium": 0.19, "large": 0.28}
"""Half the shape's extent, as a share of the picture."""
PLACES = (
    ("top left", "top", "top right"),
    ("left", "centre", "right"),
    ("bottom left", "bottom", "bottom right"),
)
PHRASINGS = (
    "a {size} {colour} {shape} at the {place}",
    "{size} {colour} {shape}, {place}",
    "at the {place} there is a {size} {colour} {shape}",
    "a picture with a {size} {shape} in {colour} at the {place}",
)
BACKGROUND = (225, 250)
"""Darkest and lightest shade of the background."""


class Demo(DataSource):
    """Coloured shapes of three sizes at nine places, each picture with a caption that says so."""

    api_version = 1

    num_samples: int = Field(default=20_000, ge=1)
    """Samples of an epoch; each is a function of its index alone."""
    image_size: int = Field(default=72, ge=16)
    """Height and width of the drawn pictures, in pixels."""

    def open(self, setup: Setup) -> SampleReader:
        return DemoReader(self.num_samples, self.image_size)


class DemoReader(SampleReader):
    """Draws pictures of ``image_size`` pixels."""

    def __init__(self, num_samples: int, image_size: int) -> None:
        self._num_samples = num_samples
        self._image_size = image_size

    def __len__(self) -> int:
        return self._num_samples

    def read(self, index: int) -> Sample:
        return self.read_for(index, "pairs")

    def read_for(self, index: int, modality: Modality) -> Sample:
        """The sample; a text-only batch has its picture left undrawn."""
        rng = generator(0, "demo", index)
        shape, colour, size, phrasing = (
            _choose(rng, choices) for choices in (SHAPES, COLOURS, SIZES, PHRASINGS)
        )
        row, column = (int(rng.random() * 3) for _ in range(2))
        caption = phrasing.format(size=size, colour=colour, shape=shape, place=PLACES[row][column])
        image = None
        if modality != "text":
            image = _draw(rng, self._image_size, shape, colour, size, (column, row))
        return Sample(id=f"demo-{index:06d}", image=image, text=caption)


def _choose(rng: np.random.Generator, choices: Iterable[str]) -> str:
    words = tuple(choices)
    return words[int(rng.random() * len(words))]


def _draw(
    rng: np.random.Generator,
    pixels: int,
    shape: str,
    colour: str,
    size: str,
    place: tuple[int, int],
) -> Image.Image:
    """One shape; its shade, size and place vary a little within what their words allow."""
    shade = round(rng.uniform(*BACKGROUND))
    fill = tuple(int(np.clip(round(value + rng.uniform(-12, 12)), 0, 255)) for value in COLOURS[colour])
    radius = SIZES[size] * rng.uniform(0.9, 1.1) * pixels
    x, y = (
        (cell + 0.5) / 3 * 0.9 * pixels + 0.05 * pixels + rng.uniform(-0.03, 0.03) * pixels for cell in place
    )
    image = Image.new("RGB", (pixels, pixels), (shade, shade, shade))
    _draw_shape(ImageDraw.Draw(image), shape, x, y, radius, fill)
    return image


def _draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, fill: tuple[int, ...]
) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, fill=fill)
    elif shape == "ring":
        draw.ellipse(box, outline=fill, width=max(2, round(radius * 0.4)))
    elif shape == "square":
        draw.rectangle(box, fill=fill)
    elif shape == "cross":
        arm = radius * 0.35
        draw.rectangle((x - radius, y - arm, x + radius, y + arm), fill=fill)
        draw.rectangle((x - arm, y - radius, x + arm, y + radius), fill=fill)
    else:
        corners, first = (3, -90) if shape == "triangle" else (4, 0)
        angles = [math.radians(first + 360 / corners * corner) for corner in range(corners)]
        draw.polygon([(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles], fill=fill)
