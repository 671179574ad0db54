"""Calls of ``gemv_all_reduce`` that must be refused, each with its message, and without anyone
hanging.
"""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import ArgumentError, GemvAllReduceConfig
from tests.errors import error_of
from tests.operators.gemv_all_reduce.calls import Call, run_one

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


def _t(*shape, dtype=f32, device="cpu"):
    return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("x", "w", "more", "message"),
    [
        (_t(2, 3, 4), _t(5, 4), {}, "x must be [K] or [B, K]; got shape [2, 3, 4]."),
        (_t(), _t(5, 4), {}, "x must be [K] or [B, K]; got shape []."),
        (_t(4), _t(4), {}, "w must be [N, K]; got shape [4]."),
        (
            _t(2, 3),
            _t(5, 4),
            {},
            "x and w must have the same last dimension, K; got 3 and 4.",
        ),
        (
            _t(4, dtype=f64),
            _t(5, 4, dtype=f64),
            {},
            "x must be float16, bfloat16 or float32; got torch.float64.",
        ),
        (
            _t(4, dtype=torch.int32),
            _t(5, 4),
            {},
            "x must be float16, bfloat16 or float32; got torch.int32.",
        ),
        (
            _t(4),
            _t(5, 4, dtype=bf16),
            {},
            "w must have the dtype of x, torch.float32; got torch.bfloat16. Cast one of them: "
            "autocast reaches the layers of interlace.nn, and no operators.",
        ),
        (_t(4), _t(5, 4, device="meta"), {}, "w must be on the device of x, cpu; got meta."),
        (_t(4), _t(5, 4), {"bias": [0.0] * 5}, "bias must be a torch.Tensor; got list."),
        (
            _t(4),
            _t(4, 5).T,
            {},
            (
                "rows of w must be contiguous; got strides [1, 5]. Keep w as nn.Linear does, [N, "
                "K], or call .contiguous() once."
            ),
        ),
        (_t(4), _t(5, 4), {"bias": _t(4)}, "bias must be [N] with N = 5; got shape [4]."),
        (_t(4), _t(5, 4), {"bias": _t(1, 5)}, "bias must be [N] with N = 5; got shape [1, 5]."),
        (
            _t(4),
            _t(5, 4),
            {"bias": _t(5, dtype=bf16)},
            "bias must be torch.float32 on cpu, like the output; got torch.bfloat16 on cpu.",
        ),
        (
            _t(4),
            _t(5, 4),
            {"bias": _t(5, device="meta")},
            "bias must be torch.float32 on cpu, like the output; got torch.float32 on meta.",
        ),
        (
            _t(4),
            _t(5, 4),
            {"impl": "fast"},
            "impl must be one of auto, measured, batch_invariant, fused, gemv, remote_stores, "
            "pushed, chunked, unfused, symm_mem; got 'fast'.",
        ),
        (
            _t(4),
            _t(5, 4),
            {"config": "one_shot 4 64 4"},
            "config must be of type GemmAllReduceConfig or GemvAllReduceConfig; got str.",
        ),
    ],
)
def test_bad_arguments(x, w, more, message):
    with pytest.raises(ArgumentError, match=f"^gem[mv]_all_reduce: {re.escape(message)}$"):
        interlace.gemv_all_reduce(x, w, **more)


def test_a_configuration_is_its_text():
    config = GemvAllReduceConfig("two_phase", 8, 32, 2, 3, 7, 64)
    assert str(config) == (
        "protocol=two_phase, block_n=8, block_k=32, num_warps=2, num_stages=3, max_programs=7, "
        "max_registers=64"
    )
    assert GemvAllReduceConfig.parse(str(config)) == config
    assert GemvAllReduceConfig.parse(_GOOD) == GemvAllReduceConfig(block_k=64)


_GOOD = (
    "protocol=one_shot, block_n=4, block_k=64, num_warps=4, num_stages=1, max_programs=0, "
    "max_registers=0"
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "one_shot 4 64 4 1 0 0",
        _GOOD.replace("block_n=4", "block_n=four"),
        _GOOD.replace("block_n=4", "block_n=3"),
        _GOOD.replace(", max_registers=0", ""),
        _GOOD.replace("block_n=4, block_k=64", "block_k=64, block_n=4"),
        _GOOD + ", more=9",
        _GOOD + ", block_n=4",
        _GOOD + " ",
    ],
)
def test_text_that_is_no_configuration(text):
    with pytest.raises(ArgumentError, match="GemvAllReduceConfig: "):
        GemvAllReduceConfig.parse(text)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("tokens", (2, 3),
            "the shape of x must be the same on every rank; got [2, 8] on rank 0, [3, 8] on rank "
            "1."),
        ("rows", (5, 6),
            "the shape of w must be the same on every rank; got [5, 8] on rank 0, [6, 8] on rank "
            "1."),
        ("dtype", ("float32", "bfloat16"),
            "dtype must be the same on every rank; got 'torch.float32' on rank 0, "
                "'torch.bfloat16' on rank 1."),
        ("bias", (True, False),
            "bias must be the same on every rank; got True on rank 0, False on rank 1."),
        ("impl", ("gemv", "auto"),
            "impl must be the same on every rank; got 'gemv' on rank 0, 'auto' on rank 1."),
        (
            "config",
            (GemvAllReduceConfig(block_n=8), GemvAllReduceConfig(block_n=16)),
            (
                f"config must be the same on every rank; got '{GemvAllReduceConfig(block_n=8)}' on "
                f"rank 0, '{GemvAllReduceConfig(block_n=16)}' on rank 1."
            ),
        ),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_told_on_every_rank(ranks, name, values, message):
    """Before anything is sent: a kernel of one shape would wait for words that a peer's never
    sends.
    """
    outcomes = ranks(2).run(_disagree, name, values)
    for error, _, broken in outcomes:
        assert error is not None
        assert error[:2] == (
            "RankMismatchError",
            f"gemm_all_reduce: {message} Nothing was computed.",
        )
        assert not broken
    good = Call(2, 5, 8)
    good.check([y for _, y, _ in outcomes])


def _disagree(name, values):
    """Rank r calls with ``values[r]``; then all call rightly: nothing may be left over from the
    refused call.
    """
    group = dist.new_group()
    good = Call(2, 5, 8, config=GemvAllReduceConfig("one_shot", block_n=4, block_k=16))
    bad = dataclasses.replace(good, **{name: values[dist.get_rank()]})
    return error_of(run_one, bad, group), run_one(good, group), interlace.group_of(group).broken


def _other_operator():
    """Rank 1 allocates while rank 0 multiplies."""
    group = dist.new_group()
    if dist.get_rank() == 1:
        return error_of(interlace.empty_symmetric, (4,), dtype=f32, group=group)
    return error_of(run_one, Call(2, 5, 8), group)


def test_different_calls_are_told_on_every_rank(ranks):
    for error in ranks(2).run(_other_operator):
        assert error is not None
        assert error[:2] == (
            "RankMismatchError",
            "ranks must make the same calls in the same order; got 'gemm_all_reduce' on rank 0, "
            "'empty_symmetric' on rank 1. "
            "Look for a call that depends on the rank.",
        )


def _too_large():
    from interlace.gemm import dispatch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "MAX_RANKS", 1)
        return error_of(run_one, Call(2, 5, 8))


def test_groups_that_are_too_large(ranks):
    expected = ("GroupError", "gemm_all_reduce: a group must have at most 1 ranks; got 2.")
    assert [error and error[:2] for error in ranks(2).run(_too_large)] == [expected] * 2
