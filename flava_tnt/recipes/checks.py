"""Checks a resolved recipe against the ranks and devices that will run it, before any process exists."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flava_tnt.errors import PluginError, RecipeError
from flava_tnt.model.sizes import resolve_dims
from flava_tnt.nearest import did_you_mean
from flava_tnt.plugin import KINDS, LOSSES_OF_MODALITY, MODALITIES, Setup, iterate_plugins
from flava_tnt.recipes.memory import check_memory
from flava_tnt.registry import list_plugins

if TYPE_CHECKING:
    from flava_tnt.recipes.resolve import Resolved


def check_setup(
    resolved: Resolved,
    *,
    world_size: int,
    local_world_size: int,
    device_type: str,
    device_memory_bytes: int | None = None,
    look_at_memory: bool = True,
    run_dir: Path | None = None,
) -> Setup:
    """Everything that can be checked without torch and without a process group.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        device_memory_bytes: free memory of the smallest GPU; None where it is not known. On a CPU the
            memory of this machine is looked up.
        look_at_memory: whether to refuse what cannot fit.

    Raises:
        UserError: (any subclass) the first thing that cannot work.
    """
    setup = Setup(
        recipe=resolved.recipe,
        world_size=world_size,
        local_world_size=local_world_size,
        device_type=device_type,
        plugins=resolved.plugins,
        run_dir=run_dir,
    )
    try:
        check_kinds(setup)
        check_relations(resolved)
        check_batch(setup)
        check_losses(setup)
        resolve_dims(setup.recipe.model, setup.recipe.text)
        for _, _, plugin in iterate_plugins(setup.plugins):
            plugin.check(setup)
        if look_at_memory:
            check_memory(setup, device_memory_bytes=device_memory_bytes)
    except RecipeError as error:
        raise _with_origin(error, resolved) from None
    return setup


def check_kinds(setup: Setup) -> None:
    """Each kind as often as a recipe takes it.

    Raises:
        RecipeError: a kind is missing, or there is more of it than a recipe takes.
    """
    for name, kind in KINDS.items():
        count = len(setup.plugins.get(name, {}))
        if count < kind.at_least:
            names = ", ".join(dict.fromkeys(entry.name for entry in list_plugins(name))) or "none"
            raise RecipeError(
                f"a recipe needs a plugin of this kind; there are: {names}", key=f"plugins.{name}"
            )
        if kind.at_most is not None and count > kind.at_most:
            raise RecipeError(f"a recipe takes at most {kind.at_most}, found {count}", key=f"plugins.{name}")


def check_relations(resolved: Resolved) -> None:
    """`requires` and `conflicts` of each plugin.

    Raises:
        PluginError: one that is needed is not there, or two cannot work beside each other.
    """
    present = {
        f"{kind}:{entry.name}": resolved.origin(f"plugins.{kind}")
        for kind, entries in resolved.entries.items()
        for entry in entries.values()
    }
    for kind, label, plugin in iterate_plugins(resolved.plugins):
        entry = resolved.entries[kind][label]
        for needed in plugin.requires:
            if needed not in present:
                hint = did_you_mean(needed, present, listed=True)
                raise PluginError(f"{entry} requires {needed}, which this recipe does not use{hint}")
        for other in plugin.conflicts:
            if other in present:
                raise PluginError(
                    f"{entry} cannot work beside {other} ({present[other]}); switch one of them off"
                )


def check_batch(setup: Setup) -> None:
    """The global batch is shared evenly by the ranks, and a rank's part by its micro-batches.

    Raises:
        RecipeError: one does not divide the other; the message proposes numbers that do.
    """
    recipe, world_size = setup.recipe, setup.world_size
    total = recipe.global_batch(world_size)
    if total % world_size:
        below, above = total // world_size * world_size, (total // world_size + 1) * world_size
        proposal = " or ".join(str(number) for number in (below, above) if number)
        raise RecipeError(
            f"{world_size} ranks cannot share {total} samples evenly; take {proposal}, or other ranks",
            key="batch.global",
        )
    local, micro = recipe.local_batch(world_size), recipe.batch.micro
    if micro is not None and local % micro:
        divisors = [number for number in range(1, local + 1) if local % number == 0]
        near = min(divisors, key=lambda number: (abs(number - micro), number))
        raise RecipeError(
            f"micro-batches of {micro} do not divide the {local} samples of each of the {world_size} ranks;"
            f" take {near}",
            key="batch.micro",
        )


def check_losses(setup: Setup) -> None:
    """Each kind of batch that has a share has a loss.

    Raises:
        RecipeError: all weights of a kind's losses are 0, so its steps would teach nothing.
    """
    weights = setup.recipe.loss.weights.model_dump()
    for modality in MODALITIES:
        share = getattr(setup.recipe.train.modalities, modality)
        names = LOSSES_OF_MODALITY[modality]
        if share > 0 and not any(weights[name] for name in names):
            raise RecipeError(
                f"{share:g} of the steps have batches of modality {modality!r}, and loss.weights of"
                f" {', '.join(names)} are 0: set this share to 0 too",
                key=f"train.modalities.{modality}",
            )


def _with_origin(error: RecipeError, resolved: Resolved) -> RecipeError:
    """The same error with the place that its key came from."""
    if error.key is None or error.origin is not None:
        return error
    message = str(error).removeprefix(f"{error.key}: ")
    return type(error)(message, key=error.key, origin=resolved.origin(error.key))
