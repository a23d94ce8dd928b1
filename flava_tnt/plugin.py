"""The contract that plugin authors import: kinds, options, hooks.

A plugin is a class that derives from the base class of its kind, states the contract's version, has its
options as typed fields, and is registered under an entry point of its kind's group::

    # pyproject.toml of your distribution
    [project.entry-points."flava_tnt.callback"]
    loss_alarm = "loss_alarm:LossAlarm"

    # loss_alarm.py
    class LossAlarm(Callback):
        \"\"\"Warns when the loss is above a limit.\"\"\"

        api_version = 1

        limit: float = 20.0
        \"\"\"The loss above which a warning is logged.\"\"\"

        def on_log(self, run, metrics):
            if metrics["loss"] > self.limit:
                run.logger.warning("step %d: loss %.2f", metrics["step"], metrics["loss"])

A recipe switches it on: ``plugins: {callback: {loss_alarm: {limit: 12}}}``. Installed is not active.

When each method runs (the phases, in this order; ``training/assembly.py`` is where the order stands):

====================  =============================================================================
before any process    ``check`` of every plugin of the recipe
process               process group and device; ``Precision.set_up``
model                 built on the meta device: no memory for weights yet
attention             ``Attention.apply``
AC                    ``ActivationCheckpointing.apply``
parallelism           ``Parallelism.shard`` (still on the meta device)
weights               materialised and initialised, each a function of the seed and its name
parallelism           ``Parallelism.wrap`` (weights are there)
optimizer             ``Optimizer.build``
data                  ``DataSource.open``
callbacks             ``Callback.on_train_start`` and so on
====================  =============================================================================

A plugin that needs random numbers takes them from ``generator(seed, "its own word", position...)``; one that
needs the model's dimensions (a source with ready pixels) asks ``flava_tnt.model.sizes.resolve_dims``; one
that replaces attention may use ``flava_tnt.model.attention.replace_attention``.

Importing this module loads no torch, so a plugin's module should import torch inside its methods: then a
wrong option is refused within a moment, and listing stays fast.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from flava_tnt.errors import DataError, PluginError, RecipeError, UserError
from flava_tnt.position import generator

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image
    from torch import nn

    from flava_tnt.model.flava import FlavaForPretraining
    from flava_tnt.recipes.schema import Recipe

API_VERSION = 1
"""Version of this contract. It rises when a plugin written for the one before would not work any more."""

Modality = Literal["pairs", "image", "text"]
"""What a batch is made of: image-text pairs, images only, or text only."""

MODALITIES: tuple[Modality, ...] = ("pairs", "image", "text")

LOSSES_OF_MODALITY: dict[Modality, tuple[str, ...]] = {
    "pairs": ("itm", "mmm_text", "mmm_image", "contrastive"),
    "image": ("mim",),
    "text": ("mlm",),
}
"""Names of the losses of each kind of batch."""


# ------------------------------------------------------------------------------------------ contexts


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is known before any process exists; ``check`` gets it. The same on every rank."""

    recipe: Recipe
    world_size: int
    local_world_size: int
    device_type: str
    """``"cuda"`` or ``"cpu"``."""
    plugins: Mapping[str, Mapping[str, Plugin]]
    """Kind, then label in the recipe, then plugin; e.g. ``plugins["precision"]["bf16"]``."""
    run_dir: Path | None = None
    """The run folder, once there is one."""

    def one(self, kind: str) -> Any:
        """The plugin of a kind that a recipe takes one of, or None where the recipe has none."""
        return next(iter(self.plugins.get(kind, {}).values()), None)


@dataclass(kw_only=True)
class Run:
    """A run as one rank sees it; every method that runs after the process group exists gets it."""

    setup: Setup
    rank: int
    local_rank: int
    device: torch.device
    run_dir: Path
    logger: logging.Logger
    step: int = 0
    """Optimizer steps completed."""
    samples: int = 0
    """Samples seen so far over all ranks; an image-text pair counts as one."""
    last_metrics: dict[str, Any] = field(default_factory=dict)
    """The newest logged metrics, the same on every rank."""
    bad_samples: int = 0
    """Samples so far that could not be used, over all ranks."""
    stopping: bool = False
    """The ranks have agreed to stop: the running step is the last."""

    @property
    def recipe(self) -> Recipe:
        return self.setup.recipe

    @property
    def world_size(self) -> int:
        return self.setup.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and speaks to the terminal."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What a transform of the model did. ``count == 0`` is an error that the assembly raises."""

    verb: str
    """What was done, as in ``"AC wraps"``."""
    count: int
    total: int
    target: str
    """What it was done to, as in ``"TransformerEncoderLayer"``."""

    def __str__(self) -> str:
        return f"{self.verb} {self.count} of {self.total} {self.target}"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One finished optimizer step; nothing in it needs the device to be waited for."""

    step: int
    """From 1."""
    modality: Modality
    items: int
    """Samples of the global batch."""
    seconds: float
    """Wall time since the end of the step before (waiting for data included) on this rank."""
    data_seconds: float
    """Of these, waiting for data."""
    sample_ids: tuple[str, ...]
    """This rank's samples, in order."""


