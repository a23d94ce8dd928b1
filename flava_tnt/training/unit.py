"""The training step: a torchtnt AutoUnit that takes one optimizer step over one global batch.

AutoUnit keeps the loop's side: fetching a batch early, autocast, the gradient scaler, the optimizer and the
schedule. Overridden here is what it does not know: a step made of micro-batches under any parallelism
plugin, losses as means over the global batch, gradient norms of sharded parameters, and the clamp of the
temperature after the optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.state import State

from flava_tnt.data.batch import Batch
from flava_tnt.errors import DataError
from flava_tnt.model.flava import FlavaForPretraining
from flava_tnt.model.losses import loss_counts, mark_counted
from flava_tnt.plugin import Optimizer, Parallelism, Precision, Run, StepRecord
from flava_tnt.training.assembly import trainable_parameters
from flava_tnt.training.exchange import sum_over_ranks
from flava_tnt.training.metrics import MetricsLog
from flava_tnt.training.stop import StopRequest

MIN_SAMPLES_FOR_BAD_FRACTION = 1000
"""``train.max_bad_fraction`` is taken of at least so many samples, so that one bad file early on is none."""


@dataclass(frozen=True)
class StepInput:
    """This rank's part of a global batch on the device, and its counts, which the host knows."""

    batch: Batch
    counts: Mapping[str, int]
    """Rows that each loss counts on this rank."""


@dataclass(frozen=True)
class MicroBatch:
    """What ``compute_loss`` works on."""

    batch: Batch
    factors: Mapping[str, float]
    """What the sum of each loss is multiplied with in the loss that is differentiated."""


