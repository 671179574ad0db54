"""Products whose output is sent to the peers as it is written: ``impl="remote_stores"``
and ``"chunked"``.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import BackendError
from interlace.gemm.call import GemmCall
from interlace.gemm.implementations import outputs, stock
from interlace.gemm.operands import Operands
from interlace.mapped import triggered
from interlace.registry import operator_named
from tests.errors import error_of
from tests.gemm.calls import Call, check_all, check_gradients, differentiate, run

CARRIED = ("remote_stores", "chunked")  # the latter in every operator below, the former in the last
OPERATORS = ["gemm_all_to_all", "gemm_reduce_scatter", "gemm_all_reduce"]
CONFIGS = {
    "gemm_all_to_all": interlace.GemmAllToAllConfig,
    "gemm_reduce_scatter": interlace.GemmReduceScatterConfig,
    "gemm_all_reduce": interlace.GemmAllReduceConfig,
}


@pytest.mark.parametrize("world_size", [1, 4])
def test_mapped_matches_float64(ranks, world_size):
    """Every dtype, w along either dimension; parts with and without memory between them; rows that
    do not divide evenly where ranks may share them out; the same memory for several calls.
    """
    sizes = [
        (16, 24, 20, "float32", "K"),
        (16, 1000, 12, "bfloat16", "N"),
        (8, 1024, 5, "float16", "K"),
        (16, 1000, 12, "bfloat16", "K"),
    ]
    sizes += [(rows, 24, 20, "float32", "N") for rows in (1, 7, 18)]
    calls = [
        Call("gemm_all_reduce", *size[:4], w_along=size[4], impl="remote_stores", seed=i)
        for i, size in enumerate(sizes)
    ]
    check_all(calls, ranks(world_size).run(run, calls))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("world_size", [1, 4])
def test_split_matches_float64(ranks, world_size, operator):
    """Biases; rows that would have to be padded; rows for a rank in two pieces, the second one
    shorter.
    """
    config = CONFIGS[operator](
        block_m=16, block_n=32, block_k=32, num_warps=4, group_m=2, max_programs=3, stagger=0
    )
    calls = [
        Call(operator, 16, 24, 20, bias=True, impl="chunked"),
        Call(operator, 80 * world_size, 24, 20, bias=True, impl="chunked", config=config, seed=4),
        Call(operator, 36, 100, 12, "bfloat16", True, w_along="N", impl="chunked", seed=1),
        Call(operator, 8, 1024, 5, "float16", impl="chunked", seed=2),
        Call(operator, 16, 24, 20, bias=True, impl="chunked", seed=3),
    ]
    check_all(calls, ranks(world_size).run(run, calls))


@pytest.mark.parametrize(
    ("operator", "impl"),
    [*((operator, "chunked") for operator in OPERATORS), ("gemm_all_reduce", "remote_stores")],
)
def test_gradients(ranks, operator, impl):
    call = Call(operator, 8, 12, 6, impl=impl, bias=impl != "remote_stores")
    check_gradients(call, ranks(2).run(differentiate, call))


def _as_graphs(call, turns):
    """Whether calls are right where each rank, in some of them, does what a graph does: all of it,
    and nothing on the host.
    """
    group, random = interlace.group_of(), torch.Generator().manual_seed(dist.get_rank())
    right = []

    def run(key, enqueue, **_):
        output = next(reversed(group.kept.values())).output
        half, turn = output.half, output.turn
        enqueue()
        if torch.rand((), generator=random) < 0.5:
            return True
        output.half, output.turn = half, turn
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group.replays, "run", run)
        for turn in range(turns):
            tensors = call.placed()
            tensors["x"] += turn
            y = call.make(**tensors)
            exact = dataclasses.replace(call, impl="unfused").make(**tensors)
            right.append(torch.allclose(y, exact, atol=1e-4, rtol=1e-4))
    return right


_KEPT = [
    ("gemm_all_to_all", "chunked"),
    ("gemm_all_reduce", "chunked"),
    ("gemm_all_reduce", "remote_stores"),
]


@pytest.mark.parametrize(("operator", "impl"), _KEPT)
def test_ranks_that_replay_graphs_in_some_calls(ranks, operator, impl):
    """The two sets of slots go on in turn."""
    assert ranks(2).run(_as_graphs, Call(operator, 8, 1024, 4, impl=impl), 12) == [[True] * 12] * 2


def _memory_of_many_sizes(impl):
    """Sizes come and go; what is kept is bounded, and ``release`` gives it back."""
    group, config = (
        interlace.group_of(),
        interlace.GemmAllReduceConfig(block_m=16, block_n=512, block_k=16),
    )
    group.release()  # what other tests have kept
    for size in range(1, 11):
        Call("gemm_all_reduce", 4, 512 * size, 4, impl=impl, config=config).make()
    kept = len(group.kept)
    # Nobody has asked for an output of these sizes: the ones that are used stay. Ranks do not ask
    # one another about each of them.
    unasked = []
    with (
        mock.patch.object(group, "exchange", wraps=group.exchange) as exchange,
        mock.patch.object(outputs, "_REPEATED_ROWS", 4),
    ):
        for size in (11, 10, *range(12, 28)):
            w = torch.ones(512 * size, 4)
            operands = Operands(torch.ones(4, 4), w, None, None, None, w.dtype)
            y = _run("gemm_all_reduce", impl, operands, config, group, dist.group.WORLD, False)
            unasked.append(y is None)
    interlace.synchronize()
    group.release()
    return kept, unasked, exchange.call_count, len(group.kept)


@pytest.mark.parametrize("impl", CARRIED)
def test_memory_is_bounded(ranks, impl):
    unasked = [True, False, *[True] * 16]
    assert ranks(2).run(_memory_of_many_sizes, impl) == [(4, unasked, 6, 0)] * 2


def _outputs_unasked(impl):
    """Whether there is a result of so many rows without having been asked for, by rows."""
    process_group = dist.new_group()
    return {
        rows: _sum_of(rows, impl, process_group, False) is not None for rows in (63, 64, 65, 128)
    }


@pytest.mark.parametrize("impl", CARRIED)
def test_outputs_are_for_rows_that_come_again(ranks, impl):
    """A prompt's length seldom does."""
    found = {63: False, 64: True, 65: False, 128: True}
    assert ranks(2).run(_outputs_unasked, impl) == [found] * 2


