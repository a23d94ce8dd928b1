"""Initial weights: each a pure function of the seed and the parameter's own name.

A parameter is generated in blocks of its flattened elements, each block from a generator of its own, so a
rank that holds a shard makes only the blocks that its shard overlaps: the same bits on any number of ranks,
and no rank ever holds a whole model, or more than a block beyond its own part.

Distributions are those of torchmultimodal's FLAVA (encoders), of PyTorch's modules (heads and projections)
and of DALL-E (codebook); see :func:`initial_distribution`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchmultimodal.models.flava.model import DalleConv2d
from torchmultimodal.modules.losses.flava import MaskedPredictionHead

from flava_tnt.model.losses import INITIAL_LOG_SCALE
from flava_tnt.model.towers import ENCODER_INIT_STD
from flava_tnt.position import generator

BLOCK_NUMEL = 2**20
"""Elements of a block. Part of what the weights are a function of: another value gives other weights."""
_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")
_TOWERS = ("model.image_encoder.", "model.text_encoder.", "model.mm_encoder.")


@dataclass(frozen=True)
class Distribution:
    """How a parameter's elements are drawn."""

    kind: Literal["constant", "normal", "uniform"]
    value: float
    """The constant, the standard deviation, or the bound on either side of 0."""
    zero_row: int | None = None
    """A row that is all zeros (the embedding of padding)."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """fp32 numbers; the same on every machine."""
        scale = np.float32(self.value)
        if self.kind == "normal":
            return rng.standard_normal(count, dtype=np.float32) * scale
        return (rng.random(count, dtype=np.float32) * np.float32(2) - np.float32(1)) * scale


def canonical_name(name: str) -> str:
    """The model's own name of a parameter or module: no prefix of a wrapper, wherever it stands."""
    for prefix in _WRAPPER_PREFIXES:
        start = 0
        while (at := name.find(prefix, start)) >= 0:
            if at == 0 or name[at - 1] == ".":
                name = name[:at] + name[at + len(prefix) :]
            else:
                start = at + 1
    return name


def materialise(
    model: nn.Module,
    *,
    device: torch.device | str,
    seed: int,
    token_init_std: float,
    init_std: float = ENCODER_INIT_STD,
    sharded_device: torch.device | str | None = None,
) -> None:
    """Give a model that was built on the meta device memory and its initial weights, in place.

    Args:
        model: a ``FlavaForPretraining``, plain or sharded with ``fully_shard``.
        device: where parameters go.
        seed: the recipe's.
        token_init_std: standard deviation of CLS, mask and image position tokens; 0: zeros, as the original.
        init_std: standard deviation of the encoders' weights (FLAVA: 0.02).
        sharded_device: where sharded parameters go instead (the CPU, where FSDP offloads).
    """
    assert not any(True for _ in model.buffers()), "a buffer would need a value here"
    model._apply(lambda x: torch.empty_like(x, device=_device_of(x, device, sharded_device)))
    _retie(model)
    done: set[int] = set()
    with torch.no_grad():
        for name, module, parameter in _owned_parameters(model):
            if id(parameter) not in done:
                done.add(id(parameter))
                distribution = initial_distribution(name, module, token_init_std, init_std)
                _fill(parameter, name, distribution, seed)


def _device_of(
    x: Tensor, device: torch.device | str, sharded_device: torch.device | str | None
) -> torch.device | str:
    return sharded_device if sharded_device is not None and isinstance(x, DTensor) else device


