"""`metrics.jsonl`: one object a logged step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flava_tnt.plugin import Callback, Run


class MetricsFile(Callback):
    """Appends the metrics of each logged step to `metrics.jsonl` in the run folder, as one JSON object."""

    api_version = 1

    def on_log(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if run.is_main:
            # Opened for each line: a run that dies leaves whole lines, and a follower sees them at once.
            with (run.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics, allow_nan=False) + "\n")
