"""What a person sees in the terminal: a bar, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field, PrivateAttr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from flava_tnt.plugin import Callback, Run, StepRecord

_LOSSES = {
    "contrastive": "contrastive (pairs)",
    "itm": "image-text matching (pairs)",
    "mmm_text": "masked text (pairs)",
    "mmm_image": "masked image (pairs)",
    "mim": "masked image (image only)",
    "mlm": "masked text (text only)",
}


class Progress(Callback):
    """A progress bar, or a line now and then where there is no terminal; at the end a table of the losses."""

    api_version = 1

    line_every_seconds: float = Field(default=10.0, gt=0.0)
    """Where the output is no terminal: seconds between two lines."""
    last_values: int = Field(default=5, ge=1)
    """The final table's end value of a loss is the mean of so many of its last logged values."""

    _console: Console | None = PrivateAttr(default=None)
    _bar: Bar | None = PrivateAttr(default=None)
    _task: Any = PrivateAttr(default=None)
    _last_line: float = PrivateAttr(default=0.0)
    _values: dict[str, list[float]] = PrivateAttr(default_factory=dict)

    def on_train_start(self, run: Run) -> None:
        if not run.is_main:
            return
        self._console = Console(stderr=True)
        self._values = {}
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=run.recipe.train.max_steps, completed=run.step)
            self._bar.start()

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step)

    def on_log(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if self._console is None:
            return
        for name, value in metrics["losses"].items():
            self._values.setdefault(name, []).append(value)
        text = _describe(metrics)
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif time.perf_counter() - self._last_line >= self.line_every_seconds:
            self._last_line = time.perf_counter()
            self._console.print(
                f"step {metrics['step']}/{run.recipe.train.max_steps}  {text}", highlight=False
            )

    def on_train_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        if self._console is None:
            return
        self._stop_bar()
        self._console.print(self._table())
        rate = summary.get("items_per_second")
        speed = f", {rate:.1f} items/s" if rate else ""
        self._console.print(
            f"{summary['status']} after {summary['steps']} steps in {summary['seconds']:.0f} s{speed}",
            highlight=False,
        )
        self._console.print(f"run folder: {run.run_dir}", highlight=False, soft_wrap=True)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._stop_bar()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _table(self) -> Table:
        table = Table("loss", "start", f"end (mean of last {self.last_values} logged)")
        for name, title in _LOSSES.items():
            values = self._values.get(name)
            if values:
                last = values[-self.last_values :]
                table.add_row(title, f"{values[0]:.3f}", f"{sum(last) / len(last):.3f}")
        return table


def _describe(metrics: Mapping[str, Any]) -> str:
    rate = metrics.get("items_per_second")
    speed = f"  {rate:.1f} items/s" if rate else ""
    return f"{metrics['modality']:<5}  loss {metrics['loss']:.3f}{speed}"
