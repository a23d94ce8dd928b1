"""Which kind of batch each step takes, as a function of the seed and the step alone.

Every rank computes the same modality without a broadcast, and a resume needs no state: the samples of a step
stand at ``first_position`` of their modality's stream, which is the number of earlier steps of that modality
times the global batch.

Draws are made in blocks of steps, and each block's counts are remembered, so a step in the millions costs a
few milliseconds once and next to nothing afterwards.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import numpy as np

from flava_tnt.plugin import MODALITIES, Modality
from flava_tnt.position import generator
from flava_tnt.recipes.schema import ModalityShares

STEPS_PER_BLOCK = 8192
"""Steps drawn at once. Part of what a seed means: another value gives other runs."""


class Schedule:
    """The modality of every step of a run.

    Args:
        seed: the recipe's seed.
        shares: how often each modality comes; scaled to a sum of 1.
    """

    def __init__(self, seed: int, shares: ModalityShares) -> None:
        bounds = np.cumsum([getattr(shares, modality) for modality in MODALITIES])
        self._seed = seed
        self._bounds = bounds / bounds[-1]
        self._counts_before: list[np.ndarray] = [np.zeros(len(MODALITIES), dtype=np.int64)]
        """Entry b: steps of each modality before block b."""
        self._block = lru_cache(maxsize=4)(self._draw_block)
        self._lock = threading.Lock()

    def modality(self, step: int) -> Modality:
        """The modality of a step (from 1)."""
        block, offset = _place(step)
        return MODALITIES[self._block(block)[offset]]

    def earlier_steps(self, step: int) -> int:
        """How many steps before ``step`` (from 1) have the same modality."""
        block, offset = _place(step)
        drawn = self._block(block)
        modality = drawn[offset]
        before = self._count_before(block)[modality]
        return int(before + np.count_nonzero(drawn[:offset] == modality))

    def _draw_block(self, block: int) -> np.ndarray:
        """Indices into MODALITIES of the block's steps."""
        uniform = generator(self._seed, "modality", block).random(STEPS_PER_BLOCK)
        # "right": a share of 0 is an empty interval, which no draw falls into.
        return np.searchsorted(self._bounds, uniform, side="right")

    def _count_before(self, block: int) -> np.ndarray:
        with self._lock:
            while len(self._counts_before) <= block:
                last = self._draw_block(len(self._counts_before) - 1)
                counts = np.bincount(last, minlength=len(MODALITIES))
                self._counts_before.append(self._counts_before[-1] + counts)
            return self._counts_before[block]


def modality_of_step(seed: int, step: int, shares: ModalityShares) -> Modality:
    """The modality of a step (from 1)."""
    return _schedule(seed, shares.pairs, shares.image, shares.text).modality(step)


def first_position(seed: int, step: int, shares: ModalityShares, global_batch: int) -> int:
    """Where the samples of a step (from 1) start in the stream of its modality."""
    schedule = _schedule(seed, shares.pairs, shares.image, shares.text)
    return schedule.earlier_steps(step) * global_batch


@lru_cache(maxsize=8)
def _schedule(seed: int, pairs: float, image: float, text: float) -> Schedule:
    return Schedule(seed, ModalityShares(pairs=pairs, image=image, text=text))


def _place(step: int) -> tuple[int, int]:
    """Block and offset in it."""
    assert step >= 1
    return divmod(step - 1, STEPS_PER_BLOCK)
