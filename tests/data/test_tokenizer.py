from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models

from flava_tnt.data.tokenizer import SPECIAL_TOKENS, Tokenizer, frame, learn_tokenizer, load_tokenizer
from flava_tnt.data.vocabulary import learn_pieces
from flava_tnt.errors import DataError

CAPTIONS = [
    "A red circle",
    "a red square",
    "two reddish circles",
    "the circle's edge",
    "a dog in the street",
] * 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_tokenizer(CAPTIONS, 200)


def bert_vocab(*words: str) -> str:
    """Laid out as BERT's: [PAD], then others, then the rest of the special tokens."""
    return "\n".join(["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n"


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    by_id = {i: token for token, i in json.loads(tokenizer.to_json())["model"]["vocab"].items()}
    return [by_id[i] for i in tokenizer.encode(text).tolist()]


# ------------------------------------------------------------------------------------------ encoding


def test_a_vocab_txt_is_read_as_berts_lower_case_word_piece(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(bert_vocab("un", "##aff", "##able", "hello", ",", "cafe"))
    tokenizer = load_tokenizer(str(path), 100)
    assert tokens(tokenizer, "Unaffable HELLO, café zebra") == [
        *("un", "##aff", "##able", "hello", ",", "cafe"),
        "[UNK]",
    ]
    assert tokenizer.vocab_size == 12
    table = tokenizer.table
    assert (table.pad_id, table.unk_id, table.cls_id, table.sep_id, table.mask_id) == (0, 2, 3, 4, 5)
    assert np.flatnonzero(table.continues_V).tolist() == [7, 8]
    assert set(table.ordinary_ids.tolist()) == {1, 6, 7, 8, 9, 10, 11}


def test_a_tokenizer_json_and_a_url_are_read(tokenizer: Tokenizer) -> None:
    with fsspec.open("memory://tokens/tokenizer.json", "w") as file:
        file.write(tokenizer.to_json())
    loaded = load_tokenizer("memory://tokens/tokenizer.json", 200)
    assert loaded.encode("a red dog").tolist() == tokenizer.encode("a red dog").tolist()


def test_json_and_pickle_give_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    for copy in (Tokenizer.from_json(tokenizer.to_json()), pickle.loads(pickle.dumps(tokenizer))):
        assert copy.to_json() == tokenizer.to_json()
        assert copy.encode("a red [SEP] dog").tolist() == tokenizer.encode("a red [SEP] dog").tolist()


def test_a_caption_cannot_write_special_tokens(tokenizer: Tokenizer) -> None:
    published = Inner.from_str(tokenizer.to_json())
    published.add_special_tokens(list(SPECIAL_TOKENS))  # as in the tokenizer.json files of others
    assert published.encode("[SEP]", add_special_tokens=False).ids == [tokenizer.table.sep_id]
    table = tokenizer.table
    for one in (tokenizer, Tokenizer.from_json(published.to_str())):
        ids = one.encode("[CLS] [SEP] [PAD] [MASK]").tolist()
        assert not set(ids) & {table.pad_id, table.cls_id, table.sep_id, table.mask_id}


@pytest.mark.parametrize("text", ["", " ", "\0", "\0\n\t\u200b"])
def test_a_text_of_nothing_has_no_ids(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text).tolist() == []
    assert frame(tokenizer.encode(text), 4, tokenizer.table).tolist() == [2, 3, 0, 0]


def test_nuls_are_dropped(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a r\0ed dog").tolist() == tokenizer.encode("a red dog").tolist()


def test_ten_thousand_characters_are_cut_to_the_length(tokenizer: Tokenizer) -> None:
    framed = frame(tokenizer.encode("a red dog " * 1000), 77, tokenizer.table)
    assert framed.shape == (77,)
    assert (framed[0], framed[-1]) == (tokenizer.table.cls_id, tokenizer.table.sep_id)
    assert framed[1:-1].tolist() == (tokenizer.encode("a red dog").tolist() * 25)
    assert tokenizer.encode("x" * 10_000).tolist() == [tokenizer.table.unk_id]


@given(text=st.text(max_size=60), length=st.integers(4, 20))
def test_any_text_is_framed_in_its_length(text: str, length: int) -> None:
    tokenizer = learn_tokenizer(["abc abd"], 50)
    framed = frame(tokenizer.encode(text), length, tokenizer.table)
    assert framed.shape == (length,)
    end = int(np.flatnonzero(framed == tokenizer.table.sep_id)[0])
    assert framed[0] == tokenizer.table.cls_id
    assert (framed[end + 1 :] == 0).all()
    assert (framed[:end] != 0).all()


# ------------------------------------------------------------------------------------------ refusals


def test_a_vocabulary_larger_than_the_embedding_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(bert_vocab("a", "b"))
    with pytest.raises(DataError, match=r"has 8 tokens, more than text\.vocab_size 7"):
        load_tokenizer(str(path), 7)


def test_padding_other_than_id_0_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("a\n" + bert_vocab("b"))
    with pytest.raises(DataError, match=r"\[PAD\] is id 1, but FLAVA's text tower takes id 0"):
        load_tokenizer(str(path), 100)


def test_missing_special_tokens_are_named(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\na\n")
    with pytest.raises(DataError, match=r"lacks \[SEP\], \[MASK\]"):
        load_tokenizer(str(path), 100)


def test_a_token_that_stands_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(bert_vocab("a", "b", "a"))
    with pytest.raises(DataError, match="holds 'a' twice"):
        load_tokenizer(str(path), 100)


def test_another_kind_of_tokenizer_is_refused() -> None:
    bpe = Inner(models.BPE(vocab={"[PAD]": 0, "a": 1}, merges=[]))
    with pytest.raises(DataError, match="a WordPiece tokenizer is needed, not BPE"):
        Tokenizer.from_json(bpe.to_str(), source="x.json")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "not a tokenizer.json"),
        ("vocab.txt", b"[PAD]\n\xff\xfe\n", "not UTF-8"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: {message}"):
        load_tokenizer(str(path), 100)


@pytest.mark.parametrize("url", ["/no/such/vocab.txt", "nosuch://bucket/vocab.txt", "memory://no/vocab.txt"])
def test_a_missing_file_is_named(url: str) -> None:
    with pytest.raises(DataError, match=url):
        load_tokenizer(url, 100)


# ------------------------------------------------------------------------------------------ learning


def test_a_learned_vocabulary_starts_with_the_special_tokens(tokenizer: Tokenizer) -> None:
    vocab = json.loads(tokenizer.to_json())["model"]["vocab"]
    assert [vocab[token] for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert tokens(tokenizer, "a red circle") == ["a", "red", "circle"]


def test_a_learned_vocabulary_covers_its_captions(tokenizer: Tokenizer) -> None:
    for caption in CAPTIONS:
        assert tokenizer.table.unk_id not in tokenizer.encode(caption)


@pytest.mark.parametrize("vocab_size", [8, 20, 40])
def test_a_learned_vocabulary_has_at_most_the_size_asked_for(vocab_size: int) -> None:
    assert learn_tokenizer(CAPTIONS, vocab_size).vocab_size == vocab_size


def test_captions_in_any_order_give_the_same_tokenizer() -> None:
    assert learn_tokenizer(CAPTIONS[::-1], 60).to_json() == learn_tokenizer(CAPTIONS, 60).to_json()


def test_every_process_learns_the_same_tokenizer() -> None:
    # The trainer of the library gives another vocabulary in another process.
    script = (
        "import hashlib; from flava_tnt.data.tokenizer import learn_tokenizer\n"
        "captions = [f'{a}{b}ing the {b}{a}s' for a in 'stamp' for b in ('low', 'night', 'ward')] * 2\n"
        "print(hashlib.sha256(learn_tokenizer(captions, 60).to_json().encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_pair_seen_once_is_not_merged() -> None:
    assert "abc" not in learn_pieces({"abc": 1, "xyz": 2}, 100)
    assert "xyz" in learn_pieces({"abc": 1, "xyz": 2}, 100)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=6), st.integers(1, 5), min_size=1, max_size=12))
def test_merges_are_those_of_counting_anew_each_time(words: dict[str, int]) -> None:
    assert learn_pieces(words, 40) == learn_pieces_slowly(words, 40)


def learn_pieces_slowly(words: dict[str, int], num_pieces: int) -> list[str]:
    splits = {word: [word[0], *("##" + c for c in word[1:])] for word in words}
    characters: dict[str, int] = {}
    for word, pieces in splits.items():
        for piece in pieces:
            characters[piece] = characters.get(piece, 0) + words[word]
    known = sorted(characters, key=lambda piece: (-characters[piece], piece))[:num_pieces]
    while len(known) < num_pieces:
        counts: dict[tuple[str, str], int] = {}
        for word, pieces in splits.items():
            for i in range(len(pieces) - 1):
                pair = (pieces[i], pieces[i + 1])
                counts[pair] = counts.get(pair, 0) + words[word]
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 2:
            break
        piece = best[0] + best[1][2:]
        if piece not in known:
            known.append(piece)
        for word, pieces in splits.items():
            i = 0
            while i < len(pieces) - 1:
                if (pieces[i], pieces[i + 1]) == best:
                    pieces[i : i + 2] = [piece]
                i += 1
            splits[word] = pieces
    return known


def test_captions_without_a_word_are_refused() -> None:
    with pytest.raises(DataError, match="no word to learn"):
        learn_tokenizer(["", "\0"], 100)
