"""Curves for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from flava_tnt.plugin import Callback, Run

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_NOT_CURVES = ("step", "time", "losses", "modality")


class TensorBoard(Callback):
    """Writes each number of the metrics as a curve under `tensorboard/` in the run folder."""

    api_version = 1

    _writer: SummaryWriter | None = PrivateAttr(default=None)

    def on_train_start(self, run: Run) -> None:
        if run.is_main:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(run.run_dir / "tensorboard"))

    def on_log(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        values = {name: value for name, value in metrics.items() if name not in _NOT_CURVES}
        values |= {f"losses/{name}": value for name, value in metrics["losses"].items()}
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, metrics["step"], walltime=metrics["time"])

    def on_train_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        self._close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
