from __future__ import annotations

import io

import numpy as np
import pytest
import torchvision.transforms.v2.functional as tvf
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode, RandomResizedCrop

from flava_tnt.data import transforms
from flava_tnt.data.transforms import Box, crop_twice, open_image, random_crop, to_rgb
from flava_tnt.plugin import BadSample
from flava_tnt.position import generator
from tests.data.helpers import picture_bytes


def reopened(image: Image.Image, kind: str = "PNG", **options: object) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return open_image(buffer.getvalue(), "x")


def pixel(image: Image.Image, x: int = 0, y: int = 0) -> tuple[int, ...]:
    rgb = to_rgb(image, "x")
    assert rgb.mode == "RGB"
    value = rgb.getpixel((x, y))
    assert isinstance(value, tuple)
    return value


# ----------------------------------------------------------------------------------------------- RGB


def test_transparency_becomes_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert pixel(reopened(image)) == (255, 0, 0)
    assert pixel(reopened(image), 1) == (255, 255, 255)


def test_half_transparency_is_mixed_with_white() -> None:
    assert pixel(reopened(Image.new("RGBA", (1, 1), (0, 0, 0, 128)))) == (127, 127, 127)
    assert pixel(reopened(Image.new("LA", (1, 1), (0, 128)))) == (127, 127, 127)


def test_a_palette_is_looked_up_and_its_transparent_colour_becomes_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    assert pixel(reopened(image), 1) == (40, 50, 60)
    transparent = reopened(image, transparency=1)
    assert transparent.mode == "P"
    assert pixel(transparent) == (10, 20, 30)
    assert pixel(transparent, 1) == (255, 255, 255)


def test_a_transparent_colour_of_an_rgb_picture_becomes_white() -> None:
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))
    reread = reopened(image, transparency=(9, 9, 9))
    assert pixel(reread) == (1, 2, 3)
    assert pixel(reread, 1) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_clipped(kind: str) -> None:
    grey = np.array([[0, 32_768, 65_535]], dtype=np.uint16)
    image = reopened(Image.fromarray(grey), kind)
    assert image.mode.startswith("I")
    assert [pixel(image, x)[0] for x in range(3)] == [0, 128, 255]


@pytest.mark.parametrize("mode", ["L", "1", "CMYK", "YCbCr", "HSV"])
def test_other_modes_are_converted(mode: str) -> None:
    image = Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode)
    assert pixel(image) == (255, 255, 255)


