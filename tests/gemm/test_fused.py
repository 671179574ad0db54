"""Products and collectives at once: traffic equal to the costs, many calls under faults, a peer
that never calls.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import (
    AllGatherGemmConfig,
    Faults,
    GemmAllReduceConfig,
    GemmAllToAllConfig,
    GemmReduceScatterConfig,
)
from interlace.comm import MAX_PROGRAMS
from interlace.costs import find_cost
from interlace.gemm.launch import padded_columns
from interlace.gemm.operands import RowPart
from interlace.gemm.splits import balanced
from interlace.language import primitives
from interlace.units import ceil_div
from tests.errors import error_of
from tests.gemm.calls import ANY_ROWS, DTYPES, Call, check_all
from tests.operators.traffic import held_up

_CONFIGS = {
    "gemm_all_to_all": GemmAllToAllConfig,
    "gemm_reduce_scatter": GemmReduceScatterConfig,
    "gemm_all_reduce": GemmAllReduceConfig,
    "all_gather_gemm": AllGatherGemmConfig,
}
OPERATORS = list(_CONFIGS)
WAYS = [*((operator, "fused") for operator in OPERATORS), *ANY_ROWS]
_GRANT_BYTES = 4  # which buffer a rank has taken; not in the costs, which are of the data
_WORD_BYTES = 8  # by which ranks agree on the call
_STAMP_BYTES = 4  # behind a copy that goes to a peer
_SCALE_BYTES = 4

SENT = [[3, 0, 17, 5], [0, 0, 0, 0], [9, 2, 1, 1], [4, 16, 0, 2]]
OWNED = [7, 0, 19, 6]


def _config(operator, **more):
    """Return a configuration with several tiles per rank and several programs.

    ``interleave`` does not divide the number of tiles.
    """
    sizes = {
        "block_m": 16,
        "block_n": 16,
        "block_k": 32,
        "max_programs": 3,
        "interleave": 2,
        "group_m": 2,
    } | more
    return _CONFIGS[operator](**sizes)


def _call(operator, rows, columns, inner, dtype="float32", splits=None, impl="fused", **more):
    return Call(
        operator,
        rows,
        columns,
        inner,
        dtype,
        splits=splits,
        impl=impl,
        config=_config(operator, **more),
    )


def _calls(operator, impl):
    """Return calls with even rows, float8, and uneven rows if the operator takes splits."""
    calls = [
        _call(operator, 36, 40, 20, impl=impl),
        _call(operator, 32, 33, 24, "float8", impl=impl, max_programs=1),
    ]
    if operator != "gemm_all_reduce":
        splits = SENT if operator == "gemm_all_to_all" else OWNED
        calls.append(_call(operator, sum(OWNED), 40, 20, "bfloat16", splits, impl))
    return [call for call in calls if call.can_run]


def _with_traffic(calls):
    """Return each call's result, and the bytes sent to each rank and fetched from each rank."""
    traffic = interlace.group_of().traffic
    answers = []
    for call in calls:
        traffic.reset()
        answers.append((call.make(), dict(traffic.bytes_to), dict(traffic.bytes_from)))
    return answers


def _cost(call, rank, world_size):
    cost = find_cost(call.operator).formula
    sizes = {
        "rows": call.rows_of(rank),
        "columns": call.columns,
        "inner": call.inner,
        "itemsize": DTYPES[call.dtype].itemsize,
        "world_size": world_size,
        "output_itemsize": call.result_dtype.itemsize,
    }
    if call.operator == "all_gather_gemm":
        sizes["rows"] = sum(call.rows_of(peer) for peer in range(world_size))
    if call.splits is None:
        return cost(**sizes)
    if call.operator == "gemm_all_to_all":
        received = [counts[rank] for counts in call.splits]
        return cost(**sizes, rank=rank, input_splits=call.splits[rank], output_splits=received)
    return cost(**sizes, rank=rank, splits=call.splits)


