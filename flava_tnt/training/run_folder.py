"""The run folder: what a run leaves behind, and where.

::

    RUN/recipe.yaml        resolved, runnable as it is
    RUN/plugins.json       kind, name, distribution, version of each
    RUN/metrics.jsonl      one object a logged step
    RUN/summary.json       at the end, also after a stop
    RUN/logs/rank-0.log    and so on
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flava_tnt.errors import UserError

if TYPE_CHECKING:
    from flava_tnt.recipes.resolve import Resolved

RECIPE = "recipe.yaml"
SUMMARY = "summary.json"
_FAILURES = "logs/.rank-*.failure.json"
"""What ranks that failed have recorded, for the launcher."""


def create_run_folder(resolved: Resolved, run_dir: str | None) -> Path:
    """Make the run folder and write the recipe and the plugins into it.

    Args:
        run_dir: where; None: ``runs/NAME-DATE-TIME`` in the working directory, with a number if taken.

    Raises:
        UserError: it holds a run already, or it cannot be written.
    """
    try:
        folder = _new_folder(resolved.recipe.name) if run_dir is None else _given_folder(Path(run_dir))
        (folder / "logs").mkdir(exist_ok=True)
        (folder / RECIPE).write_text(resolved.to_yaml(), encoding="utf-8")
        write_json(folder / "plugins.json", resolved.plugins_json())
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {error.filename}: {error.strerror}; choose another with --run-dir"
        ) from error
    return folder


def _given_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if read_summary(folder).get("steps") == 0:  # of a run that ended before its first step: nothing is lost
        for path in (folder / RECIPE, folder / SUMMARY, *folder.glob(_FAILURES)):
            path.unlink(missing_ok=True)
    try:
        (folder / RECIPE).touch(exist_ok=False)  # of two runs that want the folder, one gets it
    except FileExistsError:
        raise UserError(f"{folder} holds a run already; choose another folder with --run-dir") from None
    return folder.resolve()


def _new_folder(name: str) -> Path:
    stem = f"{Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder.resolve()
    raise UserError(f"runs/{stem} and its numbered names are all taken; choose a folder with --run-dir")


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run; empty where there is none (yet)."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all, so that a reader never sees half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def set_up_logging(folder: Path, rank: int) -> logging.Logger:
    """Log to ``logs/rank-N.log``; rank 0 speaks to the terminal too, warnings come from every rank."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("flava_tnt")
    logger.setLevel(logging.DEBUG)  # the file keeps tracebacks, the terminal does not show them
    logger.propagate = False
    file = logging.FileHandler(folder / "logs" / f"rank-{rank}.log", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    terminal = logging.StreamHandler()
    terminal.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    terminal.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    logger.handlers = [file, terminal]
    return logger


# ------------------------------------------------------------------------------------------ failures


def record_failure(folder: Path, rank: int, error: BaseException, exit_code: int) -> None:
    """Keep what went wrong on this rank, with its time, for whoever asks which rank failed first."""
    text = "".join(traceback.format_exception(error))
    record = {
        "rank": rank,
        "time": time.time(),
        "exit_code": exit_code,
        "message": f"{error}" if exit_code == 2 else f"{type(error).__name__}: {error}",
        "traceback": text,
    }
    with contextlib.suppress(OSError):  # the disk may be what failed
        write_json(_failure_file(folder, rank), record)


def first_failure(folder: Path) -> dict[str, Any] | None:
    """The earliest failure that a rank of this run recorded."""
    records = []
    for path in folder.glob(_FAILURES):
        with contextlib.suppress(OSError, ValueError):
            records.append(json.loads(path.read_text(encoding="utf-8")))
    return min(records, key=lambda record: record["time"], default=None)


def _failure_file(folder: Path, rank: int) -> Path:
    return folder / "logs" / f".rank-{rank}.failure.json"
