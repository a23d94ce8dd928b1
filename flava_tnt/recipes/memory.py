"""Refuses a model that cannot fit before anything starts, from exact parameter counts.

The need is a lower bound, for each rank: parameters, gradients and optimizer state in fp32, shared as the
parallelism plugin shares them, and the frozen codebook, which every rank holds. Activations come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import psutil

from flava_tnt.errors import RecipeError
from flava_tnt.model.sizes import SIZES, count_parameters, resolve_dims
from flava_tnt.plugin import Setup
from flava_tnt.recipes.schema import ModelSection

FP32_BYTES = 4
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one rank holds, in bytes."""

    parameters: int
    gradients: int
    optimizer_state: int
    codebook: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.codebook

    @property
    def sharded(self) -> int:
        """What more shards would make smaller."""
        return self.total - self.codebook


def memory_need(setup: Setup, model: ModelSection | None = None, *, num_shards: int | None = None) -> Need:
    """The need of each rank.

    Args:
        model: another model than the recipe's.
        num_shards: other than what the recipe's parallelism makes.
    """
    dims = resolve_dims(model or setup.recipe.model, setup.recipe.text)
    trainable, frozen = count_parameters(dims)
    shards = num_shards or setup.one("parallelism").num_shards(setup.world_size)
    held = math.ceil(trainable / shards)
    return Need(
        parameters=held * FP32_BYTES,
        gradients=held * FP32_BYTES,
        optimizer_state=held * setup.one("optimizer").state_bytes_per_parameter,
        codebook=frozen * FP32_BYTES,
    )


def check_memory(setup: Setup, *, device_memory_bytes: int | None = None) -> None:
    """Compare the need of each rank with what is there.

    Raises:
        RecipeError: it does not fit; the message says what is needed, what is there, and what to try.
    """
    there = available_bytes(setup, device_memory_bytes)
    need = memory_need(setup)
    if there is None or need.total <= there:
        return
    size = setup.recipe.model.size
    raise RecipeError(
        f"{size} on {_ranks(setup.world_size)} needs {_gib(need.total)} for each rank (parameters"
        f" {_gib(need.parameters)}, gradients {_gib(need.gradients)}, optimizer state"
        f" {_gib(need.optimizer_state)}, frozen codebook {_gib(need.codebook)}; activations come on top),"
        f" and {_gib(there)} are there; try {_proposals(setup, there)}",
        key="model.size",
    )


def available_bytes(setup: Setup, device_memory_bytes: int | None = None) -> int | None:
    """Memory that one rank can have; None where it is not known."""
    if setup.device_type != "cpu" and not setup.one("parallelism").offloads():
        return device_memory_bytes
    return host_bytes() // setup.local_world_size


def host_bytes(root: Path = Path("/")) -> int:
    """Memory of this machine that is free for us: what the system has, and what our cgroups leave."""
    return max(0, min([psutil.virtual_memory().available, *_cgroup_rooms(root)]))


def _proposals(setup: Setup, there: int) -> str:
    proposals = []
    whole = memory_need(setup, num_shards=1)
    if there > whole.codebook:
        ranks = math.ceil(whole.sharded / (there - whole.codebook))
        shares = setup.one("parallelism").num_shards(2 * setup.world_size) > 1
        how = "" if shares else "a parallelism that shards, on "
        proposals.append(f"{how}at least {_ranks(ranks)} with as much memory each")
    size = _largest_that_fits(setup, there)
    if size is not None:
        proposals.append(f"model.size={size}, the largest that fits here")
    return ", or ".join(proposals) or "a machine with more memory"


def _largest_that_fits(setup: Setup, there: int) -> str | None:
    """The largest of the sizes as they stand, without a recipe's own dimensions."""
    fitting = []
    for size in SIZES:
        model = ModelSection(size=size, max_text_positions=setup.recipe.model.max_text_positions)
        need = memory_need(setup, model).total
        if need <= there:
            fitting.append((need, size))
    return max(fitting)[1] if fitting else None


def _ranks(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"


def _cgroup_rooms(root: Path) -> list[int]:
    """Limit minus usage of each control group that this process is in, version 2 and 1."""
    rooms = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif controllers == "memory":
            base, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        top = root / base
        folder = top / path.lstrip("/")
        for group in [folder, *folder.parents]:
            room = _room(group, limit, usage, cache)
            if room is not None:
                rooms.append(room)
            if group == top:
                break
    return rooms


def _room(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """None without a limit (version 1 has a number near 2**63 then, which limits nothing).

    Files in the page cache count as usage, but are given up when needed.
    """
    limit_text, usage_text = _read(group / limit).strip(), _read(group / usage).strip()
    if not (limit_text.isdigit() and usage_text.isdigit()):
        return None
    statistics = dict(
        line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines() if " " in line
    )
    return int(limit_text) - int(usage_text) + int(statistics.get(cache, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
