"""Recomputing changes memory and time, and no number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from flava_tnt.errors import RecipeError
from flava_tnt.plugin import ActivationCheckpointing
from flava_tnt_plugins.activation_checkpointing import Full, Selective
from flava_tnt_plugins.adamw import AdamW
from flava_tnt_plugins.precision import Fp32
from flava_tnt_plugins.single import Single
from tests.plugins import toy

PLUGINS = [
    Full(),
    Selective(),
    Selective(every=1),
    Selective(every=3),
    Selective(operations=["matmul", "attention"]),
    Selective(operations=["aten.gelu"]),
]
IDS = ["full", "default", "every 1", "every 3", "matmul and attention", "gelu"]


class CountOperations(TorchDispatchMode):
    """Counts what torch executes, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def gradients(plugin: ActivationCheckpointing | None, dropout: float = 0.0) -> tuple[float, dict[str, Any]]:
    plugins = [Single(), Fp32(), AdamW()] + ([plugin] if plugin else [])
    module, run = toy.assemble(plugins, num_layers=3, dropout=dropout)
    torch.manual_seed(1)  # what dropout draws from
    loss = toy.backward(module, run, "pairs", 1)
    return loss, {name: p.grad for name, p in toy.trainable(module) if p.grad is not None}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("plugin", PLUGINS, ids=IDS)
def test_losses_and_gradients_are_bit_equal(plugin: ActivationCheckpointing, dropout: float) -> None:
    loss, expected = gradients(None, dropout)
    ac_loss, found = gradients(plugin, dropout)
    assert ac_loss == loss
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize(
    ("plugin", "wrapped", "text"),
    [
        (Full(), {0, 1, 2, 3, 4, 5}, "AC wraps 6 of 6 Layer"),
        (Selective(), {1, 3, 5}, "AC (1 in 2) wraps 3 of 6 Layer"),
        (Selective(every=4), {3}, "AC (1 in 4) wraps 1 of 6 Layer"),
        (Selective(every=7), set(), "AC (1 in 7) wraps 0 of 6 Layer"),
        (Selective(operations=["matmul"]), {0, 1, 2, 3, 4, 5}, "AC (keeps matmul) wraps 6 of 6 Layer"),
    ],
)
def test_it_says_what_it_wrapped(plugin: ActivationCheckpointing, wrapped: set[int], text: str) -> None:
    with torch.device("meta"):
        model: Any = toy.Toy()
    applied = plugin.apply(model, toy.make_run(toy.make_setup([plugin])))
    assert str(applied) == text
    classes = [type(layer).__name__ for layer in model.layers().values()]
    assert {i for i, name in enumerate(classes) if name == "CheckpointWrapper"} == wrapped
    assert applied.count == len(wrapped)


@pytest.mark.parametrize("plugin", PLUGINS, ids=IDS)
def test_names_stay_the_models_own(plugin: ActivationCheckpointing) -> None:
    model: Any = toy.Toy()
    names, keys = dict(model.named_parameters()).keys(), model.state_dict().keys()
    plugin.apply(model, toy.make_run(toy.make_setup([plugin])))
    assert model.state_dict().keys() == keys
    assert {toy.canonical_name(name) for name, _ in model.named_parameters()} == set(names)


def executed(plugin: ActivationCheckpointing | None) -> Counter[str]:
    plugins = [Single(), Fp32(), AdamW()] + ([plugin] if plugin else [])
    module, run = toy.assemble(plugins, num_layers=3)
    with CountOperations() as counter:
        toy.backward(module, run, "text", 1)
    return counter.counts


def test_layers_are_computed_again_but_for_the_operations_that_are_kept() -> None:
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    plain, full, every = executed(None), executed(Full()), executed(Selective(every=3))
    kept = executed(Selective(operations=["matmul", "attention"]))
    only_gelu = executed(Selective(operations=["gelu"]))
    # Three layers of one GELU, one attention and four products. Torch stops computing again once it has
    # what the backward pass needs: the last product of a layer is no input of that.
    assert (plain["gelu"], full["gelu"], every["gelu"], kept["gelu"], only_gelu["gelu"]) == (3, 6, 4, 6, 3)
    assert (plain[attention], full[attention], kept[attention], only_gelu[attention]) == (3, 6, 3, 6)
    assert (full["addmm"], kept["addmm"]) == (plain["addmm"] + 9, plain["addmm"])


@pytest.mark.parametrize("plugin_class", [Full, Selective])
@pytest.mark.parametrize(("dropout", "keeps_generators"), [(0.0, False), (0.1, True)])
def test_generators_are_kept_only_where_dropout_draws_from_them(
    plugin_class: type[ActivationCheckpointing], dropout: float, keeps_generators: bool
) -> None:
    model: Any = toy.Toy()
    plugin = plugin_class()
    plugin.apply(model, toy.make_run(toy.make_setup([plugin], dropout=dropout)))
    wrapper = model.layers()["text.layer.1"]
    assert wrapper.checkpoint_fn.keywords["preserve_rng_state"] is keeps_generators


@pytest.mark.parametrize(
    "options",
    [
        {"every": 2, "operations": ["matmul"]},
        {"every": 0},
        {"every": "2"},
        {"operations": []},
        {"operations": "matmul"},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Selective(**options)


@pytest.mark.parametrize("name", ["matmull", "aten.nothing", "__name__"])
def test_an_unknown_operation_is_refused_with_the_names_there_are(name: str) -> None:
    plugin = Selective(operations=["matmul", name])
    with pytest.raises(RecipeError, match=f"no operation '{name}': take matmul or attention") as error:
        plugin.check(toy.make_setup([plugin]))
    assert error.value.key == "plugins.activation_checkpointing.operations"


def test_every_friendly_name_stands_for_operations_of_this_torch() -> None:
    for name in ("matmul", "attention"):
        plugin = Selective(operations=[name])
        plugin.check(toy.make_setup([plugin]))
