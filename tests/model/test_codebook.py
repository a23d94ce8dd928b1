"""Weights of the codebook, from every kind of file, and what is refused."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import pytest
import torch
from dall_e.encoder import Encoder as PublishedEncoder
from safetensors.torch import save_file
from torch import Tensor

from flava_tnt.errors import DataError
from flava_tnt.model.codebook import load_codebook_weights
from tests.model.helpers import SMALL, make_batch, make_model

# The published class takes no fewer than 64 channels.
DIMS = replace(SMALL, codebook_hidden_size=64)


@pytest.fixture(scope="module")
def published() -> PublishedEncoder:
    torch.manual_seed(0)
    return PublishedEncoder(n_hid=64, requires_grad=False)


@pytest.fixture(scope="module")
def model():
    return make_model(DIMS)


def assert_loaded(model, published: PublishedEncoder, path) -> None:
    with torch.no_grad():
        for parameter in model.image_codebook.parameters():
            parameter.zero_()
    load_codebook_weights(model, str(path))
    for name, value in published.state_dict().items():
        assert model.image_codebook.encoder.state_dict()[name].equal(value), name
    assert not any(p.requires_grad for p in model.image_codebook.parameters())


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize("prefix", ["", "encoder.", "image_codebook.encoder."])
@pytest.mark.parametrize("kind", ["safetensors", "state-dict"])
def test_files_of_tensors_load_under_any_prefix(model, published, tmp_path, kind, prefix):
    state = prefixed(published.state_dict(), prefix)
    (save_file if kind == "safetensors" else torch.save)(state, tmp_path / "weights")
    assert_loaded(model, published, tmp_path / "weights")


def test_names_without_blocks_load_too(model, published, tmp_path):
    state = {name.removeprefix("blocks."): value for name, value in published.state_dict().items()}
    torch.save(state, tmp_path / "weights.pt")
    assert_loaded(model, published, tmp_path / "weights.pt")


def test_the_published_pickle_loads_and_gives_its_codes(model, published, tmp_path):
    torch.save(published, tmp_path / "encoder.pkl")
    assert_loaded(model, published, f"file://{tmp_path}/encoder.pkl")
    image = make_batch("image", size=1).codebook_image_B3hw
    expected = published(image / 255 * 0.8 + 0.1).argmax(1).flatten(1)
    assert model.image_codebook(image).equal(expected)


class Evil:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    "save",
    [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x, protocol=2))],
    ids=["torch", "pickle"],
)
def test_a_pickle_of_anything_else_is_refused(model, tmp_path, save):
    save({"blocks.input.w": Evil()}, tmp_path / "evil.pkl")
    with pytest.raises(DataError, match=r"evil\.pkl: neither safetensors") as error:
        load_codebook_weights(model, str(tmp_path / "evil.pkl"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("blocks.input.b"), "1 of 74 tensors are missing, the first is blocks.input.b"),
        (
            lambda s: s.update({"blocks.input.b": torch.zeros(3)}),
            r"blocks.input.b has shape \[3\], this codebook needs \[64\]",
        ),
        (lambda s: s.clear(), "74 of 74 tensors are missing"),
    ],
    ids=["missing", "shape", "empty"],
)
def test_tensors_of_another_model_are_refused(model, published, tmp_path, change, message):
    state = dict(published.state_dict())
    change(state)
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(DataError, match=message) as error:
        load_codebook_weights(model, str(tmp_path / "weights.pt"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"hello", b"\x10\0\0\0\0\0\0\0{broken"])
def test_a_missing_or_broken_file_is_one_clear_line(model, tmp_path, content):
    path = tmp_path / "weights"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"codebook weights .*: (no such file|neither)") as error:
        load_codebook_weights(model, str(path))
    assert "\n" not in str(error.value)