# ------------------------------------------------------------------------------------------- plugins


class Plugin(BaseModel):
    """A plugin of any kind. Its fields are its options; a docstring under a field describes it."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
    )

    kind: ClassVar[str]
    """Set by the base class of a kind."""
    api_version: ClassVar[int]
    """The :data:`API_VERSION` a plugin was written for; every plugin class states it itself."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Other plugins it cannot do without, as ``"kind:name"``."""
    conflicts: ClassVar[tuple[str, ...]] = ()
    """Other plugins it cannot work beside, as ``"kind:name"``."""

    def check(self, setup: Setup) -> None:
        """Look at the recipe before any process group exists.

        Raises:
            UserError: (any subclass) where this plugin cannot work in this recipe or on these devices; the
                message says why and what to do instead.
        """


class Parallelism(Plugin):
    """Wraps or shards the model. Gradients must come out *averaged* over the ranks."""

    kind: ClassVar[str] = "parallelism"

    def num_shards(self, world_size: int) -> int:
        """Over how many ranks parameters, gradients and optimizer state are divided (1: each holds all)."""
        return 1

    def shard(self, model: FlavaForPretraining, run: Run) -> Applied | None:
        """Change ``model`` in place while it is on the meta device, before any weight has memory.

        ``model.layers()``, ``model.towers()``, ``model.heads()`` and ``model.frozen_parameters()`` are its
        plan for grouping: ask them instead of knowing FLAVA's classes. Frozen parameters stay plain tensors,
        and every parameter keeps the model's own name, but for the prefixes of torch's own wrappers.
        """
        return None

    def parameter_device(self, run: Run) -> torch.device:
        """Where weights are materialised: elsewhere than ``run.device`` if they are offloaded."""
        return run.device

    def offloads(self) -> bool:
        """Whether parameters, gradients and optimizer state stay in host memory: the check before a run
        looks for room there, then."""
        return False

    def wrap(self, model: FlavaForPretraining, run: Run) -> nn.Module:
        """Return the module to call, after the weights have been materialised and initialised."""
        return model

    def micro_batch(self, module: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of one micro-batch's forward and backward; communicates gradients on the last only."""
        return contextlib.nullcontext()


class ActivationCheckpointing(Plugin):
    """Recomputes activations in the backward pass instead of keeping them."""

    kind: ClassVar[str] = "activation_checkpointing"

    def apply(self, model: FlavaForPretraining, run: Run) -> Applied:
        """Wrap what is to be recomputed, in place (``model.replace_layer``), on the meta device."""
        raise PluginError(f"{type(self).__name__} does not implement apply")


class Precision(Plugin):
    """The dtypes of the step. Parameters and optimizer state stay fp32."""

    kind: ClassVar[str] = "precision"

    def set_up(self, run: Run) -> None:
        """Set backend flags (TF32) once the device is known."""

    def compute_dtype(self) -> torch.dtype | None:
        """The autocast dtype, which sharding uses for its gathers too; None: fp32 throughout. float16 brings
        a gradient scaler."""
        return None


class Attention(Plugin):
    """How attention is computed."""

    kind: ClassVar[str] = "attention"

    def apply(self, model: FlavaForPretraining, run: Run) -> Applied:
        """Replace the attention of the layers, in place; the model is on the meta device."""
        raise PluginError(f"{type(self).__name__} does not implement apply")


class Optimizer(Plugin):
    """Optimizer and learning-rate schedule."""

    kind: ClassVar[str] = "optimizer"

    state_bytes_per_parameter: ClassVar[int] = 8
    """Bytes of optimizer state for each trainable parameter (AdamW in fp32: two moments)."""

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], run: Run
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """The optimizer and a schedule that is stepped once after each optimizer step.

        Args:
            parameters: the model's own names (no wrapper prefixes) and the trainable parameters.
        """
        raise PluginError(f"{type(self).__name__} does not implement build")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample as a source gives it, before crops, masks and tokens."""

    id: str
    """Names the sample in logs; unique in its source."""
    image: Image.Image | np.ndarray | None = None
    """A picture in any mode, or pixels [height, width, 3] uint8."""
    text: str | None = None
    codebook_image: np.ndarray | None = None
    """Given only where the pixels are ready: then ``image`` [3, image_size, image_size] and this
    [3, codebook_image_size, codebook_image_size], both uint8, are used as they are, without a crop."""
    token_ids: np.ndarray | None = None
    """In place of ``text``: ids [n] without [CLS] and [SEP]; see ``SampleReader.gives_tokens``."""


class SampleReader(abc.ABC):
    """Random access to the samples of a source. It is used in loader workers: it must survive a fork."""

    gives_tokens: ClassVar[bool] = False
    """Whether samples carry ``token_ids`` in place of text, so that no tokenizer is needed for this source.
    Where a recipe has no tokenizer at all, ids 0 to 4 are [PAD], [UNK], [CLS], [SEP] and [MASK]."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abc.abstractmethod
    def read(self, index: int) -> Sample:
        """The sample, a pure function of ``index``.

        Raises:
            BadSample: it cannot be used (a picture that does not decode, text that is not UTF-8). It is
                skipped, counted and named in the log.
        """

    def read_for(self, index: int, modality: Modality) -> Sample:
        """The sample for a batch of one kind. Override it where leaving out what such a batch does not need
        (the picture of a text-only batch) saves work."""
        return self.read(index)

    def read_text(self, index: int) -> str:
        """Only its text, for learning a vocabulary."""
        text = self.read_for(index, "text").text
        if text is None:
            raise BadSample(str(index), "has no text")
        return text


