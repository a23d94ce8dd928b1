"""One rank's run, from the process group to the summary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtnt.framework.train import train

from flava_tnt.data.loader import make_loader
from flava_tnt.data.sources import open_readers
from flava_tnt.plugin import Callback, Run, Setup
from flava_tnt.recipes.resolve import Resolved
from flava_tnt.training.assembly import assemble_model
from flava_tnt.training.callbacks import CallbackBridge
from flava_tnt.training.exchange import agree, all_succeed, main_decides, sum_over_ranks
from flava_tnt.training.metrics import MetricsLog
from flava_tnt.training.process import World, join
from flava_tnt.training.run_folder import SUMMARY, create_run_folder, set_up_logging, write_json
from flava_tnt.training.stop import StopRequest
from flava_tnt.training.tokenizer import agree_on_tokenizer
from flava_tnt.training.unit import FlavaUnit


def run_rank(
    resolved: Resolved,
    setup: Setup,
    world: World,
    *,
    run_dir: str | None,
    made_folder: str | None,
    stop: StopRequest,
) -> None:
    """Train as one of the ranks of ``world``; errors go up.

    Args:
        run_dir: where rank 0 is to make the run folder; None: under ``runs/``.
        made_folder: the run folder that our launcher has made already.
        stop: collects this process's requests to stop.
    """
    device = join(
        world, device_type=setup.device_type, timeout_seconds=resolved.recipe.launch.timeout_seconds
    )
    folder = Path(main_decides(lambda: made_folder or str(create_run_folder(resolved, run_dir))))
    logger = all_succeed(lambda: set_up_logging(folder, world.rank))
    run = Run(
        setup=setup,
        rank=world.rank,
        local_rank=world.local_rank,
        device=device,
        run_dir=folder,
        logger=logger,
    )
    callbacks: list[Callback] = list(setup.plugins.get("callback", {}).values())  # type: ignore[arg-type]
    start = time.perf_counter()
    try:
        agree("recipe and plugin versions", resolved.digest())
        _train(run, callbacks, stop)
        _finish(run, callbacks, "stopped" if run.stopping else "finished", start)
    except BaseException as error:
        _fail(run, callbacks, error, start)
        raise
    dist.destroy_process_group()


def _train(run: Run, callbacks: Sequence[Callback], stop: StopRequest) -> None:
    recipe = run.recipe
    _warn_of_dropout(run)
    readers = all_succeed(lambda: open_readers(run.setup))
    tokenizer = agree_on_tokenizer(run, readers)
    model, module = assemble_model(run)
    metrics = MetricsLog(run)
    unit = FlavaUnit(run=run, model=model, module=module, metrics=metrics, stop=stop)
    loader = make_loader(run.setup, rank=run.rank, start_step=0, tokenizer=tokenizer, readers=readers)
    if sum_over_ranks([stop.requested])[0]:
        run.stopping = True
        run.logger.info("stopped before the first step")
        return
    bridge = CallbackBridge(run, callbacks)
    train(unit, loader, max_epochs=1, max_steps=recipe.train.max_steps, callbacks=[bridge])


def _warn_of_dropout(run: Run) -> None:
    if run.recipe.model.dropout and run.is_main:
        run.logger.warning(
            "model.dropout=%g: the curve repeats exactly on the same layout of ranks only",
            run.recipe.model.dropout,
        )


def _finish(run: Run, callbacks: Sequence[Callback], status: str, start: float) -> None:
    summary = _summary(run, status, start)
    for callback in callbacks:
        summary.update(callback.summarise(run))
    if run.is_main:
        write_json(run.run_dir / SUMMARY, summary)
    for callback in callbacks:
        callback.on_train_end(run, summary)


def _summary(run: Run, status: str, start: float) -> dict[str, Any]:
    return {
        "status": status,
        "steps": run.step,
        "samples": run.samples,
        "bad_samples": run.bad_samples,
        "seconds": time.perf_counter() - start,
        "final_loss": run.last_metrics.get("loss"),
    }


def _fail(run: Run, callbacks: Sequence[Callback], error: BaseException, start: float) -> None:
    """Log the failure, then let everyone release what they hold; nothing here may hide it."""
    run.logger.debug("failed", exc_info=error)
    for callback in callbacks:
        try:
            callback.on_exception(run, error)
        except Exception as second:
            run.logger.error("%s failed while cleaning up: %s", type(callback).__name__, second)
    if run.is_main:
        summary = {**_summary(run, "failed", start), "final_loss": None, "error": str(error)}
        with contextlib.suppress(OSError):  # the disk may be what failed
            write_json(run.run_dir / SUMMARY, summary)