def _sum_of(rows, impl, process_group, replace, columns=512):
    """The all-reduce of ones ``[rows, 4] @ [4, columns]`` by ``impl``; None if there is no output
    for it.
    """
    group, config = (
        interlace.group_of(process_group),
        interlace.GemmAllReduceConfig(block_m=16, block_n=512, block_k=16),
    )
    operands = Operands(
        torch.ones(rows, 4), torch.ones(columns, 4), None, None, None, torch.float32
    )
    return _run("gemm_all_reduce", impl, operands, config, group, process_group, replace)


def _run(operator, impl, operands, config, group, process_group, replace):
    """A call of an implementation, asked for by name (``replace``) or not."""
    declaration = operator_named(operator)
    splits = (None,) * len(declaration.split_names)
    call = GemmCall(
        operator=declaration,
        operands=operands,
        rows=declaration.plan_rows(operands.rows, splits, group),
        gather=False,
        group=group,
        group_name=process_group.group_name,
        config=config,
        configs={},
        mark=0,
        impl=impl if replace else "auto",
    )
    return call.group.perform(declaration.implementation(impl).run(call))


def _captured_on_one_rank():
    """Four outputs, the oldest captured in a CUDA graph of rank 1 alone, which replays it while
    rank 0 makes the call: which are kept when two more sizes come.
    """
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    for size in range(1, 5):
        _sum_of(4, "remote_stores", process_group, True, 512 * size)
    oldest = next(iter(group.kept))
    group.kept[oldest].output.captured = dist.get_rank() == 1
    if dist.get_rank() == 0:
        group.kept.move_to_end(oldest)
    for size in (5, 6):
        y = _sum_of(4, "remote_stores", process_group, True, 512 * size)
    return sorted(key[2][-1] // 512 for key in group.kept), float(y.max())


def test_ranks_give_up_the_same_output(ranks):
    """A rank that gave up another one than its peers would map it again alone in a later call."""
    assert ranks(2).run(_captured_on_one_rank) == [([1, 3, 4, 5, 6], 8.0)] * 2


def _without_driver(impl, replace):
    """Rank 1 cannot map memory, or let copies wait: what comes of it, and of the same call once it
    can.
    """
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    interlace.set_deadline(90.0, process_group)

    def refuse(*_):
        raise BackendError("the driver refuses.")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(group.memory.heap, "remap", refuse)
            patch.setattr(triggered, "TransferQueue", refuse)
        try:
            outcome = _sum_of(4, impl, process_group, replace)
        except BackendError as error:
            outcome = str(error)
    again = _sum_of(4, impl, process_group, replace)
    return outcome, None if again is None else float(again.max()), group.broken


@pytest.mark.parametrize("impl", CARRIED)
def test_ranks_fall_back_together(ranks, impl):
    """One rank's driver refuses. No rank was asked for this implementation, so all take another
    one, now and later.
    """
    assert ranks(2).run(_without_driver, impl, False) == [(None, None, False)] * 2


@pytest.mark.parametrize("impl", CARRIED)
def test_ranks_fail_together(ranks, impl):
    """Where the implementation was asked for, every rank is told which one cannot, and the next
    call works.
    """
    told, refusing = ranks(2).run(_without_driver, impl, True)
    assert told[0].endswith("must succeed on every rank; got on rank 1: the driver refuses.")
    assert refusing[0] == "the driver refuses."
    assert told[1:] == refusing[1:] == (8.0, False)


@pytest.mark.parametrize(
    ("call", "requirement"),
    [
        (Call("gemm_reduce_scatter", 7, 8, 4, impl="pushed"), "rows that are split evenly"),
        (Call("gemm_all_reduce", 8, 8, 4, bias=True, impl="remote_stores"), "no bias"),
        (
            Call(
                "gemm_all_reduce",
                8,
                8,
                4,
                "float8",
                True,
                out_dtype="float16",
                impl="remote_stores",
            ),
            "a result of the dtype that comes by default and no bias",
        ),
        (
            Call("gemm_reduce_scatter", 7, 8, 4, "float8", out_dtype="float32", impl="chunked"),
            "a result of the dtype that comes by default",
        ),
        (
            Call("all_gather_gemm", 7, 8, 4, "float16", out_dtype="float32", impl="chunked"),
            "a result of the dtype that comes by default",
        ),
        (
            Call("all_gather_gemm", 7, 8, 4, "float8", impl="pushed"),
            "float16, bfloat16 or float32 operands",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(ranks, call, requirement):
    for kind, message in ranks(2).run(_refused, call):
        assert kind == "ArgumentError"
        assert (
            message == f"{call.operator}: impl={call.impl!r} must have {requirement}. "
            "Take impl='auto', 'fused' or 'unfused'."
        )


def _refused(call):
    dist.barrier()
    return error_of(call.make)[:2]


def _without_symmetric_memory():
    """Rank 1 gets none of PyTorch's: what comes of a stock pair that was, and was not, asked for,
    how often it was tried, and how often it came to PyTorch's rendezvous, which waits for all.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    process_group, tries, met = dist.new_group(), [], []
    group = interlace.group_of(process_group)

    def empty(*size, dtype, device):
        tries.append(size)
        if dist.get_rank():
            raise RuntimeError("no memory can be shared here")
        return torch.empty(*size, dtype=dtype, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "empty", empty)
        patch.setattr(symmetric_memory, "rendezvous", lambda *_: met.append(True))
        results = [_sum_of(8, "symm_mem", process_group, False) for _ in range(2)]
        error = error_of(_sum_of, 8, "symm_mem", process_group, True)
    group.release()
    return results, len(tries), len(met), error


def test_stock_pairs_without_their_memory_on_one_rank(ranks):
    """Every rank goes on with another implementation, and does not try again unless asked."""
    for rank, (results, tries, met, error) in enumerate(ranks(2).run(_without_symmetric_memory)):
        assert results == [None, None]
        assert met == 0
        assert tries == 2
        assert error[0] == "BackendError"
        assert "no memory can be shared here" in error[1]
        assert ("rank 1" in error[1]) == (rank == 0)


def _shots_by_size(rows_of_calls):
    """What PyTorch's all-reduces are asked for, and the results' least and largest elements."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    process_group, asked = dist.new_group(), []
    group = interlace.group_of(process_group)

    def reduced(shots):
        def reduce(part, operation, name, y):
            asked.append(shots)
            dist.all_reduce(y.copy_(part), group=process_group)

        return reduce

    with pytest.MonkeyPatch.context() as patch:
        # PyTorch's symmetric memory is of GPUs.
        patch.setattr(symmetric_memory, "empty", torch.empty)
        patch.setattr(symmetric_memory, "rendezvous", lambda *_: None)
        for shots in ("one_shot", "two_shot"):
            patch.setattr(torch.ops.symm_mem, f"{shots}_all_reduce_out", reduced(shots))
        results = [_sum_of(rows, "symm_mem", process_group, True) for rows in rows_of_calls]
    group.release()
    return asked, [(float(y.min()), float(y.max())) for y in results]


def test_symm_mem_takes_one_shot_where_a_rank_reads_little(ranks):
    """Rows are of 2 KiB, and a rank reads those of its peer, at most 2 MiB of them in one shot."""
    for asked, results in ranks(2).run(_shots_by_size, (8, 1024, 1025)):
        assert asked == ["one_shot", "one_shot", "two_shot"]
        assert results == [(8.0, 8.0)] * 3


def _without_memory_of_async_tp():
    """Rank 1 has no memory at first: what comes of asynchronous tensor parallelism that was, and
    was not, asked for; what it is with memory; and how often PyTorch's own kernel was called.
    """
    process_group, called, asked = dist.new_group(), [], []
    group, full = interlace.group_of(process_group), True

    def has_memory(nbytes, device):
        asked.append(nbytes)
        return not (full and dist.get_rank() == 1)

    operands = Operands(torch.ones(4, 8), torch.ones(2, 8), None, None, None, torch.float32)
    arguments = "gemm_reduce_scatter", "async_tp", operands, None, group, process_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock, "has_memory", has_memory)
        patch.setattr(stock, "own_kernel", lambda *_: lambda *_: called.append(True) or operands.x)
        errors = [error_of(_run, *arguments, is_explicit)[:2] for is_explicit in (False, True)]
        calls, full = len(called), False
        again = [_run(*arguments, False) for _ in range(2)]
    return errors, calls, [y is operands.x for y in again], asked


def test_asynchronous_tensor_parallelism_without_memory_on_one_rank(ranks):
    """PyTorch's rendezvous would wait without a limit for the rank that has none."""
    for errors, calls, again, asked in ranks(2).run(_without_memory_of_async_tp):
        assert (calls, again) == (0, [True, True])
        for kind, message in errors:  # by which a free call goes on with another implementation
            assert kind == "WorkspaceError"
            assert "must have 352 bytes of GPU memory on every rank" in message
        assert asked == [352] * 3, "not asked again once all ranks have had it"


def _without_a_workspace():
    """A rank has no memory for the kernel: sums by ``"auto"``, and how often the kernel was tried;
    what comes of it by its name.
    """
    process_group, tries = dist.new_group(), []
    x, w = torch.ones(64, 8), torch.ones(16, 8)
    fused = operator_named("gemm_reduce_scatter").implementation("fused")

    def no_memory(call):
        tries.append(call)
        raise interlace.WorkspaceError("a rank has no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fused.__dict__, "run", no_memory)
        sums = [interlace.gemm_reduce_scatter(x, w, group=process_group).sum() for _ in range(2)]
        tried = len(tries)
        error = error_of(interlace.gemm_reduce_scatter, x, w, group=process_group, impl="fused")
    return [float(each) for each in sums], tried, error[0]


def test_another_implementation_runs_where_a_rank_has_no_memory_for_the_fastest(ranks):
    found = ranks(2).run(_without_a_workspace)
    assert found == [([32 * 16 * 2 * 8.0] * 2, 1, "WorkspaceError")] * 2
