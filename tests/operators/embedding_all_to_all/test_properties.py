"""``embedding_all_to_all`` for random calls: right, and with exactly the traffic that
``interlace.costs`` says.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import interlace
from interlace import EmbeddingAllToAllConfig
from interlace.costs.embedding_all_to_all import backward, forward
from tests.operators.embedding_all_to_all.calls import DTYPES, SMALL, Call, check_all, run_one
from tests.operators.traffic import changing_shapes, check_traffic, with_traffic


def lookups_of(call, rank):
    """Lookups of each of a rank's tables."""
    _, offsets, _ = call.lookups(rank)
    return offsets[:: call.batch].diff().tolist() if call.batch else [0] * len(call.widths[rank])


def _cost(call, rank):
    return forward(
        rank=rank,
        widths=call.widths,
        batch=call.batch,
        lookups=lookups_of(call, rank),
        itemsize=DTYPES[call.dtype].itemsize,
        output_itemsize=call.out.itemsize,
        index_itemsize=call.index_dtype.itemsize,
        block_bags=call.config.block_bags,
        slice_blocks=call.config.slice_blocks,
        weighted=call.weighted,
    )


def _check(calls, answers):
    """``answers[rank][i]`` against ``calls[i]`` and its cost."""
    check_traffic(calls, answers, check_all, _cost)


configs = st.builds(
    EmbeddingAllToAllConfig,
    block_bags=st.sampled_from([1, 2, 8]),
    stages=st.integers(1, 3),
    max_programs=st.integers(1, 4),
    push_programs=st.integers(1, 3),
    push_rows=st.sampled_from([1, 2, 16]),
)


