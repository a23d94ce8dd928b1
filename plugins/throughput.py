"""Items per second, measured as the article did."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field, PrivateAttr

from flava_tnt.plugin import Callback, Run, StepRecord


class Throughput(Callback):
    """Items per second over all ranks; an image-text pair counts as one item, waiting for data included.

    The article ("Scaling Multimodal Foundation Models in TorchMultimodal with PyTorch Distributed") leaves
    the first 100 of 1,000 iterations out of the average.
    """

    api_version = 1

    skip_steps: int = Field(default=0, ge=0)
    """First steps left out of the average in `summary.json` (the article: 100)."""

    _start: float | None = PrivateAttr(default=None)
    _items: int = PrivateAttr(default=0)
    _steps: int = PrivateAttr(default=0)

    def on_train_start(self, run: Run) -> None:
        self._items = self._steps = 0
        self._start = _now(run) if self.skip_steps == 0 else None

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._steps += 1
        if self._steps > self.skip_steps:
            self._items += record.items
        elif self._steps == self.skip_steps:
            self._start = _now(run)

    def measure(self, run: Run, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        items = run.recipe.global_batch(run.world_size)
        return {"items_per_second": items / metrics["seconds_per_step"]}

    def summarise(self, run: Run) -> Mapping[str, Any]:
        """The average; None where the run was no longer than ``skip_steps``."""
        if self._start is None or not self._items:
            return {"items_per_second": None}
        return {"items_per_second": self._items / (_now(run) - self._start)}


def _now(run: Run) -> float:
    """The time at which the device has done all that it was given."""
    if run.device.type == "cuda":
        import torch

        torch.cuda.synchronize(run.device)
    return time.perf_counter()
