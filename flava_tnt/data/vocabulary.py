"""Learns a WordPiece vocabulary from captions, the same one every time.

The trainer of the `tokenizers` library breaks ties in the order of a hash map, so two runs of it give two
vocabularies (seen with 0.23 on 1,906 captions), and two runs of one recipe two curves. This one counts words
and merges the most frequent pair of pieces, the alphabetically first of several, until the vocabulary is full
or no pair is frequent enough: byte-pair encoding on characters (Sennrich et al., arXiv 1508.07909), with the
`##` of WordPiece on pieces inside a word. Pair counts are kept up to date as pieces merge, so the cost is
that of the merges that happen.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping

CONTINUATION = "##"
"""Prefix of a piece that continues a word."""
MIN_FREQUENCY = 2
"""A pair seen less often is not merged: it would be one caption's own."""
MAX_WORD_LENGTH = 100
"""Longer words become [UNK], as in BERT, so nothing is learned from them."""

Pair = tuple[str, str]


def learn_pieces(word_counts: Mapping[str, int], num_pieces: int) -> list[str]:
    """The pieces of a vocabulary: every character that fits, most frequent first, then merges.

    Args:
        word_counts: how often each word occurs; the result does not depend on the order of the mapping.
        num_pieces: the most pieces to return.
    """
    words = [(word, count) for word, count in word_counts.items() if len(word) <= MAX_WORD_LENGTH]
    splits = [_characters(word) for word, _ in words]
    characters: Counter[str] = Counter()
    for pieces, (_, count) in zip(splits, words, strict=True):
        for piece in pieces:
            characters[piece] += count
    alphabet = sorted(characters, key=lambda piece: (-characters[piece], piece))[:num_pieces]
    merger = _Merger(splits, [count for _, count in words])
    known = dict.fromkeys(alphabet)  # a dict keeps the order; two merges may give the same piece
    while len(known) < num_pieces and (pair := merger.most_frequent()) is not None:
        known[merger.merge(pair)] = None
    return list(known)


def _characters(word: str) -> list[str]:
    return [word[0], *(CONTINUATION + character for character in word[1:])]


class _Merger:
    """Words as lists of pieces, with the counts of neighbouring pairs over all of them."""

    def __init__(self, splits: list[list[str]], counts: list[int]) -> None:
        self._splits = splits
        self._counts = counts
        self._pair_counts: Counter[Pair] = Counter()
        self._words_of: defaultdict[Pair, set[int]] = defaultdict(set)
        for word in range(len(splits)):
            self._count_pairs(word, +1)
        self._heap = [(-count, pair) for pair, count in self._pair_counts.items()]
        heapq.heapify(self._heap)

    def most_frequent(self) -> Pair | None:
        """The pair to merge next, or None where none is frequent enough."""
        while self._heap:
            count, pair = heapq.heappop(self._heap)
            if -count < MIN_FREQUENCY:
                return None
            if self._pair_counts[pair] == -count:  # else it has changed since; its newer entry follows
                return pair
        return None

    def merge(self, pair: Pair) -> str:
        """Join the pair wherever it occurs; returns the new piece."""
        piece = pair[0] + pair[1].removeprefix(CONTINUATION)
        touched: set[Pair] = set()
        for word in self._words_of.pop(pair):
            touched |= self._count_pairs(word, -1)
            self._splits[word] = _join(self._splits[word], pair, piece)
            touched |= self._count_pairs(word, +1)
        touched.discard(pair)
        for other in touched:
            if self._pair_counts[other] >= MIN_FREQUENCY:
                heapq.heappush(self._heap, (-self._pair_counts[other], other))
        return piece

    def _count_pairs(self, word: int, sign: int) -> set[Pair]:
        pieces = self._splits[word]
        pairs = list(itertools.pairwise(pieces))
        for pair in pairs:
            self._pair_counts[pair] += sign * self._counts[word]
            if sign > 0:
                self._words_of[pair].add(word)
        return set(pairs)


def _join(pieces: list[str], pair: Pair, piece: str) -> list[str]:
    joined: list[str] = []
    i = 0
    while i < len(pieces):
        if tuple(pieces[i : i + 2]) == pair:
            joined.append(piece)
            i += 2
        else:
            joined.append(pieces[i])
            i += 1
    return joined
