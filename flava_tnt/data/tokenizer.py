"""WordPiece through the `tokenizers` library: text to ids of fixed length, and where words start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from flava_tnt.data.vocabulary import CONTINUATION, MAX_WORD_LENGTH, learn_pieces
from flava_tnt.errors import DataError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""BERT's; a learned vocabulary starts with them, in this order."""


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """What masks need to know of a vocabulary."""

    vocab_size: int
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    continues_V: np.ndarray
    """bool [vocab_size]; True for a piece that continues a word."""
    special_ids: np.ndarray
    """int64; the five above, which are never masked."""
    ordinary_ids: np.ndarray
    """int64; all ids that stand for text."""

    @classmethod
    def make(cls, special_ids: tuple[int, ...], continues_V: np.ndarray, known_ids: np.ndarray) -> TokenTable:
        """Args: ids of SPECIAL_TOKENS in their order; continuation flags; all ids that are in use."""
        names = ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id")
        return cls(
            vocab_size=len(continues_V),
            continues_V=continues_V,
            special_ids=np.array(special_ids, dtype=np.int64),
            ordinary_ids=np.setdiff1d(known_ids, special_ids).astype(np.int64),
            **dict(zip(names, special_ids, strict=True)),
        )


def table_without_tokenizer(vocab_size: int) -> TokenTable:
    """The table where sources give token ids themselves: specials 0 to 4, each other id a word of its own."""
    special_ids = tuple(range(len(SPECIAL_TOKENS)))
    return TokenTable.make(special_ids, np.zeros(vocab_size, dtype=bool), np.arange(vocab_size))


class Tokenizer:
    """A WordPiece tokenizer whose [PAD] is id 0. It can be pickled.

    Args:
        inner: the library's tokenizer; its own padding, truncation and special tokens are not used.
        source: where it came from, for messages.

    Raises:
        DataError: it is no WordPiece, a special token is missing, or [PAD] is not id 0.
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, source: str = "tokenizer") -> None:
        if not isinstance(inner.model, models.WordPiece):
            raise DataError(f"{source}: a WordPiece tokenizer is needed, not {type(inner.model).__name__}")
        inner.no_padding()
        inner.no_truncation()
        # A caption that says "[SEP]" is text, not an order to the model.
        inner.encode_special_tokens = True
        self._inner = inner
        self._source = source
        self.table = _make_table(inner, source)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.table.vocab_size

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, int64 [n], without special tokens, padding or truncation.

        Control characters (NUL too) are dropped by BERT's normaliser; an empty text has no ids.
        """
        encoding = self._inner.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64)

    def to_json(self) -> str:
        """The whole tokenizer as `tokenizer.json` text."""
        return str(self._inner.to_str())

    @classmethod
    def from_json(cls, text: str, *, source: str = "tokenizer.json") -> Tokenizer:
        """The inverse of :meth:`to_json`.

        Raises:
            DataError: the text is no tokenizer, or one that FLAVA cannot use.
        """
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{source}: not a tokenizer.json: {error}") from error
        return cls(inner, source=source)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.to_json(), self._source)


def _unpickle(text: str, source: str) -> Tokenizer:
    return Tokenizer.from_json(text, source=source)


def frame(ids_N: np.ndarray, length: int, table: TokenTable) -> np.ndarray:
    """[CLS] ids [SEP] [PAD]... as int64 [length]; ids past ``length - 2`` are cut off."""
    kept_N = ids_N[: length - 2]
    framed_T = np.full(length, table.pad_id, dtype=np.int64)
    framed_T[0] = table.cls_id
    framed_T[1 : len(kept_N) + 1] = kept_N
    framed_T[len(kept_N) + 1] = table.sep_id
    return framed_T


def load_tokenizer(path_or_url: str, vocab_size: int) -> Tokenizer:
    """Read a `tokenizer.json` (a name that ends in .json) or a BERT `vocab.txt` (lower case).

    Args:
        path_or_url: a file or any fsspec URL.
        vocab_size: rows of the word embedding.

    Raises:
        DataError: it cannot be read, is no WordPiece, lacks a special token, or has more tokens than rows.
    """
    try:
        with fsspec.open(path_or_url, "rb") as file:
            text = file.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"text.tokenizer {path_or_url}: not UTF-8 ({error.reason})") from error
    except (OSError, ValueError, ImportError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise DataError(f"text.tokenizer {path_or_url}: {reason}") from error
    if path_or_url.endswith(".json"):
        tokenizer = Tokenizer.from_json(text, source=path_or_url)
    else:
        tokenizer = Tokenizer(_word_piece(_parse_vocab(text, path_or_url)), source=path_or_url)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{path_or_url} has {tokenizer.vocab_size} tokens, more than text.vocab_size {vocab_size};"
            f" set text.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def learn_tokenizer(captions: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a lower-case WordPiece tokenizer; the same captions in any order give the same one.

    Args:
        captions: texts to learn from, once through.
        vocab_size: the most tokens, the five special ones included.

    Raises:
        DataError: there is not one word in the captions.
    """
    normaliser, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    word_counts: Counter[str] = Counter()
    for caption in captions:
        pieces = splitter.pre_tokenize_str(normaliser.normalize_str(caption))
        word_counts.update(word for word, _ in pieces)
    if not word_counts:
        raise DataError(
            "the captions hold no word to learn a tokenizer from; give text.tokenizer=FILE_OR_URL"
        )
    known = dict.fromkeys(SPECIAL_TOKENS)
    known |= dict.fromkeys(learn_pieces(word_counts, vocab_size - len(SPECIAL_TOKENS)))
    return Tokenizer(_word_piece({piece: i for i, piece in enumerate(known)}), source="learned tokenizer")


def _word_piece(vocab: dict[str, int]) -> tokenizers.Tokenizer:
    """BERT's uncased tokenizer over a vocabulary."""
    model = models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_LENGTH)
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return inner


def _parse_vocab(text: str, source: str) -> dict[str, int]:
    # Not splitlines(): a vocabulary may hold U+2028 and its like as tokens.
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").rstrip("\n").split("\n")
    vocab = {line: i for i, line in enumerate(lines)}
    if len(vocab) != len(lines):
        twice = next(line for i, line in enumerate(lines) if vocab[line] != i)
        raise DataError(f"{source}: the vocabulary holds {twice!r} twice")
    return vocab


def _make_table(inner: tokenizers.Tokenizer, source: str) -> TokenTable:
    vocab = inner.get_vocab(with_added_tokens=True)
    missing = [token for token in SPECIAL_TOKENS if token not in vocab]
    if missing:
        raise DataError(
            f"{source}: the vocabulary lacks {', '.join(missing)}; FLAVA needs BERT's special tokens"
        )
    if vocab["[PAD]"] != 0:
        raise DataError(
            f"{source}: [PAD] is id {vocab['[PAD]']}, but FLAVA's text tower takes id 0 for padding"
        )
    continues_V = np.zeros(max(vocab.values()) + 1, dtype=bool)
    prefix = getattr(inner.model, "continuing_subword_prefix", None) or CONTINUATION
    continues_V[[i for token, i in vocab.items() if token.startswith(prefix) and token != prefix]] = True
    known_ids = np.array(sorted(vocab.values()))
    return TokenTable.make(tuple(vocab[token] for token in SPECIAL_TOKENS), continues_V, known_ids)
