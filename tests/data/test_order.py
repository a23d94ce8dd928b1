from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flava_tnt.data.order import sample_index, sample_indices


@given(num_samples=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**9))
def test_each_epoch_shows_each_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    positions = np.arange(epoch * num_samples, (epoch + 1) * num_samples)
    indices = sample_indices(seed, "pairs", positions, num_samples)
    assert sorted(indices.tolist()) == list(range(num_samples))


@given(num_samples=st.integers(1, 10**12), position=st.integers(0, 10**15), seed=st.integers(0, 10**6))
def test_an_index_is_within_a_source_of_any_size(num_samples: int, position: int, seed: int) -> None:
    assert 0 <= sample_index(seed, "text", position, num_samples) < num_samples


@given(positions=st.lists(st.integers(0, 10_000), min_size=1, max_size=40), num_samples=st.integers(1, 500))
def test_many_at_once_are_the_same_as_one_by_one(positions: list[int], num_samples: int) -> None:
    together = sample_indices(7, "image", np.array(positions), num_samples)
    assert together.tolist() == [sample_index(7, "image", position, num_samples) for position in positions]


def test_the_order_is_the_one_that_runs_so_far_had() -> None:
    # A change here changes every run; it must be meant, and stand in the changelog.
    assert sample_indices(0, "pairs", np.arange(8), 1000).tolist() == [
        410,
        666,
        189,
        463,
        288,
        426,
        285,
        399,
    ]


def test_epochs_streams_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, stream: str, epoch: int) -> tuple[int, ...]:
        return tuple(sample_indices(seed, stream, np.arange(epoch * 100, epoch * 100 + 100), 100).tolist())

    orders = {order(s, m, e) for s in (0, 1) for m in ("pairs", "text") for e in (0, 1)}
    assert len(orders) == 8


@pytest.mark.parametrize("num_samples", [2, 3, 5, 10, 97])
def test_each_sample_comes_equally_often_at_each_place(num_samples: int) -> None:
    num_epochs = 1500
    indices = sample_indices(1, "pairs", np.arange(num_epochs * num_samples), num_samples)
    table = np.zeros((num_samples, num_samples))
    np.add.at(table, (np.arange(len(indices)) % num_samples, indices), 1)
    expected = num_epochs / num_samples
    chi_square = ((table - expected) ** 2 / expected).sum()
    freedom = (num_samples - 1) ** 2
    assert abs(chi_square - freedom) < 6 * np.sqrt(2 * freedom) + 6


def test_neighbours_are_not_kept_together() -> None:
    indices = sample_indices(0, "pairs", np.arange(100_000), 100_000)
    steps = np.diff(indices)
    assert abs(np.corrcoef(indices[:-1], indices[1:])[0, 1]) < 0.02
    assert Counter(steps.tolist()).most_common(1)[0][1] < 20
