"""Operators after very many calls: numbers of calls that come again, and what calls long ago left
behind.

Nobody makes 16 million calls in a test: the cells that count them are set by hand.
"""

import ctypes
import dataclasses
import functools
import time

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import EmbeddingAllToAllConfig, Faults, GemvAllReduceConfig
from interlace.comm import MAX_PROGRAMS, group_of
from interlace.gemm.kernels import layout as gemm_layout
from interlace.operators.embedding_all_to_all import layout as embedding_layout
from interlace.operators.mixture_of_experts import layout
from interlace.testing.cases import IMPLEMENTATIONS, every_case
from interlace.testing.cases.outputs import KERNEL, KernelCase
from tests.operators.mixture_of_experts.calls import Call as MoeCall
from tests.operators.mixture_of_experts.calls import run_one as run_moe

_EPOCHS = 1 << 24
_WITHOUT_COUNTERS = ("all_to_all_gemm", "gemv_all_reduce", "gemm_all_reduce_norm", "linear_top_k")
# The gradients of the other operators are calls of operators that are tested here as well.
_WITH_BACKWARD_KERNELS = ("embedding_all_to_all", "mixture_of_experts")
_CLEARING = (1 << 22) - 2  # the first call in which old signals are cleared
# The last one that is not near the number where they begin again
_LAST_CLEARING = 3 * (1 << 22) - 2


def _signals(group, block, count, kind=ctypes.c_int32):
    """This rank's signals or words, as they are now."""
    return (kind * count).from_address(block.address + group.rank * group.stride)


def _jump(group, epoch):
    """Let the next call of every operator be of ``epoch``, as if all calls before had been made."""
    group.synchronize()
    dist.barrier()
    for name, workspace in group.memory.workspaces.items():
        workspace.epochs.fill_(epoch)
        workspace.side_epochs.fill_(epoch)
        before = _EPOCHS - 2 if epoch == 1 else (epoch - 1) % _EPOCHS
        workspace.notes[0] = before
        signals = _signals(group, workspace.signals, gemm_layout.COUNTER)
        signals[gemm_layout.DONE : gemm_layout.GRANTS] = [before] * (
            gemm_layout.GRANTS - gemm_layout.DONE
        )
        if name == "embedding_all_to_all":
            # The call before, of the other parity, would have cleared the tickets of this one.
            tickets = embedding_layout.TICKETS
            _signals(group, workspace.signals, tickets + 2)[tickets : tickets + 2] = [0, 0]
    dist.barrier()


def _reduce_scatter(rows, inner, columns, rank):
    generator = torch.Generator().manual_seed(rank)
    x, w = (
        torch.randn(rows, inner, generator=generator),
        torch.randn(columns, inner, generator=generator),
    )
    return lambda factor: interlace.gemm_reduce_scatter(factor * x, w, impl="fused")


def _after_many_calls(first, second, again):
    """A large call at an epoch, and another, ``again``, when the same number, or one near it, has
    come again.

    Meanwhile only small calls were made, which set few signals. Rank 1 is late in the last call, so
    a signal of the first call would be taken for one of the last.
    """
    rank, group = dist.get_rank(), group_of()
    group.release()  # signals of other tests may be of the same numbers
    sizes = {"tiny": (2, 16, 16), "a": (32, 16, 64), "b": (32, 32, 64)}
    calls = {name: _reduce_scatter(*sizes_, rank) for name, sizes_ in sizes.items()}
    expected = calls[again](2)
    _jump(group, first)
    calls["a"](1)
    _jump(group, _CLEARING)
    calls["tiny"](1)
    _jump(group, second)
    calls["tiny"](1)
    with interlace.inject(Faults(seed=rank, max_delay_s=0.1 if rank == 1 else 0.0)):
        y = calls[again](2)
    group.release()
    return torch.allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("second", "again"),
    [
        (5000, "a"),
        (4997, "a"),
        (5000, "b"),
        (_EPOCHS + 5000, "b"),
        (_EPOCHS + 1001, "b"),
        (2**31 - 2, "a"),
    ],
)
def test_a_signal_of_long_ago_does_not_pass_for_a_new_one(ranks, second, again):
    """The same mark and number after all numbers have been used; another mark; cells that never
    wrapped, as they once did.
    """
    assert ranks(2).run(_after_many_calls, 5001, second, again) == [True, True]


