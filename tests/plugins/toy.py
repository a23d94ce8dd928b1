"""A small model with FLAVA's plan for grouping, and a training loop like the trainer's, for plugin tests.

Shape letters: B samples, T tokens, D hidden, V vocabulary, H heads.

It has what makes FLAVA hard for a parallelism plugin: parts that a batch does not use, a weight that is
never used (the towers' pooler), a frozen codebook, a root parameter of shape [1], a head with a tied bias,
integer input, and parameters whose first dimension no rank count divides.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from flava_tnt.plugin import ActivationCheckpointing, Optimizer, Parallelism, Plugin, Precision, Run, Setup
from flava_tnt.recipes.schema import Recipe

HIDDEN, NUM_HEADS, VOCAB, TOKENS = 12, 2, 23, 5
Kind = Literal["text", "image", "pairs"]


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.output = nn.Linear(HIDDEN, HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, _ = x_BTD.shape
        normed_BTD = _layer_norm(self.norm, x_BTD)
        q, k, v = (
            part.view(batch, tokens, NUM_HEADS, -1).transpose(1, 2)
            for part in self.qkv(normed_BTD).chunk(3, dim=-1)
        )
        mixed_BTD = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, HIDDEN)
        x_BTD = x_BTD + F.dropout(self.output(mixed_BTD), self.dropout, self.training)
        return x_BTD + self.down(F.gelu(self.up(x_BTD)))


class Tower(nn.Module):
    def __init__(self, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layer = nn.ModuleList(Layer(dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.pooler = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layer:
            x_BTD = layer(x_BTD)
        self.pooler(x_BTD[:, 0])  # as FLAVA's: computed, and used by no loss
        return _layer_norm(self.norm, x_BTD)


class Head(nn.Module):
    """As torchmultimodal's MaskedPredictionHead: ``bias`` is the decoder's bias under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(HIDDEN, VOCAB)
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.decoder.bias = self.bias

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.decoder(x_BTD)


class Toy(nn.Module):
    """Text and image towers, a head for each, a contrast of both, and a frozen codebook."""

    def __init__(self, num_layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.text = Tower(num_layers, dropout)
        self.image = Tower(num_layers, dropout)
        self.text_head = Head()
        self.image_head = Head()
        self.projection = nn.Linear(HIDDEN, 7)
        self.logit_scale = nn.Parameter(torch.zeros(1))
        self.codebook = nn.Linear(4, VOCAB).requires_grad_(False)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum of each loss over the rows of the batch; text_BT int64, image_B4 uint8."""
        sums, views = {}, {}
        if "text_BT" in batch:
            views["text"] = self.text(batch["text_BT"])
            sums["mlm"] = _sum_of_losses(self.text_head(views["text"]), batch["text_BT"])
        if "image_B4" in batch:
            codes_B = self.codebook(batch["image_B4"] / 255).argmax(-1)
            codes_BT = (codes_B[:, None] + torch.arange(TOKENS)) % VOCAB
            views["image"] = self.image(codes_BT)
            sums["mim"] = _sum_of_losses(self.image_head(views["image"]), codes_BT)
        if len(views) == 2:
            text_BE, image_BE = (self.projection(view[:, 0]).float() for view in views.values())
            sums["match"] = (self.logit_scale.exp() * (text_BE - image_BE).square()).sum()
        return sums

    # ---- the plan for grouping, as FlavaForPretraining has it

    def layers(self) -> dict[str, nn.Module]:
        towers = {"text": self.text, "image": self.image}
        return {
            f"{name}.layer.{i}": layer
            for name, tower in towers.items()
            for i, layer in enumerate(tower.layer)
        }

    def replace_layer(self, name: str, module: nn.Module) -> None:
        tower, _, index = name.split(".")
        getattr(self, tower).layer[int(index)] = module

    def towers(self) -> dict[str, nn.Module]:
        return {"text": self.text, "image": self.image}

    def heads(self) -> dict[str, nn.Module]:
        return {"text_head": self.text_head, "image_head": self.image_head}

    def frozen_parameters(self) -> set[nn.Parameter]:
        return set(self.codebook.parameters())


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """In fp32, whatever the dtype of the gathered weights, as torchmultimodal's Fp32LayerNorm."""
    return F.layer_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float()).type_as(x)


def _sum_of_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten(), reduction="sum")


# ------------------------------------------------------------------------------------- making a run


