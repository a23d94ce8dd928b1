"""Ways to compute a layer's attention, for the attention plugins.

Shape letters: B rows of the joint pass, H heads, L positions, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F
from torchmultimodal.modules.layers.attention import MultiHeadAttention, SelfAttention

if TYPE_CHECKING:
    from flava_tnt.model.flava import FlavaForPretraining


class SdpaAttention(nn.Module):
    """PyTorch's fused attention; nothing of the size L x L is kept for the backward pass."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self,
        q_BHLD: Tensor,
        k_BHLD: Tensor,
        v_BHLD: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention output [B, H, L, D].

        Args:
            attention_mask: bool, True where a key may be attended to; it broadcasts to [B, H, L, L].
            head_mask: not supported; FLAVA's pretraining has none.
        """
        assert head_mask is None
        return F.scaled_dot_product_attention(
            q_BHLD,
            k_BHLD,
            v_BHLD,
            attn_mask=attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
        )


def replace_attention(model: FlavaForPretraining, make: Callable[[float], nn.Module]) -> tuple[int, int]:
    """Give each layer's attention the module that ``make(dropout)`` returns.

    Returns:
        How many attentions were replaced, and how many layers there are.
    """
    layers = model.layers()
    replaced = 0
    for layer in layers.values():
        for module in layer.modules():
            if isinstance(module, MultiHeadAttention):
                module.attn = make(model.dims.dropout)
                replaced += 1
    return replaced, len(layers)


__all__ = ["SdpaAttention", "SelfAttention", "replace_attention"]
