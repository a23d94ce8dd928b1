"""The order of samples: a keyed permutation for each epoch, computed in O(1) memory.

A Feistel network over a rectangle of about sqrt(n) x sqrt(n) places, with cycle walking for the few places
past the last sample (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): each epoch shows each
sample exactly once, and the sample at any position is known without the ones before it. No index array is
shuffled, kept or sent.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

NUM_ROUNDS = 8
"""Each changes one half; four for either half mix both thoroughly (tests look at the distribution)."""


def sample_index(seed: int, stream: str, position: int, num_samples: int) -> int:
    """The sample at one position of a stream.

    Args:
        seed: the recipe's seed.
        stream: what is shuffled (a modality); streams are independent of each other.
        position: from 0; it runs on through the epochs.
        num_samples: samples of the source.
    """
    return int(sample_indices(seed, stream, np.array([position], dtype=np.int64), num_samples)[0])


def sample_indices(seed: int, stream: str, positions_N: np.ndarray, num_samples: int) -> np.ndarray:
    """The samples at several positions [N] of a stream, as int64 [N]; see :func:`sample_index`."""
    epochs_N, places_N = np.divmod(np.asarray(positions_N, dtype=np.int64), num_samples)
    indices_N = np.empty_like(places_N)
    for epoch in np.unique(epochs_N):
        chosen_N = epochs_N == epoch
        keys = _round_keys(seed, stream, int(epoch))
        indices_N[chosen_N] = _permute(places_N[chosen_N], num_samples, keys)
    return indices_N


def _permute(places_N: np.ndarray, num_samples: int, keys: np.ndarray) -> np.ndarray:
    """Where a permutation of range(num_samples) sends each place."""
    rows = max(1, math.isqrt(num_samples - 1) + 1)
    columns = -(-num_samples // rows)
    values_N = _network(places_N.astype(np.uint64), rows, columns, keys)
    # Cycle walking: what falls past the last sample goes through again until it does not.
    while (outside_N := values_N >= num_samples).any():
        values_N[outside_N] = _network(values_N[outside_N], rows, columns, keys)
    return values_N.astype(np.int64)


def _network(values_N: np.ndarray, rows: int, columns: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of range(rows * columns): each round shifts one coordinate by a hash of the other."""
    row_N, column_N = np.divmod(values_N, np.uint64(columns))
    for number, key in enumerate(keys):
        if number % 2 == 0:
            row_N = (row_N + _mix(column_N ^ key) % np.uint64(rows)) % np.uint64(rows)
        else:
            column_N = (column_N + _mix(row_N ^ key) % np.uint64(columns)) % np.uint64(columns)
    return row_N * np.uint64(columns) + column_N


def _mix(values_N: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit depends on every bit."""
    values_N = (values_N ^ (values_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values_N = (values_N ^ (values_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values_N ^ (values_N >> np.uint64(31))


def _round_keys(seed: int, stream: str, epoch: int) -> np.ndarray:
    text = f"order\x1f{seed}\x1f{stream}\x1f{epoch}"
    digest = hashlib.blake2b(text.encode(), digest_size=8 * NUM_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