class FlavaUnit(AutoUnit[StepInput]):
    """Trains the model of a run; see the module's text."""

    def __init__(
        self,
        *,
        run: Run,
        model: FlavaForPretraining,
        module: nn.Module,
        metrics: MetricsLog,
        stop: StopRequest,
    ) -> None:
        precision: Precision = run.setup.one("precision")
        # AutoUnit would move the module to the device, also what a plugin keeps elsewhere on purpose: give
        # it an empty one, and the assembled one afterwards, before its metaclass asks for the optimizer.
        super().__init__(
            module=nn.Module(),
            device=run.device,
            precision=precision.compute_dtype(),
            step_lr_interval="step",
        )
        self.module = module
        self.run = run
        self.metrics = metrics
        self.stop = stop
        self.parallelism: Parallelism = run.setup.one("parallelism")
        self.record: StepRecord | None = None
        self._clamp_temperature = model.clamp_temperature
        self._weights = {
            name: weight for name, weight in run.recipe.loss.weights.model_dump().items() if weight > 0
        }
        self._samples_read = 0.0
        self._named_bad: set[str] = set()
        self._data_seconds = 0.0
        self._step_end = time.perf_counter()

    # ------------------------------------------------------------------------------ AutoUnit's questions

    def configure_optimizers_and_lr_scheduler(
        self, module: nn.Module
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer: Optimizer = self.run.setup.one("optimizer")
        return optimizer.build(list(trainable_parameters(module)), self.run)

    def compute_loss(self, state: State, data: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to differentiate and the sum of each loss over the micro-batch."""
        sums: dict[str, Tensor] = self.module(data.batch)
        loss = torch.stack([sums[name] * factor for name, factor in data.factors.items()]).sum()
        return loss, {name: value.detach() for name, value in sums.items()}

    def _prefetch_next_batch(self, state: State, data_iter: Iterator[Batch]) -> None:
        start = time.perf_counter()
        super()._prefetch_next_batch(state, data_iter)
        self._data_seconds += time.perf_counter() - start

    def move_data_to_device(self, state: State, data: Batch, non_blocking: bool) -> StepInput:
        data = mark_counted(data, self.run.recipe.loss)
        counts = loss_counts(data, self.run.recipe.loss)
        return StepInput(data.to(self.device, non_blocking=non_blocking), counts)

    # ----------------------------------------------------------------------------------------- the step

    def train_step(self, state: State, data: StepInput) -> tuple[Tensor, Any]:
        step = self.run.step + 1
        self._name_bad_samples(data.batch)
        counts = self._exchange(state, data)
        factors = self._factors(data.counts, counts)
        learning_rate = self.optimizer.param_groups[0]["lr"]

        micro_batches = data.batch.split(self.run.recipe.micro_batch(self.run.world_size))
        totals: dict[str, Tensor] = {}
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with self.parallelism.micro_batch(self.module, is_last=is_last):
                with self.maybe_autocast_precision:
                    loss, sums = self.compute_loss(state, MicroBatch(batch, factors))
                (self.grad_scaler.scale(loss) if self.grad_scaler else loss).backward()
            totals = {name: totals[name] + value if name in totals else value for name, value in sums.items()}

        grad_norm = self._update_weights(state)
        self._clamp_temperature()
        self.record = self._finish_step(step, data.batch)
        if self.metrics.is_logged(step):
            self.metrics.log(
                self.record, totals, data.counts, counts, grad_norm=grad_norm, learning_rate=learning_rate
            )
        return loss.detach(), totals

    def _exchange(self, state: State, data: StepInput) -> dict[str, float]:
        """Sum over the ranks what the host knows: counts of the losses, bad samples, requests to stop."""
        names = list(data.counts)
        *counts, read, bad, stop = sum_over_ranks(
            [
                *data.counts.values(),
                data.batch.num_samples_read,
                len(data.batch.bad_samples),
                self.stop.requested,
            ]
        )
        self._samples_read += read
        self.run.bad_samples += int(bad)
        limit = self.run.recipe.train.max_bad_fraction
        if self.run.bad_samples > limit * max(self._samples_read, MIN_SAMPLES_FOR_BAD_FRACTION):
            raise DataError(
                f"{self.run.bad_samples} of {self._samples_read:.0f} samples could not be used, more than"
                f" train.max_bad_fraction={limit:g} allows; the logs name them"
            )
        if stop:
            self.run.stopping = True
            state.stop()
        return dict(zip(names, counts, strict=True))

    def _factors(self, local: Mapping[str, int], world: Mapping[str, float]) -> dict[str, float]:
        """What turns the sum of a loss on this rank into its share of the loss.

        Gradients are averaged over the ranks: the sum over the global batch / the count there needs a factor
        world size. A loss without rows anywhere gets 0 from its sum, which is 0 and connected to the graph.
        """
        if self.run.recipe.loss.reduction == "per_rank":
            return {name: self._weights[name] / max(local[name], 1) for name in local}
        scale = self.run.world_size
        return {name: scale * self._weights[name] / max(world[name], 1) for name in local}

    def _update_weights(self, state: State) -> Tensor | None:
        """Norm and clipping of the whole gradient, sharded or not, then AutoUnit's optimizer step."""
        norm = None
        clip = self.run.recipe.train.clip_grad_norm
        if clip is not None or self.metrics.is_logged(self.run.step + 1):
            if self.grad_scaler:
                self.grad_scaler.unscale_(self.optimizer)
            norm = gradient_norm(self.module)
            if clip is not None:
                torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), clip, norm)
        super()._update_weights(state)
        return norm

    # -------------------------------------------------------------------------------------- book-keeping

    def _name_bad_samples(self, batch: Batch) -> None:
        for sample_id, reason in batch.bad_samples:
            if sample_id not in self._named_bad:
                self._named_bad.add(sample_id)
                self.run.logger.warning("sample skipped: %s: %s", sample_id, reason)

    def _finish_step(self, step: int, batch: Batch) -> StepRecord:
        now = time.perf_counter()
        items = self.run.recipe.global_batch(self.run.world_size)
        self.run.step = step
        self.run.samples += items
        record = StepRecord(
            step=step,
            modality=batch.modality,
            items=items,
            seconds=now - self._step_end,
            data_seconds=self._data_seconds,
            sample_ids=batch.sample_ids,
        )
        self._step_end, self._data_seconds = now, 0.0
        self.metrics.add(record)
        return record


def gradient_norm(module: nn.Module) -> Tensor:
    """The norm of all gradients together, sharded or not; the same on every rank."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
