from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchmultimodal.transforms.flava_transform import ImageMaskingGenerator

from flava_tnt.data.masks import (
    IGNORED,
    TextMask,
    image_mask,
    image_mask_capacity,
    text_mask,
    text_mask_capacity,
)
from flava_tnt.position import generator

SPECIAL_IDS = np.arange(5)
ORDINARY_IDS = np.arange(5, 400)
MASK_ID = 4


# --------------------------------------------------------------------------------------------- image


@pytest.fixture(scope="module")
def masks_14() -> np.ndarray:
    """5,000 masks of FLAVA's grid, [5000, 196]."""
    return np.stack([image_mask(generator(0, "image mask", i), 14) for i in range(5000)])


def test_image_masks_are_distributed_as_the_originals(masks_14: np.ndarray) -> None:
    # 5,000 draws of torchmultimodal's ImageMaskingGenerator: mean 74.49, minimum 65, 75 in 67.7%.
    counts = masks_14.sum(axis=1)
    assert counts.mean() == pytest.approx(74.49, abs=0.06)
    assert counts.max() == 75
    assert 60 <= counts.min() <= 68
    assert (counts == 75).mean() == pytest.approx(0.677, abs=0.025)


def test_each_patch_is_hidden_as_often_as_in_the_original(masks_14: np.ndarray) -> None:
    random.seed(0)
    original = ImageMaskingGenerator(14, num_masking_patches=75, min_num_patches=16)
    theirs = np.mean([original().reshape(-1) for _ in range(1500)], axis=0)
    # Both are means of independent draws: three standard errors and a bit, over 196 patches.
    assert np.abs(masks_14.mean(axis=0) - theirs).max() < 0.06
    neighbours = masks_14[:1500].reshape(-1, 14, 14)
    assert (neighbours[:, 1:] == neighbours[:, :-1]).mean() > 0.8  # independent patches: 0.53


