"""The frozen DALL-E encoder, whose codes are the targets of masked pictures, and its weights.

Shape letters: B samples, C codes to choose from, P patches.
"""

from __future__ import annotations

import contextlib
import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec
import torch
from torch import Tensor, nn
from torchmultimodal.models.flava.model import DalleEncoder

from flava_tnt.errors import DataError
from flava_tnt.model.sizes import CODEBOOK_VOCAB_SIZE, ModelDims

PIXEL_SCALE, PIXEL_OFFSET = 0.8, 0.1
"""Pixels in [0, 1] become 0.8 x + 0.1 (DALL-E's `map_pixels`, with its epsilon of 0.1)."""
_PREFIXES = ("image_codebook.encoder.", "encoder.")


class Codebook(nn.Module):
    """DALL-E's encoder under the names of torchmultimodal's ``DalleVAEEncoder``. Frozen; never downloads."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.encoder = DalleEncoder(n_hid=dims.codebook_hidden_size, vocab_size=CODEBOOK_VOCAB_SIZE)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, image_B3hw: Tensor) -> Tensor:
        """Codes [B, P], int64, of uint8 pixels (floats: taken as scaled already).

        Computed in fp32 whatever the precision of the step, so that the targets do not depend on it.
        """
        if not image_B3hw.is_floating_point():
            image_B3hw = image_B3hw.float() / 255 * PIXEL_SCALE + PIXEL_OFFSET
        with torch.autocast(image_B3hw.device.type, enabled=False), _exact_convolutions(image_B3hw.device):
            logits_BChw = self.encoder(image_B3hw.float())
        return logits_BChw.argmax(dim=1).flatten(1)


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    # Through torch's older interface, as the precision plugins: it fails once the newer one was written.
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _exact_convolutions(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """cuDNN takes TF32 for fp32 convolutions unless told otherwise."""
    return _without_tf32() if device.type == "cuda" else contextlib.nullcontext()


# ------------------------------------------------------------------------------------------ weights


def load_codebook_weights(model: nn.Module, path_or_url: str) -> None:
    """Load the codebook's weights into a materialised model.

    Args:
        model: a ``FlavaForPretraining``.
        path_or_url: any fsspec path or URL of a safetensors file, a state dict saved by ``torch.save``
            (keys with or without ``image_codebook.encoder.`` or ``encoder.``), or the published
            `encoder.pkl`. Nothing but tensors and DALL-E's own classes is ever unpickled.

    Raises:
        DataError: the file is missing or of another kind, or its tensors are not this codebook's.
    """
    encoder = model.get_submodule("image_codebook.encoder")
    wanted = dict(encoder.named_parameters())
    found = _without_prefix(_read(path_or_url))
    _check(path_or_url, wanted, found)
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(found[name])


def _read(path_or_url: str) -> Mapping[str, Any]:
    try:
        with fsspec.open(path_or_url, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise DataError(f"codebook weights {path_or_url}: no such file") from None
    except Exception as error:
        raise DataError(f"codebook weights {path_or_url}: cannot be read: {_reason(error)}") from error
    try:
        return _parse(data)
    except Exception as error:
        raise DataError(
            f"codebook weights {path_or_url}: neither safetensors, nor a state dict, nor DALL-E's"
            f" encoder.pkl: {_reason(error)}"
        ) from error


def _parse(data: bytes) -> Mapping[str, Any]:
    # safetensors: 8 bytes of header length, then a JSON object.
    if data[8:9] == b"{":
        from safetensors.torch import load

        return load(data)
    with torch.serialization.safe_globals(_dalle_classes()):
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if isinstance(loaded, nn.Module):
        return loaded.state_dict()
    if not isinstance(loaded, Mapping):
        raise TypeError(f"holds a {type(loaded).__name__}")
    return loaded


def _dalle_classes() -> list[Any]:
    """Exactly what the published `encoder.pkl`, a pickled ``dall_e.Encoder``, is made of."""
    from dall_e.encoder import Encoder, EncoderBlock
    from dall_e.utils import Conv2d

    return [
        Encoder,
        EncoderBlock,
        Conv2d,
        nn.Sequential,
        nn.ReLU,
        nn.MaxPool2d,
        nn.Identity,
        OrderedDict,
        set,
    ]


def _without_prefix(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Parameters by the encoder's own names (``blocks...``)."""
    names: dict[str, Tensor] = {}
    for name, value in state.items():
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        if isinstance(value, Tensor):
            names[name if name.startswith("blocks.") else f"blocks.{name}"] = value
    return names


def _check(path_or_url: str, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError(
            f"codebook weights {path_or_url}: {len(missing)} of {len(wanted)} tensors are missing, the first"
            f" is {missing[0]}"
        )
    for name, parameter in wanted.items():
        if found[name].shape != parameter.shape:
            raise DataError(
                f"codebook weights {path_or_url}: {name} has shape {list(found[name].shape)}, this codebook"
                f" needs {list(parameter.shape)} (model.codebook.hidden_size)"
            )


def _reason(error: BaseException) -> str:
    """An error's gist on one line; the unpickler's stands below its advice."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
    return text.splitlines()[0][:200]
