"""Results of ``embedding_all_to_all``: examples, comparison with float64, bit equality."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import interlace
from tests.operators.embedding_all_to_all.calls import DTYPES, SMALL, Call, check_all, run, run_one


def _worked_example(impl):
    """Of the kernel's docstring: one table of width 1 on each of two ranks, batch 2; bags [a0, a1]
    and [b0, b1].
    """
    rank = dist.get_rank()
    table = torch.tensor([[1.0], [2.0], [4.0]]) * (1 if rank == 0 else 10)
    indices, offsets = torch.tensor([0, 2, 1]), torch.tensor([0, 2, 3])
    config = SMALL if impl == "fused" else None
    return interlace.embedding_all_to_all(
        [table], indices, offsets, impl=impl, config=config
    ).tolist()


@pytest.mark.parametrize("impl", ["unfused", "pooled", "fused"])
def test_worked_example(ranks, impl):
    assert ranks(2).run(_worked_example, impl) == [[[5.0, 50.0]], [[2.0, 20.0]]]


# Widths by rank: equal and not, odd, a rank without tables; batches that do not divide, and smaller
# than the group.
LAYOUTS = {
    1: [((3, 8), 5), ((16,), 1)],
    2: [((4,), (4,), 6), ((8, 5, 1), (20,), 7), ((), (2, 2), 3)],
    4: [((4, 4), (8,), (), (1, 16), 10), ((2,), (3,), (4,), (5,), 3)],
}


def _calls(world_size, **more):
    layouts = LAYOUTS[world_size]
    if world_size == 1:
        return [Call((widths,), batch, seed=i, **more) for i, (widths, batch) in enumerate(layouts)]
    return [
        Call(tuple(widths), batch, seed=i, **more) for i, (*widths, batch) in enumerate(layouts)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_matches_float64(ranks, world_size, dtype):
    """All layouts; mean, weights, index and output dtypes in turn."""
    calls = [
        dataclasses.replace(
            call,
            mode="mean" if i % 3 == 1 else "sum",
            weighted=i % 3 == 2,
            index_dtype=torch.int32 if i % 2 else torch.int64,
            output_dtype="float32" if i == 0 else None,
        )
        for i, call in enumerate(_calls(world_size, dtype=dtype, config=SMALL))
    ]
    check_all(calls, ranks(world_size).run(run, calls))


def test_blocks_of_every_size(ranks):
    """Blocks larger and smaller than a chunk, vectors wider than a table, more lookups at a time
    than a bag has.
    """
    cuts = [(1, 1, 1), (16, 4, 2), (2, 8, 7)]
    calls = [
        Call(
            ((4, 12), (6,)),
            9,
            config=dataclasses.replace(
                SMALL, block_bags=bags, stages=stages, max_programs=programs
            ),
        )
        for bags, stages, programs in cuts
    ]
    results = ranks(2).run(run, calls)
    check_all(calls, results)
    for rank in results:
        assert all(torch.equal(y, rank[0]) for y in rank), (
            "sums must not depend on the configuration"
        )


@pytest.mark.parametrize("impl", ["auto", "pooled", "unfused"])
def test_others_than_fused_need_no_configuration(ranks, impl):
    calls = [dataclasses.replace(call, impl=impl, config=None) for call in _calls(4)]
    check_all(calls, ranks(4).run(run, calls))


@pytest.mark.parametrize("impl", ["fused", "pooled", "unfused"])
def test_nothing_to_do(ranks, impl):
    """No samples, no lookups, no tables at all."""
    empty = [
        Call(((4,), (4,)), 0, impl=impl),
        Call(((4,), (4,)), 5, most=0, impl=impl),
        Call(((), ()), 5, output_dtype="float32", impl=impl),
    ]
    check_all(empty, ranks(2).run(run, empty))


def _kept(call, count):
    """Results of ``count`` calls, all alive, their numbers not equal: which of them lie in
    symmetric memory.
    """
    group = dist.new_group()
    calls = [dataclasses.replace(call, seed=seed) for seed in range(count)]
    results = [run_one(each, group) for each in calls]
    places = len({y.data_ptr() for y in results})
    first = results[0].data_ptr()
    del results[0]
    again = run_one(calls[0], group)
    return [again, *results], places, again.data_ptr() == first


def test_results_stay_while_they_are_alive(ranks):
    """Calls beyond the buffers of the pool copy; a buffer whose tensor is gone is used again."""
    call, count = Call(((4,), (8,)), 6), 5
    outcomes = ranks(2).run(_kept, call, count)
    for i in range(count):
        dataclasses.replace(call, seed=i).check([results[i] for results, _, _ in outcomes])
    assert [(places, reused) for _, places, reused in outcomes] == [(count, True)] * 2


def _views(call):
    """A view keeps its buffer; rows of a table may lie apart, and tables may start anywhere."""
    rank, group = dist.get_rank(), dist.new_group()
    view = run_one(call, group)[:, 1:2]
    kept = view.clone()
    indices, offsets, _ = call.lookups(rank)
    odd = []
    for table in call.tables(rank):
        padded = torch.full((table.shape[0], table.shape[1] + 3), float("nan"))
        odd.append(padded[:, 1:-2].copy_(table))
    others = [
        interlace.embedding_all_to_all(odd, indices, offsets, group=group, config=call.config)
        for _ in range(4)
    ]
    return torch.equal(view, kept), others[-1]


def test_views_and_strided_tables(ranks):
    call = Call(((4, 5), (8,)), 7)
    outcomes = ranks(2).run(_views, call)
    assert all(unchanged for unchanged, _ in outcomes)
    call.check([y for _, y in outcomes])


def test_explain_names_the_configuration():
    tables, indices = [torch.zeros(9, 16), torch.zeros(9, 24)], torch.zeros(20, dtype=torch.int64)
    text = interlace.explain("embedding_all_to_all", tables, indices, torch.arange(9) * 20 // 8)
    assert text.startswith(
        "embedding_all_to_all of 2 tables per rank, at most 24 wide, float32, batch 4, about 4 "
        "lookups per bag, on 1 rank: "
        "fused (block_bags=8, "
    )
    with pytest.raises(
        interlace.ArgumentError, match="must have weights, indices, offsets; got 2 arguments"
    ):
        interlace.explain("embedding_all_to_all", tables, indices)
