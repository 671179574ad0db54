"""Ranks whose calls do not fit together are all told, at once, and can go on."""

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import GemmAllReduceConfig, GemmAllToAllConfig
from tests.errors import error_of

MISMATCH = "must be the same on every rank; got"
A2A, RS, AR, AG = "gemm_all_to_all", "gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"


def _call(operator, x=(4, 8), w=(6, 8), dtype=torch.float32, bias=False, along_k=True, **options):
    more = {"bias": torch.zeros(w[0], dtype=dtype)} if bias else {}
    weight = torch.zeros(w, dtype=dtype)
    return getattr(interlace, operator)(
        torch.zeros(x, dtype=dtype),
        weight if along_k else weight.T.contiguous().T,
        **more,
        **options,
    )


# Operator, each rank's arguments, the error on both ranks.
CASES = [
    (A2A, {"x": (4, 8)}, {"x": (6, 8)},
        f"splits {MISMATCH} 'even, of 4 rows' on rank 0, 'even, of 6 rows' on rank 1."),
    (A2A, {}, {"input_splits": [2, 2], "output_splits": [2, 2]},
        f"splits {MISMATCH} 'even, of 4 rows' on rank 0, 'given' on rank 1."),
    (A2A, {"w": (6, 8)}, {"w": (5, 8)},
        f"the shape of w {MISMATCH} [6, 8] on rank 0, [5, 8] on rank 1."),
    (RS, {"along_k": True}, {"along_k": False},
        f"the layout of w {MISMATCH} 'along K' on rank 0, 'along N' on rank 1."),
    (A2A, {"config": GemmAllToAllConfig()}, {"config": GemmAllToAllConfig(block_m=64)},
        f"config {MISMATCH} '{GemmAllToAllConfig()}' on rank 0, '{GemmAllToAllConfig(block_m=64)}' "
        f"on rank 1."),
    (A2A, {"input_splits": [1, 3], "output_splits": [1, 2]},
        {"input_splits": [3, 1], "output_splits": [3, 1]},
        "input_splits[0] on rank 1 and output_splits[1] on rank 0 must be equal; got 3 and 2."),
    (RS, {"x": (4, 8)}, {"x": (5, 8)},
        f"the shape of x {MISMATCH} [4, 8] on rank 0, [5, 8] on rank 1."),
    (RS, {"splits": [1, 3]}, {"splits": [3, 1]},
        f"splits {MISMATCH} [1, 3] on rank 0, [3, 1] on rank 1."),
    (RS, {"bias": True}, {"bias": False}, f"bias {MISMATCH} True on rank 0, False on rank 1."),
    (AR, {"dtype": torch.float32}, {"dtype": torch.float16},
        f"dtype {MISMATCH} 'torch.float32' on rank 0, 'torch.float16' on rank 1."),
    (AR, {"out_dtype": torch.float32}, {"out_dtype": torch.float16},
        f"out dtype {MISMATCH} 'torch.float32' on rank 0, 'torch.float16' on rank 1."),
    (AR, {"impl": "auto"}, {"impl": "unfused"},
        f"impl {MISMATCH} 'auto' on rank 0, 'unfused' on rank 1."),
    (AR, {"config": GemmAllReduceConfig()}, {},
        f"config {MISMATCH} '{GemmAllReduceConfig()}' on rank 0, '' on rank 1."),
    (AG, {"x": (4, 8)}, {"x": (5, 8)}, f"splits {MISMATCH} [4, 4] on rank 0, [5, 5] on rank 1."),
    (AG, {"splits": [4, 4]}, {"splits": [4, 4], "x": (5, 8)},
        f"rows of x beyond their split {MISMATCH} 0 on rank 0, 1 on rank 1."),
]  # fmt: skip

# One rank's list cannot be, or all ranks' cannot: an ArgumentError on both.
BAD = [
    (A2A, {"x": (3, 8)}, {"x": (3, 8)},
        "rows of x must divide evenly over 2 ranks unless splits are given; got 3. "
        "Pass input_splits and output_splits, or pad x to 4 rows."),
    (A2A, {"input_splits": [2, 2], "output_splits": [2, 2]},
        {"input_splits": [2, 3], "output_splits": [2, 2]},
        "input_splits on rank 1 must sum to 4, its rows of x; got [2, 3], which is 5."),
    (A2A, {"input_splits": [2, 2], "output_splits": [2]},
        {"input_splits": [2, 2], "output_splits": [2, 2]},
        "output_splits on rank 0 must have an entry for each of 2 ranks; got [2]."),
    (A2A, {"input_splits": [5, -1], "output_splits": [2, 2]},
        {"input_splits": [2, 2], "output_splits": [2, 2]},
        "input_splits on rank 0 must not be negative; got [5, -1]."),
    (RS, {"splits": [1, 2]}, {"splits": [1, 2]},
        "splits must sum to 4, the rows of x; got [1, 2], which is 3."),
    (AG, {"splits": [3]}, {"splits": [3]},
        "splits must have an entry for each of 2 ranks; got [3]."),
    (RS, {"splits": [4, torch.ones(2)]}, {"splits": [4, torch.ones(2)]},
        "splits must hold integers; got tensor([1., 1.])."),
    (AR, {"impl": None}, {"impl": None},
        "impl must be one of auto, measured, batch_invariant, fused, gemv, remote_stores, pushed, "
        "chunked, unfused, symm_mem; got None."),
]  # fmt: skip


def _all_cases():
    """On a rank: the error of each case, and whether a good call follows each."""
    rank = dist.get_rank()
    outcomes = []
    for operator, *arguments, _ in CASES + BAD:
        group = dist.new_group()
        error = error_of(_call, operator, group=group, **arguments[rank])
        good = _call(operator, group=group)
        outcomes.append((error, good.shape[1] == 6, interlace.group_of(group).broken))
    return outcomes


def test_ranks_that_disagree_are_told_on_every_rank(ranks):
    for outcomes in ranks(2).run(_all_cases):
        for (operator, *_, message), (error, good, broken) in zip(
            CASES + BAD, outcomes, strict=True
        ):
            mismatch = (operator, message) in [(case[0], case[3]) for case in CASES]
            assert error is not None, message
            assert error[0] == ("RankMismatchError" if mismatch else "ArgumentError")
            assert error[1] == f"{operator}: {message}" + (
                " Nothing was computed." if mismatch else ""
            )
            assert good
            assert not broken


def test_splits_are_given_together():
    with pytest.raises(interlace.ArgumentError) as caught:
        _call(A2A, output_splits=[4])
    assert str(caught.value) == (
        "gemm_all_to_all: input_splits and output_splits must be given together; got "
        "output_splits only. "
        "Pass input_splits too, or neither for an even split."
    )


def _x_too_long():
    return error_of(_call, AG, x=(5, 8), splits=[4, 4])


def test_rows_and_splits_that_never_fit(ranks):
    messages = [error[:2] for error in ranks(2).run(_x_too_long)]
    assert messages == [
        (
            "ArgumentError",
            f"all_gather_gemm: x must have as many rows as splits say, 4 on rank {rank}; got 5.",
        )
        for rank in range(2)
    ]


def _too_large():
    from interlace.gemm import dispatch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "MAX_RANKS", 1)
        return [error_of(_call, operator) for operator in (A2A, RS, AR, AG)]


def test_groups_that_are_too_large(ranks):
    for errors in ranks(2).run(_too_large):
        for operator, error in zip((A2A, RS, AR, AG), errors, strict=True):
            assert error[:2] == (
                "GroupError",
                f"{operator}: a group must have at most 1 ranks; got 2.",
            )
