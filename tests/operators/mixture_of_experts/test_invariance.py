"""Batch invariance of ``mixture_of_experts``: the bits of a token in batches of any size, and what
is refused.

Elements are small integers, so that no product depends on the order of its own sum, which in the
interpreter is numpy's. Weights of slots are random: a token's rows are added in the order of slots.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.gemm import invariance
from interlace.operators.mixture_of_experts import choice
from interlace.registry import BATCH_INVARIANT
from tests.gemm.row_calls import bits

MOST_TOKENS, HIDDEN, FFN, LOCAL, TOP_K = 24, 32, 48, 2, 3


def _operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return x, experts, weights, w_in and w_out of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    experts = LOCAL * dist.get_world_size()

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    scores = torch.rand(MOST_TOKENS, experts, generator=generator)
    weights, chosen = torch.softmax(scores, -1).topk(TOP_K)
    return (
        integers(MOST_TOKENS, HIDDEN), chosen, weights, integers(LOCAL, FFN, 2, HIDDEN),
        integers(LOCAL, HIDDEN, FFN),
    )  # fmt: skip


def _call(operands: tuple[torch.Tensor, ...], tokens: torch.Tensor, **more: Any) -> torch.Tensor:
    x, experts, weights, w_in, w_out = operands
    return interlace.mixture_of_experts(
        x[tokens].contiguous(), experts[tokens], weights[tokens], w_in, w_out,
        activation="relu", **more,
    )  # fmt: skip


def _differing(dtype: torch.dtype, has_one_arithmetic: bool) -> tuple[list[int], set[str]]:
    """Return batches in which some token has other bits than among all, and what has run."""
    operands, wrong, ran = _operands(dtype), [], set()
    decide = choice.decide

    def record(*arguments: Any) -> Any:
        decision = decide(*arguments)
        ran.add(decision.impl)
        return decision

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariance, "has_one_arithmetic", lambda *_: has_one_arithmetic)
        patch.setattr("interlace.operators.mixture_of_experts.call.decide", record)
        wanted = _call(operands, torch.arange(MOST_TOKENS), impl=BATCH_INVARIANT)
        with interlace.batch_invariant():
            for count in (1, 7, 16, MOST_TOKENS):
                tokens = torch.arange(MOST_TOKENS - count, MOST_TOKENS).roll(count // 2)
                named = {"impl": "decode"} if has_one_arithmetic and count < 16 else {}
                found = _call(operands, tokens, **named)
                if not torch.equal(bits(found), bits(wanted[tokens])):
                    wrong.append(count)
    return wrong, ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("has_one_arithmetic", "expected"), [(False, {"fused"}), (True, {"fused", "decode"})]
)
def test_tokens_have_the_same_bits_in_every_batch(
    ranks: Any, dtype: torch.dtype, has_one_arithmetic: bool, expected: set[str]
) -> None:
    """Where tiles may change bits, the fused kernels run any number of tokens; else both do."""
    for wrong, ran in ranks(2).run(_differing, dtype, has_one_arithmetic):
        assert wrong == []
        assert ran == expected


def _tiles() -> set[str]:
    """Return the configurations of free and of invariant calls of several sizes."""
    operands = _operands(torch.float32)
    texts = set()
    with interlace.batch_invariant():
        for count in (1, 8, MOST_TOKENS):
            x, experts, weights, w_in, w_out = operands
            text = interlace.explain(
                "mixture_of_experts", x[:count], experts[:count], weights[:count], w_in, w_out
            )
            assert "calls must be batch-invariant" in text
            texts.add(text[text.index("block_m=") : text.index("stagger=")])
    return texts


def test_tiles_do_not_follow_the_number_of_tokens(ranks: Any) -> None:
    for texts in ranks(2).run(_tiles):
        assert len(texts) == 1


def _gradients() -> list[bool]:
    """Return whether gradients with the mode around one of the passes are those of free calls."""
    operands = _operands(torch.float32)
    found = []
    for forward, backward in ((False, False), (True, False), (False, True)):
        x = operands[0].clone().requires_grad_()
        with interlace.batch_invariant(forward):
            y = _call((x, *operands[1:]), torch.arange(MOST_TOKENS))
        with interlace.batch_invariant(backward):
            y.square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    free, *within = found
    return [torch.equal(gradient, free) for gradient in within]


def test_gradients_within_the_mode(ranks: Any) -> None:
    assert ranks(2).run(_gradients) == [[True, True], [True, True]]


def _refusals() -> list[str]:
    operands, messages = _operands(torch.float32), []
    with torch.no_grad(), interlace.batch_invariant():
        for options in ({"impl": "unfused"}, {"impl": "decode"}, {"capacity": 5}):
            with pytest.raises(interlace.ArgumentError) as caught:
                _call(operands, torch.arange(MOST_TOKENS), **options)
            messages.append(str(caught.value))
        _call(operands, torch.arange(MOST_TOKENS), capacity=MOST_TOKENS)
    return messages


def test_what_is_refused(ranks: Any) -> None:
    """On all ranks alike, and the next call works."""
    for unfused, decode, capacity in ranks(2).run(_refusals):
        assert "impl must be 'auto' or 'fused' or 'decode' within" in unfused
        assert "impl='decode' must run on a GPU that is known to add up products" in decode
        assert "must have no capacity that could drop tokens; got 5 for 24 tokens" in capacity
