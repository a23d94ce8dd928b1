"""Loads the steps of a run in worker processes, each step as a whole, in order."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from flava_tnt.data.batch import Batch
from flava_tnt.data.collate import collate
from flava_tnt.data.samples import SampleMaker
from flava_tnt.data.schedule import first_position, modality_of_step
from flava_tnt.data.tokenizer import Tokenizer
from flava_tnt.errors import FlavaTntError
from flava_tnt.model.sizes import resolve_dims
from flava_tnt.plugin import Modality, SampleReader, Setup
from flava_tnt.processes import signal_when_parent_ends

PREFETCHED_STEPS = 2
"""Steps that each worker is ahead."""


class Steps(Dataset[Batch]):
    """One rank's part of every step, by step number (from 1)."""

    def __init__(
        self,
        setup: Setup,
        *,
        rank: int,
        tokenizer: Tokenizer | None,
        readers: Mapping[Modality, SampleReader],
    ) -> None:
        recipe = setup.recipe
        self._seed = recipe.seed
        self._shares = recipe.train.modalities
        self._global_batch = recipe.global_batch(setup.world_size)
        self._local_batch = recipe.local_batch(setup.world_size)
        self._rank = rank
        dims = resolve_dims(recipe.model, recipe.text)
        self._makers = {
            modality: SampleMaker(
                seed=recipe.seed,
                modality=modality,
                reader=reader,
                dims=dims,
                text=recipe.text,
                tokenizer=tokenizer,
            )
            for modality, reader in readers.items()
        }

    def __getitem__(self, step: int) -> Batch:
        """This rank's slice of the global batch of a step.

        Raises:
            Exception: whatever a source or transform raised, its message led by the step and position.
        """
        modality = modality_of_step(self._seed, step, self._shares)
        start = first_position(self._seed, step, self._shares, self._global_batch)
        start += self._rank * self._local_batch
        maker, positions, samples = self._makers[modality], range(start, start + self._local_batch), []
        for position, index in zip(positions, maker.indices(positions), strict=True):
            try:
                samples.append(maker.make(position, index))
            except Exception as error:
                _lead(error, f"step {step}, {modality} at position {position}")
                raise
        return collate(modality, samples)


class StepLoader(DataLoader[Batch]):
    """Yields batches; an exception in a worker arrives here as what it was, not as text."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        for loaded in super().__iter__():
            if isinstance(loaded, Failure):
                raise loaded.error from WorkerTraceback(loaded.text)
            yield loaded


@dataclass(frozen=True)
class Failure:
    """An exception on its way from a worker."""

    error: Exception
    text: str
    """The worker's traceback."""


class WorkerTraceback(Exception):
    """Where an exception was raised in a worker; shown as the cause of that exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Guarded(Dataset[Any]):
    """Steps for a worker process: hands exceptions on as values, for DataLoader would rewrite them."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __getitem__(self, step: int) -> Batch | Failure:
        try:
            return self._steps[step]
        except Exception as error:
            return Failure(_picklable(error), traceback.format_exc())


def make_loader(
    setup: Setup,
    *,
    rank: int,
    start_step: int,
    tokenizer: Tokenizer | None,
    readers: Mapping[Modality, SampleReader],
) -> StepLoader:
    """A loader of this rank's batches for the steps ``start_step + 1`` to ``train.max_steps``, in order.

    Each batch is a function of the seed, the step, and this rank's slice of the global batch alone: the
    number of ranks and of workers, and where the loader starts, change nothing. Workers are forked, so
    readers are not copied; each runs one thread (DataLoader's own doing).

    Args:
        start_step: steps completed.
        tokenizer: None where no reader gives text.
        readers: of ``open_readers``.
    """
    steps = Steps(setup, rank=rank, tokenizer=tokenizer, readers=readers)
    num_workers = setup.recipe.train.data_workers
    return StepLoader(
        steps if num_workers == 0 else _Guarded(steps),
        batch_size=None,
        sampler=range(start_step + 1, setup.recipe.train.max_steps + 1),
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        prefetch_factor=PREFETCHED_STEPS if num_workers else None,
        worker_init_fn=_start_worker,
        pin_memory=setup.device_type == "cuda",
    )


def _start_worker(_worker_id: int) -> None:
    # Launchers and terminals send their signals to every process of a rank; the training process decides
    # what they mean, and needs its workers to finish the step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal_when_parent_ends(signal.SIGKILL)


def _lead(error: Exception, where: str) -> None:
    """Put ``where`` in front of an exception's message."""
    if isinstance(error, OSError) and error.strerror:
        error.strerror = f"{where}: {error.strerror}"
        error.args = (error.errno, error.strerror, *error.args[2:])
    elif not error.args:
        error.args = (where,)
    elif isinstance(error.args[0], str) and not isinstance(error, UnicodeError):
        error.args = (f"{where}: {error.args[0]}", *error.args[1:])


def _picklable(error: Exception) -> Exception:
    """The exception, or one that says what it was where it cannot travel between processes."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return FlavaTntError(f"{type(error).__name__}: {error}")
    return error if type(copy) is type(error) else FlavaTntError(f"{type(error).__name__}: {error}")