def _retie(model: nn.Module) -> None:
    """A head's bias and its decoder's are one parameter, which ``_apply`` has made two.

    FSDP keeps the first of them (the head's) and sets both to it at each gather; until then, and without
    FSDP, this does it.
    """
    for module in model.modules():
        if isinstance(module, MaskedPredictionHead):
            module.decoder._parameters["bias"] = module._parameters["bias"]


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """(canonical name, the module that owns it, parameter); a tied one at each of its places."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield canonical_name(f"{module_name}.{name}" if module_name else name), module, parameter


def initial_distribution(
    name: str, module: nn.Module, token_init_std: float, init_std: float = ENCODER_INIT_STD
) -> Distribution:
    """The distribution of a parameter from its canonical name and the module that owns it."""
    is_bias = name.endswith(".bias")
    if name == "loss.contrastive_loss.logit_scale":
        return Distribution("constant", INITIAL_LOG_SCALE)
    if isinstance(module, DalleConv2d):
        fan_in = module.w[0].numel()
        return Distribution("constant", 0.0) if name.endswith(".b") else _normal(1 / math.sqrt(fan_in))
    if isinstance(module, nn.LayerNorm):
        return Distribution("constant", 0.0 if is_bias else 1.0)
    if isinstance(module, MaskedPredictionHead):
        return Distribution("constant", 0.0)  # the decoder's bias
    if isinstance(module, nn.Embedding):
        return Distribution("normal", init_std, zero_row=module.padding_idx)
    if isinstance(module, nn.Linear | nn.Conv2d):
        if name.startswith(_TOWERS):
            return Distribution("constant", 0.0) if is_bias else _normal(init_std)
        # PyTorch's default for a linear layer: kaiming_uniform with a = sqrt(5), for weight and bias.
        assert isinstance(module, nn.Linear)
        return Distribution("uniform", 1 / math.sqrt(module.in_features))
    assert name.startswith(_TOWERS), name
    return _normal(token_init_std)


def _normal(std: float) -> Distribution:
    return Distribution("normal", std) if std > 0 else Distribution("constant", 0.0)


# ------------------------------------------------------------------------------------------ filling


def _fill(parameter: Tensor, name: str, distribution: Distribution, seed: int) -> None:
    """Fill what this process holds of a parameter."""
    local, start = _local_part(parameter)
    if local is None:
        assert isinstance(parameter, DTensor)
        _fill_any_shard(parameter, name, distribution, seed)
    elif distribution.kind == "constant":
        local.fill_(distribution.value)
    elif local.numel():
        _fill_range(local, start, parameter.numel(), name, distribution, seed)
        _zero_row(local, start, parameter.shape, distribution.zero_row)


def _local_part(parameter: Tensor) -> tuple[Tensor | None, int]:
    """The flattened local elements and where they start in the flattened parameter; None: not one range."""
    if not isinstance(parameter, DTensor):
        return parameter.view(-1), 0
    local = parameter.to_local()
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if tuple(shape[1:]) != tuple(parameter.shape[1:]):
        return None, 0
    assert tuple(local.shape) == tuple(shape)
    return local.view(-1), offset[0] * math.prod(shape[1:])


def _fill_range(
    flat: Tensor, start: int, numel: int, name: str, distribution: Distribution, seed: int
) -> None:
    """Fill elements ``start`` to ``start + len(flat)`` of a parameter of ``numel`` elements."""
    end = start + flat.numel()
    for block in range(start // BLOCK_NUMEL, math.ceil(end / BLOCK_NUMEL)):
        block_start = block * BLOCK_NUMEL
        block_end = min(block_start + BLOCK_NUMEL, numel)
        values = distribution.draw(generator(seed, "init", name, block), block_end - block_start)
        first, last = max(start, block_start), min(end, block_end)
        part = torch.from_numpy(values[first - block_start : last - block_start])
        flat[first - start : last - start].copy_(part)


def _zero_row(flat: Tensor, start: int, shape: torch.Size, row: int | None) -> None:
    if row is None:
        return
    width = math.prod(shape[1:])
    first = max(row * width - start, 0)
    last = min((row + 1) * width - start, flat.numel())
    if first < last:
        flat[first:last].zero_()


def _fill_any_shard(parameter: DTensor, name: str, distribution: Distribution, seed: int) -> None:
    """A shard that is no contiguous range (sharded along another dimension than the first): the slow way,
    through this one parameter as a whole, in host memory."""
    full = torch.empty(parameter.shape)
    _fill(full, name, distribution, seed)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    for dim, (size, begin) in enumerate(zip(shape, offset, strict=True)):
        full = full.narrow(dim, begin, size)
    parameter.to_local().copy_(full)
