"""What the callbacks that come along make of a run."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flava_tnt.plugin import Run, StepRecord
from flava_tnt.recipes.resolve import check_setup, resolve
from flava_tnt_plugins import throughput
from flava_tnt_plugins.metrics_file import MetricsFile
from flava_tnt_plugins.progress import Progress
from flava_tnt_plugins.tensorboard import TensorBoard
from flava_tnt_plugins.throughput import Throughput


@pytest.fixture
def run(tmp_path: Path) -> Run:
    resolved = resolve("demo", ["batch.global=12"])
    setup = check_setup(resolved, world_size=1, local_world_size=1, device_type="cpu")
    return Run(
        setup=setup,
        rank=0,
        local_rank=0,
        device=torch.device("cpu"),
        run_dir=tmp_path,
        logger=logging.getLogger("test"),
    )


def record(step: int) -> StepRecord:
    return StepRecord(step=step, modality="pairs", items=12, seconds=2.0, data_seconds=0.5, sample_ids=("a",))


def metrics(step: int) -> dict[str, Any]:
    losses = {"itm": 0.5 / step, "contrastive": 2.0}
    return {
        "step": step,
        "modality": "pairs",
        "loss": 2.5,
        "losses": losses,
        "grad_norm": None,
        "seconds_per_step": 2.0,
        "time": 1e9 + step,
    }


def test_throughput_leaves_the_first_steps_out_of_the_average(run, monkeypatch):
    clock = itertools.count(start=0.0, step=10.0)
    monkeypatch.setattr(throughput, "_now", lambda _run: next(clock))
    callback = Throughput(skip_steps=2)
    callback.on_train_start(run)
    for step in range(1, 6):
        callback.on_step_end(run, record(step))
    # Two looks at the clock, 10 s apart: after step 2, and at the end, with 3 steps of 12 items in between.
    assert callback.summarise(run) == {"items_per_second": pytest.approx(3.6)}
    assert callback.measure(run, metrics(5)) == {"items_per_second": 6.0}


def test_throughput_of_a_run_that_was_too_short_is_not_known(run):
    callback = Throughput(skip_steps=100)
    callback.on_train_start(run)
    callback.on_step_end(run, record(1))
    assert callback.summarise(run) == {"items_per_second": None}


def test_metrics_file_has_one_object_a_line_and_appends(run):
    for step in (1, 2):
        MetricsFile().on_log(run, metrics(step))
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [metrics(1), metrics(2)]


def test_only_the_main_rank_writes(run):
    run.rank = 1
    for callback in (MetricsFile(), TensorBoard(), Progress()):
        callback.on_train_start(run)
        callback.on_log(run, metrics(1))
        callback.on_train_end(run, {"status": "finished", "steps": 1, "seconds": 1.0})
    assert list(run.run_dir.iterdir()) == []


def test_tensorboard_has_a_curve_for_each_number(run):
    callback = TensorBoard()
    callback.on_train_start(run)
    for step in (1, 2):
        callback.on_log(run, metrics(step))
    callback.on_train_end(run, {})
    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "losses/itm", "losses/contrastive", "seconds_per_step"}
    assert [(e.step, e.value) for e in events.Scalars("losses/itm")] == [(1, 0.5), (2, 0.25)]


def test_progress_ends_with_a_table_and_the_run_folder(run, capsys):
    callback = Progress(last_values=2, line_every_seconds=1000.0)
    callback.on_train_start(run)
    for step in (1, 2, 4):
        callback.on_step_end(run, record(step))
        callback.on_log(run, metrics(step))
    callback.on_train_end(run, {"status": "finished", "steps": 4, "seconds": 9.0, "items_per_second": 5.0})
    shown = capsys.readouterr().err
    assert shown.count("step 1/") + shown.count("step 2/") == 1, "one line in so short a time"
    row = next(line for line in shown.splitlines() if "image-text matching" in line)
    assert "0.500" in row
    assert "0.188" in row  # the mean of 0.25 and 0.125
    assert "finished after 4 steps in 9 s, 5.0 items/s" in shown
    assert str(run.run_dir) in shown
