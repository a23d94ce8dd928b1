from __future__ import annotations

import time

import pytest

from flava_tnt.data.schedule import STEPS_PER_BLOCK, Schedule, first_position, modality_of_step
from flava_tnt.recipes.schema import ModalityShares

SHARES = ModalityShares(pairs=0.70, image=0.15, text=0.15)


def test_modalities_come_with_their_shares() -> None:
    drawn = [modality_of_step(3, step, SHARES) for step in range(1, 20_001)]
    assert drawn.count("pairs") / len(drawn) == pytest.approx(0.70, abs=0.015)
    assert drawn.count("image") / len(drawn) == pytest.approx(0.15, abs=0.015)


def test_shares_are_scaled_to_a_sum_of_one() -> None:
    scaled = ModalityShares(pairs=7.0, image=1.5, text=1.5)
    steps = range(1, 500)
    assert [modality_of_step(0, s, scaled) for s in steps] == [modality_of_step(0, s, SHARES) for s in steps]


@pytest.mark.parametrize("absent", ["pairs", "image", "text"])
def test_a_share_of_zero_never_comes(absent: str) -> None:
    shares = ModalityShares(**{"pairs": 1.0, "image": 1.0, "text": 1.0, absent: 0.0})
    assert absent not in {modality_of_step(1, step, shares) for step in range(1, 20_001)}


def test_first_position_counts_the_earlier_steps_of_the_modality() -> None:
    schedule = Schedule(5, SHARES)
    seen = {"pairs": 0, "image": 0, "text": 0}
    for step in range(1, 2 * STEPS_PER_BLOCK + 50):
        modality = schedule.modality(step)
        if step % 97 == 1 or step % STEPS_PER_BLOCK in (0, 1, 2):
            assert first_position(5, step, SHARES, 12) == 12 * seen[modality]
        seen[modality] += 1


def test_a_step_is_the_same_whatever_was_asked_before() -> None:
    fresh = Schedule(9, SHARES)
    late = (fresh.modality(40_001), fresh.earlier_steps(40_001))
    used = Schedule(9, SHARES)
    for step in (1, 100_000, 3, 40_000, 20_000):
        used.earlier_steps(step)
    assert (used.modality(40_001), used.earlier_steps(40_001)) == late


def test_seeds_differ() -> None:
    first, second = ([modality_of_step(seed, s, SHARES) for s in range(1, 200)] for seed in (0, 1))
    assert first != second


def test_a_step_in_the_millions_costs_moments() -> None:
    schedule = Schedule(0, SHARES)
    start = time.process_time()
    schedule.earlier_steps(5_000_000)
    first = time.process_time() - start
    start = time.process_time()
    for step in range(5_000_000, 5_000_200):
        schedule.earlier_steps(step)
    assert first < 5.0  # about 0.2 s; one draw at a time would take minutes
    assert (time.process_time() - start) / 200 < 0.005


def test_counts_of_all_modalities_add_up_to_the_steps() -> None:
    schedule = Schedule(2, SHARES)
    last_of = {}
    for step in range(30_000, 30_200):
        last_of[schedule.modality(step)] = schedule.earlier_steps(step) + 1
    total = 0
    for step in range(30_199, 29_999, -1):
        modality = schedule.modality(step)
        if modality in last_of:
            total += last_of.pop(modality)
    assert total == 30_199
    assert not last_of
