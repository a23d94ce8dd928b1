"""Dtypes, TF32 flags, and what a device cannot do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pydantic import ValidationError

from flava_tnt.errors import PluginError, RecipeError
from flava_tnt.plugin import Precision
from flava_tnt_plugins.precision import Bf16, Fp16, Fp32
from tests.plugins import toy


@pytest.fixture(autouse=True)
def _flags() -> Iterator[None]:
    """Put the process's flags back."""
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = cudnn


def set_up(plugin: Precision, device: str) -> tuple[str, bool]:
    plugin.set_up(toy.make_run(toy.make_setup([plugin]), device=device))
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_each_computes_in_its_dtype() -> None:
    assert [p.compute_dtype() for p in (Fp32(), Bf16(), Fp16())] == [None, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("plugin_class", [Fp32, Bf16, Fp16])
def test_tf32_is_switched_on_and_off_for_products_and_convolutions(
    plugin_class: type[Precision], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert set_up(plugin_class(tf32=True), "cuda:0") == ("high", True)
    assert set_up(plugin_class(), "cuda:0") == ("highest", False)


def test_a_cpu_run_leaves_the_flags_alone() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    assert set_up(Fp32(tf32=True), "cpu") == before
    assert set_up(Bf16(tf32=True), "cpu") == before


def test_fp16_on_a_cpu_is_refused_with_the_alternative() -> None:
    with pytest.raises(RecipeError, match="take bf16") as error:
        Fp16().check(toy.make_setup([Fp16()]))
    assert error.value.key == "plugins.precision"
    Fp16().check(toy.make_setup([Fp16()], device_type="cuda"))


def test_bf16_on_a_gpu_without_it_is_refused_with_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    with pytest.raises(PluginError, match="Tesla V100 has no bf16 arithmetic: take the precision fp16"):
        set_up(Bf16(), "cuda:0")


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(ValidationError):
        Fp32(tf32="yes")  # type: ignore[arg-type]
