"""Calls that come again as CUDA graphs. Run with ``-m gpu``."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
import interlace.operators  # registers torch.ops.interlace
import interlace.optim
from interlace.gemm import dispatch, schema
from interlace.operators.gemm_all_reduce import normed
from tests.entered import entered

pytestmark = pytest.mark.gpu

ROWS, COLUMNS, INNER = 512, 1024, 1024


@contextlib.contextmanager
def _not_played() -> Iterator[None]:
    """Let calls of single kernels, too, be found by their form and become graphs."""
    with (
        mock.patch.object(schema, "may_be_played", return_value=False),
        mock.patch.object(normed, "may_be_played", return_value=False),
    ):
        yield


@_not_played()
def _calls(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    """Operators that enqueue several things: products in parts, gathers, outputs that are kept; and
    single kernels.
    """
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    found = [interlace.gemm_reduce_scatter(x, w, bias, impl=impl) for impl in ("chunked", "fused")]
    for impl in ("chunked", "fused", "pushed"):
        found += interlace.all_gather_gemm(mine, w, bias, impl=impl, return_gathered=True)
    found += [
        interlace.gemm_all_reduce(x, w, bias, impl="fused"),
        interlace.gemm_all_to_all(x, w, bias, impl="fused"),
    ]
    found.append(interlace.gemv_all_reduce(mine[:2], w, bias, impl="gemv"))
    for impl in ("fused", "pushed"):
        y, total, _ = interlace.gemm_all_reduce(mine[:4], w, bias, norm="rms", impl=impl)
        found += [y, total]
    found += [interlace.gemm_all_reduce(x, w, impl=impl) for impl in ("remote_stores", "chunked")]
    return [*found, interlace.gemm_all_to_all(x, w, impl="chunked")]


def _operands(seed: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(10 * seed + dist.get_rank())
    shapes = ((rows, INNER), (COLUMNS, INNER), (COLUMNS,))
    x, w, bias = (
        torch.randn(*shape, generator=generator, device="cuda").bfloat16() for shape in shapes
    )
    return x, w, bias


def _fresh_group() -> interlace.comm.Group:
    """The default group without what earlier calls have left there."""
    group = interlace.group_of()
    group.release()
    torch.cuda.empty_cache()
    return group


def _same(turns: int) -> tuple[int, int]:
    """Elements that differ from calls without graphs, with new values in the same memory, and late
    ranks; graphs at the end.
    """
    replays = _fresh_group().replays
    places = _operands(0)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(turns):
        for place, new in zip(places, _operands(turn), strict=True):
            place.copy_(new)
        if (turn + dist.get_rank()) % 3 == 0:
            torch.cuda._sleep(500_000)
        found = _calls(*places)
        enabled, replays.is_enabled = replays.is_enabled, False
        wanted = _calls(*places)
        replays.is_enabled = enabled
        wrong += sum((each != other).sum() for each, other in zip(found, wanted, strict=True))
        del found, wanted
    interlace.synchronize()
    return int(wrong), len(replays)


def _elsewhere(rows: int, turns: int, times: int) -> tuple[int, list[int]]:
    """Elements that differ from calls without graphs, of calls whose operands lie elsewhere in each
    turn, several times in a turn, and late ranks; how many calls took the long way by turn.
    """
    replays = _fresh_group().replays
    wrong, kept, long_ways = torch.zeros((), dtype=torch.int64, device="cuda"), [], []
    for turn in range(turns):
        operands = _operands(turn, rows)
        kept.append(operands)  # so that no others come to lie there
        enabled, replays.is_enabled = replays.is_enabled, False
        wanted = _calls(*operands)
        replays.is_enabled = enabled
        ways = mock.patch.object(dispatch, "effective_impl", wraps=dispatch.effective_impl)
        with ways as long_way:
            for time in range(times):
                if (turn + time + dist.get_rank()) % 3 == 0:
                    torch.cuda._sleep(500_000)
                found = _calls(*operands)
                pairs = zip(found, wanted, strict=True)
                wrong += sum((each != other).sum() for each, other in pairs)
        long_ways.append(long_way.call_count)
    interlace.synchronize()
    return int(wrong), long_ways


def _together() -> tuple[list[str], int]:
    """What differs, and the number of graphs: as :func:`_same` within a graph of the program's own,
    on another stream, and after the workspace has grown and gone.
    """
    group, wrong, turns = _fresh_group(), [], itertools.count()

    def compare(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        torch.cuda.synchronize()
        turn = next(turns)
        for place, (each, other) in enumerate(zip(found, wanted, strict=True)):
            rows = (each != other).flatten(0, -2).any(1).nonzero().flatten().tolist()
            if rows:
                # Enough to tell a part that never came, NaN, from one that another call wrote.
                sample = each.flatten(0, -2)[rows[0], :4].tolist()
                wrong.append(
                    f"comparison {turn}, result {place} of {list(each.shape)}: {len(rows)} rows "
                    f"from {rows[0]} to {rows[-1]}, {int(each.isnan().sum())} NaN, {sample}"
                )

    operands = _operands(1)
    wanted = [each.clone() for each in _calls(*operands)]
    for _ in range(12):
        compare(_calls(*operands), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _calls(*operands)
    for _ in range(3):
        graph.replay()
        compare(captured, wanted)
        compare(_calls(*operands), wanted)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            compare(_calls(*operands), wanted)
    torch.cuda.current_stream().wait_stream(stream)
    del graph, captured
    larger = _operands(2, 8 * ROWS)
    before = len(group.replays)
    for _ in range(3):
        _calls(*larger)
        compare(_calls(*operands), wanted)
    group.release()
    assert len(group.replays) == 0
    for _ in range(3):
        compare(_calls(*operands), wanted)
    return wrong, before


def _moving(calls: int) -> tuple[int, int, int]:
    """Calls with x in more places than there may be graphs: how many there are; what as many calls
    add to them, and to memory.
    """
    group, operands = _fresh_group(), _operands(3)
    places = [torch.empty(1 << 20, device="cuda", dtype=torch.bfloat16) for _ in range(100)]
    wanted = _calls(*operands)
    graphs, held = [], []
    for _ in range(2):
        for turn in range(calls):
            x = places[turn % len(places)][: ROWS * INNER].view(ROWS, INNER)
            x.copy_(operands[0])
            results = _calls(x, *operands[1:])
        graphs.append(len(group.replays))
        held.append(torch.cuda.memory_reserved())
    interlace.synchronize()
    assert all(torch.equal(each, other) for each, other in zip(results, wanted, strict=True))
    return graphs[0], graphs[1] - graphs[0], held[1] - held[0]


def _returned(turns: int) -> tuple[list[int], int]:
    """Results that are wrong after torch has returned all memory to the driver and has got other
    memory, and how many results have come to lie where they lay before.
    """
    _fresh_group()
    operands = _operands(4)
    wanted = [each.clone() for each in _calls(*operands)]
    wrong: list[int] = []
    places: set[int] = set()
    again = 0
    for _ in range(turns):
        for _ in range(12):
            found = _calls(*operands)
        wrong += [
            place
            for place, (each, other) in enumerate(zip(found, wanted, strict=True))
            if not torch.equal(each, other)
        ]
        addresses = {each.data_ptr() for each in found}
        again += len(addresses & places)
        places |= addresses
        torch.cuda.synchronize()
        del found
        torch.cuda.empty_cache()
    interlace.synchronize()
    return wrong, again


_MOST_FUNCTIONS = 90
"""Functions of Python that a call which comes again may enter; without recalling it are 200."""
_SETTLED = 40
"""Calls after which no more is a graph for the first time, and none is recorded for a while."""


def _host(impls: dict[str, tuple[str, ...]]) -> dict[str, int]:
    """How many functions of Python a call enters that has come before with the same memory."""
    _fresh_group()
    x, w, bias = _operands(5)
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    counts = {}
    for name, words in impls.items():
        operands = (mine if name == "all_gather_gemm" else x, w, bias)
        for impl in words:
            given = operands[:2] if impl == "remote_stores" else operands
            rows = given[0][:2] if impl == "gemv" else given[0]

            def call(name: str = name, impl: str = impl, given: Any = (rows, *given[1:])) -> Any:
                return getattr(interlace, name)(*given, impl=impl)

            for _ in range(_SETTLED):
                found = call()
            found, files = entered(call)
            counts[f"{name} {impl}"] = len(files)
            interlace.group_of().replays.forget()
            if not torch.equal(found, call()):
                counts[f"{name} {impl}, wrong"] = len(files)
    for tokens in (1, 16, 64):
        norm = torch.ones_like(w[:, 0])
        residual = torch.zeros_like(x[:tokens, :1] @ w[:, :1].T)
        given = x[:tokens], w, bias

        def call_normed(given: Any = given, norm: Any = norm, residual: Any = residual) -> Any:
            return interlace.gemm_all_reduce(*given, norm_weight=norm, residual=residual)

        for _ in range(_SETTLED):
            call_normed()
        found, files = entered(call_normed)
        counts[f"norm, {tokens} tokens"] = len(files)
        interlace.group_of().replays.forget()
        if not all(map(torch.equal, found, call_normed())):
            counts[f"norm, {tokens} tokens, wrong"] = len(files)
    interlace.synchronize()
    return counts


_IMPLS = {
    "all_gather_gemm": ("fused", "chunked", "pushed"),
    "gemm_all_reduce": ("fused", "chunked", "pushed", "remote_stores", "gemv"),
    "gemm_all_to_all": ("fused", "chunked", "pushed"),
    "gemm_reduce_scatter": ("fused", "chunked", "pushed"),
}


@pytest.mark.parametrize("rows", [16, ROWS])
def test_operands_elsewhere(ranks: Any, world_size: int, rows: int) -> None:
    """One call of a form is enough to know the others, the first time that they come and later."""
    for wrong, long_ways in ranks(world_size).run(_elsewhere, rows, 4, 13):
        assert wrong == 0
        assert long_ways[0] > 0
        assert not any(long_ways[2:]), long_ways


def test_a_call_that_comes_again_costs_the_host_little(ranks: Any, world_size: int) -> None:
    for counts in ranks(world_size).run(_host, _IMPLS):
        assert not [name for name in counts if name.endswith("wrong")]
        assert len(counts) == sum(map(len, _IMPLS.values())) + 3
        assert max(counts.values()) <= _MOST_FUNCTIONS, counts


_MOST_FUNCTIONS_OF_TABLES = 300
"""The same of a forward and a backward pass of embedding tables, whatever their number."""


def _tables(count: int, steps: int, bags: int) -> tuple[list[str], list[int], int]:
    """What differs between training with graphs and without; functions of Python that the last
    steps enter; graphs at the end.
    """
    group, rank, ranks = _fresh_group(), dist.get_rank(), dist.get_world_size()
    lookups = 3 * bags * count
    trained, counts = [], []
    for enabled in (True, False):
        generator = torch.Generator("cuda").manual_seed(rank)
        weights = [
            torch.randn(40 + table, 16, device="cuda", generator=generator).requires_grad_()
            for table in range(count)
        ]
        states = [torch.zeros(len(weight), device="cuda") for weight in weights]
        update = interlace.optim.RowWiseAdagrad(learning_rate=0.1, epsilon=1e-8, states=states)
        indices = torch.zeros(lookups, dtype=torch.int64, device="cuda")
        offsets = torch.arange(count * bags + 1, device="cuda") * 3
        grad = torch.zeros(bags // ranks, ranks * count * 16, device="cuda")
        forward = functools.partial(
            interlace.embedding_all_to_all,
            weights, indices, offsets, gradient=update, name=f"replayed {count}",
        )  # fmt: skip

        def step(forward: Any = forward, grad: torch.Tensor = grad) -> torch.Tensor:
            y: torch.Tensor = forward()
            y.backward(grad)
            return y

        before, group.replays.is_enabled = group.replays.is_enabled, enabled
        outputs = []
        for _ in range(steps):
            indices.copy_(torch.randint(0, 40, (lookups,), device="cuda", generator=generator))
            grad.copy_(torch.randn(grad.shape, device="cuda", generator=generator))
            y, files = entered(step)
            with torch.no_grad():
                z = forward()
            outputs += [y.detach().clone(), z.clone()]
            if enabled:
                counts.append(len(files))
        group.replays.is_enabled = before
        trained.append([*outputs, *weights, *states])
    wrong = [
        f"tensor {place}"
        for place, (one, other) in enumerate(zip(*trained, strict=True))
        if not torch.equal(one, other)
    ]
    return wrong, counts, len(group.replays)


def test_tables_are_trained_by_graphs_to_the_same_bits(ranks: Any, world_size: int) -> None:
    last = []
    for count in (3, 30):
        for wrong, counts, graphs in ranks(world_size).run(_tables, count, 12, 8 * world_size):
            assert wrong == []
            assert graphs >= 3
            last.append(min(counts))
    assert max(last) <= _MOST_FUNCTIONS_OF_TABLES, last


def _experts(steps: int) -> tuple[list[str], int, int]:
    """What differs between experts that train and decode with graphs and without; functions of
    Python that the last step enters; graphs at the end.
    """
    group, rank, ranks = _fresh_group(), dist.get_rank(), dist.get_world_size()
    tokens, hidden, inner, count = 64, 256, 128, 4 * dist.get_world_size()
    trained, functions = [], 0
    for enabled in (True, False):
        generator = torch.Generator("cuda").manual_seed(rank)

        def random(*shape: int, source: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=source).bfloat16() * 0.1

        x, grad = random(tokens, hidden).requires_grad_(), random(tokens, hidden)
        w_in = random(count // ranks, inner, 2, hidden).requires_grad_()
        w_out = random(count // ranks, hidden, inner).requires_grad_()
        weights, experts = torch.rand(tokens, count, device="cuda", generator=generator).topk(2)

        def step(operands: Any = (x, experts, weights, w_in, w_out), grad: Any = grad) -> Any:
            y = interlace.mixture_of_experts(*operands)
            y.backward(grad)
            return y

        before, group.replays.is_enabled = group.replays.is_enabled, enabled
        found = []
        for _ in range(steps):
            with torch.no_grad():
                x.copy_(random(tokens, hidden))
                experts.copy_(
                    torch.rand(x.shape[0], count, device="cuda", generator=generator)
                    .topk(2)
                    .indices
                )
            y, files = entered(step)
            with torch.no_grad():
                few = interlace.mixture_of_experts(
                    x[:8], experts[:8], weights[:8], w_in, w_out, impl="decode"
                )
            found += [y.detach().cpu(), few.cpu()]  # no memory of the GPU, which is to be the same
            for leaf in (x, w_in, w_out):
                assert leaf.grad is not None
                found.append(leaf.grad.cpu())
                leaf.grad = None
            if enabled:
                functions = len(files)
        group.replays.is_enabled = before
        trained.append(found)
    wrong = [
        f"step {place // 5}, tensor {place % 5}"
        for place, (one, other) in enumerate(zip(*trained, strict=True))
        if not torch.equal(one, other)
    ]
    return wrong, functions, len(group.replays)


def test_experts_train_and_decode_by_graphs_to_the_same_bits(ranks: Any, world_size: int) -> None:
    for wrong, functions, graphs in ranks(world_size).run(_experts, 12):
        assert wrong == []
        assert graphs >= 3
        assert functions <= _MOST_FUNCTIONS_OF_TABLES


def _choices() -> tuple[dict[str, int], list[str]]:
    """The same of ``linear_top_k``, by the kernel and by the stock pair; what differs from calls
    without graphs, with new values in the same memory.
    """
    replays = _fresh_group().replays
    x, w, bias = _operands(8, 8)
    counts, wrong = {}, []
    for impl, k, shape in itertools.product(("fused", "nccl"), (1, 5), ((8, INNER), (2, 4, INNER))):
        name = f"{impl}, k = {k}, x {list(shape)}"
        rows = x.view(shape)
        call = functools.partial(interlace.linear_top_k, rows, w, k, bias, impl=impl)
        for turn in range(14):
            x.copy_(_operands(8 + turn, 8)[0])
            dist.broadcast(x, 0)
            found, files = entered(call)
            enabled, replays.is_enabled = replays.is_enabled, False
            remembered, replays._remembered = replays._remembered, {}
            forms, replays._alike = replays._alike, {}
            wanted = call()
            replays.is_enabled, replays._remembered, replays._alike = enabled, remembered, forms
            for one, other in zip(found, wanted, strict=True):
                if not torch.equal(one, other):
                    wrong.append(f"{name}, call {turn}")
                if one.data_ptr() == other.data_ptr():
                    wrong.append(f"{name}, memory of call {turn}")
            del found, wanted, one, other
        counts[name] = len([file for file in files if "interlace" in file])
    interlace.synchronize()
    return counts, wrong


def test_a_choice_that_comes_again_costs_the_host_little(ranks: Any, world_size: int) -> None:
    for counts, wrong in ranks(world_size).run(_choices):
        assert wrong == []
        assert len(counts) == 8
        assert max(counts.values()) <= _MOST_FUNCTIONS, counts


def _long_way(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A call's result, made the long way."""
    interlace.group_of().replays.forget()
    return interlace.gemm_all_reduce(x, w)


