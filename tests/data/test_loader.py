from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from flava_tnt.data.batch import Batch
from flava_tnt.data.loader import make_loader
from flava_tnt.data.sources import open_readers
from flava_tnt.data.tokenizer import Tokenizer, learn_tokenizer
from flava_tnt.errors import DataError, FlavaTntError
from flava_tnt.plugin import DataSource, Sample, SampleReader, Setup
from tests.data.helpers import ListReader, ListSource, caption_of, make_setup

BAD = [3, 8, 17, 29, 30, 31, 44]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_tokenizer([caption_of(i) for i in range(1000)], 500)


def batches(
    tokenizer: Tokenizer,
    *,
    world_size: int = 1,
    workers: int = 0,
    start_step: int = 0,
    source: DataSource | None = None,
    max_steps: int = 8,
) -> list[list[Batch]]:
    """The batches of each step, by rank."""
    setup = make_setup(
        {"list": source or ListSource(bad=BAD)},
        world_size=world_size,
        train={"max_steps": max_steps, "data_workers": workers},
    )
    readers = open_readers(setup)
    loaders = [
        make_loader(setup, rank=rank, start_step=start_step, tokenizer=tokenizer, readers=readers)
        for rank in range(world_size)
    ]
    return [list(step) for step in zip(*loaders, strict=True)]


def joined(parts: Sequence[Batch]) -> dict[str, Any]:
    """The global batch from the ranks' parts."""
    values: dict[str, Any] = {
        name: torch.cat([part.tensors()[name] for part in parts]) for name in parts[0].tensors()
    }
    values["modality"] = {part.modality for part in parts}
    values["sample_ids"] = [id for part in parts for id in part.sample_ids]
    values["bad_samples"] = [bad for part in parts for bad in part.bad_samples]
    values["num_samples_read"] = sum(part.num_samples_read for part in parts)
    return values


def assert_same(steps: list[list[Batch]], others: list[list[Batch]]) -> None:
    assert len(steps) == len(others)
    for step, other in zip(steps, others, strict=True):
        ours, theirs = joined(step), joined(other)
        assert ours.keys() == theirs.keys()
        for name in ours:
            same = torch.equal if isinstance(ours[name], torch.Tensor) else lambda a, b: a == b
            assert same(ours[name], theirs[name]), name


