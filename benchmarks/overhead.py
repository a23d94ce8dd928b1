"""What the trainer costs: its step against a bare loop's over the same model, batches and optimizer.

    python benchmarks/overhead.py [RECIPE] [KEY=VALUE ...] [--rounds 10] [--steps 20]

Both run in one process, in turn, round by round, so that a machine whose speed drifts treats them alike. The
trainer runs with the recipe's plugins and callbacks, reading batches that were made before; the bare loop is
forward, backward, clipping where the recipe clips, optimizer and schedule, and nothing else. Who comes first
in a round alternates. Printed: seconds a step of both, and the ratio of each round's pair (median, lowest
and highest).
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

warnings.filterwarnings("ignore", message="pkg_resources is deprecated")

from torchtnt.framework.train import train  # noqa: E402

from flava_tnt.data.batch import Batch  # noqa: E402
from flava_tnt.data.loader import make_loader  # noqa: E402
from flava_tnt.data.sources import open_readers  # noqa: E402
from flava_tnt.model.losses import loss_counts  # noqa: E402
from flava_tnt.plugin import Callback, Run  # noqa: E402
from flava_tnt.recipes.resolve import check_setup, resolve  # noqa: E402
from flava_tnt.training.assembly import assemble_model, trainable_parameters  # noqa: E402
from flava_tnt.training.callbacks import CallbackBridge  # noqa: E402
from flava_tnt.training.metrics import MetricsLog  # noqa: E402
from flava_tnt.training.stop import StopRequest  # noqa: E402
from flava_tnt.training.tokenizer import agree_on_tokenizer  # noqa: E402
from flava_tnt.training.unit import FlavaUnit  # noqa: E402


class BareLoop:
    """What one would write by hand."""

    def __init__(self, run: Run, module: nn.Module) -> None:
        self.run, self.module = run, module
        self.optimizer, self.schedule = run.setup.one("optimizer").build(
            list(trainable_parameters(module)), run
        )

    def step(self, batch: Batch) -> None:
        counts = loss_counts(batch, self.run.recipe.loss)
        sums = self.module(batch)
        loss = torch.stack([value / max(counts[name], 1) for name, value in sums.items()]).sum()
        loss.backward()
        if self.run.recipe.train.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.run.recipe.train.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="demo")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps of each in a round")
    options = parser.parse_args()

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        run = _make_run(options, Path(folder))
        batches = _make_batches(run, options.steps)
        model, module = assemble_model(run)
        bare_module = assemble_model(run)[1]
        bare = BareLoop(run, bare_module)
        callbacks: list[Callback] = list(run.setup.plugins.get("callback", {}).values())
        callbacks = [callback for callback in callbacks if type(callback).__name__ != "Progress"]
        unit = FlavaUnit(run=run, model=model, module=module, metrics=MetricsLog(run), stop=StopRequest())
        bridge = CallbackBridge(run, callbacks)
        # One iterator for all rounds: AutoUnit fetches a batch early, also across the end of a round.
        endless = itertools.cycle(batches)
        pairs = []
        for number in range(options.rounds + 1):
            theirs = _time_bare(bare, batches) if number % 2 else 0.0
            ours = _time_trainer(unit, bridge, endless, options.steps)
            theirs = theirs or _time_bare(bare, batches)
            if number:  # the first round warms up
                pairs.append((ours / options.steps, theirs / options.steps))
    ratios = [ours / theirs for ours, theirs in pairs]
    print(f"{len(pairs)} rounds, medians")
    print(f"trainer   {statistics.median(ours for ours, _ in pairs):.4f} s a step")
    print(f"bare loop {statistics.median(theirs for _, theirs in pairs):.4f} s a step")
    print(f"ratio     {statistics.median(ratios):.3f} (lowest {min(ratios):.3f}, highest {max(ratios):.3f})")
    dist.destroy_process_group()


def _make_run(options: argparse.Namespace, folder: Path) -> Run:
    resolved = resolve(options.recipe, ["train.max_steps=100000", *options.overrides])
    setup = check_setup(resolved, world_size=1, local_world_size=1, device_type="cpu")
    logger = logging.getLogger("benchmark")
    return Run(setup=setup, rank=0, local_rank=0, device=torch.device("cpu"), run_dir=folder, logger=logger)


def _make_batches(run: Run, count: int) -> list[Batch]:
    readers = open_readers(run.setup)
    tokenizer = agree_on_tokenizer(run, readers)
    loader = iter(make_loader(run.setup, rank=0, start_step=0, tokenizer=tokenizer, readers=readers))
    return [next(loader) for _ in range(count)]


def _time_trainer(unit: FlavaUnit, bridge: CallbackBridge, batches: Iterator[Batch], steps: int) -> float:
    progress = unit.train_progress
    start = time.perf_counter()
    train(
        unit,
        batches,
        max_epochs=progress.num_epochs_completed + 1,
        max_steps=progress.num_steps_completed + steps,
        callbacks=[bridge],
    )
    return time.perf_counter() - start


def _time_bare(bare: BareLoop, batches: list[Batch]) -> float:
    start = time.perf_counter()
    for batch in batches:
        bare.step(batch)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