def _pairs() -> dict[str, int]:
    """The same of stock pairs, which are no graphs; ``wrong`` behind the name where a result is."""
    _fresh_group()
    x, w, _ = _operands(7)
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    counts = {}
    for name in ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "gemm_all_to_all"):
        operand = mine if name == "all_gather_gemm" else x
        operator = getattr(interlace, name)
        call = functools.partial(operator, operand, w, impl="nccl")
        for _ in range(_SETTLED):
            wanted = call()
        found, files = entered(call)
        ours = [file for file in files if "interlace" in file]
        counts[name if torch.equal(found, wanted) else f"{name}, wrong"] = len(ours)
        with torch.enable_grad():
            weight = w.clone().requires_grad_()
            assert operator(operand, weight, impl="nccl").requires_grad
    interlace.synchronize()
    return counts


def test_a_pair_that_comes_again_costs_the_host_little(ranks: Any, world_size: int) -> None:
    for counts in ranks(world_size).run(_pairs):
        assert not [name for name in counts if name.endswith("wrong")]
        assert max(counts.values()) <= _MOST_FUNCTIONS, counts


def _changes(as_what: str) -> list[str]:
    """What is wrong where a program changes how the same call is to run, which is a graph, or is
    played.
    """
    is_graph = as_what == "graphs"
    with _not_played() if is_graph else contextlib.nullcontext():
        wrong = _found_in_changes()
        if is_graph and not len(interlace.group_of().replays):
            wrong.append("no graph")
    return wrong


