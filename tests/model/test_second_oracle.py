"""A second, independent FLAVA: Hugging Face transformers', with the same weights under its own names."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from transformers import FlavaConfig
from transformers import FlavaForPreTraining as TransformersFlava

from flava_tnt.model.flava import FlavaForPretraining
from tests.model.helpers import WIDER, full_text_labels, jolt, make_batch, make_model, means, normalised

RENAMES = [
    (r"^model\.(image|text)_encoder\.", r"flava.\1_model."),
    (r"^model\.mm_encoder\.", r"flava.multimodal_model."),
    (r"^model\.((?:image|text)_(?:to_mm_)?projection)", r"flava.\1"),
    (r"^loss\.contrastive_loss\.logit_scale", r"flava.logit_scale"),
    (r"^loss\.(mlm|mim)_loss\.cls\.", r"\1_head."),
    (r"^loss\.mmm_loss\.mlm\.cls\.", r"mmm_text_head."),
    (r"^loss\.mmm_loss\.mim\.cls\.", r"mmm_image_head."),
    (r"^loss\.itm_loss\.pooler\.", r"itm_head.pooler."),
    (r"^loss\.itm_loss\.cls\.", r"itm_head."),
    (r"_head\.(dense|layer_norm)\.", r"_head.transform.\1."),
    (r"layer_norm\.", r"LayerNorm."),
    (r"\.attention\.(query|key|value)\.", r".attention.attention.\1."),
    (r"\.attention\.output\.", r".attention.output.dense."),
    (r"\.feedforward\.model\.0\.", r".intermediate.dense."),
    (r"\.feedforward\.model\.[23]\.", r".output.dense."),
    (r"\.attention_layernorm\.", r".layernorm_before."),
    (r"\.feedforward_layernorm\.", r".layernorm_after."),
    (r"^image_codebook\.encoder\.", r"image_codebook."),
    (r"(group_\d)\.", r"\1.group."),
    (r"res_path\.", r"res_path.path."),
    (r"^(image_codebook\..*)\.w$", r"\1.weight"),
    (r"^(image_codebook\..*)\.b$", r"\1.bias"),
]


def their_name(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


@pytest.fixture(scope="module")
def models() -> tuple[FlavaForPretraining, TransformersFlava]:
    ours, dims = make_model(WIDER), WIDER
    jolt(ours)
    size = {
        "hidden_size": dims.hidden_size,
        "num_attention_heads": dims.num_heads,
        "intermediate_size": dims.mlp_size,
    }
    config = FlavaConfig(
        hidden_size=dims.hidden_size,
        projection_dim=dims.projection_size,
        image_config=size
        | {
            "image_size": dims.image_size,
            "patch_size": dims.patch_size,
            "num_hidden_layers": dims.num_image_layers,
            "mask_token": True,
        },
        text_config=size
        | {
            "vocab_size": dims.vocab_size,
            "num_hidden_layers": dims.num_text_layers,
            "max_position_embeddings": dims.max_text_positions,
        },
        multimodal_config=size | {"num_hidden_layers": dims.num_multimodal_layers},
        image_codebook_config={"hidden_size": dims.codebook_hidden_size},
    )
    theirs = TransformersFlava(config)
    state = {their_name(name): value for name, value in ours.state_dict().items()}
    state["flava.logit_scale"] = state["flava.logit_scale"].squeeze()
    theirs.load_state_dict(state, strict=True)
    for head in (theirs.mlm_head, theirs.mim_head, theirs.mmm_text_head, theirs.mmm_image_head):
        head.transform.LayerNorm.eps = 1e-5  # torchmultimodal's; theirs is 1e-12
    return ours, theirs


def their_losses(theirs: TransformersFlava, batch) -> dict[str, Tensor]:
    inputs = {"return_loss": True}
    if batch.image_B3HW is not None:
        inputs |= {
            "pixel_values": normalised(batch.image_B3HW),
            "codebook_pixel_values": batch.codebook_image_B3hw / 255 * 0.8 + 0.1,
            "bool_masked_pos": batch.image_mask_BP,
        }
    if batch.text_BT is not None:
        labels = full_text_labels(batch)
        inputs |= {
            "input_ids": batch.text_BT,
            "input_ids_masked": batch.text_masked_BT,
            "mlm_labels": labels.masked_fill(labels < 0, -100),
        }
    if batch.matched_B is not None:
        inputs["itm_labels"] = batch.matched_B.long()
    losses = dict(theirs(**inputs).loss_info)
    losses["contrastive"] = losses.pop("global_contrastive", None)
    return {name: value for name, value in losses.items() if value is not None}


@pytest.mark.parametrize("modality", ["pairs", "image", "text"])
def test_losses_and_gradients_are_those_of_transformers(models, modality):
    ours, theirs = models
    batch = make_batch(modality, dims=WIDER, padded=False, mismatched=(1, 2))
    mine, other = means(ours, batch), their_losses(theirs, batch)
    assert mine.keys() == other.keys()
    for name in mine:
        assert mine[name].item() == pytest.approx(other[name].item(), rel=1e-5), name

    for model, losses in ((ours, mine), (theirs, other)):
        model.zero_grad()
        torch.stack([value.reshape(()) for value in losses.values()]).sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    total = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()
    compared = 0
    for name, parameter in ours.named_parameters():
        if parameter.grad is None:
            continue
        expected = gradients[their_name(name)].reshape(parameter.shape)
        assert (parameter.grad - expected).norm() <= 1e-4 * expected.norm() + 1e-7 * total, name
        compared += 1
    assert compared > 30