def test_a_cmyk_jpeg_has_its_colours() -> None:
    image = reopened(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")
    red, green, blue = pixel(image)
    assert red > 200
    assert max(green, blue) < 60


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    upright = np.zeros((16, 32, 3), dtype=np.uint8)
    upright[:8, :8] = 255  # the white corner is at the top left when shown
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = Image.fromarray(upright)
    if orientation in undo:
        stored = stored.transpose(undo[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = to_rgb(reopened(stored, "JPEG", exif=exif, quality=95), "x")
    assert shown.size == (32, 16)
    assert np.abs(np.asarray(shown).astype(int) - upright).mean() < 4


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"MM\0*\xff\xff\xff\xff\0\0", b"no TIFF header"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_damaged_exif_is_ignored(kind: str, exif: bytes) -> None:
    image = reopened(Image.new("RGB", (8, 8), (200, 0, 0)), kind, exif=b"Exif\0\0" + exif)
    assert pixel(image)[0] > 150


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    image = reopened(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixel(image) == (255, 0, 0)


def test_pixels_of_an_array_are_taken_as_they_are() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert (np.asarray(to_rgb(pixels, "x")) == pixels).all()


@pytest.mark.parametrize(
    "array", [np.zeros((3, 5, 5), np.uint8), np.zeros((5, 5, 3)), np.zeros((0, 5, 3), np.uint8)]
)
def test_arrays_of_another_shape_or_type_are_refused(array: np.ndarray) -> None:
    with pytest.raises(BadSample, match="x: pixels must be uint8"):
        to_rgb(array, "x")


# ------------------------------------------------------------------------------------------- refused


def test_what_is_no_picture_is_a_bad_sample() -> None:
    for data in (b"", b"no picture", b"\x89PNG\r\n\x1a\n"):
        with pytest.raises(BadSample, match="pic7: no picture"):
            open_image(data, "pic7")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_truncated_picture_is_a_bad_sample(kind: str) -> None:
    data = picture_bytes(kind=kind, size=(200, 200))
    image = open_image(data[: len(data) // 2], "pic7")
    with pytest.raises(BadSample, match="pic7: the picture cannot be decoded"):
        to_rgb(image, "pic7")


def test_too_many_pixels_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    data = picture_bytes(size=(100, 100))
    monkeypatch.setattr(transforms, "MAX_PIXELS", 9_999)
    with pytest.raises(BadSample, match="pic7: 100 x 100 pixels are more than the limit of 9,999"):
        open_image(data, "pic7")


def test_a_decompression_bomb_is_refused() -> None:
    data = bytearray(picture_bytes(mode="1", size=(8, 8)))
    data[16:24] = (30_000).to_bytes(4, "big") * 2  # width and height in the header
    import zlib

    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    with pytest.raises(BadSample, match="pixels"):
        open_image(bytes(data), "pic7")


# ---------------------------------------------------------------------------------------------- crop


@given(width=st.integers(1, 2000), height=st.integers(1, 2000), seed=st.integers(0, 1000))
def test_a_crop_lies_in_the_picture(width: int, height: int, seed: int) -> None:
    box = random_crop(generator(seed, "crop"), width, height)
    assert box.width >= 1
    assert box.height >= 1
    assert 0 <= box.left <= width - box.width
    assert 0 <= box.top <= height - box.height


def test_crops_are_distributed_as_torchvisions() -> None:
    import torch

    torch.manual_seed(0)
    image = Image.new("RGB", (250, 200))
    theirs = np.array([RandomResizedCrop.get_params(image, [0.9, 1.0], [3 / 4, 4 / 3]) for _ in range(3000)])
    ours = np.array(
        [
            (box.top, box.left, box.height, box.width)
            for box in (random_crop(generator(0, "crop", i), 250, 200) for i in range(3000))
        ]
    )
    assert np.abs(theirs.mean(axis=0) - ours.mean(axis=0)).max() < 1.0
    assert np.abs(theirs.std(axis=0) - ours.std(axis=0)).max() < 1.0


def test_crops_take_90_to_100_percent_of_a_square_picture() -> None:
    boxes = [random_crop(generator(0, "crop", i), 400, 400) for i in range(1000)]
    shares = np.array([box.width * box.height / 400**2 for box in boxes])
    assert shares.min() > 0.895
    assert np.mean(shares) == pytest.approx(0.95, abs=0.01)
    ratios = np.array([box.width / box.height for box in boxes])
    assert ratios.min() < 0.95
    assert ratios.max() > 1.05


def test_a_very_long_picture_gives_its_middle() -> None:
    assert random_crop(generator(0, "crop"), 1000, 30) == Box(left=480, top=0, width=40, height=30)


def test_both_sizes_are_torchvisions_of_the_same_crop() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (120, 200, 3), dtype=np.uint8))
    box = Box(left=11, top=7, width=150, height=110)
    large, small = crop_twice(image, box, 64, 32)
    for ours, size, mode in (
        (large, 64, InterpolationMode.BICUBIC),
        (small, 32, InterpolationMode.LANCZOS),
    ):
        theirs = tvf.resized_crop(image, 7, 11, 110, 150, [size, size], mode)
        assert ours.dtype == np.uint8
        assert ours.shape == (3, size, size)
        assert (ours.transpose(1, 2, 0) == np.asarray(theirs)).all()


def test_a_large_picture_is_reduced_first_without_a_visible_difference() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((1500, 1000), Image.Resampling.BICUBIC)
    box = Box(left=0, top=0, width=1500, height=1000)
    ours, _ = crop_twice(image, box, 112, 56)
    exact = np.asarray(image.resize((112, 112), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.abs(ours.astype(int) - exact).mean() < 0.5
    assert np.abs(ours.astype(int) - exact).max() <= 6
