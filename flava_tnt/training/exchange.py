"""What ranks tell each other from host to host, and how they agree.

Everything here uses CPU tensors (gloo), so the device is never waited for, and everything here is called by
all ranks at the same point: ranks that disagreed on a call would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flava_tnt.errors import TrainingError

T = TypeVar("T")


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Element-wise sums, in double precision."""
    return _all_reduce(values, dist.ReduceOp.SUM)


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Element-wise maxima."""
    return _all_reduce(values, dist.ReduceOp.MAX)


def _all_reduce(values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    if dist.get_world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=operation)
    result: list[float] = tensor.tolist()
    return result


def main_decides(decide: Callable[[], T]) -> T:
    """Rank 0 computes a value and every rank gets it; if that fails, every rank raises the same error."""
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            message = [(decide(), None)]
        except Exception as error:
            message = [(None, error)]
    dist.broadcast_object_list(message, src=0)
    value, failure = message[0]
    if failure is not None:
        raise failure
    result: T = value
    return result


def all_succeed(what: Callable[[], T]) -> T:
    """Every rank does something that may fail on some; if it fails anywhere, every rank raises.

    All raise the error of the first rank on which it failed, so that nobody goes on to wait for a rank that
    is gone, and all end alike.
    """
    value: T | None = None
    error: Exception | None = None
    try:
        value = what()
    except Exception as caught:
        error = caught
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next((failure for failure in errors if failure is not None), None)
    if first is not None:
        raise first
    return value  # type: ignore[return-value]


def agree(what: str, value: str) -> None:
    """Check that all ranks hold the same value.

    Raises:
        TrainingError: on every rank, naming the ranks that differ from rank 0.
    """
    values: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    others = [str(rank) for rank, other in enumerate(values) if other != values[0]]
    if others:
        raise TrainingError(
            f"ranks do not agree on the {what}: rank {', '.join(others)} differs from rank 0; start the same"
            " command with the same files and package versions everywhere"
        )
