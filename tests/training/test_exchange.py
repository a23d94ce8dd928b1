"""Ranks agree, or all of them raise."""

from __future__ import annotations

import torch.distributed as dist

from flava_tnt.errors import DataError, TrainingError
from flava_tnt.training.exchange import agree, all_succeed, main_decides, max_over_ranks, sum_over_ranks
from tests.distributed import run_ranks


def reduce() -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    return sum_over_ranks([1.0, rank]), max_over_ranks([rank, -rank])


def test_sums_and_maxima_are_the_same_on_every_rank():
    assert run_ranks(reduce, 3) == [([3.0, 3.0], [2.0, 0.0])] * 3


def raised(what) -> str | None:
    try:
        what()
    except (DataError, TrainingError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise DataError(f"rank {rank} has no disk")
    return dist.get_rank()


def fail_in_all_succeed() -> tuple[str | None, str | None]:
    return raised(lambda: all_succeed(lambda: fail_on(1))), raised(lambda: all_succeed(lambda: fail_on(9)))


def test_what_fails_on_one_rank_raises_the_same_on_all():
    assert run_ranks(fail_in_all_succeed, 2) == [("DataError: rank 1 has no disk", None)] * 2


def decide() -> tuple[str, str | None]:
    def fail() -> str:
        raise ValueError("rank 0 cannot decide")

    return main_decides(lambda: f"by rank {dist.get_rank()}"), raised(lambda: main_decides(fail))


def test_rank_0_decides_for_all_also_that_it_cannot():
    assert run_ranks(decide, 2) == [("by rank 0", "ValueError: rank 0 cannot decide")] * 2


def disagree() -> tuple[str | None, str | None]:
    rank = dist.get_rank()
    return raised(lambda: agree("recipe", "same")), raised(lambda: agree("recipe", f"{rank > 0}"))


def test_ranks_that_differ_are_named():
    for same, other in run_ranks(disagree, 3):
        assert same is None
        assert other is not None
        assert "do not agree on the recipe: rank 1, 2 differs from rank 0" in other