def make_setup(
    plugins: Sequence[Plugin] = (),
    *,
    world_size: int = 1,
    device_type: str = "cpu",
    max_steps: int = 20,
    dropout: float = 0.0,
) -> Setup:
    recipe = Recipe.model_validate(
        {
            "name": "toy",
            "model": {"size": "tiny", "dropout": dropout},
            "batch": {"global": 12},
            "train": {"max_steps": max_steps},
        }
    )
    return Setup(
        recipe=recipe,
        world_size=world_size,
        local_world_size=world_size,
        device_type=device_type,
        plugins={plugin.kind: {type(plugin).__name__.lower(): plugin} for plugin in plugins},
    )


def make_run(setup: Setup, *, device: str = "cpu") -> Run:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Run(
        setup=setup,
        rank=rank,
        local_rank=rank,
        device=torch.device(device),
        run_dir=Path("unused"),
        logger=logging.getLogger("test"),
    )


def canonical_name(name: str) -> str:
    return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")


def materialise(model: nn.Module, device: torch.device) -> None:
    """Every parameter a function of its name, whole or sharded; tied ones stay tied."""
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, Head):
            module.decoder.bias = module.bias
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(canonical_name(name).encode()))
        whole = 0.3 * torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(
                    whole, parameter.device_mesh, parameter.placements, src_data_rank=None
                ).to_local()
                parameter.to_local().copy_(whole)
            else:
                parameter.copy_(whole)


def assemble(plugins: Sequence[Plugin], *, num_layers: int = 1, **setup: Any) -> tuple[nn.Module, Run]:
    """The phases in the assembly's order; returns the module to call."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    run = make_run(make_setup(plugins, world_size=world_size, **setup))
    for plugin in plugins:
        plugin.check(run.setup)
    precision: Precision = run.setup.one("precision")
    precision.set_up(run)
    with torch.device("meta"):
        model: Any = Toy(num_layers, dropout=setup.get("dropout", 0.0))
    checkpointing: ActivationCheckpointing | None = run.setup.one("activation_checkpointing")
    if checkpointing is not None:
        assert checkpointing.apply(model, run).count > 0
    parallelism: Parallelism = run.setup.one("parallelism")
    applied = parallelism.shard(model, run)
    assert applied is None or applied.count == applied.total > 0
    materialise(model, parallelism.parameter_device(run))
    return parallelism.wrap(model, run), run


# ----------------------------------------------------------------------------------------- training


def global_batch(kind: Kind, step: int, size: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    text_BT = torch.randint(VOCAB, (size, TOKENS), generator=generator)
    image_B4 = torch.randint(256, (size, 4), generator=generator, dtype=torch.uint8)
    return {
        "text": {"text_BT": text_BT},
        "image": {"image_B4": image_B4},
        "pairs": {"text_BT": text_BT, "image_B4": image_B4},
    }[kind]


def backward(module: nn.Module, run: Run, kind: Kind, step: int, num_micro: int = 1) -> float:
    """One step's gradients as the trainer makes them: the global mean of every loss, averaged over ranks."""
    batch = global_batch(kind, step)
    size = len(next(iter(batch.values())))
    local = {name: x.chunk(run.world_size)[run.rank] for name, x in batch.items()}
    total = 0.0
    for index in range(num_micro):
        part = {name: x.chunk(num_micro)[index] for name, x in local.items()}
        parallelism: Parallelism = run.setup.one("parallelism")
        with parallelism.micro_batch(module, is_last=index == num_micro - 1):
            with _autocast(run):
                sums = module(part)
                loss = run.world_size * torch.stack(list(sums.values())).sum() / size
            loss.backward()
        total += float(loss.detach()) / run.world_size
    return sum_over_ranks(total)


def _autocast(run: Run) -> contextlib.AbstractContextManager[Any]:
    dtype = run.setup.one("precision").compute_dtype()
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def sum_over_ranks(value: float) -> float:
    if not dist.is_initialized():
        return value
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def train(
    plugins: Sequence[Plugin], kinds: Sequence[Kind], num_micro: int = 1, **setup: Any
) -> dict[str, Any]:
    """Train a step on each kind; return losses, and whole weights and last gradients by canonical name."""
    module, run = assemble(plugins, **setup)
    optimizer_plugin: Optimizer = run.setup.one("optimizer")
    optimizer, schedule = optimizer_plugin.build(trainable(module), run)
    losses = []
    for step, kind in enumerate(kinds, start=1):
        optimizer.zero_grad()
        losses.append(backward(module, run, kind, step, num_micro))
        optimizer.step()
        schedule.step()
    gradients = {name: whole(p.grad) for name, p in trainable(module) if p.grad is not None}
    weights = {canonical_name(name): whole(p) for name, p in module.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def trainable(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield canonical_name(name), parameter


def whole(value: Tensor | None) -> Tensor:
    assert value is not None
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().clone()