class BadSample(UserError):
    """A sample that cannot be used; the run goes on without it, up to ``train.max_bad_fraction``."""

    def __init__(self, sample_id: str, reason: str) -> None:
        super().__init__(f"{sample_id}: {reason}")
        self.sample_id = sample_id
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sample_id, self.reason)


class DataSource(Plugin):
    """A source of samples. A recipe takes one or more, each feeding some kinds of batch."""

    kind: ClassVar[str] = "data"

    modalities: list[Modality] = Field(default=list(MODALITIES), min_length=1)
    """The kinds of batch that this source feeds: pairs, image, text."""

    def open(self, setup: Setup) -> SampleReader:
        """Find the samples.

        Raises:
            DataError: a source that is missing, empty or damaged; the message names what is there.
        """
        raise PluginError(f"{type(self).__name__} does not implement open")


class Callback(Plugin):
    """Watches the run. Hooks run on every rank; ``run.is_main`` is the one that writes.

    An exception in a hook is never swallowed: a rank that went on alone would leave the others waiting.
    """

    kind: ClassVar[str] = "callback"

    def on_train_start(self, run: Run) -> None:
        """Before the first step; everything is assembled."""

    def on_step_start(self, run: Run) -> None:
        """Before each step, with its batch at hand."""

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        """After each step, logged or not. Cheap things only: the device may still be working."""

    def measure(self, run: Run, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """At a logged step: fields to add to the metrics, before any ``on_log``.

        Args:
            metrics: what is known so far: global values, the same on every rank.
        """
        return {}

    def on_log(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """At a logged step, with the metrics of `metrics.jsonl`: global values, the same on every rank."""

    def summarise(self, run: Run) -> Mapping[str, Any]:
        """Fields to add to `summary.json`, at the end, also after a stop; rank 0's are written."""
        return {}

    def on_train_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        """After the last step, also after a stop on request; the summary is complete."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """When this rank fails. Release what you hold; do not communicate with other ranks."""


# --------------------------------------------------------------------------------------------- kinds


@dataclass(frozen=True)
class Kind:
    """A kind of plugin: its base class and how many of it a recipe takes."""

    base: type[Plugin]
    at_least: int
    at_most: int | None
    """None: any number, each under a label of its own."""

    @property
    def name(self) -> str:
        return self.base.kind

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"flava_tnt.{self.name}"

    @property
    def takes_many(self) -> bool:
        return self.at_most is None


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(Parallelism, 1, 1),
        Kind(ActivationCheckpointing, 0, 1),
        Kind(Precision, 1, 1),
        Kind(Attention, 0, 1),
        Kind(Optimizer, 1, 1),
        Kind(DataSource, 1, None),
        Kind(Callback, 0, None),
    )
}
"""Every kind, by name, in the order of the phases."""


def iterate_plugins(plugins: Mapping[str, Mapping[str, Plugin]]) -> Iterator[tuple[str, str, Plugin]]:
    """All plugins of a recipe as (kind, label, plugin), in the order of the phases."""
    for kind in KINDS:
        for label, plugin in plugins.get(kind, {}).items():
            yield kind, label, plugin


__all__ = [
    "API_VERSION",
    "KINDS",
    "LOSSES_OF_MODALITY",
    "MODALITIES",
    "ActivationCheckpointing",
    "Applied",
    "Attention",
    "BadSample",
    "Callback",
    "DataError",
    "DataSource",
    "Kind",
    "Modality",
    "Optimizer",
    "Parallelism",
    "Plugin",
    "PluginError",
    "Precision",
    "RecipeError",
    "Run",
    "Sample",
    "SampleReader",
    "Setup",
    "StepRecord",
    "UserError",
    "generator",
    "iterate_plugins",
]