@pytest.fixture(scope="module")
def on_one_rank(tokenizer: Tokenizer) -> list[list[Batch]]:
    return batches(tokenizer)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_batch_is_the_same_on_any_number_of_ranks_and_workers(
    tokenizer: Tokenizer, on_one_rank: list[list[Batch]], world_size: int, workers: int
) -> None:
    steps = batches(tokenizer, world_size=world_size, workers=workers)
    assert_same(steps, on_one_rank)
    assert {len(part) for step in steps for part in step} == {12 // world_size}
    assert {step[0].modality for step in steps} == {"pairs", "image", "text"}
    assert any(part.bad_samples for step in steps for part in step)


@pytest.mark.parametrize(("workers", "start_step"), [(0, 3), (2, 5), (0, 8)])
def test_a_loader_that_starts_in_the_middle_goes_on_as_the_first_would(
    tokenizer: Tokenizer, on_one_rank: list[list[Batch]], workers: int, start_step: int
) -> None:
    assert_same(
        batches(tokenizer, workers=workers, start_step=start_step, world_size=2), on_one_rank[start_step:]
    )


def test_an_epoch_of_a_modality_shows_each_sample_once(tokenizer: Tokenizer) -> None:
    steps = batches(tokenizer, source=ListSource(num_samples=48), max_steps=20)
    seen = [id for (part,) in steps if part.modality == "pairs" for id in part.sample_ids]
    assert len(seen) >= 48
    assert sorted(seen[:48]) == sorted(f"s{i}" for i in range(48))


def test_bad_samples_are_counted_as_read(on_one_rank: list[list[Batch]]) -> None:
    for (part,) in on_one_rank:
        assert part.num_samples_read == 12 + len(part.bad_samples)


def test_a_batch_of_each_modality_has_what_it_needs(on_one_rank: list[list[Batch]]) -> None:
    image = {"image_B3HW", "codebook_image_B3hw", "image_mask_BP", "image_mask_positions_BI"}
    text = {"text_BT", "text_masked_BT", "text_mask_positions_BM", "text_mask_labels_BM"}
    wanted = {"image": image, "text": text, "pairs": image | text | {"matched_B"}}
    for (part,) in on_one_rank:
        assert set(part.tensors()) == wanted[part.modality]
        length = {"pairs": 16, "text": 32}.get(part.modality)
        assert part.text_BT is None or part.text_BT.shape == (12, length)


# -------------------------------------------------------------------------------------------- errors


class UnlikelyError(Exception):
    def __init__(self, *, needed: str) -> None:
        super().__init__(needed)


ERRORS = {
    "data": DataError("shard x cannot be read"),
    "value": ValueError("odd value"),
    "key": KeyError("no such key"),
    "os": OSError(5, "Input/output error"),
    "none": AssertionError(),
}


class Failing(DataSource):
    api_version = 1

    error: str

    def open(self, setup: Setup) -> SampleReader:
        return FailingReader(self.error)


class FailingReader(ListReader):
    def __init__(self, error: str) -> None:
        super().__init__(50)
        self.error = error
        self.opened_in = os.getpid()

    def read(self, index: int) -> Sample:
        if index == 7:
            if self.error == "unlikely":
                raise UnlikelyError(needed="cannot be pickled")
            raise type(ERRORS[self.error])(*ERRORS[self.error].args)
        return super().read(index)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", list(ERRORS))
def test_an_exception_arrives_as_what_it_was_and_names_step_and_position(
    tokenizer: Tokenizer, name: str, workers: int
) -> None:
    with pytest.raises(type(ERRORS[name])) as caught:
        batches(tokenizer, source=Failing(error=name), workers=workers, max_steps=20)
    assert type(caught.value) is type(ERRORS[name])
    message = str(caught.value)
    assert "step " in message
    assert " at position " in message
    assert all(str(part) in message for part in ERRORS[name].args)
    assert "\n" not in message


def test_an_exception_of_a_worker_shows_where_it_was_raised(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="odd value") as caught:
        batches(tokenizer, source=Failing(error="value"), workers=1, max_steps=20)
    assert "in read" in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_pickled_arrives_in_words(tokenizer: Tokenizer) -> None:
    with pytest.raises(FlavaTntError, match=r"UnlikelyError: step .*: cannot be pickled"):
        batches(tokenizer, source=Failing(error="unlikely"), workers=1, max_steps=20)


# --------------------------------------------------------------------------------------------- forks


class PidReader(ListReader):
    def read(self, index: int) -> Sample:
        ignores_interrupt = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        id = f"{os.getpid()}-{torch.get_num_threads()}-{ignores_interrupt}-{index}"
        return replace(super().read(index), id=id)


class PidSource(DataSource):
    api_version = 1

    def open(self, setup: Setup) -> SampleReader:
        return PidReader(50)


def test_workers_are_processes_of_one_thread_that_leave_ctrl_c_to_the_main_process(
    tokenizer: Tokenizer,
) -> None:
    steps = batches(tokenizer, source=PidSource(), workers=2)
    workers = {tuple(id.split("-")[:3]) for (part,) in steps for id in part.sample_ids}
    assert len({pid for pid, _, _ in workers} - {str(os.getpid())}) == 2
    assert {(threads, ignores) for _, threads, ignores in workers} == {("1", "True")}


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    import gc
    import multiprocessing

    gc.collect()
    for child in multiprocessing.active_children():
        child.join(timeout=10)
        assert not child.is_alive()