@pytest.mark.parametrize(("operator", "impl"), WAYS)
@pytest.mark.parametrize("world_size", [1, 4])
def test_costs_are_the_counted_traffic(ranks, operator, impl, world_size):
    calls = [call for call in _calls(operator, impl) if world_size == 4 or call.splits is None]
    answers = ranks(world_size).run(_with_traffic, calls)
    check_all(calls, [[y for y, _, _ in answer] for answer in answers])
    for rank, answer in enumerate(answers):
        for i, (call, (_, put, fetched)) in enumerate(zip(calls, answer, strict=True)):
            besides = (
                0
                if operator in ("gemm_reduce_scatter", "all_gather_gemm")
                else _GRANT_BYTES * (world_size - 1)
            )
            if (operator, impl) == (
                "gemm_reduce_scatter",
                "chunked",
            ):  # in pieces of as many rows as a tile has
                owned = call.splits or balanced(call.rows, world_size)
                rows_of_peers = [rows for peer, rows in enumerate(owned) if peer != rank]
                padding = padded_columns(call.columns, call.result_dtype) - call.columns
                besides = _STAMP_BYTES * sum(ceil_div(rows, 16) for rows in rows_of_peers)
                besides += padding * call.result_dtype.itemsize * sum(rows_of_peers)
            if operator == "all_gather_gemm" and call.dtype == "float8":
                besides = _SCALE_BYTES * call.rows_of(rank) * (world_size - 1)
            if (operator, impl) == (
                "all_gather_gemm",
                "pushed",
            ):  # copies take the padding of rows along, stores do not
                dtype = DTYPES[call.dtype]
                padding = (padded_columns(call.inner, dtype) - call.inner) * dtype.itemsize
                besides = (_WORD_BYTES - padding * call.rows_of(rank)) * (world_size - 1)
            expected = _cost(call, rank, world_size).link_bytes + besides
            fetched_bytes = sum(answer[i][2].get(rank, 0) for answer in answers)
            fetches = operator == "all_gather_gemm" and impl != "pushed"
            assert (sum(put.values()), fetched_bytes) == (
                (0, expected) if fetches else (expected, 0)
            ), (
                rank,
                call,
            )
            assert rank not in put | fetched


def _under_faults(batch, count, faults):
    """Calls in turn, under faults of this rank's own: indices of those that are not right bit by
    bit.
    """
    expected = [call.make() for call in batch]
    wrong = []
    with interlace.inject(dataclasses.replace(faults, seed=dist.get_rank())):
        for i in range(count):
            y = batch[i % len(batch)].make()
            if not y.equal(expected[i % len(batch)]):
                wrong.append(i)
            del y  # its memory is another call's
    return wrong


@pytest.mark.parametrize(("operator", "impl"), WAYS)
def test_calls_back_to_back_with_slow_ranks(ranks, operator, impl):
    """Shapes and grids change from call to call; puts come in any order. A stale slot, signal or
    ticket shows here.
    """
    batch = [
        _call(operator, 36, 40, 20, impl=impl),
        _call(operator, 4, 9, 5, max_programs=1),
        _call(operator, 64, 16, 16, impl=impl, max_programs=4),
    ]
    faults = Faults(max_delay_s=0.001, reorder_puts=True)
    assert ranks(2).run(_under_faults, batch, 9, faults) == [[]] * 2


def _absent_peer(call, absent):
    """``absent`` never calls: what the others see, and how long it took them."""
    group = dist.new_group()
    call.make(group)
    interlace.set_deadline(1.0, group)
    if dist.get_rank() == absent:
        dist.barrier()
        return None
    start = time.monotonic()
    first = error_of(call.make, group)
    seconds = time.monotonic() - start
    later = error_of(call.make, group)
    dist.barrier()
    return first, later, seconds


@pytest.mark.parametrize(("operator", "impl"), WAYS)
def test_a_peer_that_never_calls(ranks, operator, impl):
    outcomes = ranks(2).run(_absent_peer, _call(operator, 4, 8, 8, impl=impl), 1)
    assert outcomes[1] is None
    (kind, message, fields), later, seconds = outcomes[0]
    assert kind == "PeerTimeoutError"
    assert message.startswith(f"{operator}: rank 0 waited 1 s for rank 1 ")
    assert (fields["wanted"], fields["peer"], fields["different_call"]) == (2, 1, False)
    assert later == (kind, message, fields)
    assert 1.0 <= seconds < 60


def _kept(call):
    """Results of four calls alive at once: more than there are buffers for."""
    results = [call.make() for _ in range(4)]
    return all(torch.equal(result, results[0]) for result in results[1:]), results[0]


@pytest.mark.parametrize("operator", ["gemm_all_to_all", "gemm_all_reduce"])
def test_results_stay_as_they_are(ranks, operator):
    call = _call(operator, 36, 40, 20)
    outcomes = ranks(2).run(_kept, call)
    assert all(unchanged for unchanged, _ in outcomes)
    call.check([y for _, y in outcomes])


def _settled(stamp):
    """What becomes of a result of five elements whose call is the first, where ``stamp`` is what
    staging noted; and the epochs.
    """
    from interlace.gemm.kernels import staged

    group, y, epochs = interlace.group_of(), torch.arange(5.0), torch.ones(MAX_PROGRAMS).int()
    notes = torch.tensor([1, stamp], dtype=torch.int32)
    staged.settle_rows[(1,)](
        None, y, 0, epochs, group.context("test"), notes, 7 << 24, 0, 5, WORLD_SIZE=1,
        IN_PLACE=False,
    )  # fmt: skip
    return y.tolist(), epochs.unique().tolist()


