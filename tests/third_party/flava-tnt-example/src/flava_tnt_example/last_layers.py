"""Activation checkpointing for the last layers of each tower only."""

from __future__ import annotations

from collections import defaultdict

from pydantic import Field

from flava_tnt.plugin import ActivationCheckpointing, Applied, Run


class LastLayers(ActivationCheckpointing):
    """Recomputes the last layers of each tower in the backward pass."""

    api_version = 1

    num_layers: int = Field(default=1, ge=1)
    """Layers of each tower that are recomputed."""

    def apply(self, model, run: Run) -> Applied:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        layers = model.layers()
        towers = defaultdict(list)
        for name in layers:
            towers[name.rpartition(".")[0]].append(name)
        chosen = [name for names in towers.values() for name in names[-self.num_layers :]]
        for name in chosen:
            model.replace_layer(name, checkpoint_wrapper(layers[name]))
        return Applied(verb="LastLayers wraps", count=len(chosen), total=len(layers), target="layers")
