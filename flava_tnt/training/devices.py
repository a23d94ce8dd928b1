"""What this machine has to train on, found without torch and without touching a GPU.

Asking CUDA for a device's memory creates a context of several hundred MB on it, which would stay for the
whole run; the driver's own command does not.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/version")
_QUERY = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]


@dataclass(frozen=True)
class Devices:
    """The accelerators of this machine, or its CPU."""

    device_type: str
    """``"cuda"`` or ``"cpu"``."""
    count: int
    """GPUs; 1 on a CPU."""
    free_bytes: tuple[int, ...] | None = None
    """Free memory of each GPU; None on a CPU and where it is not known."""

    def memory_of(self, local_world_size: int) -> int | None:
        """Free memory of the fullest GPU that the local ranks use, in bytes; None where it is not known."""
        return min(self.free_bytes[:local_world_size]) if self.free_bytes else None


def find_devices() -> Devices:
    """Look for GPUs."""
    if not _DRIVER.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return Devices("cpu", 1)
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=True).stdout
        free_bytes = visible(read_free_bytes(answer), os.environ)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return _ask_torch()
    return Devices("cuda", len(free_bytes), free_bytes) if free_bytes else Devices("cpu", 1)


def read_free_bytes(answer: str) -> tuple[int, ...]:
    """Free bytes of each GPU from the driver's answer in MiB, a line each."""
    return tuple(int(line) * 2**20 for line in answer.split())


def visible(free_bytes: tuple[int, ...], environ: Mapping[str, str]) -> tuple[int, ...]:
    """Those of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    Raises:
        ValueError: it has names (UUIDs) in place of numbers.
        IndexError: it has numbers of GPUs that are not there.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return free_bytes
    return tuple(free_bytes[int(number)] for number in chosen.split(","))


def _ask_torch() -> Devices:
    """Only the count, which torch can tell without a context."""
    import torch

    count = torch.cuda.device_count()
    return Devices("cuda", count) if count else Devices("cpu", 1)
