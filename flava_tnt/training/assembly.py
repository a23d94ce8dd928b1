"""The phases of putting a run together, in the one place where their order stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from flava_tnt.errors import PluginError
from flava_tnt.model.codebook import load_codebook_weights
from flava_tnt.model.flava import FlavaForPretraining, build_model
from flava_tnt.model.sizes import count_parameters, resolve_dims
from flava_tnt.model.weights import canonical_name, materialise
from flava_tnt.plugin import Applied, Run

if TYPE_CHECKING:
    from flava_tnt.plugin import Parallelism


def assemble_model(run: Run) -> tuple[FlavaForPretraining, nn.Module]:
    """Build, transform, shard, materialise and wrap the model.

    Returns:
        The model itself and the module to call, which may be a wrapper around it.

    Raises:
        PluginError: a transform matched nothing.
    """
    recipe, setup = run.recipe, run.setup
    dims = resolve_dims(recipe.model, recipe.text)
    parallelism: Parallelism = setup.one("parallelism")

    setup.one("precision").set_up(run)
    with torch.device("meta"):
        model = build_model(dims, recipe.loss)
    names = {name for name, _ in model.named_parameters()}

    attention = setup.one("attention")
    if attention is not None:
        _report(run, attention.apply(model, run))
    checkpointing = setup.one("activation_checkpointing")
    if checkpointing is not None:
        _report(run, checkpointing.apply(model, run))
    sharded = parallelism.shard(model, run)
    if sharded is not None:
        _report(run, sharded)
    _check_names(model, names)

    materialise(
        model,
        device=run.device,
        sharded_device=parallelism.parameter_device(run),
        seed=recipe.seed,
        token_init_std=recipe.model.token_init_std,
        init_std=dims.init_std,
    )
    _fill_codebook(model, run)
    trainable, frozen = count_parameters(dims)
    run.logger.info(
        "model: %s, %s trainable and %s frozen parameters", recipe.model.size, f"{trainable:,}", f"{frozen:,}"
    )
    return model, parallelism.wrap(model, run)


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's own names and its trainable parameters, tied ones once."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield canonical_name(name), parameter


def _check_names(model: nn.Module, names: set[str]) -> None:
    """Initial weights and checkpoints go by the model's own names, so a wrapper must not change them.

    Raises:
        PluginError: it does.
    """
    changed = sorted(
        name for name in map(canonical_name, dict(model.named_parameters())) if name not in names
    )
    if changed:
        raise PluginError(
            f"a plugin's wrapper renames parameters ({changed[0]} and {len(changed) - 1} others): wrap with"
            " torch's checkpoint_wrapper, torch.compile or a module whose attribute is called 'module', whose"
            " prefixes are known"
        )


def _report(run: Run, applied: Applied) -> None:
    if applied.count == 0:
        raise PluginError(
            f"{applied}: a transform that matches nothing is a mistake; remove it or mend what it matches"
        )
    run.logger.info("%s", applied)


def _fill_codebook(model: FlavaForPretraining, run: Run) -> None:
    weights = run.recipe.model.codebook.weights
    if weights is not None:
        load_codebook_weights(model, weights)
        run.logger.info("codebook: weights of %s", weights)
    else:
        run.logger.info(
            "codebook: RANDOM weights, good for tests and demonstrations only; for real targets give"
            " model.codebook.weights=FILE_OR_URL"
        )
