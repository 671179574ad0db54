"""``gemv_all_reduce`` for random calls: right, and with exactly the traffic that
``interlace.costs`` says.
"""

import dataclasses
import functools

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import interlace
from interlace import GemvAllReduceConfig
from interlace.costs.gemv_all_reduce import fused
from interlace.operators.gemm_all_reduce.config import block_tokens
from tests.operators.gemv_all_reduce.calls import DTYPES, Call, check_all, run_one
from tests.operators.traffic import changing_shapes, check_traffic, with_traffic


def _cost(call, rank, world_size):
    config, tokens = call.config, 1 if call.tokens is None else call.tokens
    tile_tokens = block_tokens(tokens)
    return fused(
        protocol=config.protocol,
        rank=rank,
        world_size=world_size,
        tokens=tokens,
        rows=call.rows,
        columns=call.columns,
        itemsize=DTYPES[call.dtype].itemsize,
        block_n=config.block_n,
        block_tokens=tile_tokens,
    )


def _check(calls, answers):
    """``answers[rank][i]`` against ``calls[i]`` and its cost."""
    cost = functools.partial(_cost, world_size=len(answers))
    check_traffic(calls, answers, check_all, cost)


calls = st.builds(
    Call,
    tokens=st.one_of(st.none(), st.integers(0, 20), st.sampled_from([64, 65])),
    rows=st.integers(0, 40),
    columns=st.integers(0, 50),
    dtype=st.sampled_from(list(DTYPES)),
    bias=st.booleans(),
    config=st.builds(
        GemvAllReduceConfig,
        protocol=st.sampled_from(["one_shot", "two_phase"]),
        block_n=st.sampled_from([1, 2, 4, 8, 16, 64]),
        block_k=st.sampled_from([16, 32]),
        max_programs=st.integers(1, 4),
    ),
    seed=st.integers(0, 9),
)


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_call_is_right_and_costs_what_is_predicted(ranks, world_size):
    """One program's workspace serves calls of all shapes in any order: a stale word or signal shows
    here too.
    """

    @settings(max_examples=4 if world_size == 2 else 2)
    @given(batch=st.lists(calls, min_size=1, max_size=4))
    def check(batch):
        _check(batch, ranks(world_size).run(with_traffic, run_one, batch))

    check()


@pytest.mark.parametrize("protocol", ["one_shot", "two_phase"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_costs_are_the_counted_traffic(ranks, world_size, protocol):
    """A tile more than fits, tiles smaller than the group, a program for each tile and fewer."""
    # Every shape is cut in both ways on two ranks, and in one of them on others.
    shapes = [((1, 33, 8), 0), ((None, 7, 8), 1), ((65, 5, 4), 0)]
    cuts = [(16, 0), (2, 3)]
    batch = [
        Call(
            *shape,
            config=GemvAllReduceConfig(
                protocol, block_n=block_n, block_k=16, max_programs=programs
            ),
        )
        for shape, cut in shapes
        for block_n, programs in (cuts if world_size == 2 else cuts[cut : cut + 1])
    ]
    _check(batch, ranks(world_size).run(with_traffic, run_one, batch))


def _back_to_back(call, count, faults):
    """``count`` calls under faults of this rank's own: indices of those that are not right bit by
    bit.
    """
    expected = run_one(call)
    with interlace.inject(dataclasses.replace(faults, seed=dist.get_rank())):
        return [i for i in range(count) if not run_one(call).equal(expected)], expected


@pytest.mark.parametrize("protocol", ["one_shot", "two_phase"])
def test_many_calls_back_to_back_with_slow_ranks(ranks, protocol):
    """A half that is written before its reader is done, or a word taken for the next call's, shows
    here.
    """
    call = Call(1, 3, 16, config=GemvAllReduceConfig(protocol, block_n=4, block_k=16))
    results = ranks(3).run(_back_to_back, call, 16, interlace.Faults(max_delay_s=0.001))
    assert [wrong for wrong, _ in results] == [[]] * 3
    call.check([expected for _, expected in results])


@pytest.mark.parametrize("protocol", ["one_shot", "two_phase"])
def test_puts_may_arrive_in_any_order(ranks, protocol):
    """Only what a signal or a word's epoch vouches for may be read."""
    call = Call(
        2, 9, 16, config=GemvAllReduceConfig(protocol, block_n=2, block_k=16, max_programs=2)
    )
    results = ranks(2).run(
        _back_to_back, call, 12, interlace.Faults(max_delay_s=0.001, reorder_puts=True)
    )
    assert [wrong for wrong, _ in results] == [[]] * 2
    call.check([expected for _, expected in results])


def test_calls_of_different_shapes_share_memory(ranks):
    """Grids and slots change from call to call, epochs do not."""
    batch = [
        Call(
            tokens,
            rows,
            16,
            config=GemvAllReduceConfig(
                protocol, block_n=block_n, block_k=16, max_programs=programs
            ),
        )
        for tokens, rows, block_n, programs in ((None, 5, 2, 0), (3, 12, 4, 1), (1, 20, 16, 2))
        for protocol in ("one_shot", "two_phase")
    ]
    assert ranks(2).run(changing_shapes, run_one, batch, 12) == [[]] * 2
