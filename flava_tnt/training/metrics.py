"""The metrics of logged steps: global values, the same on every rank, on the host.

This is the only place of the loop that waits for the device.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flava_tnt.errors import TrainingError
from flava_tnt.plugin import Run, StepRecord
from flava_tnt.training.exchange import max_over_ranks, sum_over_ranks


class MetricsLog:
    """Collects what passes between logged steps and turns a logged step into metrics."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._train = run.recipe.train
        self._steps = 0
        self._data_seconds = 0.0
        self._last_log = time.perf_counter()
        self.newest: dict[str, Any] | None = None
        """Metrics of the step that has just ended, if it is a logged one."""

    def is_logged(self, step: int) -> bool:
        """The first step, the last one, and every ``log_every_steps``."""
        return step % self._train.log_every_steps == 0 or step in (1, self._train.max_steps)

    def add(self, record: StepRecord) -> None:
        """Count a finished step."""
        self._steps += 1
        self._data_seconds += record.data_seconds
        self.newest = None

    def log(
        self,
        record: StepRecord,
        sums: Mapping[str, Tensor],
        local_counts: Mapping[str, int],
        counts: Mapping[str, float],
        *,
        grad_norm: Tensor | None,
        learning_rate: float,
    ) -> None:
        """Make :attr:`newest`.

        Args:
            sums: of each loss on this rank.
            local_counts: rows that each loss counted on this rank.
            counts: the same over all ranks; a loss without any is left out.

        Raises:
            TrainingError: a loss is not finite.
        """
        losses = self._losses(sums, local_counts, counts)
        weights = self._run.recipe.loss.weights.model_dump()
        seconds, data_seconds, memory = max_over_ranks(
            [
                (time.perf_counter() - self._last_log) / self._steps,
                self._data_seconds / self._steps,
                _peak_memory_bytes(self._run.device),
            ]
        )
        self.newest = {
            "step": record.step,
            "samples": self._run.samples,
            "bad_samples": self._run.bad_samples,
            "modality": record.modality,
            "loss": sum(weights[name] * value for name, value in losses.items()),
            "losses": losses,
            "learning_rate": learning_rate,
            "grad_norm": None if grad_norm is None else finite_or_none(grad_norm.item()),
            "seconds_per_step": seconds,
            "data_seconds": data_seconds,
            "peak_memory_gib": memory / 2**30,
            "time": time.time(),
        }
        self._steps, self._data_seconds = 0, 0.0
        self._last_log = time.perf_counter()
        self._refuse_broken(record.step, losses)

    def _losses(
        self, sums: Mapping[str, Tensor], local: Mapping[str, int], counts: Mapping[str, float]
    ) -> dict[str, float]:
        values = torch.stack([value.double() for value in sums.values()]).tolist()
        if self._run.recipe.loss.reduction == "per_rank":
            values = [value / max(local[name], 1) for name, value in zip(sums, values, strict=True)]
            totals = [value / self._run.world_size for value in sum_over_ranks(values)]
            return {name: total for name, total in zip(sums, totals, strict=True) if counts[name]}
        totals = sum_over_ranks(values)
        return {name: total / counts[name] for name, total in zip(sums, totals, strict=True) if counts[name]}

    def _refuse_broken(self, step: int, losses: Mapping[str, float]) -> None:
        broken = [f"{name} is {value}" for name, value in losses.items() if not math.isfinite(value)]
        if broken:
            raise TrainingError(
                f"step {step}: {', '.join(broken)}; try a smaller plugins.optimizer.learning_rate, more"
                " warm-up, or train.clip_grad_norm"
            )


def finite_or_none(value: float) -> float | None:
    """JSON has no infinity: a norm that overflowed (fp16's first steps) is logged as null."""
    return value if math.isfinite(value) else None


def _peak_memory_bytes(device: torch.device) -> float:
    """Largest memory so far: the allocator's on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
