"""What this machine has to train on, found without torch where there is no GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Devices:
    """The accelerators of this machine, or its CPU."""

    device_type: str
    """``"cuda"`` or ``"cpu"``."""
    count: int
    """GPUs; 1 on a CPU."""
    memory_bytes: int | None
    """Free memory of the smallest GPU; None on a CPU."""


def find_devices() -> Devices:
    """Look for GPUs. torch is imported only where a driver is loaded: it takes seconds."""
    if _DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        import torch

        count = torch.cuda.device_count()
        if count:
            free = min(torch.cuda.mem_get_info(index)[0] for index in range(count))
            return Devices("cuda", count, free)
    return Devices("cpu", 1, None)
