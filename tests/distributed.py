"""Run a function on several local ranks over gloo, with a time limit and without leftovers."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
# Ranks are forked from a process that has torch imported already; it ends with this one.
_context.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", __name__]
)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 60.0
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a new gloo world; no port is taken (file store).

    Args:
        function: a module's function, so that another process can import it. It asks
            ``torch.distributed`` for its rank.
        args: picklable arguments, the same on every rank.

    Returns:
        What each rank returned, by rank.

    Raises:
        AssertionError: a rank failed (with the traceback of the first that did) or the time was up. All
            ranks have ended by then.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # the ranks share few cores; the fork server hands it down
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _context.Process(
                target=_run_rank, args=(function, rank, world_size, Path(folder), timeout_seconds, args)
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            exit_codes = _wait_for(ranks, timeout_seconds)
        finally:
            _end(ranks)
        _raise_first_failure(Path(folder))
        assert None not in exit_codes, f"not all ranks ended within {timeout_seconds:g} s: {exit_codes}"
        assert not any(exit_codes), f"a rank died without a word, by exit code: {exit_codes}"
        return [
            torch.load(Path(folder, f"result-{rank}.pt"), weights_only=False) for rank in range(world_size)
        ]


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: Path,
    timeout_seconds: float,
    args: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        torch.save(function(*args), folder / f"result-{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{time.time_ns():020d}-{rank}.txt").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _wait_for(ranks: Sequence[BaseProcess], timeout_seconds: float) -> list[int | None]:
    """Exit codes by rank once all have ended, one has failed, or the time is up (None: still running)."""
    deadline = time.monotonic() + timeout_seconds
    while running := [process for process in ranks if process.is_alive()]:
        wait([process.sentinel for process in running], timeout=max(0.0, deadline - time.monotonic()))
        if time.monotonic() > deadline or any(process.exitcode for process in ranks):
            break
    exit_codes = [process.exitcode for process in ranks]
    return [code for code in exit_codes if code] or exit_codes


def _end(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.join()


def _raise_first_failure(folder: Path) -> None:
    errors = sorted(folder.glob("error-*.txt"))
    if errors:
        rank = errors[0].stem.rsplit("-", 1)[1]
        raise AssertionError(f"rank {rank} failed first:\n{errors[0].read_text()}")
