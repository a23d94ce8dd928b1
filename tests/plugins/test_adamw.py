"""The learning rate is a function of the step; groups, decay and the fused update."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from flava_tnt.errors import RecipeError
from flava_tnt_plugins.adamw import AdamW
from tests.plugins import toy


@st.composite
def schedules(draw: st.DrawFn) -> tuple[AdamW, int]:
    max_steps = draw(st.integers(1, 300))
    warmup = draw(st.none() | st.integers(0, max_steps))
    plugin = AdamW(
        learning_rate=draw(st.floats(1e-6, 1.0)),
        warmup_steps=warmup,
        schedule=draw(st.sampled_from(["cosine", "constant"])),
        min_learning_rate_fraction=draw(st.floats(0.0, 1.0)),
    )
    return plugin, max_steps


def curve(plugin: AdamW, max_steps: int) -> list[float]:
    return [plugin.learning_rate_at(step, max_steps) for step in range(1, max_steps + 1)]


@given(schedules())
def test_no_step_is_lost_to_a_rate_of_0_and_none_is_above_the_peak(case: tuple[AdamW, int]) -> None:
    plugin, max_steps = case
    rates = curve(plugin, max_steps)
    assert all(0 < rate <= plugin.learning_rate * (1 + 1e-12) for rate in rates)


@given(schedules())
def test_it_rises_in_a_line_to_the_peak_and_falls_from_there(case: tuple[AdamW, int]) -> None:
    plugin, max_steps = case
    rates = curve(plugin, max_steps)
    warmup = plugin.warmup(max_steps)
    for step in range(1, warmup + 1):
        assert rates[step - 1] == pytest.approx(plugin.learning_rate * step / warmup)
    after = rates[max(warmup - 1, 0) :]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(after))
    if warmup:
        assert max(rates) == rates[warmup - 1] == pytest.approx(plugin.learning_rate)


@given(schedules())
def test_it_ends_at_the_fraction_one_step_after_the_last(case: tuple[AdamW, int]) -> None:
    plugin, max_steps = case
    left = plugin.min_learning_rate_fraction if plugin.schedule == "cosine" else 1.0
    end = plugin.learning_rate_at(max_steps + 1, max_steps)
    assert end == pytest.approx(plugin.learning_rate * left, abs=1e-12)


@given(schedules())
def test_the_scheduler_gives_each_step_its_rate(case: tuple[AdamW, int]) -> None:
    plugin, max_steps = case
    run = toy.make_run(toy.make_setup([plugin], max_steps=max_steps))
    optimizer, schedule = plugin.build([("w", nn.Parameter(torch.ones(2, 2)))], run)
    for step in range(1, min(max_steps, 30) + 1):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(plugin.learning_rate_at(step, max_steps))
        optimizer.step()
        schedule.step()


def test_half_way_down_the_cosine_half_of_the_peak_is_left() -> None:
    plugin = AdamW(learning_rate=1.0, warmup_steps=10)
    assert [plugin.learning_rate_at(step, 99) for step in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert plugin.learning_rate_at(10 + (100 - 10) // 2, 99) == pytest.approx(0.5)


@pytest.mark.parametrize(("max_steps", "warmup"), [(5, 0), (20, 2), (1000, 100), (150_000, 10_000)])
def test_the_warm_up_is_a_tenth_of_the_run_and_at_most_the_papers(max_steps: int, warmup: int) -> None:
    assert AdamW().warmup(max_steps) == warmup


def test_a_warm_up_that_outlasts_the_run_is_refused() -> None:
    plugin = AdamW(warmup_steps=10_000)
    with pytest.raises(RecipeError, match="10000 steps is longer than the run of 1000") as error:
        plugin.check(toy.make_setup([plugin], max_steps=1000))
    assert error.value.key == "plugins.optimizer.warmup_steps"
    plugin.check(toy.make_setup([plugin], max_steps=10_000))
    AdamW().check(toy.make_setup(max_steps=1))


# ---------------------------------------------------------------------------------------- the update


def build(plugin: AdamW, model: nn.Module) -> torch.optim.Optimizer:
    return plugin.build(toy.trainable(model), toy.make_run(toy.make_setup([plugin])))[0]


def test_everything_decays_as_in_the_paper() -> None:
    (group,) = build(AdamW(), toy.Toy()).param_groups
    assert (group["weight_decay"], group["betas"], group["lr"]) == (0.1, (0.9, 0.999), pytest.approx(5e-4))
    assert set(group["param_names"]) == {name for name, _ in toy.trainable(toy.Toy())}


def test_norms_biases_and_the_temperature_can_be_left_out_of_the_decay() -> None:
    decayed, kept = build(AdamW(decay_norms_and_biases=False), toy.Toy()).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    for name in kept["param_names"]:
        assert name.endswith("bias") or "norm" in name or name == "logit_scale"
    for name in decayed["param_names"]:
        assert name.endswith("weight")
        assert "norm" not in name
    assert len(decayed["params"]) + len(kept["params"]) == len(list(toy.trainable(toy.Toy())))


def test_a_weight_without_a_gradient_does_not_move() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    before = model["unused"].weight.clone()
    optimizer = build(AdamW(), model)
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model["unused"].weight, before)


def update(plugin: AdamW) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = toy.Toy()
    optimizer = build(plugin, model)
    for step in range(3):
        optimizer.zero_grad()
        torch.stack(list(model(toy.global_batch("pairs", step)).values())).sum().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_the_fused_update_is_the_same_update() -> None:
    plain_update, fused_update = (update(AdamW(eps=1e-3, fused=fused)) for fused in (False, True))
    for plain, fused in zip(plain_update, fused_update, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


def test_the_update_is_fused_where_torch_can_unless_asked_otherwise() -> None:
    assert build(AdamW(), toy.Toy()).defaults["fused"] is True
    assert build(AdamW(fused=False), toy.Toy()).defaults["fused"] is False
    with torch.device("meta"):
        elsewhere = toy.Toy()
    assert build(AdamW(), elsewhere).defaults["fused"] is False


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.0},
        {"learning_rate": "1e-3"},
        {"betas": [0.9]},
        {"betas": [0.9, 1.0]},
        {"weight_decay": -0.1},
        {"warmup_steps": -1},
        {"warmup_steps": 1.5},
        {"schedule": "linear"},
        {"min_learning_rate_fraction": 1.5},
        {"lr": 1e-3},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AdamW(**options)