@given(grid_size=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_an_image_mask_hides_at_least_one_patch_and_at_most_its_capacity(grid_size: int, seed: int) -> None:
    mask = image_mask(generator(seed, "image mask"), grid_size)
    assert mask.shape == (grid_size**2,)
    assert 1 <= mask.sum() <= image_mask_capacity(grid_size)


@pytest.mark.parametrize(("grid_size", "share"), [(8, 0.36), (14, 0.37), (24, 0.37)])
def test_other_grids_hide_about_the_same_share(grid_size: int, share: float) -> None:
    shares = [image_mask(generator(3, "image mask", i), grid_size).mean() for i in range(500)]
    assert np.mean(shares) == pytest.approx(share, abs=0.03)


# ---------------------------------------------------------------------------------------------- text


def framed(num_tokens: int, length: int, seed: int = 0) -> np.ndarray:
    ids = np.random.default_rng(seed).integers(5, 400, num_tokens)
    text = np.zeros(length, dtype=np.int64)
    text[0], text[num_tokens + 1] = 2, 3
    text[1 : num_tokens + 1] = ids
    return text


def mask_of(text_T: np.ndarray, starts_T: np.ndarray, *, whole_words: bool, seed: int = 0) -> TextMask:
    return text_mask(
        generator(seed, "text mask"),
        text_T,
        word_starts_T=starts_T,
        special_ids=SPECIAL_IDS,
        mask_id=MASK_ID,
        ordinary_ids=ORDINARY_IDS,
        whole_words=whole_words,
    )


@st.composite
def texts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    length = draw(st.integers(4, 80))
    num_tokens = draw(st.integers(0, length - 2))
    text_T = framed(num_tokens, length, draw(st.integers(0, 10**6)))
    for place in draw(st.lists(st.integers(1, length - 1), max_size=3)):
        if 1 <= place <= num_tokens:
            text_T[place] = 1  # [UNK]
    starts = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    return text_T, np.array(starts), draw(st.integers(0, 10**6))


@given(texts(), st.booleans())
def test_only_real_tokens_are_chosen_and_at_most_the_capacity(
    text: tuple[np.ndarray, np.ndarray, int], whole_words: bool
) -> None:
    text_T, starts_T, seed = text
    mask = mask_of(text_T, starts_T, whole_words=whole_words, seed=seed)
    capacity = text_mask_capacity(len(text_T))
    assert mask.positions_M.shape == mask.labels_M.shape == (capacity,)
    number = (mask.positions_M != IGNORED).sum()
    positions = mask.positions_M[:number]
    assert (mask.positions_M[number:] == IGNORED).all()
    assert (mask.labels_M[number:] == IGNORED).all()
    assert (np.diff(positions) > 0).all()
    assert not np.isin(text_T[positions], SPECIAL_IDS).any()
    assert (mask.labels_M[:number] == text_T[positions]).all()
    eligible = (~np.isin(text_T, SPECIAL_IDS)).sum()
    assert (number >= 1) == (eligible >= 1)
    if eligible and not whole_words:
        assert number == max(1, round(0.15 * eligible))
    unchosen = np.setdiff1d(np.arange(len(text_T)), positions)
    assert (mask.masked_T[unchosen] == text_T[unchosen]).all()
    assert not np.isin(mask.masked_T[positions], [0, 1, 2, 3]).any()


@given(texts())
def test_whole_words_are_chosen_whole_unless_not_one_fits(text: tuple[np.ndarray, np.ndarray, int]) -> None:
    text_T, starts_T, seed = text
    eligible = np.flatnonzero(~np.isin(text_T, SPECIAL_IDS))
    if len(eligible) == 0:
        return
    starts_T[eligible[0]] = True
    word_of = np.cumsum(starts_T[eligible])
    mask = mask_of(text_T, starts_T, whole_words=True, seed=seed)
    chosen = np.isin(eligible, mask.positions_M[mask.positions_M != IGNORED])
    whole = all(chosen[word_of == word].all() for word in np.unique(word_of[chosen]))
    number = max(1, round(0.15 * len(eligible)))
    if whole:
        one_word = len(np.unique(word_of[chosen])) == 1
        assert chosen.sum() <= number or one_word
    else:
        assert chosen.sum() == text_mask_capacity(len(text_T))
        assert len(np.unique(word_of[chosen])) == 1


def test_chosen_tokens_become_mask_80_other_10_same_10() -> None:
    counts = {"mask": 0, "same": 0, "other": 0}
    starts_T = np.ones(512, dtype=bool)
    for seed in range(300):
        text_T = framed(500, 512, seed)
        mask = mask_of(text_T, starts_T, whole_words=False, seed=seed)
        replaced = mask.masked_T[mask.positions_M[mask.positions_M != IGNORED]]
        labels = mask.labels_M[mask.labels_M != IGNORED]
        counts["mask"] += int((replaced == MASK_ID).sum())
        counts["same"] += int((replaced == labels).sum())
        counts["other"] += int(((replaced != MASK_ID) & (replaced != labels)).sum())
    total = sum(counts.values())
    assert total == 300 * 75
    assert counts["mask"] / total == pytest.approx(0.8, abs=0.01)
    assert counts["other"] / total == pytest.approx(0.1, abs=0.01)


def test_whole_word_masks_choose_about_15_percent_of_a_caption() -> None:
    starts_T = np.arange(77) % 3 != 2  # words of one and two tokens
    shares = []
    for seed in range(400):
        mask = mask_of(framed(60, 77, seed), starts_T, whole_words=True, seed=seed)
        shares.append((mask.positions_M != IGNORED).sum() / 60)
    assert np.mean(shares) == pytest.approx(0.15, abs=0.005)


def test_capacity_is_15_percent_of_what_a_text_can_hold() -> None:
    # 512 - 2 and 77 - 2 real tokens at most.
    assert text_mask_capacity(512) == 76
    assert text_mask_capacity(77) == 11
    assert text_mask_capacity(4) == 1
