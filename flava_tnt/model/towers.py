"""FLAVA's three encoders with a forward made for pretraining.

Modules, names and parameters are torchmultimodal's; only ``forward`` is ours:

- the unmasked and the masked view go through a tower in one joint pass, one after the other along the
  batch: two passes through one sharded tower would gather its weights twice and hold all its layers'
  unsharded gradients until the second backward;
- no lists of hidden states and no attention probabilities are kept;
- the final norm sees only the rows that a loss reads, gathered first, with static shapes;
- the poolers keep their parameters (published weights have them) but never run.

A tower is called through ``forward`` alone, so each can be an FSDP unit of its own.

Shape letters: B samples, V rows of the joint pass (B or 2B), P patches, I masked-patch capacity, T text
tokens, M masked-token capacity, L positions of a sequence, N of these gathered, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchmultimodal.models.flava.image_encoder import ImageEmbeddings, ImageTransformer
from torchmultimodal.models.flava.transformer import FLAVATransformerWithoutEmbeddings, TransformerEncoder
from torchmultimodal.modules.encoders.bert_text_encoder import BERTTextEncoder
from torchmultimodal.modules.layers.normalizations import Fp32LayerNorm
from torchmultimodal.modules.layers.text_embedding import BERTTextEmbeddings
from torchmultimodal.modules.losses.flava import Pooler

from flava_tnt.model.sizes import ModelDims

ENCODER_NORM_EPS = 1e-12
"""Of the norms of all encoders (torchmultimodal's FLAVA)."""
ENCODER_INIT_STD = 0.02
"""Of the initial weights of all encoders (torchmultimodal's FLAVA)."""
PAD_ID = 0
NUM_CLS_BEFORE_PATCHES = 2
"""The multimodal sequence is [CLS_M, CLS_I, patches, text]."""


class TowerOutput(NamedTuple):
    """What the losses need of a tower; None where it was not asked for."""

    cls_BD: Tensor | None
    """Unmasked view: the CLS row after the final norm."""
    hidden_BLD: Tensor | None
    """Masked view: the last hidden state *before* the final norm, which is what is fused."""
    rows_BND: Tensor | None
    """Masked view: the rows at the given positions after the final norm."""


class MultimodalOutput(NamedTuple):
    """Rows of the multimodal encoder after its final norm; None where not asked for."""

    cls_BD: Tensor
    image_BID: Tensor | None
    text_BMD: Tensor | None


def gather_rows(x_BLD: Tensor, positions_BN: Tensor) -> Tensor:
    """Rows [B, N, D] at the positions; -1 (nothing there) gives row 0, whose label is ignored."""
    index_BND = positions_BN.clamp(min=0).unsqueeze(-1).expand(-1, -1, x_BLD.shape[-1])
    return x_BLD.gather(1, index_BND)


class ImageTower(ImageTransformer):
    """FLAVA's image encoder."""

    def forward(  # type: ignore[override,unused-ignore]
        self,
        image_B3HW: Tensor,
        mask_BP: Tensor | None = None,
        positions_BI: Tensor | None = None,
        *,
        unmasked: bool,
    ) -> TowerOutput:
        """Run the unmasked view where asked for, and the masked one where there is a mask.

        Args:
            image_B3HW: normalised pixels.
            mask_BP: bool, the patches to hide; None: no masked view.
            positions_BI: which patches' rows to return (-1: none); None: return the masked hidden state.
        """
        x_VLD = self._embed(image_B3HW, mask_BP, unmasked=unmasked)
        x_VLD = self.encoder(x_VLD).last_hidden_state
        if positions_BI is not None:
            positions_BI = torch.where(positions_BI < 0, 0, positions_BI + 1)  # the CLS comes first
        return _tower_output(
            x_VLD, positions_BI, self.layernorm, unmasked=unmasked, masked=mask_BP is not None
        )

    def _embed(self, image_B3HW: Tensor, mask_BP: Tensor | None, *, unmasked: bool) -> Tensor:
        """Both views' embeddings, from one pass of the patch projection."""
        embeddings = self.embeddings
        patches_BPD = embeddings.patch_embeddings(image_B3HW)
        views = [patches_BPD] if unmasked else []
        if mask_BP is not None:
            views.append(torch.where(mask_BP.unsqueeze(-1), embeddings.mask_token, patches_BPD))
        patches_VPD = torch.cat(views)
        cls_V1D = embeddings.cls_token.expand(patches_VPD.shape[0], -1, -1)
        x_VLD = torch.cat((cls_V1D, patches_VPD), dim=1) + embeddings.position_embeddings
        return embeddings.dropout(x_VLD)


class TextTower(BERTTextEncoder):
    """FLAVA's text encoder; it masks padding (id 0)."""

    def forward(  # type: ignore[override,unused-ignore]
        self,
        text_BT: Tensor | None,
        text_masked_BT: Tensor | None,
        positions_BM: Tensor | None = None,
    ) -> TowerOutput:
        """Run the views that are given.

        Args:
            text_BT: token ids of the unmasked view.
            text_masked_BT: token ids of the masked view.
            positions_BM: which tokens' rows to return (-1: none); None: return the masked hidden state.
        """
        views = [ids for ids in (text_BT, text_masked_BT) if ids is not None]
        ids_VT = torch.cat(views)
        is_token_V11T = ids_VT.ne(PAD_ID)[:, None, None, :]
        x_VTD = self.embeddings(input_ids=ids_VT)
        x_VTD = self.encoder(x_VTD, attention_mask=is_token_V11T).last_hidden_state
        return _tower_output(
            x_VTD,
            positions_BM,
            self.layernorm,
            unmasked=text_BT is not None,
            masked=text_masked_BT is not None,
        )


class MultimodalTower(FLAVATransformerWithoutEmbeddings):
    """FLAVA's multimodal encoder; it masks nothing, as the original."""

    def forward(  # type: ignore[override,unused-ignore]
        self,
        image_BLD: Tensor,
        text_BTD: Tensor,
        image_positions_BI: Tensor | None,
        text_positions_BM: Tensor | None,
    ) -> MultimodalOutput:
        """Fuse and encode [CLS_M, image, text].

        Args:
            image_BLD: the projected image sequence, its CLS first.
            text_BTD: the projected text sequence.
            image_positions_BI: which patches' rows to return (-1: none).
            text_positions_BM: which tokens' rows to return (-1: none).
        """
        cls_B1D = self.cls_token.expand(image_BLD.shape[0], -1, -1)
        x_BLD = torch.cat((cls_B1D, image_BLD, text_BTD), dim=1)
        x_BLD = self.encoder(x_BLD).last_hidden_state
        text_start = 1 + image_BLD.shape[1]
        return MultimodalOutput(
            self.layernorm(x_BLD[:, 0]),
            self._normed_rows(x_BLD, image_positions_BI, NUM_CLS_BEFORE_PATCHES),
            self._normed_rows(x_BLD, text_positions_BM, text_start),
        )

    def _normed_rows(self, x_BLD: Tensor, positions_BN: Tensor | None, start: int) -> Tensor | None:
        if positions_BN is None:
            return None
        return self.layernorm(gather_rows(x_BLD[:, start:], positions_BN))


def _tower_output(
    x_VLD: Tensor, positions_BN: Tensor | None, norm: nn.Module, *, unmasked: bool, masked: bool
) -> TowerOutput:
    """Take the joint pass apart: the unmasked view stands first."""
    num_samples = x_VLD.shape[0] // (int(unmasked) + int(masked))
    cls_BD = norm(x_VLD[:num_samples, 0]) if unmasked else None
    if not masked:
        return TowerOutput(cls_BD, None, None)
    masked_BLD = x_VLD[-num_samples:]
    if positions_BN is None:
        return TowerOutput(cls_BD, masked_BLD, None)
    return TowerOutput(cls_BD, None, norm(gather_rows(masked_BLD, positions_BN)))


# ---------------------------------------------------------------------------------------- building


def _encoder(dims: ModelDims, num_layers: int) -> TransformerEncoder:
    return TransformerEncoder(
        n_layer=num_layers,
        d_model=dims.hidden_size,
        n_head=dims.num_heads,
        dim_feedforward=dims.mlp_size,
        dropout=dims.dropout,
        activation=nn.GELU,
        layer_norm_eps=ENCODER_NORM_EPS,
        norm_first=True,
    )


def build_image_tower(dims: ModelDims) -> ImageTower:
    embeddings = ImageEmbeddings(
        image_size=dims.image_size,
        patch_size=dims.patch_size,
        hidden_size=dims.hidden_size,
        hidden_dropout_prob=dims.dropout,
        use_image_masking=True,
    )
    return ImageTower(
        embeddings=embeddings,
        encoder=_encoder(dims, dims.num_image_layers),
        layernorm=Fp32LayerNorm(dims.hidden_size, eps=ENCODER_NORM_EPS),
        pooler=Pooler(hidden_size=dims.hidden_size),
        weight_init_fn=_leave,
    )


def build_text_tower(dims: ModelDims) -> TextTower:
    embeddings = BERTTextEmbeddings(
        hidden_size=dims.hidden_size,
        vocab_size=dims.vocab_size,
        pad_token_id=PAD_ID,
        max_position_embeddings=dims.max_text_positions,
        layer_norm_eps=ENCODER_NORM_EPS,
        dropout=dims.dropout,
    )
    return TextTower(
        embeddings=embeddings,
        encoder=_encoder(dims, dims.num_text_layers),
        layernorm=Fp32LayerNorm(dims.hidden_size, eps=ENCODER_NORM_EPS),
        pooler=Pooler(hidden_size=dims.hidden_size),
        weight_init_fn=_leave,
    )


def build_multimodal_tower(dims: ModelDims) -> MultimodalTower:
    return MultimodalTower(
        encoder=_encoder(dims, dims.num_multimodal_layers),
        layernorm=Fp32LayerNorm(dims.hidden_size, eps=ENCODER_NORM_EPS),
        pooler=Pooler(hidden_size=dims.hidden_size),
        hidden_size=dims.hidden_size,
        weight_init_fn=_leave,
    )


def _leave(module: nn.Module) -> None:
    """Weights come from :func:`flava_tnt.model.weights.materialise`, on every rank the same."""
