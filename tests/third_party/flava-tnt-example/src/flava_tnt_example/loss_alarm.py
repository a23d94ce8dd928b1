"""Warns when the loss is high."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flava_tnt.plugin import Callback, Run


class LossAlarm(Callback):
    """Warns when the loss of a logged step is above a limit."""

    api_version = 1

    limit: float = 20.0
    """The loss above which a warning is logged."""

    def on_log(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if metrics["loss"] > self.limit and run.is_main:
            run.logger.warning(
                "step %d: loss %.2f is above %.2f", metrics["step"], metrics["loss"], self.limit
            )
