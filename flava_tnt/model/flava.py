"""FLAVA for pretraining: from a batch to the sums of its losses.

The module tree gives torchmultimodal's names (``model.``, ``image_codebook.``, ``loss.``), so state dicts go
back and forth between the two. The frozen codebook takes no part in sharding; every tower and head is called
through its own ``forward``, so each can be an FSDP unit.

Shape letters: B samples, P patches, I masked-patch capacity, T text tokens, M masked-token capacity, D hidden
size, L positions of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flava_tnt.data.batch import Batch
from flava_tnt.data.masks import IGNORED
from flava_tnt.model.codebook import Codebook
from flava_tnt.model.losses import LOG_SCALE_RANGE, PretrainingLosses, active_losses, mark_counted
from flava_tnt.model.sizes import ModelDims
from flava_tnt.model.towers import build_image_tower, build_multimodal_tower, build_text_tower
from flava_tnt.recipes.schema import LossSection

IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
"""Channel means and standard deviations of pixels in [0, 1] (CLIP's, which FLAVA takes over)."""


class FlavaEncoders(nn.Module):
    """Towers and projections under torchmultimodal's names (``FLAVAModel``); it is not called itself."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        hidden, projection = dims.hidden_size, dims.projection_size
        self.image_encoder = build_image_tower(dims)
        self.text_encoder = build_text_tower(dims)
        self.mm_encoder = build_multimodal_tower(dims)
        self.image_to_mm_projection = nn.Linear(hidden, hidden)
        self.text_to_mm_projection = nn.Linear(hidden, hidden)
        self.image_projection = nn.Linear(hidden, projection)
        self.text_projection = nn.Linear(hidden, projection)


class FlavaForPretraining(nn.Module):
    """FLAVA with its codebook and losses."""

    def __init__(self, dims: ModelDims, loss: LossSection) -> None:
        super().__init__()
        self.dims = dims
        self.loss_section = loss
        self.model = FlavaEncoders(dims)
        self.image_codebook = Codebook(dims)
        self.loss = PretrainingLosses(dims)

    # ------------------------------------------------------------------------------------- forward

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The sum over this rank's counted rows of each loss of the batch's kind with a weight above 0.

        Sums are fp32, without weights; :func:`flava_tnt.model.losses.loss_counts` gives the counts. The
        contrastive sum is over this rank's counted pairs, against the columns of all ranks.
        """
        active = active_losses(batch.modality, self.loss_section.weights)
        if not active:
            return {}
        if batch.modality == "image":
            return {"mim": self._mim(batch)}
        if batch.modality == "text":
            return {"mlm": self._mlm(batch)}
        return self._pairs(batch, active)

    def _mim(self, batch: Batch) -> Tensor:
        assert batch.image_B3HW is not None
        tower = self.model.image_encoder(
            normalise_image(batch.image_B3HW),
            batch.image_mask_BP,
            batch.image_mask_positions_BI,
            unmasked=False,
        )
        return self.loss.mim_loss(tower.rows_BND, self._image_labels(batch))

    def _mlm(self, batch: Batch) -> Tensor:
        tower = self.model.text_encoder(None, batch.text_masked_BT, batch.text_mask_positions_BM)
        return self.loss.mlm_loss(tower.rows_BND, batch.text_mask_labels_BM)

    def _pairs(self, batch: Batch, active: tuple[str, ...]) -> dict[str, Tensor]:
        assert batch.image_B3HW is not None
        assert batch.matched_B is not None
        unmasked = "contrastive" in active
        masked = active != ("contrastive",)
        image = self.model.image_encoder(
            normalise_image(batch.image_B3HW), batch.image_mask_BP if masked else None, unmasked=unmasked
        )
        text = self.model.text_encoder(
            batch.text_BT if unmasked else None, batch.text_masked_BT if masked else None
        )
        counted_B = mark_counted(batch, self.loss_section).counted_B
        assert counted_B is not None
        sums: dict[str, Tensor] = {}
        if masked:
            sums.update(self._fused(batch, image.hidden_BLD, text.hidden_BLD, counted_B, active))
        if unmasked:
            sums["contrastive"] = self.loss.contrastive_loss(
                self.model.image_projection(image.cls_BD), self.model.text_projection(text.cls_BD), counted_B
            )
        return sums

    def _fused(
        self,
        batch: Batch,
        image_BLD: Tensor,
        text_BTD: Tensor,
        counted_B: Tensor,
        active: tuple[str, ...],
    ) -> dict[str, Tensor]:
        """The losses that read the multimodal encoder."""
        fused = self.model.mm_encoder(
            self.model.image_to_mm_projection(image_BLD),
            self.model.text_to_mm_projection(text_BTD),
            batch.image_mask_positions_BI if "mmm_image" in active else None,
            batch.text_mask_positions_BM if "mmm_text" in active else None,
        )
        sums: dict[str, Tensor] = {}
        if "itm" in active:
            sums["itm"] = self.loss.itm_loss(fused.cls_BD, batch.matched_B)
        if "mmm_text" in active:
            assert batch.text_mask_labels_BM is not None
            labels_BM = torch.where(counted_B[:, None], batch.text_mask_labels_BM, IGNORED)
            sums["mmm_text"] = self.loss.mmm_loss["mlm"](fused.text_BMD, labels_BM)
        if "mmm_image" in active:
            labels_BI = torch.where(counted_B[:, None], self._image_labels(batch), IGNORED)
            sums["mmm_image"] = self.loss.mmm_loss["mim"](fused.image_BID, labels_BI)
        return sums

    def _image_labels(self, batch: Batch) -> Tensor:
        """The codes [B, I] of the hidden patches; -1 where the capacity is not used."""
        positions_BI = batch.image_mask_positions_BI
        assert positions_BI is not None
        codes_BP = self.image_codebook(batch.codebook_image_B3hw)
        codes_BI = codes_BP.gather(1, positions_BI.clamp(min=0))
        return torch.where(positions_BI < 0, IGNORED, codes_BI)

    # ------------------------------------------------------------------- what the plugins ask it for

    def layers(self) -> dict[str, nn.Module]:
        """The transformer layers by name, as they are now (also where one has been wrapped)."""
        return {
            f"{name}.encoder.layer.{index}": layer
            for name, tower in self.towers().items()
            for index, layer in enumerate(tower.get_submodule("encoder.layer").children())
        }

    def replace_layer(self, name: str, module: nn.Module) -> None:
        """Put ``module`` where the layer of that name stands."""
        parent_name, _, index = name.rpartition(".")
        parent = self.get_submodule(parent_name)
        assert isinstance(parent, nn.ModuleList)
        parent[int(index)] = module

    def towers(self) -> dict[str, nn.Module]:
        """The three encoders by name; each is called through its forward."""
        return {
            f"model.{name}": getattr(self.model, name)
            for name in ("image_encoder", "text_encoder", "mm_encoder")
        }

    def heads(self) -> dict[str, nn.Module]:
        """The loss heads by name; each is called through its forward."""
        names = ("itm_loss", "mlm_loss", "mim_loss", "mmm_loss.mlm", "mmm_loss.mim")
        return {f"loss.{name}": self.loss.get_submodule(name) for name in names}

    def frozen_parameters(self) -> set[nn.Parameter]:
        """The codebook's: never trained, left out of sharding."""
        return set(self.image_codebook.parameters())

    def clamp_temperature(self) -> None:
        """Keep the log scale in its range. After the optimizer step, on the stored value (or shard): a clamp
        inside forward would reach only the gathered copy of a sharded parameter."""
        value = self.loss.contrastive_loss.logit_scale.detach()
        (value.to_local() if isinstance(value, DTensor) else value).clamp_(*LOG_SCALE_RANGE)


def normalise_image(image_B3HW: Tensor) -> Tensor:
    """uint8 pixels to normalised fp32; floats are taken as normalised already.

    The constants go into the kernels channel by channel: no tensor of them has to be copied to the device,
    kept as a buffer, or broadcast by DDP.
    """
    if image_B3HW.is_floating_point():
        return image_B3HW
    channels = zip(image_B3HW.unbind(1), IMAGE_MEAN, IMAGE_STD, strict=True)
    return torch.stack([x_BHW.float() / 255 / std - mean / std for x_BHW, mean, std in channels], dim=1)


def build_model(dims: ModelDims, loss: LossSection) -> FlavaForPretraining:
    """Build FLAVA; never downloads anything.

    Under ``torch.device("meta")`` it takes no memory, which is how training does it. Either way
    :func:`flava_tnt.model.weights.materialise` gives it FLAVA's initial weights.
    """
    return FlavaForPretraining(dims, loss)
