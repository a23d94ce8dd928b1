"""Keeps the samples of every step."""

from __future__ import annotations

import json

from flava_tnt.plugin import Callback, Run, StepRecord


class SampleLog(Callback):
    """Writes each rank's sample ids of every step to `samples-RANK.jsonl` in the run folder.

    Can fail on purpose, to show that an exception in a callback ends all ranks.
    """

    api_version = 1

    fail_at_step: int | None = None
    """Raise after this step; None: never."""
    fail_on_rank: int = 0
    """The rank that raises."""

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        with (run.run_dir / f"samples-{run.rank}.jsonl").open("a", encoding="utf-8") as file:
            line = {"step": record.step, "modality": record.modality, "ids": list(record.sample_ids)}
            file.write(json.dumps(line) + "\n")
        if record.step == self.fail_at_step and run.rank == self.fail_on_rank:
            raise RuntimeError("failed on purpose")
