"""Precision: autocast's dtype, and whether fp32 matrix products may use TF32.

Parameters, gradients' averages and optimizer state stay fp32 everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flava_tnt.errors import PluginError, RecipeError
from flava_tnt.plugin import Precision, Run, Setup

if TYPE_CHECKING:
    import torch


class _WithTf32(Precision):
    """What the three have in common: TF32 for the products that are computed in fp32."""

    tf32: bool = False
    """Let an NVIDIA GPU (Ampere or later) round the inputs of fp32 matrix products and convolutions to 10
    bits of mantissa, which is several times faster; the article ran with it on. No effect on a CPU."""

    def set_up(self, run: Run) -> None:
        """Set the flags on a GPU.

        The older of torch's two interfaces is used: its compiler and libraries read the flags through that
        one, which fails once the newer one has been written.
        """
        if run.device.type != "cuda":
            return
        import torch

        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32


class Fp32(_WithTf32):
    """Computes in fp32."""

    api_version = 1


class Bf16(_WithTf32):
    """Autocast to bf16: the exponents of fp32, so that no loss scaling is needed."""

    api_version = 1

    def set_up(self, run: Run) -> None:
        """Set the flags.

        Raises:
            PluginError: the GPU has no bf16. This can be seen on the device only, and looking at it earlier
                would leave a CUDA context in the process that starts the ranks.
        """
        super().set_up(run)
        import torch

        if run.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(run.device)
            raise PluginError(f"{name} has no bf16 arithmetic: take the precision fp16 or fp32")

    def compute_dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16


class Fp16(_WithTf32):
    """Autocast to fp16, with loss scaling; for GPUs without bf16."""

    api_version = 1

    def check(self, setup: Setup) -> None:
        """Refuse a CPU.

        Raises:
            RecipeError: the run is on a CPU.
        """
        if setup.device_type == "cpu":
            raise RecipeError(
                "fp16 needs a GPU, since torch trains in fp16 nowhere else: take bf16 (or fp32) on a CPU",
                key="plugins.precision",
            )

    def compute_dtype(self) -> torch.dtype:
        import torch

        return torch.float16