def test_products_without_a_peers_rows_become_nan(ranks):
    assert ranks(1).run(_settled, 1 ^ (7 << 24)) == [([0.0, 1.0, 2.0, 3.0, 4.0], [2])]
    ((spoilt, epochs),) = ranks(1).run(_settled, 0)
    assert all(value != value for value in spoilt)
    assert epochs == [2]


def _without_rows(inner):
    """Rank 1 owns no rows and waits for none; rank 0 is held up at every look at a signal, as by
    other work on its GPU.
    """
    generator = torch.Generator().manual_seed(dist.get_rank())
    operands = [[torch.randn(32, size, generator=generator) for _ in range(2)] for size in inner]

    def call(x, w):
        return interlace.gemm_reduce_scatter(x, w, splits=[32, 0], impl="fused")

    expected = [call(*pair) for pair in operands]
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(primitives, "load_acquire", held_up(primitives.load_acquire, 0.3))
        actual = [call(*pair) for pair in operands]
    dist.barrier()
    return [torch.allclose(y, exact, atol=1e-4) for y, exact in zip(actual, expected, strict=True)]


def test_a_rank_without_rows_may_be_one_call_ahead(ranks):
    """That it is done with the next call, which has another mark, must not hide that it is done
    with this one.
    """
    assert ranks(2).run(_without_rows, (16, 48)) == [[True, True]] * 2


def _left_by_an_absent_peer(call):
    """What rank 0 is left with where rank 1 does not come, as on a GPU, where the error comes with
    the next call.
    """
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    call(process_group.group_name)
    interlace.set_deadline(0.5, process_group)
    dist.barrier()
    outcomes = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "check", lambda: None)
        if dist.get_rank() == 0:
            outcomes = [bool(result.isnan().all()) for result in call(process_group.group_name)]
    dist.barrier()
    return outcomes, group.broken


def _gathered_rows(name, impl, dtype):
    """The peer's rows, multiplied and as they are."""
    x, w = torch.ones(16, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype)
    y, gathered = torch.ops.interlace.all_gather_gemm(
        x, w, None, None, None, None, dtype, True, name, impl, ""
    )
    return y[16:], gathered[16:].float()


@pytest.mark.parametrize("impl", ["fused", "chunked", "pushed"])
def test_rows_that_do_not_come_are_gathered_as_nan(ranks, impl):
    """Autograd keeps them for the weight's gradient."""
    outcomes = ranks(2).run(
        _left_by_an_absent_peer, functools.partial(_gathered_rows, impl=impl, dtype=torch.bfloat16)
    )
    assert outcomes == [([True, True], True), (None, False)]


def _padding_that_libraries_see(call, module, product):
    """Whether rows are padded where a library multiplies them, and what is in the padding, in all
    calls.
    """
    padding = []
    multiply = getattr(module, product)

    def watched(first, second, *extra, **more):
        operands = second if isinstance(second, RowPart) else (second,)
        for operand in (first, *operands):
            if (
                isinstance(operand, torch.Tensor)
                and operand.dim() > 1
                and operand.stride(-2) > operand.shape[-1] > 1
            ):
                wide = operand.stride(-2)
                padded = operand.as_strided((*operand.shape[:-1], wide), operand.stride())
                padding.append(bool((padded[..., operand.shape[-1] :] == 0).all()))
        return multiply(first, second, *extra, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, product, watched)
        for _ in range(2):
            call("")
    return padding


def _padded_gather(name, impl):
    """Fewer rows for each next rank, none for the last; K that fills no vector of 16 bytes."""
    rows = [9, 4, 8, 0][: dist.get_world_size()]
    for inner in (37, 29):  # memory is used again, with another row length
        x, w = torch.ones(rows[dist.get_rank()], inner).bfloat16(), torch.ones(6, inner).bfloat16()
        y = torch.ops.interlace.all_gather_gemm(
            x, w, None, None, None, rows, x.dtype, True, name, impl, ""
        )[0]
        assert torch.equal(y, torch.full_like(y, inner))


def _padding(impl):
    from interlace.gemm.implementations import pushed
    from interlace.operators.all_gather_gemm import fused

    module, product = (
        (pushed, "multiply_by_faster") if impl == "pushed" else (fused, "multiply_into")
    )
    call = functools.partial(_padded_gather, impl=impl)
    return _padding_that_libraries_see(call, module, product)


@pytest.mark.parametrize("impl", ["chunked", "pushed"])
def test_padding_beside_what_a_library_reads_is_zero(ranks, impl):
    """A product of bfloat16 may multiply it by zero (AMX does), which turns memory that nobody
    wrote into NaN.
    """
    for outcomes in ranks(4).run(_padding, impl):
        assert outcomes
        assert all(outcomes)
