"""Gradients of ``embedding_all_to_all``, and its fused updates, against float64."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.optim import SGD, RowWiseAdagrad
from tests.operators.embedding_all_to_all.calls import DTYPES, SMALL, Call, run_one

LEARNING_RATE, EPSILON = 0.5, 1e-4


def upstream(call, rank):
    """The gradient of a rank's output; rounded to its dtype, so that float64 starts from the same
    numbers.
    """
    samples = call.samples(rank)
    columns = sum(map(sum, call.widths))
    whole = torch.randn(
        call.batch, columns, generator=torch.Generator().manual_seed(call.seed + 99)
    )
    return whole[samples].to(call.out)


def train(call, kind, steps=1, frozen=(), more=None):
    """On a rank: gradients (``dense``, ``sparse``), or tables and states after updates, of every
    table.
    """
    rank = dist.get_rank()
    indices, offsets, scale = call.lookups(rank)
    tables = [
        table.requires_grad_((rank, i) not in frozen) for i, table in enumerate(call.tables(rank))
    ]
    states = [
        torch.rand(table.shape[0], generator=torch.Generator().manual_seed(7)) for table in tables
    ]
    gradient = {
        "sgd": SGD(LEARNING_RATE),
        "adagrad": RowWiseAdagrad(LEARNING_RATE, EPSILON, states),
    }.get(kind, kind)
    for _ in range(steps):
        y = interlace.embedding_all_to_all(
            tables, indices, offsets, per_sample_weights=scale, mode=call.mode,
            output_dtype=None if call.output_dtype is None else DTYPES[call.output_dtype],
            gradient=gradient, batch_size=call.batch, name=f"{call.widths} {call.dtype} {frozen}",
            impl=call.impl, config=call.config, **(more or {}),
        )  # fmt: skip
        y.backward(upstream(call, rank))
    if kind in ("sgd", "adagrad"):
        assert all(table.grad is None for table in tables)
        return [table.detach() for table in tables], states
    return [table.grad for table in tables], states


def exact(call, rank):
    """Gradient of each of a rank's tables in float64, and the sum of the absolute values of what
    was added.
    """
    whole = torch.cat([upstream(call, other).double() for other in range(len(call.widths))])
    first = sum(sum(widths) for widths in call.widths[:rank])
    indices, offsets, scale = call.lookups(rank)
    found = []
    for table, weight in enumerate(call.tables(rank)):
        width = weight.shape[1]
        bounds = offsets[table * call.batch : (table + 1) * call.batch + 1].long()
        lengths, part = bounds.diff(), slice(int(bounds[0]), int(bounds[-1]))
        per_bag = whole[:, first : first + width] / (
            lengths.clamp(min=1)[:, None] if call.mode == "mean" else 1
        )
        per_lookup = per_bag.repeat_interleave(lengths, 0)
        if scale is not None:
            per_lookup = per_lookup * scale[part, None].double()
        zeros = torch.zeros(weight.shape, dtype=torch.float64)
        rows = indices[part].long()
        found.append(
            (zeros.index_add(0, rows, per_lookup), zeros.index_add(0, rows, per_lookup.abs()))
        )
        first += width
    return found


def bound(call, value, magnitude):
    """Of a float32 sum of at most all lookups of one table, each a rounded product, and one
    rounding to the table's dtype.
    """
    u = torch.finfo(torch.float32).eps / 2
    steps = call.batch * call.most + 4
    accumulated = steps * u / (1 - steps * u) * magnitude
    table = torch.finfo(DTYPES[call.dtype])
    # The CPU backend truncates to bfloat16.
    rounding = table.eps if call.dtype == "bfloat16" else table.eps / 2
    return accumulated + rounding * (value.abs() + accumulated) + table.smallest_normal * table.eps


CALLS = {
    1: [Call(((5, 8),), 6)],
    2: [
        Call(((4,), (4, 12)), 7),
        Call(((), (6, 3)), 5, mode="mean", output_dtype="float32"),
        Call(((8,), (1,)), 3, weighted=True, index_dtype=torch.int32),
    ],
    4: [Call(((4, 4), (8,), (), (1,)), 10, mode="mean"), Call(((2,), (3,), (4,), (5,)), 3)],
}


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, "float16"), (2, "float32"), (2, "float16"), (2, "bfloat16"), (4, "float32")],
)
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_gradients_match_float64(ranks, world_size, kind, dtype):
    for each in CALLS[world_size] if dtype == "float32" else CALLS[world_size][:1]:
        call = dataclasses.replace(each, dtype=dtype)
        for rank, (gradients, _) in enumerate(ranks(world_size).run(train, call, kind)):
            for gradient, (value, magnitude) in zip(gradients, exact(call, rank), strict=True):
                if kind == "sparse":
                    assert (gradient._indices()[0].diff() > 0).all(), (
                        "coalesced: each row once, in order"
                    )
                    gradient = gradient.to_dense()
                assert gradient.dtype == DTYPES[dtype]
                assert ((gradient.double() - value).abs() <= bound(call, value, magnitude)).all()


def _behind_a_table():
    """A table and what follows it in memory, after the sparse gradient of its only row was added to
    it, where another table of the rank is wider.
    """
    tables = [torch.ones(1, width).requires_grad_() for width in (3, 16)]
    places = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2])
    y = interlace.embedding_all_to_all(tables, *places, gradient="sparse", name="beside")
    (gradient, _) = torch.autograd.grad(y.sum(), tables)
    memory = torch.full((32,), -0.0)
    memory[:3].view(1, 3).add_(gradient)
    return memory


def test_a_single_row_is_added_to_its_table_alone(ranks):
    (memory,) = ranks(1).run(_behind_a_table)
    assert memory[:3].tolist() == [1.0] * 3
    assert memory[3:].signbit().all(), "something was added, be it zero"


@pytest.mark.parametrize("kind", ["dense", "sparse", "sgd", "adagrad"])
@pytest.mark.parametrize("impl", ["fused", "pooled", "unfused"])
def test_updates_match_float64(ranks, impl, kind):
    """All ways, by the formulas of ``interlace.optim``; rows that nobody looked up keep their
    bits.
    """
    call = Call(((4, 6), (9,)), 8, impl=impl, config=None if impl == "unfused" else SMALL)
    for rank, (results, states) in enumerate(ranks(2).run(train, call, kind)):
        before = call.tables(rank)
        for table, (value, _) in enumerate(exact(call, rank)):
            result, state = (
                results[table],
                torch.rand(
                    before[table].shape[0], generator=torch.Generator().manual_seed(7)
                ).double(),
            )
            if kind in ("dense", "sparse"):
                torch.testing.assert_close(result.to_dense().double(), value, rtol=1e-5, atol=1e-5)
                continue
            step = torch.full_like(state, LEARNING_RATE)
            if kind == "adagrad":
                state += (value**2).mean(1)
                step = LEARNING_RATE / (state.sqrt() + EPSILON)
                torch.testing.assert_close(states[table].double(), state, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                result.double(),
                before[table].double() - step[:, None] * value,
                rtol=1e-5,
                atol=1e-5,
            )
            untouched = value.abs().sum(1) == 0
            assert torch.equal(result[untouched], before[table][untouched])


@pytest.mark.parametrize("kind", ["dense", "sparse", "adagrad"])
def test_one_row_that_every_bag_uses(ranks, kind):
    """Its sum is cut into runs, which any program may add; runs of several such rows lie side by
    side.
    """
    call = Call(((4, 3), (8,)), 40, most=6, hot=True, config=SMALL)
    for rank, (results, _) in enumerate(ranks(2).run(train, call, kind)):
        before = call.tables(rank)
        for table, (value, magnitude) in enumerate(exact(call, rank)):
            if kind == "adagrad":
                state = torch.rand(
                    before[table].shape[0], generator=torch.Generator().manual_seed(7)
                ).double() + (value**2).mean(1)
                after = (
                    before[table].double()
                    - (LEARNING_RATE / (state.sqrt() + EPSILON))[:, None] * value
                )
                torch.testing.assert_close(results[table].double(), after, rtol=1e-5, atol=1e-5)
            else:
                assert (
                    (results[table].to_dense().double() - value).abs()
                    <= bound(call, value, magnitude)
                ).all()


def _repeats(call, kind, configs):
    results = []
    for i, config in enumerate(configs):
        with interlace.inject(
            interlace.Faults(seed=10 * dist.get_rank() + i, max_delay_s=0.001, reorder_puts=True)
        ):
            results.append(train(dataclasses.replace(call, config=config), kind, steps=2))
    return results


def _equal(one, other):
    if isinstance(one, (list, tuple)):
        return all(map(_equal, one, other))
    return torch.equal(one.to_dense(), other.to_dense())


@pytest.mark.parametrize("kind", ["sparse", "adagrad"])
def test_results_repeat_bit_by_bit(ranks, kind):
    """Under delays and reordered puts, on other grids and with other blocks: only ``run_lookups``
    may change bits.
    """
    call = Call(((4, 3), (8,)), 20, rows=3, most=6)
    configs = [
        SMALL,
        dataclasses.replace(SMALL, block_runs=1, update_programs=1, push_programs=1, push_rows=16),
    ]
    for results in ranks(2).run(_repeats, call, kind, configs):
        assert all(_equal(result, results[0]) for result in results)


def test_frozen_tables(ranks):
    """A frozen table gets no gradient and does not change; a rank whose tables are all frozen still
    sends.
    """
    call, frozen = Call(((4, 6), (8,)), 6), ((0, 1), (1, 0))
    (results, _), (others, _) = ranks(2).run(train, call, "dense", 1, frozen)
    assert results[1] is None
    assert others == [None]
    value, magnitude = exact(call, 0)[0]
    assert ((results[0].double() - value).abs() <= bound(call, value, magnitude)).all()
    (results, _), (others, _) = ranks(2).run(train, call, "sgd", 1, frozen)
    assert torch.equal(results[1], call.tables(0)[1])
    assert torch.equal(others[0], call.tables(1)[0])
    torch.testing.assert_close(
        results[0].double(),
        call.tables(0)[0].double() - LEARNING_RATE * value,
        rtol=1e-5,
        atol=1e-5,
    )


def _given_other_memory():
    """Tables and states before and after an update, where they were left and where they are."""
    tables, states = [torch.ones(3, 4).requires_grad_()], [torch.ones(3)]
    update = RowWiseAdagrad(LEARNING_RATE, EPSILON, states)
    # A program may also have the graph save copies, such as on the host.
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        y = interlace.embedding_all_to_all(
            tables, torch.tensor([1]), torch.tensor([0, 1]), gradient=update, config=SMALL
        )
    left = [tensor.data for tensor in (*tables, *states)]
    for tensor in (*tables, *states):
        tensor.data = tensor.data.clone()
    y.backward(torch.ones_like(y))
    return left, [tensor.detach() for tensor in (*tables, *states)]


def test_an_update_is_made_where_tables_and_states_are_by_then(ranks):
    """A program may give them other memory between the two passes."""
    ((left, (table, state)),) = ranks(1).run(_given_other_memory)
    assert all(tensor.eq(1).all() for tensor in left)
    assert state.tolist() == [1, 2, 1]
    assert table[[0, 2]].eq(1).all()
    assert table[1].lt(1).all()


def _without_gradients(call):
    rank = dist.get_rank()
    y = run_one(call)
    tables = [table.requires_grad_() for table in call.tables(rank)]
    indices, offsets, _ = call.lookups(rank)
    with torch.no_grad():
        z = interlace.embedding_all_to_all(
            tables, indices, offsets, batch_size=call.batch, config=call.config
        )
    return y.requires_grad, z.requires_grad, torch.equal(y, z)


def test_no_backward_pass_where_nothing_trains(ranks):
    assert ranks(2).run(_without_gradients, Call(((4,), ()), 6)) == [(False, False, True)] * 2


def _interleaved(call):
    """Two forward passes, then their backward passes, over and over: landings and outputs share
    memory.
    """
    rank = dist.get_rank()
    indices, offsets, _ = call.lookups(rank)
    sums = []
    with interlace.inject(interlace.Faults(seed=rank, max_delay_s=0.001, reorder_puts=True)):
        for _ in range(2):
            tables = [table.requires_grad_() for table in call.tables(rank)]
            outputs = [
                interlace.embedding_all_to_all(
                    tables, indices, offsets, batch_size=call.batch, config=call.config
                )
                for _ in range(3)
            ]
            for factor, y in enumerate(outputs):
                y.backward(upstream(call, rank) * (factor + 1))
            sums.append([table.grad for table in tables])
    return sums


def _landing_used_again(call):
    """A backward pass that nobody waits for (no lookups) with slow puts of rank 0, then a forward
    pass into the landing.
    """
    rank = dist.get_rank()
    kept = [run_one(call, check_indices=False) for _ in range(3)]
    empty = dataclasses.replace(call, most=0)
    indices, offsets, _ = empty.lookups(rank)
    tables = [table.requires_grad_() for table in empty.tables(rank)]
    for delay in (0.0, 0.7):  # the first backward pass agrees on the host
        y = interlace.embedding_all_to_all(
            tables, indices, offsets, batch_size=call.batch, config=call.config
        )
        with interlace.inject(interlace.Faults(max_delay_s=delay if rank == 0 else 0.0)):
            y.backward(torch.full_like(y, 1e6))
        del y
    return run_one(call, check_indices=False), kept


def test_a_backward_pass_is_over_when_it_ends(ranks):
    """Also where no table has lookups: late gradients would fall on what the next call stores there
    before it waits.
    """
    call = Call(((4,), (4,), (4,)), 6)
    call.check([y for y, _ in ranks(3).run(_landing_used_again, call)])


def test_passes_back_to_back(ranks):
    call = Call(((4,), (2, 8)), 9)
    for rank, sums in enumerate(ranks(2).run(_interleaved, call)):
        for gradients in sums:
            assert _equal(gradients, sums[0])
            for gradient, (value, magnitude) in zip(gradients, exact(call, rank), strict=True):
                assert (
                    (gradient.double() - 6 * value).abs() <= 12 * bound(call, value, magnitude)
                ).all()


def _without_tables(widths):
    """Two exchanges in one backward pass, rank 0's puts slow; rank 1 has no table of either, so
    nothing holds it back.
    """
    rank = dist.get_rank()
    calls = [Call(((width,) * 4, (), (width,) * 4), 12, seed=width) for width in widths]

    def backward(delay):
        tables = [[table.requires_grad_() for table in call.tables(rank)] for call in calls]
        with interlace.inject(interlace.Faults(seed=rank, max_delay_s=delay if rank == 0 else 0.0)):
            outputs = []
            for call, mine in zip(calls, tables, strict=True):
                indices, offsets, _ = call.lookups(rank)
                outputs.append(
                    interlace.embedding_all_to_all(
                        mine, indices, offsets, config=call.config, name=f"{call.widths}",
                        batch_size=12, output_dtype=torch.float32, check_indices=delay == 0,
                    )
                )  # fmt: skip
            sum(y.sum() for y in outputs).backward()
        return [table.grad for mine in tables for table in mine]

    expected = backward(0.0)
    dist.barrier()
    found = backward(0.2)
    dist.barrier()
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_rank_without_tables_may_be_one_call_ahead(ranks):
    """Its next grant, of a call with another mark, must not hide the one that a late rank has yet
    to see.
    """
    assert ranks(3).run(_without_tables, (4, 8)) == [True] * 3
