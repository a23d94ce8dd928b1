"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) with linear warm-up and a cosine or constant schedule.

The defaults are FLAVA's (arXiv 2112.04482, section 4 and appendix): learning rate 1e-3, betas 0.9 and 0.999,
weight decay 0.1 on everything, up to 10,000 warm-up steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flava_tnt.errors import RecipeError
from flava_tnt.plugin import Optimizer, Run, Setup

if TYPE_CHECKING:
    import torch
    from torch import nn

PAPER_WARMUP_STEPS = 10_000
"""FLAVA's warm-up, in steps."""
_FUSED_DEVICES = ("cuda", "cpu")


class AdamW(Optimizer):
    """AdamW; the learning rate is a function of the step alone.

    Step n (from 1) of N, with W warm-up steps, runs at the peak rate times

    - ``n / W`` while n <= W: the first step already learns, and step W runs at the peak;
    - ``f + (1 - f) * (1 + cos(pi * (n - W) / (N + 1 - W))) / 2`` after that, f being the fraction that is
      left at the end: the curve reaches f one step after the last, so no step is spent at a rate of 0.
    """

    api_version = 1

    learning_rate: float = Field(default=1e-3, gt=0.0, allow_inf_nan=False)
    """The peak, reached at the end of the warm-up."""
    betas: list[Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(
        default=[0.9, 0.999], min_length=2, max_length=2
    )
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the squared gradients' mean."""
    weight_decay: float = Field(default=0.1, ge=0.0)
    """Decoupled decay: a weight loses this fraction times the learning rate at each step that it has a
    gradient."""
    decay_norms_and_biases: bool = True
    """Whether biases, norms and the temperature (all that has one dimension) decay too, as in FLAVA."""
    fused: bool | None = None
    """One kernel for the whole update, sharded or not. None: where torch has it (on a GPU and on a CPU)."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps until the peak. None: a tenth of `train.max_steps`, at most FLAVA's 10,000."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What follows the warm-up, until `train.max_steps`."""
    min_learning_rate_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Fraction of the peak at which the cosine ends."""

    def check(self, setup: Setup) -> None:
        """Compare the warm-up with the length of the run.

        Raises:
            RecipeError: the run would end before the peak is reached.
        """
        max_steps = setup.recipe.train.max_steps
        if self.warmup_steps is not None and self.warmup_steps > max_steps:
            raise RecipeError(
                f"the warm-up of {self.warmup_steps} steps is longer than the run of {max_steps}"
                " (train.max_steps), which would never reach its learning rate: leave it out for a tenth"
                " of the run",
                key="plugins.optimizer.warmup_steps",
            )

    def warmup(self, max_steps: int) -> int:
        """Warm-up steps of a run of ``max_steps`` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(PAPER_WARMUP_STEPS, max_steps // 10)

    def learning_rate_at(self, step: int, max_steps: int) -> float:
        """The learning rate of a step, counted from 1."""
        warmup = self.warmup(max_steps)
        if step <= warmup:
            return self.learning_rate * (step / warmup)
        if self.schedule == "constant":
            return self.learning_rate
        progress = min(1.0, (step - warmup) / (max_steps + 1 - warmup))
        left = self.min_learning_rate_fraction
        return self.learning_rate * (left + (1.0 - left) * (1.0 + math.cos(math.pi * progress)) / 2.0)

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], run: Run
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """The optimizer and its schedule, before the first step."""
        import torch

        named = list(parameters)
        fused = self.fused
        if fused is None:
            fused = all(parameter.device.type in _FUSED_DEVICES for _, parameter in named)
        optimizer = torch.optim.AdamW(
            self._groups(named),
            lr=self.learning_rate,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=fused,
        )
        max_steps = run.recipe.train.max_steps

        def fraction(steps_done: int) -> float:
            return self.learning_rate_at(steps_done + 1, max_steps) / self.learning_rate

        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, fraction)

    def _groups(self, named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """The group that decays and the one that does not, with their parameters' names; none is empty."""
        decayed = [item for item in named if self.decay_norms_and_biases or item[1].ndim > 1]
        kept = [item for item in named if not self.decay_norms_and_biases and item[1].ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]
