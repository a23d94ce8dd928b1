"""Opens the sources of a recipe: one for each kind of batch. Loads no torch, so a launcher can do it too."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from flava_tnt.errors import DataError
from flava_tnt.plugin import MODALITIES, BadSample, DataSource, Modality, Sample, SampleReader, Setup

PROBED_SAMPLES = 16
"""Samples looked at for one that can be read, to see what a source has."""


def open_readers(setup: Setup) -> dict[Modality, SampleReader]:
    """A reader for each modality that has a share; a source that feeds several is opened once.

    Raises:
        DataError: a modality has no source or several; a source cannot be opened, has fewer samples than one
            global batch, or lacks what the modality needs.
    """
    labels = source_labels(setup)
    sources = setup.plugins["data"]
    readers: dict[str, SampleReader] = {}
    for label in dict.fromkeys(labels.values()):
        readers[label] = sources[label].open(setup)  # type: ignore[attr-defined]
        _check_size(label, readers[label], setup)
    for modality, label in labels.items():
        _check_parts(label, modality, readers[label])
    return {modality: readers[label] for modality, label in labels.items()}


def source_labels(setup: Setup) -> dict[Modality, str]:
    """Which source, by its label in the recipe, feeds each modality that has a share.

    Raises:
        DataError: a modality has no source, or several.
    """
    labels: dict[Modality, str] = {}
    for modality in MODALITIES:
        share = getattr(setup.recipe.train.modalities, modality)
        if share == 0:
            continue
        found = _feeding(setup.plugins.get("data", {}), modality)
        if not found:
            raise DataError(
                f"no data source feeds batches of modality {modality!r}, whose share is {share:g}:"
                f" add one under plugins.data, or set train.modalities.{modality}=0"
            )
        if len(found) > 1:
            raise DataError(
                f"batches of modality {modality!r} have several sources ({', '.join(found)}):"
                f" divide the modalities among them, as in plugins.data.{found[0]}.modalities=[...]"
            )
        labels[modality] = found[0]
    return labels


def _feeding(sources: Mapping[str, object], modality: Modality) -> list[str]:
    return [
        label
        for label, source in sources.items()
        if isinstance(source, DataSource) and modality in source.modalities
    ]


def _check_size(label: str, reader: SampleReader, setup: Setup) -> None:
    global_batch = setup.recipe.global_batch(setup.world_size)
    if len(reader) < global_batch:
        raise DataError(
            f"data source {label!r} has {len(reader)} samples, fewer than one global batch of {global_batch}:"
            " lower batch.global (or batch.local), or give it more"
        )


def _check_parts(label: str, modality: Modality, reader: SampleReader) -> None:
    """See that the first sample that can be read has a picture and a text, as the modality needs."""
    sample = _first_readable(reader, modality)
    if sample is None:
        return  # the policy for bad samples applies
    missing = []
    if modality != "text" and sample.image is None:
        missing.append("picture")
    if modality != "image" and sample.text is None and sample.token_ids is None:
        missing.append("text")
    if missing:
        raise DataError(
            f"data source {label!r} cannot feed batches of modality {modality!r}:"
            f" sample {sample.id} has no {' and no '.join(missing)}"
        )


def _first_readable(reader: SampleReader, modality: Modality) -> Sample | None:
    for index in itertools.islice(range(len(reader)), PROBED_SAMPLES):
        try:
            return reader.read_for(index, modality)
        except BadSample:
            continue
    return None
