"""Starts the local ranks through torch's elastic launcher and reports how they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flava_tnt.training.run_folder import SUMMARY, first_failure, read_summary, write_json

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

MADE_FOLDER = "FLAVA_TNT_RUN_DIR"
"""Environment variable that tells the ranks which run folder their launcher has made."""
LAUNCHER = "FLAVA_TNT_LAUNCHER"
"""Environment variable that tells the ranks the launcher's process id."""


def launch_ranks(arguments: Sequence[str], *, nproc: int, folder: Path) -> int:
    """Run the command once for each local rank and wait.

    Args:
        arguments: of ``python -m flava_tnt.recipes.run``, the same for every rank.
        nproc: ranks to start.
        folder: the run folder.

    Returns:
        The exit code: 0, or that of the rank that failed first, whose cause is printed.
    """
    # Imported here: torch takes seconds, and a wrong recipe is to be refused before.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_elastic()
    os.environ[MADE_FOLDER] = str(folder)
    os.environ[LAUNCHER] = str(os.getpid())
    _set_threads(nproc)
    with tempfile.TemporaryDirectory(prefix="flava_tnt_") as scratch:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # a free port
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        )
        try:
            elastic_launch(config, sys.executable)("-m", "flava_tnt.recipes.run", *arguments)
        except ChildFailedError as error:
            return report_failure(folder, _killed_rank(error.failures))
        except SignalException:
            return after_signal(folder)
    return 0


def _silence_elastic() -> None:
    """It logs each signal and failure, which we say in our own words; its loggers have their own levels."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _killed_rank(failures: Mapping[int, ProcessFailure]) -> dict[str, Any] | None:
    """The rank that a signal ended: it could not record its cause, and all others are consequences."""
    for rank, failure in failures.items():
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:
            hint = " (out of memory?)" if -failure.exitcode == signal.SIGKILL else ""
            return {"rank": rank, "exit_code": 1, "message": f"ended by {failure.signal_name()}{hint}"}
    return None


def _set_threads(nproc: int) -> None:
    """Share the cores: torch takes all of them in every rank otherwise."""
    if nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _count_cores() // nproc)))


def _count_cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def after_signal(folder: Path) -> int:
    """The ranks were asked to stop and have ended."""
    if first_failure(folder) is not None:
        return report_failure(folder, None)
    if not read_summary(folder):
        print("stopped before the first step", file=sys.stderr)
        write_json(folder / SUMMARY, {"status": "stopped", "steps": 0})
    return 0


def report_failure(folder: Path, killed: dict[str, Any] | None) -> int:
    """Print the first cause and make sure that the summary says so.

    Args:
        killed: a rank that a signal ended, if there is one.
    """
    unknown = {"rank": None, "exit_code": 1, "message": "a rank ended without a word; see its log"}
    record = killed or first_failure(folder) or unknown
    rank = "" if record["rank"] is None else f"rank {record['rank']}: "
    print(f"error: {rank}{record['message']}", file=sys.stderr)
    print(f"the logs are in {folder / 'logs'}", file=sys.stderr)
    # Rank 0 may have written what it saw of another rank's end, or nothing at all.
    write_json(folder / SUMMARY, {**read_summary(folder), "status": "failed", "error": record["message"]})
    return 2 if record["exit_code"] == 2 else 1
