"""Activation checkpointing: recompute a layer in the backward pass instead of keeping its activations.

Both plugins wrap transformer layers with torch's non-reentrant checkpoint. The wrapper strips its own prefix
from a state dict, so names stay the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from flava_tnt.errors import RecipeError
from flava_tnt.plugin import ActivationCheckpointing, Applied, Run, Setup

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from flava_tnt.model.flava import FlavaForPretraining

OPERATIONS: dict[str, tuple[str, ...]] = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}
"""Names that stand for several of torch's operations: the dearest to compute again."""


class Full(ActivationCheckpointing):
    """Recomputes every transformer layer: only the layers' inputs are kept."""

    api_version = 1

    def apply(self, model: FlavaForPretraining, run: Run) -> Applied:
        return _wrap_layers(model, model.layers(), run, verb="AC wraps")


class Selective(ActivationCheckpointing):
    """Recomputes every n-th transformer layer, or every layer but for the results of some operations."""

    api_version = 1

    every: int | None = Field(default=None, ge=1)
    """Recompute every n-th layer, in the model's order: 2 leaves out the first, the third and so on. Where
    neither option is given: 2."""
    operations: list[str] | None = Field(default=None, min_length=1)
    """Recompute every layer, but keep the results of these: `matmul`, `attention`, or the name of one of
    torch's operations (`aten.gelu` or `gelu`)."""

    @model_validator(mode="after")
    def _one_of_every_and_operations(self) -> Selective:
        if self.every is not None and self.operations is not None:
            raise ValueError("give one of every and operations")
        return self

    def check(self, setup: Setup) -> None:
        """Look the operations up.

        Raises:
            RecipeError: torch has no such operation.
        """
        for name in self.operations or ():
            if name not in OPERATIONS and not _overloads([name]):
                friendly = " or ".join(OPERATIONS)
                raise RecipeError(
                    f"torch has no operation {name!r}: take {friendly}, or one of torch.ops.aten",
                    key="plugins.activation_checkpointing.operations",
                )

    def apply(self, model: FlavaForPretraining, run: Run) -> Applied:
        if self.operations is None:
            every = self.every or 2
            names = list(model.layers())[every - 1 :: every]
            return _wrap_layers(model, names, run, verb=f"AC (1 in {every}) wraps")
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        kept = _overloads(name for key in self.operations for name in OPERATIONS.get(key, (key,)))
        return _wrap_layers(
            model,
            model.layers(),
            run,
            verb=f"AC (keeps {', '.join(self.operations)}) wraps",
            context_fn=partial(create_selective_checkpoint_contexts, kept),
        )


def _wrap_layers(
    model: FlavaForPretraining,
    names: Iterable[str],
    run: Run,
    *,
    verb: str,
    context_fn: Callable[..., Any] | None = None,
) -> Applied:
    """Wrap the named layers; generators are kept and restored only where dropout draws from them."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = model.layers()
    options: dict[str, Any] = {"preserve_rng_state": run.recipe.model.dropout > 0}
    if context_fn is not None:
        options["context_fn"] = context_fn
    names = list(names)
    for name in names:
        model.replace_layer(name, checkpoint_wrapper(layers[name], **options))
    target = " and ".join(sorted({type(layer).__name__ for layer in layers.values()}))
    return Applied(verb=verb, count=len(names), total=len(layers), target=target)


def _overloads(names: Iterable[str]) -> list[OpOverload]:
    """The overloads of aten operations, leaving out the ones that this torch does not have."""
    import torch
    from torch._ops import OpOverloadPacket

    found = [getattr(torch.ops.aten, name.removeprefix("aten."), None) for name in names]
    packets = [packet for packet in found if isinstance(packet, OpOverloadPacket)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
