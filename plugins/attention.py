"""How attention is computed: fused, or as the original does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flava_tnt.plugin import Applied, Attention, Run

if TYPE_CHECKING:
    from flava_tnt.model.flava import FlavaForPretraining


class Sdpa(Attention):
    """PyTorch's fused attention: faster, and no attention probabilities are kept. Same numbers."""

    api_version = 1

    def apply(self, model: FlavaForPretraining, run: Run) -> Applied:
        from flava_tnt.model.attention import SdpaAttention, replace_attention

        count, total = replace_attention(model, SdpaAttention)
        return Applied(verb="SDPA replaces", count=count, total=total, target="attentions")


class Eager(Attention):
    """The original's attention, step by step; its probabilities are kept for the backward pass."""

    api_version = 1

    def apply(self, model: FlavaForPretraining, run: Run) -> Applied:
        from flava_tnt.model.attention import SelfAttention, replace_attention

        count, total = replace_attention(model, SelfAttention)
        return Applied(verb="eager attention in", count=count, total=total, target="attentions")
