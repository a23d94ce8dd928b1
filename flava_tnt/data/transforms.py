"""From a picture in any mode to the pixels of the model and of its codebook.

Pixels leave as uint8, channels first; normalisation happens on the device.
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from flava_tnt.plugin import BadSample

MAX_PIXELS = 64 * 1024**2
"""A picture with more is refused before it is decoded: its pixels alone would take 200 MB, and files made to
exhaust memory are found in any crawl."""
CROP_SCALE = (0.9, 1.0)
"""Share of the picture's area (FLAVA's image transform)."""
CROP_RATIO = (3 / 4, 4 / 3)
"""Width / height of a crop, log-uniform (RandomResizedCrop's default, which FLAVA keeps)."""
CROP_TRIES = 10
REDUCING_GAP = 3.0
"""A crop of at least six times the wanted size is first averaged down to no less than three times of it
(Pillow: "almost indistinguishable"); smaller ones are resized exactly."""
_EXIF_ORIENTATION = 0x0112
_OPAQUE_MODES = ("RGB", "L", "CMYK", "YCbCr", "1", "HSV", "F")


@dataclass(frozen=True, kw_only=True)
class Box:
    """A crop, in pixels."""

    left: int
    top: int
    width: int
    height: int


def open_image(data: bytes, sample_id: str) -> Image.Image:
    """Read a picture's header; its pixels are decoded when they are needed.

    Raises:
        BadSample: it is no picture that Pillow knows, or has more than MAX_PIXELS.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower
            image = Image.open(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        raise BadSample(sample_id, str(error)) from error
    except UnidentifiedImageError as error:  # its text has an address in memory
        raise BadSample(sample_id, "no picture of a kind that Pillow reads") from error
    except Exception as error:  # decoders raise whatever damaged bytes lead them to
        raise BadSample(sample_id, f"no picture that can be read ({error})") from error
    _check_size(image, sample_id)
    return image


def to_rgb(image: Image.Image | np.ndarray, sample_id: str) -> Image.Image:
    """The picture upright, in RGB, as a viewer shows it on a white page.

    The EXIF orientation is applied; transparency (an alpha channel, or a transparent colour of a palette)
    becomes white; 16-bit greys are scaled to 8 bits; of an animation the first frame is taken.

    Raises:
        BadSample: it cannot be decoded, has more than MAX_PIXELS, or is an array of another shape or type.
    """
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            found = f"{image.dtype} of shape {image.shape}"
            raise BadSample(sample_id, f"pixels must be uint8 [height, width, 3], not {found}")
        image = Image.fromarray(image)
    _check_size(image, sample_id)
    try:
        return _flatten(_upright(image))
    except Exception as error:
        raise BadSample(sample_id, f"the picture cannot be decoded ({error})") from error


def random_crop(rng: np.random.Generator, width: int, height: int) -> Box:
    """The box of torchvision's RandomResizedCrop with FLAVA's scale and ratio.

    Where ten draws find no box inside the picture, the largest middle part with a permitted ratio.
    """
    area = width * height
    low, high = (math.log(ratio) for ratio in CROP_RATIO)
    for u_scale, u_ratio, u_top, u_left in rng.random((CROP_TRIES, 4)).tolist():
        target = area * (CROP_SCALE[0] + (CROP_SCALE[1] - CROP_SCALE[0]) * u_scale)
        ratio = math.exp(low + (high - low) * u_ratio)
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(u_top * (height - h + 1)), int(u_left * (width - w + 1))
            return Box(left=left, top=top, width=w, height=h)
    w, h = width, height
    if width / height < CROP_RATIO[0]:
        h = max(1, round(width / CROP_RATIO[0]))
    elif width / height > CROP_RATIO[1]:
        w = max(1, round(height * CROP_RATIO[1]))
    return Box(left=(width - w) // 2, top=(height - h) // 2, width=w, height=h)


def crop_twice(
    image: Image.Image, box: Box, image_size: int, codebook_image_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The same crop for the model (bicubic) and for the codebook (Lanczos), uint8 [3, size, size] each."""
    # Cropped before it is resized: with resize(box=...), pixels outside the box would reach into its edges.
    crop = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    return (
        _resize(crop, image_size, Image.Resampling.BICUBIC),
        _resize(crop, codebook_image_size, Image.Resampling.LANCZOS),
    )


def _resize(image: Image.Image, size: int, resampling: Image.Resampling) -> np.ndarray:
    resized = image.resize((size, size), resampling, reducing_gap=REDUCING_GAP)
    return np.ascontiguousarray(np.asarray(resized).transpose(2, 0, 1))


def _check_size(image: Image.Image, sample_id: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadSample(sample_id, f"{width} x {height} pixels are more than the limit of {MAX_PIXELS:,}")


def _upright(image: Image.Image) -> Image.Image:
    try:
        turned = image.getexif().get(_EXIF_ORIENTATION, 1) not in (0, 1)
    except Exception:  # damaged EXIF says nothing about the pixels
        return image
    return ImageOps.exif_transpose(image) if turned else image


def _flatten(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion clips at 255
        image.load()
        grey = np.clip(np.asarray(image, dtype=np.int64), 0, 65_535) / 257
        return Image.fromarray(np.round(grey).astype(np.uint8)).convert("RGB")
    if image.mode in _OPAQUE_MODES and "transparency" not in image.info:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")
