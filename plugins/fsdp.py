"""FSDP2 (``fully_shard``): ranks share parameters, gradients and optimizer state."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flava_tnt.errors import RecipeError
from flava_tnt.plugin import Applied, Parallelism, Run, Setup

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from flava_tnt.model.flava import FlavaForPretraining

_KEY = "plugins.parallelism"
_GATHERED = "_flava_tnt_gathered"
"""Attribute of a unit that has had a gradient, so that its weights have been gathered before."""


class Fsdp(Parallelism):
    """Fully sharded data parallelism: one unit for each layer, head and tower, and one for the rest.

    A unit's weights are gathered for its forward and again for its backward pass, and freed in between. The
    root's own weights (projections, temperature) are few: they stay gathered from forward to backward, and
    they are gathered in fp32, since the temperature is an exponent.
    """

    api_version = 1

    mesh: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=2, max_length=2)
    """Hybrid sharding as [replicas, shards]: `shards` ranks share one copy of the model, and `replicas` such
    groups average their gradients. The product is the number of ranks. None: all ranks share one copy."""
    reshard_after_forward: bool | int = True
    """true: free a unit's gathered weights after its forward pass; false: keep them for its backward pass; a
    number: keep them shared by groups of that many ranks (it must divide the shards)."""
    cpu_offload: bool = False
    """Keep the shards of weights, gradients and optimizer state in host memory; the optimizer runs there."""
    gather_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """The dtype in which weights travel. None: the dtype in which the precision plugin computes."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """The dtype in which gradients are averaged over the ranks."""
    sync_every_micro_batch: bool = True
    """Reduce gradients after every micro-batch. false: after the last only, which saves messages and costs
    the memory of a whole model's gradients on each rank until then."""

    def num_shards(self, world_size: int) -> int:
        """The mesh's second dimension, or all ranks."""
        return self.mesh[1] if self.mesh is not None else world_size

    def check(self, setup: Setup) -> None:
        """Compare the options with the ranks, the device, and the precision.

        Raises:
            RecipeError: the mesh is not as large as the run, the resharding group does not divide the shards,
                offloading on a CPU, or weights gathered in a dtype that nothing computes in.
        """
        self._check_mesh(setup.world_size)
        self._check_resharding(self.num_shards(setup.world_size))
        if self.cpu_offload and setup.device_type != "cuda":
            raise RecipeError(
                "torch's offloading moves weights between a GPU and the host, and on a CPU they are in host"
                " memory already: leave it out",
                key=f"{_KEY}.cpu_offload",
            )
        self._check_gather_dtype(setup)

    def _check_mesh(self, world_size: int) -> None:
        if self.mesh is None:
            return
        replicas, shards = self.mesh
        if replicas * shards != world_size:
            raise RecipeError(
                f"{replicas} replicas x {shards} shards are {replicas * shards} ranks, and this run has"
                f" {world_size}",
                key=f"{_KEY}.mesh",
            )

    def _check_resharding(self, shards: int) -> None:
        group = self.reshard_after_forward
        if isinstance(group, bool):
            return
        if group < 2 or shards % group:
            raise RecipeError(
                f"groups of {group} ranks do not divide {shards} shards: take true, false, or a divisor > 1",
                key=f"{_KEY}.reshard_after_forward",
            )

    def _check_gather_dtype(self, setup: Setup) -> None:
        if self.gather_dtype in (None, "fp32"):
            return
        if _dtype(self.gather_dtype) != setup.one("precision").compute_dtype():
            raise RecipeError(
                f"weights gathered in {self.gather_dtype} need the precision {self.gather_dtype}: take that"
                " precision, or leave this option out",
                key=f"{_KEY}.gather_dtype",
            )

    def offloads(self) -> bool:
        return self.cpu_offload

    def parameter_device(self, run: Run) -> torch.device:
        """The host where weights are offloaded to it."""
        import torch

        return torch.device("cpu") if self.cpu_offload else run.device

    def shard(self, model: FlavaForPretraining, run: Run) -> Applied:
        """Shard bottom-up: layers, heads and towers, then what is left as the root's unit."""
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

        # The towers hand on slices of what they computed, and nothing changes those in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        layers = model.layers()
        names = sorted({_layer_class(layer) for layer in layers.values()})
        options: dict[str, Any] = {
            "mesh": self._device_mesh(run),
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
            "ignored_params": set(model.frozen_parameters()),
        }
        policy = self._mixed_precision(_gather_dtype(self.gather_dtype, run))
        for unit in [*layers.values(), *model.heads().values(), *model.towers().values()]:
            fully_shard(unit, mp_policy=policy, reshard_after_forward=self.reshard_after_forward, **options)
        fully_shard(model, mp_policy=self._mixed_precision(None), reshard_after_forward=False, **options)
        if run.device.type == "cpu":
            # gloo's own average has been a sum in some versions of torch: sum, and divide explicitly.
            for unit in model.modules():
                if isinstance(unit, FSDPModule):
                    unit.set_force_sum_reduction_for_comms(True)
        return Applied(
            verb="FSDP shards",
            count=sum(isinstance(layer, FSDPModule) for layer in model.layers().values()),
            total=len(layers),
            target=" and ".join(names),
        )

    @contextlib.contextmanager
    def micro_batch(self, module: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Communicate gradients in this micro-batch's backward pass, or keep them whole until the last.

        A unit communicates always until it has had its first gradient: a backward pass without communication
        fails in torch (up to 2.14) where a unit has never been gathered, as the image tower in a run that
        starts with text. Forward and backward passes alternate, so each backward pass ends FSDP's own
        bookkeeping (``set_is_last_backward`` stays at its default).
        """
        from torch.distributed.fsdp import FSDPModule

        if self.sync_every_micro_batch:
            yield
            return
        units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        for unit in units:
            has_been_gathered = getattr(unit, _GATHERED, False)
            unit.set_requires_gradient_sync(is_last or not has_been_gathered, recurse=False)
        yield
        for unit in units:
            if not is_last and _has_gradient(unit):
                setattr(unit, _GATHERED, True)

    def _device_mesh(self, run: Run) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        if self.mesh is None:
            return init_device_mesh(run.device.type, (run.world_size,), mesh_dim_names=("shard",))
        return init_device_mesh(run.device.type, tuple(self.mesh), mesh_dim_names=("replicate", "shard"))

    def _mixed_precision(self, gather_dtype: torch.dtype | None) -> Any:
        """Only weights and gradients change dtype: autocast casts activations, integers pass unharmed."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(
            param_dtype=gather_dtype, reduce_dtype=_dtype(self.reduce_dtype), cast_forward_inputs=False
        )


def _has_gradient(unit: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in unit.parameters())


def _gather_dtype(name: str | None, run: Run) -> torch.dtype | None:
    """The dtype of gathered weights; None: as they are stored, in fp32."""
    if name is None:
        return run.setup.one("precision").compute_dtype()
    return None if name == "fp32" else _dtype(name)


def _dtype(name: str) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def _layer_class(layer: nn.Module) -> str:
    """A layer's class, seen through an activation-checkpointing wrapper."""
    return type(getattr(layer, "_checkpoint_wrapped_module", layer)).__name__
