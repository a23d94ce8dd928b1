"""Where this process stands among the ranks, and how it joins them.

The command runs in three places: started plainly (it launches the local ranks itself, see ``launch.py``),
under torchrun or our own launcher (which set RANK and so on), and under SLURM's srun.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flava_tnt.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place. Ranks are counted over all nodes, local ranks on one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def find_world(environ: Mapping[str, str]) -> World | None:
    """The place that a launcher gave this process, or None where it was started plainly.

    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. srun sets SLURM_STEP_*; a step of one
    task counts as plain, since that is also an interactive shell on a node.

    Raises:
        UserError: some of torchrun's variables are set and others are not.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = [name for name in names if name in environ]
    if len(found) == len(names):
        rank, world_size, local_rank, local_world_size = (int(environ[name]) for name in names)
        return World(
            rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size
        )
    if found and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) <= 1:
        missing = ", ".join(name for name in names if name not in environ)
        raise UserError(
            f"the environment has {', '.join(found)} but not {missing}: start with torchrun, which sets all"
            " of them, or unset them"
        )
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _slurm_world(environ)
    return None


def _slurm_world(environ: Mapping[str, str]) -> World:
    node = int(environ["SLURM_NODEID"])
    return World(
        rank=int(environ["SLURM_PROCID"]),
        world_size=int(environ["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world_size=tasks_of_nodes(environ["SLURM_STEP_TASKS_PER_NODE"])[node],
    )


def tasks_of_nodes(text: str) -> list[int]:
    """Tasks of each node from SLURM's notation: ``"8(x2),4"`` is ``[8, 8, 4]``."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(f"cannot read SLURM_STEP_TASKS_PER_NODE={text!r}")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def first_host(nodelist: str) -> str:
    """The first host of SLURM's notation: ``"gpu[03-05,9],cpu1"`` is ``"gpu03"``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    if match is None:
        raise UserError(f"cannot read SLURM_STEP_NODELIST={nodelist!r}")
    return "".join(part or "" for part in match.groups())


def set_rendezvous(environ: MutableMapping[str, str], world: World) -> None:
    """Fill in what torch's ``env://`` rendezvous needs where the launcher (srun) did not."""
    environ.setdefault("RANK", str(world.rank))
    environ.setdefault("WORLD_SIZE", str(world.world_size))
    environ.setdefault("LOCAL_RANK", str(world.local_rank))
    environ.setdefault("LOCAL_WORLD_SIZE", str(world.local_world_size))
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = first_host(environ["SLURM_STEP_NODELIST"])
    if "MASTER_PORT" not in environ:
        # A function of job and step: all ranks agree on it, and two steps on a node do not meet.
        job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
        # Below 32,768, from where on systems hand out ports by themselves.
        environ["MASTER_PORT"] = str(20_000 + (job * 31 + step) % 12_000)


def join(world: World, *, device_type: str, timeout_seconds: float) -> torch.device:
    """Create the process group and return this rank's device.

    Collectives on CPU tensors go through gloo on GPU machines too: the host exchanges its small numbers
    (counts, requests to stop) without waiting for the device.
    """
    import torch
    import torch.distributed as dist

    set_rendezvous(os.environ, world)
    device = torch.device("cpu")
    if device_type == "cuda":
        # SLURM's --gpus-per-task shows each task its own GPU only, as number 0.
        device = torch.device("cuda", world.local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        rank=world.rank,
        world_size=world.world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    return device
