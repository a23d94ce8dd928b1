"""Looks at the files that a recipe names before anything starts: sources, tokenizer, codebook weights."""

from __future__ import annotations

from flava_tnt.data.sources import open_readers
from flava_tnt.data.tokenizer import load_tokenizer
from flava_tnt.data.urls import filesystem_of
from flava_tnt.errors import DataError, RecipeError
from flava_tnt.plugin import Setup
from flava_tnt.recipes.schema import LEARN


def check_inputs(setup: Setup) -> None:
    """Open what the ranks will open.

    Raises:
        UserError: (any subclass) something is missing, damaged, or too small.
    """
    readers = open_readers(setup)
    texts = [readers[modality] for modality in ("pairs", "text") if modality in readers]
    if not all(reader.gives_tokens for reader in texts):
        check_tokenizer(setup)
    weights = setup.recipe.model.codebook.weights
    if weights is not None:
        filesystem, path = filesystem_of(weights)
        if not filesystem.isfile(path):
            raise DataError(f"codebook weights {weights}: no such file")


def check_tokenizer(setup: Setup) -> None:
    """A tokenizer is named, and it can be loaded.

    Raises:
        UserError: (any subclass) it is not.
    """
    text = setup.recipe.text
    if text.tokenizer is None:
        raise RecipeError(
            "must be given where a source has text: a vocab.txt or tokenizer.json, or learn",
            key="text.tokenizer",
        )
    if text.tokenizer != LEARN:
        load_tokenizer(text.tokenizer, text.vocab_size)
