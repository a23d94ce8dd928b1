"""Looks at the files that a recipe names before anything starts: sources, tokenizer, codebook weights."""

from __future__ import annotations

from collections.abc import Mapping

from flava_tnt.data.sources import open_readers
from flava_tnt.data.tokenizer import Tokenizer, load_tokenizer
from flava_tnt.data.urls import filesystem_of
from flava_tnt.errors import DataError, RecipeError
from flava_tnt.plugin import Modality, SampleReader, Setup
from flava_tnt.recipes.schema import LEARN, TextSection


def check_inputs(setup: Setup) -> None:
    """Open what the ranks will open.

    Raises:
        UserError: (any subclass) something is missing, damaged, or too small.
    """
    if readers_of_text(open_readers(setup)):
        load_named_tokenizer(setup.recipe.text)
    weights = setup.recipe.model.codebook.weights
    if weights is not None:
        filesystem, path = filesystem_of(weights)
        if not filesystem.isfile(path):
            raise DataError(f"codebook weights {weights}: no such file")


def readers_of_text(readers: Mapping[Modality, SampleReader]) -> list[SampleReader]:
    """The sources, each once, whose text needs a tokenizer: none where all give token ids themselves."""
    texts = [readers[modality] for modality in ("pairs", "text") if modality in readers]
    return list({id(reader): reader for reader in texts if not reader.gives_tokens}.values())


def load_named_tokenizer(text: TextSection) -> Tokenizer | None:
    """The tokenizer that a recipe names; None where one is to be learned.

    Raises:
        UserError: (any subclass) none is named, or it cannot be loaded.
    """
    if text.tokenizer is None:
        raise RecipeError(
            "must be given where a source has text: a vocab.txt or tokenizer.json, or learn",
            key="text.tokenizer",
        )
    return None if text.tokenizer == LEARN else load_tokenizer(text.tokenizer, text.vocab_size)
