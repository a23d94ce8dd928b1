"""The attention plugins say what they replaced and give the same numbers."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torchmultimodal.modules.layers.attention import SelfAttention

from flava_tnt.model.attention import SdpaAttention
from flava_tnt.model.flava import build_model
from flava_tnt.model.weights import materialise
from flava_tnt_plugins.attention import Eager, Sdpa
from tests.model.helpers import GLOBAL, SMALL, make_batch, make_model

NO_RUN = cast(Any, None)


@pytest.mark.parametrize(
    ("plugin", "module", "said"),
    [
        (Sdpa(), SdpaAttention, "SDPA replaces 6 of 6 attentions"),
        (Eager(), SelfAttention, "eager attention in 6 of 6 attentions"),
    ],
)
def test_plugins_replace_every_attention_on_the_meta_device(plugin, module, said):
    with torch.device("meta"):
        model = build_model(SMALL, GLOBAL)
    before = model.state_dict().keys()
    assert str(plugin.apply(model, NO_RUN)) == said
    assert all(type(layer.attention.attn) is module for layer in model.layers().values())
    assert model.state_dict().keys() == before
    materialise(model, device="cpu", seed=0, token_init_std=0.02)
    assert model(make_batch("text"))["mlm"].isfinite()


@pytest.mark.parametrize("modality", ["pairs", "image", "text"])
def test_both_give_the_same_numbers(modality):
    batch = make_batch(modality, mismatched=(2,))
    sdpa, eager = (make_model(sdpa=choice)(batch) for choice in (True, False))
    for name in sdpa:
        assert sdpa[name].item() == pytest.approx(eager[name].item(), rel=1e-6), name


def test_dropout_acts_on_sdpa_in_training_only():
    attention = SdpaAttention(dropout=0.5)
    x = torch.randn(2, 3, 5, 4)
    assert not attention(x, x, x).equal(attention(x, x, x))
    attention.eval()
    assert attention(x, x, x).equal(attention(x, x, x))
