"""The contrastive loss over ranks is that of one process over the whole batch, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flava_tnt.model.losses import GlobalContrastive
from tests.distributed import run_ranks

GLOBAL_BATCH, WIDTH = 8, 16
# Rank 0 of 4 has no matched pair at all, and ranks have unequal numbers of them.
COUNTED = torch.tensor([False, False, True, True, False, True, True, True])


def inputs() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    image, text = torch.randn(2, GLOBAL_BATCH, WIDTH, generator=rng)
    return image, text


def sum_and_gradients(image: Tensor, text: Tensor, counted: Tensor) -> list[Tensor]:
    loss = GlobalContrastive()
    image.requires_grad_()
    text.requires_grad_()
    value = loss(image, text, counted)
    value.backward()
    return [value.detach(), image.grad, text.grad, loss.logit_scale.grad]


def on_this_rank() -> list[Tensor]:
    rank, size = dist.get_rank(), GLOBAL_BATCH // dist.get_world_size()
    mine = slice(rank * size, (rank + 1) * size)
    image, text = inputs()
    return sum_and_gradients(image[mine].clone(), text[mine].clone(), COUNTED[mine])


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_together_are_one_process(world_size):
    image, text = inputs()
    value, image_grad, text_grad, scale_grad = sum_and_gradients(image, text, COUNTED)
    ranks = run_ranks(on_this_rank, world_size)
    values, image_grads, text_grads, scale_grads = zip(*ranks, strict=True)
    torch.testing.assert_close(torch.stack(values).sum(), value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat(image_grads), image_grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(text_grads), text_grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.stack(scale_grads).sum(0), scale_grad, rtol=1e-5, atol=1e-6)


def test_mismatched_pairs_stay_as_columns():
    image, text = inputs()
    with_all, *_ = sum_and_gradients(image.clone(), text.clone(), COUNTED)
    alone, *_ = sum_and_gradients(image[COUNTED], text[COUNTED], COUNTED[COUNTED])
    assert with_all > alone + 0.1
