"""One tokenizer for all ranks: rank 0 loads or learns it, the run folder keeps it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from flava_tnt.data.inputs import load_named_tokenizer, readers_of_text
from flava_tnt.data.tokenizer import Tokenizer, learn_tokenizer
from flava_tnt.plugin import BadSample, Modality, Run, SampleReader
from flava_tnt.training.exchange import main_decides

MAX_CAPTIONS = 100_000
"""Captions that a vocabulary is learned from at most; spread over the source."""


def agree_on_tokenizer(run: Run, readers: Mapping[Modality, SampleReader]) -> Tokenizer | None:
    """The run's tokenizer, the same on every rank; None where every source gives token ids itself.

    Raises:
        DataError: the file does not exist or is no WordPiece that FLAVA can use.
    """
    texts = readers_of_text(readers)
    if not texts:
        return None
    text = main_decides(lambda: _make(run, texts).to_json())
    return Tokenizer.from_json(text)


def _make(run: Run, readers: list[SampleReader]) -> Tokenizer:
    section = run.recipe.text
    tokenizer = load_named_tokenizer(section)
    if tokenizer is None:
        run.logger.info("tokenizer: learning a vocabulary from the captions")
        tokenizer = learn_tokenizer(_captions(readers), section.vocab_size)
    path = run.run_dir / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    run.logger.info(
        "tokenizer: %s of at most %s tokens, kept in %s", tokenizer.vocab_size, section.vocab_size, path
    )
    return tokenizer


def _captions(readers: list[SampleReader]) -> Iterator[str]:
    for reader in readers:
        stride = math.ceil(len(reader) * len(readers) / MAX_CAPTIONS)
        for index in range(0, len(reader), stride):
            try:
                yield reader.read_text(index)
            except BadSample:
                continue  # named and counted when it comes up in training