def _operators(rank):
    """``name: (a large call, a small one of the same memory)``."""
    generator = torch.Generator().manual_seed(rank)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    def gemv(protocol, dtype):
        config = GemvAllReduceConfig(protocol, block_n=4, block_k=16)
        return lambda rows: interlace.gemv_all_reduce(
            random(2, 16).to(dtype), random(rows, 16).to(dtype), impl="gemv", config=config
        )

    def embedding(config, backward):
        def call(rows):
            tables = [random(9, rows // 2).requires_grad_(backward)] * (1 if rows < 8 else 4)
            lookups = 4 * len(tables)
            indices, offsets = torch.zeros(lookups, dtype=torch.int64), torch.arange(lookups + 1)
            y = interlace.embedding_all_to_all(
                tables, indices, offsets, config=config, name=f"{rows}", batch_size=4
            )
            if backward:
                y.sum().backward()
            return [table.grad for table in tables] if backward else y

        return call

    def product(operator, impl, **more):
        return lambda rows: getattr(interlace, operator)(
            random(2 * rows, 16), random(2 * rows, 16), impl=impl, **more
        )

    def remote_stores(rows):
        return interlace.gemm_all_reduce(
            random(2 * rows, 16), random(1024, 16), impl="remote_stores"
        )

    def moe(rows, impl="fused"):
        call = MoeCall(2, tokens=rows, routing="random" if rows > 4 else "one", impl=impl)
        return run_moe(call, backward=impl == "fused")

    small = EmbeddingAllToAllConfig(
        block_bags=4, max_programs=3, push_programs=2, push_rows=4, update_programs=3,
        block_runs=4,
    )  # fmt: skip
    return {
        "gemm_reduce_scatter": product("gemm_reduce_scatter", "fused"),
        "gemm_reduce_scatter, chunked": product("gemm_reduce_scatter", "chunked"),
        "gemm_all_reduce": product("gemm_all_reduce", "fused"),
        "gemm_all_to_all": product("gemm_all_to_all", "fused"),
        "gemm_all_to_all_columns": product("gemm_all_to_all_columns", "fused"),
        "all_to_all_gemm": lambda rows: interlace.all_to_all_gemm(
            random(2 * rows, 16), random(8, 32), impl="fused"
        ),
        "all_gather_gemm": product("all_gather_gemm", "fused"),
        "remote_stores": remote_stores,
        "one_shot": gemv("one_shot", torch.float32),
        "one_shot, pairs": gemv("one_shot", torch.bfloat16),
        "two_phase": gemv("two_phase", torch.float32),
        "two_phase, pairs": gemv("two_phase", torch.bfloat16),
        "embedding": embedding(small, False),
        "embedding, backward": embedding(small, True),
        "mixture_of_experts": moe,
        "mixture_of_experts, decode": functools.partial(moe, impl="decode"),
    }


def _left_behind(epoch):
    """For each operator: how many signals and words a large call at ``epoch`` leaves to a small
    one, and after clearing.
    """
    left_over = {}
    for name, call in _operators(dist.get_rank()).items():
        group = group_of()
        group.release()
        for rows in (20, 4):  # memory grows before it is looked at
            call(rows)
        counts = []
        for jump, rows in ((epoch, 20), (epoch + 10, 4), (_CLEARING, 4)):
            _jump(group, jump)
            call(rows)
            group.synchronize()
            dist.barrier()
            count = 0
            for workspace in group.memory.workspaces.values():
                words = list(_signals(group, workspace.signals, workspace.signal_count))
                if name.startswith(("one_shot", "two_phase")):
                    words = list(
                        _signals(group, workspace.data, workspace.half_bytes // 4, ctypes.c_int64)
                    )
                count += sum(word & (_EPOCHS - 1) == epoch for word in words)
            counts.append(count)
            dist.barrier()
        left_over[name] = counts
    group_of().release()
    return left_over


def test_every_operator_clears_what_calls_long_ago_left_behind(ranks):
    for left_over in ranks(2).run(_left_behind, 70001):
        for name, (at_once, later, cleared) in left_over.items():
            assert at_once > 0, name
            assert cleared == 0, (
                f"{name}: {cleared} signals of an old call are left, of {later} before"
            )


# Calls where numbers begin again


def _cells(group):
    """The numbers of every workspace's next call and of its next launch beside a kernel."""
    return {
        name: (int(cells.epochs[0]), int(cells.side_epochs[0]))
        for name, cells in group.memory.workspaces.items()
    }


def _move(group, used, epoch):
    """Let the next calls of the workspaces ``used`` be of ``epoch``, or one less, so that parity
    goes on alternating.

    Cells that their calls do not change stay as they are, and so do signals but for those that
    carry a number alone.
    """
    group.synchronize()
    dist.barrier()  # no rank has a call under way
    for name, has_side_stream in used.items():
        workspace = group.memory.workspaces[name]
        first = epoch - ((epoch ^ int(workspace.epochs[0])) & 1)
        workspace.epochs.fill_(first)
        if has_side_stream:
            workspace.side_epochs.fill_(first)
        workspace.notes[0] = first - 1
        signals = _signals(group, workspace.signals, gemm_layout.GRANTS)
        for index in range(gemm_layout.DONE, gemm_layout.GRANTS):
            if 0 < signals[index] < _EPOCHS:
                signals[index] = first - 1
    dist.barrier()  # no rank is in a call before the other one has the same numbers


def _call_until(group, prepared, used, last, moment):
    """What went wrong in calls until every workspace has had the call of number ``last``.

    The first case is called at 1 and 2 and every seventh number from there on, the others in
    between. So none of the calls from 3 to ``2**24 - 2`` that are made here hides what the first
    case has left at 1 and 2 from its calls at 1 and 2. Ranks take turns in being late: each passes
    a number both before the other one and after it.
    """
    first, *other_cases = prepared
    wrong, calls, number = [], 0, _cells(group)[next(iter(used))][0]
    while any((_cells(group)[name][0] - last) % _EPOCHS not in range(1, 64) for name in used):
        assert calls < 40, f"{moment}: {_cells(group)}"
        case = (
            first
            if number % 7 in (1, 2) or not other_cases
            else other_cases[number // 2 % len(other_cases)]
        )
        if number % 2 == group.rank:
            time.sleep(0.02)
        before = _cells(group)
        counts = case.check(calls % 3)
        if any(counts):
            numbers = {
                name: value for name, value in before.items() if value != _cells(group)[name]
            }
            wrong.append(
                f"{moment}, rank {group.rank}, {case.case.label}: {counts} elements are wrong; "
                f"numbers {numbers}"
            )
        calls, number = calls + 1, 1 if number == _EPOCHS - 2 else number + 1
    return wrong


def _fill_counters(group, used):
    """Bring every counter that only grows close to 2**31; how many there were.

    Between two launches they are multiples of ``MAX_PROGRAMS``; all other signals among them have
    marks.
    """
    filled = 0
    for name in used:
        workspace = group.memory.workspaces[name]
        signals = _signals(group, workspace.signals, workspace.signal_count)
        for index in range(layout.FINISHED, workspace.signal_count):
            if 0 < signals[index] < _EPOCHS and signals[index] % MAX_PROGRAMS == 0:
                signals[index] = 2**31 - MAX_PROGRAMS
                filled += 1
    return filled


def _where_numbers_begin_again(operator, impl):
    """What went wrong, how many workspaces were used, and how many counters."""
    group = group_of()
    group.release()  # other tests may have left signals of numbers that come again here
    cases = [
        dataclasses.replace(case, backward=case.backward and operator in _WITH_BACKWARD_KERNELS)
        for case in every_case(group.world_size, [operator])
        if case.impl == impl
    ]
    # The last one sets most signals
    prepared = [case.prepare(seeds=(0, 1, 2)) for case in reversed(cases)]
    for case in prepared:  # memory grows before numbers are set
        case.run()
    used = {
        name: side_number > 1 for name, (number, side_number) in _cells(group).items() if number > 1
    }
    group.synchronize()
    dist.barrier()  # no rank has a call under way
    for name in used:
        group.memory.workspaces[name].reset(group.rank)
    dist.barrier()
    wrong = _call_until(group, prepared, used, 2, "at first")
    _move(group, used, _CLEARING)
    wrong += _call_until(group, prepared, used, _CLEARING + 1, "where signals are cleared")
    # The last clearing before numbers come again: without it, signals of the first calls would pass
    # for new ones.
    _move(group, used, _LAST_CLEARING)
    wrong += _call_until(group, prepared, used, _LAST_CLEARING, "where signals are cleared again")
    _move(group, used, _EPOCHS - 3)
    counters = _fill_counters(group, used)
    wrong += _call_until(group, prepared, used, 2, "where numbers begin again")
    group.release()
    return wrong, len(used), counters


@pytest.mark.parametrize(
    ("operator", "impl"),
    [
        (operator, impl)
        for operator, impls in IMPLEMENTATIONS.items()
        for impl in impls
        # These have no memory of the group of their own, and no numbers in it; ``"gemm"`` calls
        # gemm_all_reduce.
        if impl not in ("unfused", "pooled", "gemm") and operator != KERNEL
    ],
)
def test_calls_where_numbers_begin_again(ranks, operator, impl):
    """Calls around 2**22, where old signals are cleared, and around 2**24; counters that only grow
    pass 2**31.
    """
    for wrong, used, counters in ranks(2).run(_where_numbers_begin_again, operator, impl):
        assert not wrong, "\n".join(wrong)
        assert used
        assert counters or not impl.startswith("fused") or operator in _WITHOUT_COUNTERS


def _where_the_host_counts():
    """Wrong elements of each call of a kernel whose calls the host counts, from number ``2**24 -
    4`` on.

    The last rank signals the first one long before the others: that one is a call ahead of those.
    """
    case = KernelCase(KERNEL, "sum", calls_before=_EPOCHS - 5).prepare(seeds=(0, 1, 2))
    counts = []
    for call in range(6):
        with interlace.inject(Faults(seed=call, max_delay_s=0.1 if dist.get_rank() == 2 else 0.0)):
            counts.append(case.check(call % 3))
    dist.barrier()  # nobody frees what another rank still reads
    return counts


def test_a_host_that_counts_begins_again_as_kernels_do(ranks):
    assert ranks(3).run(_where_the_host_counts) == [[[0]] * 6] * 3
