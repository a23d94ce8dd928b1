"""Hands torchtnt's loop on to the callbacks of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchtnt.framework.callback import Callback as TorchTntCallback
from torchtnt.framework.state import State

from flava_tnt.plugin import Callback, Run

if TYPE_CHECKING:
    from flava_tnt.training.unit import FlavaUnit


class CallbackBridge(TorchTntCallback):
    """One torchtnt callback that calls ours, in the recipe's order. Exceptions go through."""

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        self._run = run
        self._callbacks = callbacks

    def on_train_start(self, state: State, unit: FlavaUnit) -> None:
        for callback in self._callbacks:
            callback.on_train_start(self._run)

    def on_train_step_start(self, state: State, unit: FlavaUnit) -> None:
        for callback in self._callbacks:
            callback.on_step_start(self._run)

    def on_train_step_end(self, state: State, unit: FlavaUnit) -> None:
        assert unit.record is not None
        for callback in self._callbacks:
            callback.on_step_end(self._run, unit.record)
        metrics = unit.metrics.newest
        if metrics is None:
            return
        for callback in self._callbacks:
            metrics.update(callback.measure(self._run, metrics))
        self._run.last_metrics = metrics
        for callback in self._callbacks:
            callback.on_log(self._run, metrics)
