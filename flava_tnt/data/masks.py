"""Which patches and which tokens the masked view hides.

Both kinds of mask have a capacity that depends on the recipe alone, so the masked places travel in arrays of
fixed shape. Suffixes: P patches, I capacity of patches, T text tokens, M capacity of tokens.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

IGNORED = -1
"""Label and position of a place that counts for nothing (FLAVA's ignore index)."""

REFERENCE_PATCHES = 196
"""FLAVA's grid of 14 x 14, for which the next two numbers are given."""
REFERENCE_TARGET = 75
"""Patches to hide (FLAVA's image transform, after BEiT, arXiv 2106.08254, section 2.3)."""
REFERENCE_SMALLEST_BLOCK = 16
SMALLEST_ASPECT = 0.3
"""Blocks have an aspect between this and its inverse, log-uniform."""
TRIES_PER_BLOCK = 10

MASKED_SHARE = 0.15
"""Share of the real tokens that is chosen (BERT, arXiv 1810.04805, section 3.1)."""
REPLACED_BY_MASK = 0.8
"""Of the chosen tokens: 80% become [MASK], 10% another token, 10% stay (same place)."""
REPLACED_BY_OTHER = 0.1


# --------------------------------------------------------------------------------------------- image


def image_mask_capacity(grid_size: int) -> int:
    """The most patches that :func:`image_mask` hides: its target, 75 of 196, scaled by the patches."""
    return max(1, round(REFERENCE_TARGET * grid_size**2 / REFERENCE_PATCHES))


def image_mask(rng: np.random.Generator, grid_size: int) -> np.ndarray:
    """BEiT's block mask: bool [P], True where a patch is hidden; at least one, at most the capacity.

    Blocks are added until the target is reached or ten tries for one block find no place. On a grid of other
    than 14 x 14, the target (75) and the smallest block (16) are scaled by the number of patches, so the
    hidden share stays; the largest block is what is left to the target, as in the original. Where not even
    one block fits (a grid of 1 x 1), one patch is hidden.
    """
    mask = np.zeros((grid_size, grid_size), dtype=bool)
    target = image_mask_capacity(grid_size)
    smallest = max(1, round(REFERENCE_SMALLEST_BLOCK * grid_size**2 / REFERENCE_PATCHES))
    left = target
    while left > 0:
        added = _add_block(rng, mask, smallest, left)
        if added == 0:
            break
        left -= added
    if left == target:
        mask.flat[int(rng.random() * mask.size)] = True
    return mask.reshape(-1)


def _add_block(rng: np.random.Generator, mask: np.ndarray, smallest: int, largest: int) -> int:
    """Hide one more block of at most ``largest`` new patches; returns how many it added."""
    side = len(mask)
    log_aspect = math.log(SMALLEST_ASPECT)
    for u_area, u_aspect, u_top, u_left in rng.random((TRIES_PER_BLOCK, 4)).tolist():
        # `largest` may be below `smallest`; the original draws between the two all the same.
        area = smallest + (largest - smallest) * u_area
        aspect = math.exp(log_aspect * (1 - 2 * u_aspect))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if not (height < side and width < side):
            continue
        top, left = int(u_top * (side - height + 1)), int(u_left * (side - width + 1))
        block = mask[top : top + height, left : left + width]
        added = height * width - int(np.count_nonzero(block))
        if 0 < added <= largest:
            block[...] = True
            return added
    return 0


# ---------------------------------------------------------------------------------------------- text


@dataclass(frozen=True, kw_only=True)
class TextMask:
    """A masked text."""

    masked_T: np.ndarray
    """int64; the text with the chosen tokens replaced."""
    positions_M: np.ndarray
    """int64; the chosen tokens in ascending order, then -1."""
    labels_M: np.ndarray
    """int64; their true ids, then -1."""


def text_mask_capacity(length: int) -> int:
    """The most tokens that :func:`text_mask` chooses in a text of ``length`` tokens, [CLS] and [SEP] among
    them: 15% of the rest, at least 1."""
    return _num_to_choose(length - 2)


def text_mask(
    rng: np.random.Generator,
    text_T: np.ndarray,
    *,
    word_starts_T: np.ndarray,
    special_ids: np.ndarray,
    mask_id: int,
    ordinary_ids: np.ndarray,
    whole_words: bool,
) -> TextMask:
    """Choose 15% of the real tokens; 80% of them become [MASK], 10% another token, 10% stay.

    The number is exact, ``max(1, round(0.15 * n))`` of n tokens that may be chosen, where BERT's original
    draws each token by itself with 0.15: the same share (one of the rules that Hugging Face's collators
    use, the whole-word one), and a capacity that is known beforehand. The original also counted padding in n.

    Whole words: words are taken in a random order as long as they fit into that number, so the chosen tokens
    never exceed it; where not one word fits, the first word is taken, cut to the capacity.

    Args:
        text_T: int64 ids, [CLS] tokens [SEP] [PAD]...
        word_starts_T: bool; True at the first token of each word.
        special_ids: ids that are never chosen: [PAD], [CLS], [SEP], [MASK], [UNK].
        ordinary_ids: ids to draw another token from.
        whole_words: choose whole words (pairs) instead of single tokens (text only).
    """
    capacity = text_mask_capacity(len(text_T))
    eligible_N = np.flatnonzero((text_T[:, None] != special_ids).all(axis=1))
    number = _num_to_choose(len(eligible_N))
    if whole_words and len(eligible_N):
        chosen_N = _choose_words(rng, _words(eligible_N, word_starts_T), number, capacity)
    else:
        chosen_N = rng.permutation(eligible_N)[:number]
    chosen_N = np.sort(chosen_N)

    labels_N = text_T[chosen_N]
    masked_T = text_T.copy()
    masked_T[chosen_N] = _replace(rng, labels_N, mask_id, ordinary_ids)
    return TextMask(
        masked_T=masked_T,
        positions_M=padded(chosen_N, capacity),
        labels_M=padded(labels_N, capacity),
    )


def padded(values_N: np.ndarray, capacity: int) -> np.ndarray:
    """The values as int64, then -1 up to the capacity."""
    out = np.full(capacity, IGNORED, dtype=np.int64)
    out[: len(values_N)] = values_N
    return out


def _num_to_choose(num_eligible: int) -> int:
    return max(1, round(MASKED_SHARE * num_eligible))


def _words(eligible_N: np.ndarray, word_starts_T: np.ndarray) -> list[np.ndarray]:
    """The places of each word; those of a word whose start is not among them begin one all the same."""
    starts_N = np.flatnonzero(word_starts_T[eligible_N])
    bounds = [0, *starts_N[starts_N > 0].tolist(), len(eligible_N)]
    return [eligible_N[start:end] for start, end in itertools.pairwise(bounds)]


def _choose_words(
    rng: np.random.Generator, words: list[np.ndarray], number: int, capacity: int
) -> np.ndarray:
    order = rng.permutation(len(words))
    chosen: list[np.ndarray] = []
    left = number
    for word in (words[i] for i in order):
        if len(word) <= left:
            chosen.append(word)
            left -= len(word)
        if left == 0:
            break
    if not chosen:
        return words[order[0]][:capacity]
    return np.concatenate(chosen)


def _replace(
    rng: np.random.Generator, labels_N: np.ndarray, mask_id: int, ordinary_ids: np.ndarray
) -> np.ndarray:
    uniform_N = rng.random(len(labels_N))
    others_N = ordinary_ids[(rng.random(len(labels_N)) * len(ordinary_ids)).astype(np.int64)]
    kept_N = np.where(uniform_N < REPLACED_BY_MASK + REPLACED_BY_OTHER, others_N, labels_N)
    return np.where(uniform_N < REPLACED_BY_MASK, mask_id, kept_N)
