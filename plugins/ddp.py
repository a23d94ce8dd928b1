"""DistributedDataParallel: each rank holds the whole model and gradients are averaged."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

from pydantic import Field

from flava_tnt.plugin import Parallelism, Run

if TYPE_CHECKING:
    from torch import nn

    from flava_tnt.model.flava import FlavaForPretraining


class Ddp(Parallelism):
    """Each rank holds the whole model; gradients are averaged in buckets while the backward pass runs."""

    api_version = 1

    bucket_cap_mb: float | None = Field(default=None, gt=0.0)
    """Size of a gradient bucket in MiB; larger buckets mean fewer, later messages. None: torch's own (25)."""
    gradient_as_bucket_view: bool = True
    """Let gradients live inside the buckets instead of copying them, which saves their memory once."""

    def wrap(self, model: FlavaForPretraining, run: Run) -> nn.Module:
        """Wrap the model, whose weights every rank has computed alike, so nothing is broadcast.

        A step uses the parts that its modality needs. ``find_unused_parameters`` lets the rest keep the
        gradient None, so that the optimizer leaves it alone instead of decaying it.
        """
        from torch.nn.parallel import DistributedDataParallel

        options: dict[str, Any] = {_buffer_option(DistributedDataParallel): False}
        if run.device.type == "cuda":
            options["device_ids"] = [run.device.index]
        return DistributedDataParallel(
            model,
            init_sync=False,
            find_unused_parameters=True,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            bucket_cap_mb=self.bucket_cap_mb,
            **options,
        )

    def micro_batch(self, module: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Accumulate locally, and average over the ranks in the last micro-batch's backward pass."""
        from torch.nn.parallel import DistributedDataParallel

        assert isinstance(module, DistributedDataParallel)
        return contextlib.nullcontext() if is_last else module.no_sync()


def _buffer_option(ddp_class: type) -> str:
    """The argument that switches off the broadcast of buffers before each forward; torch 2.13 renamed it."""
    names = inspect.signature(ddp_class).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
