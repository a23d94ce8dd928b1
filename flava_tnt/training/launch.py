"""Starts the local ranks through torch's elastic launcher and reports how they ended."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from flava_tnt.training.run_folder import SUMMARY, first_failure, read_summary, write_json

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

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
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
            _, failure = error.get_first_failure()
            return report_failure(folder, failure.exitcode, failure.message)
        except (SignalException, KeyboardInterrupt):
            return _after_signal(folder)
    return 0


def _set_threads(nproc: int) -> None:
    """Share the cores: torch takes all of them in every rank otherwise."""
    if nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _count_cores() // nproc)))


def _count_cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _after_signal(folder: Path) -> int:
    """The ranks were asked to stop and have ended: well if the summary says so."""
    if first_failure(folder) is None and (folder / SUMMARY).exists():
        return 0
    return report_failure(folder, 1, "ended by a signal before the run could stop by itself")


def report_failure(folder: Path, exit_code: int, message: str) -> int:
    """Print the first cause and make sure that the summary says so.

    Args:
        exit_code: of the rank that failed; negative where a signal ended it.
        message: what the launcher knows, for a rank that could not record its cause.
    """
    record = first_failure(folder)
    if record is None:
        record = {"rank": None, "exit_code": exit_code, "message": message}
    rank = "" if record["rank"] is None else f"rank {record['rank']}: "
    print(f"error: {rank}{record['message']}", file=sys.stderr)
    print(f"the logs are in {folder / 'logs'}", file=sys.stderr)
    # Rank 0 may have written what it saw of another rank's end, or nothing at all.
    write_json(folder / SUMMARY, {**read_summary(folder), "status": "failed", "error": record["message"]})
    return 2 if record["exit_code"] == 2 else 1