def _found_in_changes() -> list[str]:
    """What is wrong in one series of such calls."""
    _, wrong = _fresh_group(), []
    x, w, _ = _operands(6)
    few = x[:4]

    def compare(title: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if not torch.equal(found, wanted):
            wrong.append(title)

    def settle() -> torch.Tensor:
        for _ in range(12):
            y = interlace.gemm_all_reduce(few, w)
        return y

    first = settle().clone()
    with interlace.batch_invariant():
        compare("batch-invariant", settle(), interlace.gemm_all_reduce(x, w)[:4])
    compare("by speed again", settle(), first)
    with torch.profiler.profile() as profile:
        interlace.gemm_all_reduce(few, w)
    if not any(
        each.key.startswith("interlace: gemm_all_reduce") for each in profile.key_averages()
    ):
        wrong.append("no range in the profile")
    # The same memory seen in another way is another call.
    compare("another layout", interlace.gemm_all_reduce(few, w.T), _long_way(few, w.T))
    weight = w.clone().requires_grad_()
    for _ in range(6):
        y = interlace.gemm_all_reduce(few, weight)
        weight.grad = None
        y.sum().backward()
    compare("with autograd", y.detach(), first)
    wanted = few.sum(0).expand_as(weight)
    if not torch.allclose(weight.grad.float(), wanted.float(), rtol=0.05, atol=0.5):
        wrong.append("gradient")
    with torch.no_grad():
        y = interlace.gemm_all_reduce(few, weight)
    if y.requires_grad:
        wrong.append("gradient within no_grad")
    interlace.synchronize()
    return wrong


@pytest.mark.parametrize("as_what", ["graphs", "tapes"])
def test_a_call_that_is_to_run_in_another_way_is_not_recalled(
    ranks: Any, world_size: int, as_what: str
) -> None:
    for wrong in ranks(world_size).run(_changes, as_what):
        assert wrong == []


def test_graphs_compute_what_calls_do(ranks: Any, world_size: int) -> None:
    for wrong, graphs in ranks(world_size).run(_same, 30):
        assert wrong == 0
        assert graphs >= 11, "one for each call"


def test_beside_other_graphs_streams_and_workspaces(ranks: Any, world_size: int) -> None:
    for wrong, graphs in ranks(world_size).run(_together):
        assert wrong == []
        assert graphs >= 11, "one for each call"


def test_memory_that_torch_returns_and_gets_again(ranks: Any, world_size: int) -> None:
    """A captured copy between GPUs reaches the pages that lay at its address when it was captured.

    Graphs were replayed for other memory at the same address, so copies went to pages that other
    tensors had by then: wrong results, or a peer's signals overwritten and waited for in vain.
    """
    for wrong, again in ranks(world_size).run(_returned, 12):
        assert wrong == []
        assert again, "no memory came again; the test must make it"


def test_a_program_that_never_settles(ranks: Any, world_size: int, own_gpus: None) -> None:
    for graphs, more, grown in ranks(world_size).run(_moving, 1600):
        assert 200 < graphs <= 256
        assert more <= 256 - graphs
        assert grown == 0
