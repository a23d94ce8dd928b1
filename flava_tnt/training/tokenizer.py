"""One tokenizer for all ranks: rank 0 loads or learns it, the run folder keeps it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from flava_tnt.data.inputs import check_tokenizer
from flava_tnt.data.tokenizer import Tokenizer, learn_tokenizer, load_tokenizer
from flava_tnt.plugin import BadSample, Modality, Run, SampleReader
from flava_tnt.recipes.schema import LEARN
from flava_tnt.training.exchange import main_decides

MAX_CAPTIONS = 100_000
"""Captions that a vocabulary is learned from at most; spread over the source."""


def agree_on_tokenizer(run: Run, readers: Mapping[Modality, SampleReader]) -> Tokenizer | None:
    """The run's tokenizer, the same on every rank; None where every source gives token ids itself.

    Raises:
        DataError: the file does not exist or is no WordPiece that FLAVA can use.
    """
    texts = [readers[modality] for modality in ("pairs", "text") if modality in readers]
    if all(reader.gives_tokens for reader in texts):
        return None
    text = main_decides(lambda: _make(run, texts).to_json())
    return Tokenizer.from_json(text)


def _make(run: Run, readers: list[SampleReader]) -> Tokenizer:
    section = run.recipe.text
    check_tokenizer(run.setup)
    assert section.tokenizer is not None
    if section.tokenizer == LEARN:
        run.logger.info("tokenizer: learning a vocabulary from the captions")
        tokenizer = learn_tokenizer(_captions(readers), section.vocab_size)
    else:
        tokenizer = load_tokenizer(section.tokenizer, section.vocab_size)
    path = run.run_dir / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    run.logger.info(
        "tokenizer: %s of at most %s tokens, kept in %s", tokenizer.vocab_size, section.vocab_size, path
    )
    return tokenizer


def _captions(readers: list[SampleReader]) -> Iterator[str]:
    distinct = list({id(reader): reader for reader in readers if not reader.gives_tokens}.values())
    for reader in distinct:
        stride = math.ceil(len(reader) * len(distinct) / MAX_CAPTIONS)
        for index in range(0, len(reader), stride):
            try:
                yield reader.read_text(index)
            except BadSample:
                continue  # named and counted when it comes up in training
