"""Attention over a sharded sequence: layouts of tokens, dtypes, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import interlace
from interlace import ArgumentError

WIDTH, HEADS, HEAD_DIM = 12, 4, 6


def _whole(x: torch.Tensor, layer: interlace.nn.UlyssesAttention) -> torch.Tensor:
    """One rank's attention over all tokens, ``[S, B, H]``."""
    counts = [count * HEAD_DIM for count in (HEADS, layer.kv_heads, layer.kv_heads)]
    q, k, v = (
        part.unflatten(-1, (-1, HEAD_DIM)).permute(1, 2, 0, 3)
        for part in layer.qkv(x).split(counts, -1)
    )
    y = scaled_dot_product_attention(q, k, v, is_causal=layer.is_causal, enable_gqa=True)
    return layer.out(y.permute(2, 0, 1, 3).flatten(2))


def _differences(kv_heads: int, is_causal: bool) -> list[float]:
    """Of even tokens, with and without samples, and of autocast; in the implementations in turn."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layer = interlace.nn.UlyssesAttention(WIDTH, HEADS, kv_heads, HEAD_DIM, is_causal=is_causal)
    x = torch.randn(5 * ranks, 3, WIDTH)
    found = []
    for impl in ("fused", "unfused"):
        layer.impl = impl
        wanted = _whole(x, layer).chunk(ranks)[rank]
        found.append(float((layer(x.chunk(ranks)[rank]) - wanted).abs().max()))
        one = x[:, 0].chunk(ranks)[rank]
        found.append(float((layer(one) - wanted[:, 0]).abs().max()))
    with torch.autocast("cpu", torch.bfloat16):
        y = copy.deepcopy(layer)(x.chunk(ranks)[rank])
    assert y.dtype == torch.bfloat16
    return [*found, float((y - wanted).abs().max()) / 100]


@pytest.mark.parametrize(
    ("count", "kv_heads", "is_causal"), [(1, 2, True), (2, 4, False), (4, 1, True)]
)
def test_is_attention_over_the_whole_sequence(
    ranks: Any, count: int, kv_heads: int, is_causal: bool
) -> None:
    for differences in ranks(count).run(_differences, kv_heads, is_causal):
        assert max(differences) < 1e-3, differences


class _Scaled(interlace.nn.UlyssesAttention):
    """Another function of this rank's heads."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 2 * v


def test_attention_can_be_replaced(ranks: Any) -> None:
    assert ranks(2).run(_replaced) == [True, True]


def _replaced() -> bool:
    torch.manual_seed(1)
    layer = _Scaled(WIDTH, HEADS, head_dim=HEAD_DIM)
    x = torch.randn(2, WIDTH)
    v = layer.qkv(x)[:, -HEADS * HEAD_DIM :]
    return torch.allclose(layer(x), 2 * layer.out(v), atol=1e-5)


def test_no_samples() -> None:
    x = torch.zeros(3, 0, WIDTH, requires_grad=True)
    y = interlace.nn.UlyssesAttention(WIDTH, HEADS)(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad is not None


def test_what_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match="heads must be a multiple of world_size, 1, and of kv_"
    ):
        interlace.nn.UlyssesAttention(WIDTH, HEADS, 3)
    with pytest.raises(ArgumentError, match="heads must be at least 1; got 0"):
        interlace.nn.UlyssesAttention(WIDTH, 0)
    layer = interlace.nn.UlyssesAttention(WIDTH, HEADS)
    assert repr(layer).startswith("UlyssesAttention(\n  heads=4, kv_heads=4, head_dim=3")
    with pytest.raises(ArgumentError, match=r"x must be \[S_s, ..., 12\]; got shape \[3, 5\]"):
        layer(torch.ones(3, 5))
    with pytest.raises(ArgumentError, match="UlyssesAttention: splits must be a list of rows"):
        layer(torch.ones(3, WIDTH), splits=3)  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match=r"UlyssesAttention: splits must hold integers; got 3\.0"
    ):
        layer(torch.ones(3, WIDTH), splits=[3.0])  # type: ignore[list-item]