def _calls(world_size):
    widths = st.lists(st.integers(1, 9), max_size=3).map(tuple)
    return st.builds(
        Call,
        widths=st.tuples(*[widths] * world_size),
        batch=st.integers(0, 9),
        most=st.integers(0, 4),
        dtype=st.sampled_from(list(DTYPES)),
        output_dtype=st.sampled_from(list(DTYPES)),
        index_dtype=st.sampled_from([torch.int32, torch.int64]),
        mode=st.just("sum"),
        weighted=st.booleans(),
        config=configs,
        seed=st.integers(0, 9),
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_call_is_right_and_costs_what_is_predicted(ranks, world_size):
    """One program's workspace serves calls of all shapes in any order: a stale grant or signal
    shows here too.
    """

    @settings(max_examples=4 if world_size == 2 else 2)
    @given(batch=st.lists(_calls(world_size), min_size=1, max_size=4))
    def check(batch):
        _check(batch, ranks(world_size).run(with_traffic, run_one, batch))

    check()


def _backward_traffic(calls):
    """Return the traffic of each call's backward pass, and the distinct rows of each table."""
    traffic, rank = interlace.group_of().traffic, dist.get_rank()
    answers = []
    for call in calls:
        indices, offsets, scale = call.lookups(rank)
        tables = [table.requires_grad_() for table in call.tables(rank)]
        y = interlace.embedding_all_to_all(
            tables, indices, offsets, per_sample_weights=scale, batch_size=call.batch,
            config=call.config, output_dtype=call.out,
            name=f"trained {call.widths} {call.dtype} {call.output_dtype}",
        )  # fmt: skip
        traffic.reset()
        if y.requires_grad:
            y.backward(torch.ones_like(y))
        answers.append((traffic.message_bytes, traffic.messages, traffic.signals))
    return answers


@pytest.mark.parametrize("world_size", [2, 4])
def test_backward_passes_cost_what_is_predicted(ranks, world_size):
    @settings(max_examples=3 if world_size == 2 else 2)
    @given(batch=st.lists(_calls(world_size), min_size=1, max_size=3))
    def check(batch):
        for rank, answers in enumerate(ranks(world_size).run(_backward_traffic, batch)):
            for call, answer in zip(batch, answers, strict=True):
                cost = backward(
                    rank=rank, widths=call.widths, batch=call.batch, lookups=lookups_of(call, rank),
                    distinct_rows=[0] * len(call.widths[rank]),
                    itemsize=DTYPES[call.dtype].itemsize, gradient_itemsize=call.out.itemsize,
                    push_rows=call.config.push_rows,
                )  # fmt: skip
                assert answer == (cost.link_bytes, cost.messages, cost.signals), (rank, call)

    check()


def test_costs_of_a_worked_example():
    """Two ranks, 2 and 1 tables of width 4 and 8, batch 5 (3 + 2), blocks of 2 bags."""
    common = {
        "widths": ((4, 4), (8,)), "batch": 5, "itemsize": 4, "output_itemsize": 4,
        "index_itemsize": 8, "block_bags": 2, "slice_blocks": 2,
    }  # fmt: skip
    direct = forward(rank=0, lookups=(10, 0), **common)
    assert direct.flops == 10 * 4
    assert direct.memory_bytes == 10 * 16 + 8 * (10 + 10 + 1) + 3 * 16 * 4
    assert (direct.link_bytes, direct.messages, direct.signals) == (2 * 8 * 4 + 4, 1 + 2 * 1, 1 + 1)
    # All vectors are written before the exchange and read for it, and so are those that come.
    pooled = forward(impl="pooled", rank=0, lookups=(10, 0), **common)
    assert pooled.memory_bytes == direct.memory_bytes + 2 * 5 * 8 * 4 + 2 * 3 * 16 * 4
    # Rank 0 sends 3 samples' 8 columns of one table; reads them and 5 samples' own 8; receives 2
    # samples' own 8; 4 distinct rows.
    back = backward(
        rank=0, widths=((4, 4), (8,)), batch=5, lookups=(10, 0), distinct_rows=(4, 0), itemsize=2,
        gradient_itemsize=4, push_rows=2, row_accesses=2, state_bytes=8,
    )  # fmt: skip
    assert back.memory_bytes == 4 * (3 * 8 + 2 * 8 + 5 * 8) + 4 * 10 + 4 * (2 * 4 * 2 + 8)
    assert (back.link_bytes, back.messages, back.signals) == (3 * 8 * 4, 2, 1 + 1)


def _back_to_back(call, count, faults):
    """``count`` calls under faults of this rank's own: indices of those that are not right bit by
    bit.

    Numbers change from call to call, so that what an earlier one left in a buffer is not taken for
    right.
    """
    calls = [dataclasses.replace(call, seed=seed) for seed in range(5)]
    expected = [run_one(each).clone() for each in calls]
    with interlace.inject(dataclasses.replace(faults, seed=dist.get_rank())):
        wrong = [
            i
            for i in range(count)
            if not run_one(calls[i % 5], check_indices=False).equal(expected[i % 5])
        ]
    return wrong, expected[0]


def test_many_calls_back_to_back_with_slow_ranks(ranks):
    """Buffers are not written before their readers are done, nor after their tensors are freed."""
    call = Call(((2,), (), (3,)), 5, config=dataclasses.replace(SMALL, max_programs=2))
    results = ranks(3).run(_back_to_back, call, 9, interlace.Faults(max_delay_s=0.001))
    assert [wrong for wrong, _ in results] == [[]] * 3
    call.check([expected for _, expected in results])


def test_puts_may_arrive_in_any_order(ranks):
    """Only what a signal vouches for may be read."""
    call = Call(((4, 2), (3,)), 9, config=dataclasses.replace(SMALL, block_bags=1))
    results = ranks(2).run(
        _back_to_back, call, 7, interlace.Faults(max_delay_s=0.001, reorder_puts=True)
    )
    assert [wrong for wrong, _ in results] == [[]] * 2
    call.check([expected for _, expected in results])


def test_calls_of_different_shapes_share_memory(ranks):
    """Grids and buffers change from call to call, epochs do not."""
    batch = [
        Call(
            widths,
            samples,
            config=dataclasses.replace(SMALL, block_bags=bags, max_programs=programs),
        )
        for widths, samples, bags, programs in (
            (((4,), (2,)), 9, 2, 4),
            (((), (1, 3)), 4, 1, 1),
            (((6, 6), (2,)), 3, 4, 2),
        )
    ]
    assert ranks(2).run(changing_shapes, run_one, batch, 12) == [[]] * 2
