"""The recipe's keys: each section stands with its fields, defaults and checks.

Plain pydantic models; ``compose.py`` makes the values and knows where each came from, so a
:class:`pydantic.ValidationError` turns into one line with file, line and key there.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from flava_tnt.model.sizes import SIZE_NAMES
from flava_tnt.places import absolute


class Section(BaseModel):
    """A section of a recipe: unknown keys are refused, and types are not converted."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        populate_by_name=True,
        allow_inf_nan=False,
    )


class CodebookSection(Section):
    """The frozen DALL-E encoder whose codes are the targets of masked pictures."""

    weights: str | None = None
    """File or URL (any fsspec one) of its weights: safetensors, a state dict, or the published `encoder.pkl`.
    None: random weights, for tests and demonstrations; the run says so."""

    @field_validator("weights")
    @classmethod
    def _from_anywhere(cls, weights: str | None) -> str | None:
        return None if weights is None else absolute(weights)

    hidden_size: int | None = Field(default=None, ge=4)
    """Channels of its first group (the published encoder: 256). None: what the size says."""


class ModelSection(Section):
    """FLAVA's size; single dimensions override what the size says."""

    size: Literal[SIZE_NAMES] = "350m"  # type: ignore[valid-type]
    hidden_size: int | None = Field(default=None, ge=1)
    mlp_size: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_image_layers: int | None = Field(default=None, ge=1)
    num_text_layers: int | None = Field(default=None, ge=1)
    num_multimodal_layers: int | None = Field(default=None, ge=1)
    projection_size: int | None = Field(default=None, ge=1)
    """Size of the contrastive space."""
    image_size: int | None = Field(default=None, ge=8)
    """Height and width of the model's picture, in pixels."""
    patch_size: int | None = Field(default=None, ge=1)
    max_text_positions: int = Field(default=512, ge=8)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """FLAVA trains without. With dropout a curve repeats on the same layout only; the run says so."""
    init_std: float | None = Field(default=None, gt=0.0)
    """Standard deviation of the encoders' initial weights (FLAVA: 0.02). None: what the size says."""
    token_init_std: float = Field(default=0.02, ge=0.0)
    """Standard deviation of the initial CLS, mask and position tokens; 0: zeros, as the original."""
    codebook: CodebookSection = CodebookSection()


LEARN = "learn"
"""``text.tokenizer``: learn a vocabulary from the captions."""


class TextSection(Section):
    """Tokenizer and lengths."""

    tokenizer: str | None = None
    """File or URL of a WordPiece `vocab.txt` or `tokenizer.json`, or `learn`: learn one from the captions at
    the start and keep it in the run folder. Must be given where a source has text."""

    @field_validator("tokenizer")
    @classmethod
    def _from_anywhere(cls, tokenizer: str | None) -> str | None:
        return tokenizer if tokenizer in (None, LEARN) else absolute(tokenizer)

    vocab_size: int = Field(default=30_522, ge=8)
    """Rows of the word embedding (BERT's vocabulary: 30,522); a tokenizer must not have more."""
    length: int = Field(default=512, ge=4)
    """Tokens of a text-only sample, [CLS] and [SEP] included (FLAVA: 512)."""
    pair_length: int = Field(default=77, ge=4)
    """Tokens of a pair's caption (FLAVA: 77)."""


class LossWeights(Section):
    """Weights of the losses (FLAVA: all 1); 0 leaves a loss out, with the work that only it needs."""

    mim: float = Field(default=1.0, ge=0.0)
    mlm: float = Field(default=1.0, ge=0.0)
    itm: float = Field(default=1.0, ge=0.0)
    mmm_text: float = Field(default=1.0, ge=0.0)
    mmm_image: float = Field(default=1.0, ge=0.0)
    contrastive: float = Field(default=1.0, ge=0.0)


class LossSection(Section):
    reduction: Literal["global", "per_rank"] = "global"
    """`global`: a loss is its sum over the global batch / its count there. `per_rank`: the mean of each
    rank's mean, as the original trainer does."""
    weights: LossWeights = LossWeights()


class BatchSection(Section):
    """One of `local` and `global`; a later layer that names one replaces the other."""

    local: int | None = Field(default=None, ge=1)
    """Samples of a step on each rank."""
    global_: int | None = Field(default=None, ge=1, alias="global")
    """Samples of a step over all ranks."""
    micro: int | None = Field(default=None, ge=1)
    """Samples that a rank takes through the model at once; it must divide the rank's part. None: the whole
    part. The contrastive loss has the negatives of its micro-batch (over all ranks) only."""

    @model_validator(mode="after")
    def _one_of_local_and_global(self) -> BatchSection:
        if (self.local is None) == (self.global_ is None):
            raise ValueError("give one of batch.local and batch.global")
        return self


class ModalityShares(Section):
    """Shares of the steps (FLAVA, section 4: 0.70, 0.15, 0.15); they are scaled to a sum of 1."""

    pairs: float = Field(default=0.70, ge=0.0)
    image: float = Field(default=0.15, ge=0.0)
    text: float = Field(default=0.15, ge=0.0)

    @model_validator(mode="after")
    def _some(self) -> ModalityShares:
        if self.pairs + self.image + self.text <= 0:
            raise ValueError("at least one share must be above 0")
        return self


class TrainSection(Section):
    max_steps: int = Field(default=1000, ge=1)
    log_every_steps: int = Field(default=10, ge=1)
    modalities: ModalityShares = ModalityShares()
    clip_grad_norm: float | None = Field(default=None, gt=0.0)
    """Largest norm of all gradients together; None: no clipping."""
    data_workers: int = Field(default=1, ge=0)
    """Loader processes of each rank; 0: the training process reads itself."""
    max_bad_fraction: float = Field(default=0.01, ge=0.0, le=1.0)
    """The run stops when more than this share of the samples so far (of at least 1,000) could not be used."""


class LaunchSection(Section):
    nproc: int | None = Field(default=None, ge=1)
    """Ranks to start on this machine. None: one for each GPU, else 1. Ignored under torchrun and SLURM."""
    timeout_seconds: float = Field(default=600.0, gt=0.0)
    """How long a collective may take before the run fails."""


class PluginChoice(BaseModel):
    """One plugin of a recipe: which, and its options, which the plugin's own class checks."""

    model_config = ConfigDict(extra="allow", frozen=True)

    use: str
    """A name, `distribution/name`, or `module:attribute`."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Recipe(Section):
    """A whole recipe, after `extends` and overrides."""

    name: str = Field(pattern=r"^[^/\\]+$")
    """The name under which it was run; names the run folder."""
    seed: int = Field(default=0, ge=0)
    model: ModelSection = ModelSection()
    text: TextSection = TextSection()
    loss: LossSection = LossSection()
    batch: BatchSection
    train: TrainSection = TrainSection()
    launch: LaunchSection = LaunchSection()
    plugins: dict[str, dict[str, PluginChoice]] = {}
    """Kind, then label, then choice."""

    def global_batch(self, world_size: int) -> int:
        """Samples of one optimizer step over all ranks."""
        if self.batch.global_ is not None:
            return self.batch.global_
        assert self.batch.local is not None
        return self.batch.local * world_size

    def local_batch(self, world_size: int) -> int:
        """Samples of one optimizer step on each rank; ``check_batch`` has seen that it divides."""
        return self.global_batch(world_size) // world_size

    def micro_batch(self, world_size: int) -> int:
        """Samples that a rank takes through the model at once."""
        return self.batch.micro or self.local_batch(world_size)
