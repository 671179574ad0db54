"""Products between a sharded sequence and sharded columns: those of one rank that has all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import interlace
from interlace import ArgumentError
from interlace.costs import find_cost
from interlace.gemm import invariance, launch
from interlace.gemm.operands import Operands
from interlace.gemm.sequence import SequenceOperator, flat_ranges, ranges_of
from interlace.operators.all_to_all_gemm import AllToAllGemm
from interlace.operators.gemm_all_to_all_columns import GemmAllToAllColumns
from interlace.operators.gemm_all_to_all_columns import fused as columns_fused
from interlace.operators.gemm_all_to_all_columns.layout import columns_of_tiles
from interlace.testing.cases.sequence import TO_COLUMNS, TO_ROWS, SequenceCase
from interlace.tuning.choice import Choice
from tests.errors import error_of
from tests.operators.traffic import changing_shapes, with_traffic

OPERATORS, WAYS = (TO_COLUMNS, TO_ROWS), ("fused", "unfused")
SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 1, "stagger": 0}
CONFIGS = {
    TO_COLUMNS: interlace.GemmAllToAllColumnsConfig(**SMALL, max_programs=2),
    TO_ROWS: interlace.AllToAllGemmConfig(**SMALL, max_programs=3, senders=2),
}
GRANT_BYTES = 4
"""Bytes by which a rank tells another one which buffer it may write."""


# Results


def _examples(impl: str) -> list[list[list[float]]]:
    """Those of the kernels' docstrings, with a = 2 and b = 3."""
    rank = dist.get_rank()
    x, w = torch.tensor([[[2.0], [3.0]][rank]]), torch.tensor([[5.0], [7.0]])
    to_columns = interlace.gemm_all_to_all_columns(
        x, w, column_ranges=[[(1, 2)], [(0, 1)]], impl=impl
    )
    columns = torch.tensor([[[2.0], [20.0]], [[3.0], [30.0]]][rank])
    to_rows = interlace.all_to_all_gemm(columns, torch.tensor([[1.0, 100.0]]), impl=impl)
    return [to_columns.tolist(), to_rows.tolist()]


@pytest.mark.parametrize("impl", WAYS)
def test_the_docstrings_examples(ranks: Any, impl: str) -> None:
    assert ranks(2).run(_examples, impl) == [
        [[[14.0], [21.0]], [[302.0]]],
        [[[10.0], [15.0]], [[3020.0]]],
    ]


def _wrong(operator: str) -> list[str]:
    """The cases of which a result of this rank is wrong, gradients among them."""
    ranks = dist.get_world_size()
    splits = ((33, 0, 5, 17), (0, 1, 40, 2))
    cases = [
        SequenceCase(operator, impl, dtype, True, rows, head, other, bias, uneven)
        for impl in WAYS
        for dtype, rows, head, other, bias, uneven in (
            ("float32", 16, 16, 32, True, None),
            ("bfloat16", 19, 24, 33, True, None),
            ("float16", 0, 5, 48, False, splits[0][:ranks]),
            ("float32", 0, 8, 1, True, splits[1][:ranks]),
            ("float32", 0, 8, 16, True, (0,) * ranks),
        )
    ]
    return [case.label for case in cases if any(case.prepare().check())]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_form_is_the_product_of_one_rank(ranks: Any, operator: str, count: int) -> None:
    assert ranks(count).run(_wrong, operator) == [[]] * count


def _of_heads(kv_heads: int, impl: str) -> bool:
    """Whether every rank gets the queries, keys and values of its heads."""
    rank, ranks, heads, width = dist.get_rank(), dist.get_world_size(), 8, 6
    source = torch.Generator().manual_seed(1)
    x = torch.randn(5 * ranks, 12, generator=source)
    w = torch.randn((heads + 2 * kv_heads) * width, 12, generator=source)
    ranges = interlace.qkv_column_ranges(heads, kv_heads, width, ranks)
    found = interlace.gemm_all_to_all_columns(
        x.chunk(ranks)[rank], w, column_ranges=ranges, impl=impl
    )
    y = (x @ w.T).unflatten(1, (-1, width))
    own = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    own_kv = sorted({head * kv_heads // heads for head in own})
    wanted = [*own, *(heads + each for each in own_kv)]
    wanted += [heads + kv_heads + each for each in own_kv]
    return torch.allclose(found, y[:, wanted].flatten(1), atol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_fewer_key_heads_than_ranks(ranks: Any, kv_heads: int) -> None:
    for impl in WAYS:
        assert ranks(4).run(_of_heads, kv_heads, impl) == [True] * 4


def _with_a_rank_without_columns(impl: str) -> list[bool]:
    """Uneven columns, of which rank 1 has none, and column 0 nobody; and back."""
    rank, x = dist.get_rank(), torch.arange(40.0).view(8, 5)
    w = torch.arange(35.0).view(7, 5) % 4
    ranges = [[(1, 4), (6, 7)], [], [(4, 5), (5, 6)], [(2, 2), (3, 7)]]
    own = x.chunk(4)[rank].clone().requires_grad_()
    y = interlace.gemm_all_to_all_columns(own, w, column_ranges=ranges, impl=impl)
    wanted = (x @ w.T)[:, [column for a, b in ranges[rank] for column in range(a, b)]]
    y.sum().backward()
    counts = torch.tensor([sum(a <= n < b for each in ranges for a, b in each) for n in range(7)])
    same = [y.equal(wanted), own.grad.equal((counts[:, None] * w).sum(0).expand(2, 5))]
    columns = [2, 0, 2, 1]
    back = interlace.all_to_all_gemm(
        x.split(columns, 1)[rank], w, column_splits=columns, impl=impl, return_gathered=True
    )
    return [*same, back[0].equal(x.chunk(4)[rank] @ w.T), back[1].equal(x.chunk(4)[rank])]


@pytest.mark.parametrize("impl", WAYS)
def test_a_rank_may_have_no_columns(ranks: Any, impl: str) -> None:
    assert ranks(4).run(_with_a_rank_without_columns, impl) == [[True] * 4] * 4


def _nothing_to_multiply() -> list[Any]:
    """No columns of the result, and no rows."""
    x, none = torch.ones(4, 3), torch.ones(0, 6)
    gathered = interlace.all_to_all_gemm(x, none, return_gathered=True)[1]
    y = interlace.gemm_all_to_all_columns(x, torch.ones(2, 3), column_ranges=[[], [(1, 1)]])
    over_none = interlace.gemm_all_to_all_columns(
        x[:, :0], torch.ones(2, 0), torch.tensor([2.0, 3.0])
    )
    return [gathered.tolist(), list(y.shape), over_none[:, 0].tolist()]


def test_products_without_columns_or_over_none(ranks: Any) -> None:
    for rank, (gathered, shape, biases) in enumerate(ranks(2).run(_nothing_to_multiply)):
        assert gathered == [[1.0] * 6] * 2
        assert shape == [8, 0]
        assert biases == [2.0 + rank] * 8


def _through_descriptors(operator: str) -> list[str]:
    """As :func:`_wrong`, with the tensor descriptors that GPUs have; of columns, also whether tiles
    are stored through one.
    """
    ranks, described = dist.get_world_size(), []
    describe = columns_fused.describe_ranks

    def noted(*arguments: Any) -> Any:
        described.append(True)
        return describe(*arguments)

    wrong = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "moves_tiles", lambda _: True)
        patch.setattr(columns_fused, "describe_ranks", noted)
        # The configuration on the CPU has tiles of 16 rows and 32 columns.
        for head, other, splits, is_whole in (
            (32, 33, None, True),
            (9, 17, None, False),
            (32, 32, (32, 0, 16, 48)[:ranks], True),
            (32, 16, (33, 0, 5, 1)[:ranks], False),
        ):
            case = SequenceCase(operator, "fused", "float32", False, 19, head, other, True, splits)
            described.clear()
            wrong += [case.label] if any(case.prepare().check()) else []
            is_described = bool(described)
            if operator == TO_COLUMNS and ranks > 1 and is_described != is_whole:
                wrong.append(f"{case.label}: {is_described}")
    return wrong


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("count", [1, 4])
def test_tiles_through_descriptors(ranks: Any, operator: str, count: int) -> None:
    assert ranks(count).run(_through_descriptors, operator) == [[]] * count


# The layout of columns


@st.composite
def _shared_columns(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Ranges of up to 4 ranks, each without a column twice."""

    def of_rank() -> list[tuple[int, int]]:
        edges = sorted(draw(st.lists(st.integers(0, 60), max_size=6, unique=True)))
        pairs = list(zip(edges[::2], edges[1::2], strict=False))
        return draw(st.permutations(pairs)) if pairs else []

    return [of_rank() for _ in range(draw(st.integers(1, 4)))]


@given(_shared_columns(), st.sampled_from([1, 4, 16]), st.integers(0, 3))
def test_every_column_is_computed_once_and_goes_to_its_places(
    ranges: list[list[tuple[int, int]]], block_n: int, rank: int
) -> None:
    wanted: dict[int, set[tuple[int, int]]] = {}
    for owner, of_rank in enumerate(ranges):
        columns = [column for first, end in of_rank for column in range(first, end)]
        for place, column in enumerate(columns):
            wanted.setdefault(column, set()).add((owner, place))
    found: dict[int, set[tuple[int, int]]] = {}
    for column, count, *pairs in columns_of_tiles(ranges, block_n, rank % len(ranges)):
        assert 0 < count <= block_n
        owners = list(zip(pairs[::2], pairs[1::2], strict=True))
        for step in range(count):
            assert column + step not in found
            found[column + step] = {(owner, place + step) for owner, place in owners if owner >= 0}
    assert found == wanted
    assert [list(each) for each in ranges_of(tuple(flat_ranges(ranges)))] == ranges


def test_ranks_take_turns_and_tiles_fit() -> None:
    ranges = interlace.qkv_column_ranges(32, 8, 128, 4)
    assert [owner for _, _, owner, _ in columns_of_tiles(ranges, 128, 1)][:5] == [2, 3, 0, 1, 2]
    fitted = GemmAllToAllColumns().fitted
    config = dataclasses.replace(CONFIGS[TO_COLUMNS], block_n=256)
    assert fitted(config, ranges).block_n == 256
    assert fitted(config, interlace.qkv_column_ranges(32, 4, 128, 4)).block_n == 128
    assert fitted(config, interlace.qkv_column_ranges(32, 4, 40, 4)).block_n == 256


def test_a_shared_key_and_its_value_are_one_tile() -> None:
    """Their columns are the same ranks', and neighbours in the weight and in every result."""
    ranges = interlace.qkv_column_ranges(32, 1, 128, 2)
    config = dataclasses.replace(CONFIGS[TO_COLUMNS], block_n=256)
    assert GemmAllToAllColumns().fitted(config, ranges).block_n == 256
    shared = [entry for entry in columns_of_tiles(ranges, 256, 0) if entry[-2] >= 0]
    assert [entry[:2] for entry in shared] == [(4096, 256)]
    assert {shared[0][2:4], shared[0][4:]} == {(0, 2048), (1, 2048)}


@pytest.mark.parametrize(
    ("dtype", "first", "along_k", "loads"),
    [
        (torch.float32, 66, False, False),
        (torch.float32, 68, False, True),
        (torch.bfloat16, 68, False, False),
        (torch.bfloat16, 80, False, True),
        (torch.float32, 66, True, True),
    ],
)
def test_descriptors_load_from_multiples_of_16_bytes_on(
    dtype: torch.dtype, first: int, along_k: bool, loads: bool
) -> None:
    """GPUs report an illegal instruction where one would load from another address."""
    w = torch.zeros(133, 64, dtype=dtype) if along_k else torch.zeros(64, 133, dtype=dtype).T
    operands = Operands(torch.zeros(8, 64, dtype=dtype), w, None, None, None, dtype)
    columns = columns_of_tiles([[(0, first)], [(first, 133)]], 64, 0)
    assert columns_fused.are_read_by_descriptors(columns, operands) == loads


# Batch invariance


def _batches_that_differ(operator: str) -> list[list[str]]:
    """Without the mode and in it, the batches in which a row has other bits than among all, where
    tables have another step along K for fewer rows.
    """
    free_choice, ranks, most = SequenceOperator.choose, dist.get_world_size(), 96

    def choose(declaration: SequenceOperator, *, rows: int, **call: Any) -> Choice[Any]:
        choice = free_choice(declaration, rows=rows, **call)
        block_k = 16 if rows < 100 else 64
        config = dataclasses.replace(choice.config, block_k=block_k)
        # In the mode the kernel runs although the pair would be chosen, as on GPUs without tables.
        impl = "unfused" if invariance.is_enabled() else choice.impl
        return dataclasses.replace(choice, config=config, impl=impl)

    case = SequenceCase(operator, "auto", "float32", False, most, 16, 80, True)
    tensors, options = case.tensors(dist.get_rank(), ranks, 0), case.column_options(ranks)
    # Sums of these depend on their order.
    torch.manual_seed(0)
    tensors = {name: torch.randn_like(each) for name, each in tensors.items()}
    x = tensors.pop("x")
    call = functools.partial(getattr(interlace, operator), **tensors, **options)

    def run(rows: int) -> torch.Tensor:
        # The first rows of each rank's part, which stay on their rank.
        parts = x.view(-1, most, x.shape[1])
        y: torch.Tensor = call(parts[:, :rows].reshape(-1, x.shape[1]))
        return y.view(-1, rows, y.shape[1])

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceOperator, "choose", choose)
        for enabled in (False, True):
            with interlace.batch_invariant(enabled):
                whole = run(most)
                found.append(
                    [f"{rows} rows" for rows in (1, 7, 40) if not run(rows).equal(whole[:, :rows])]
                )
    interlace.group_of().release()
    return found


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_have_the_same_bits_in_every_batch(ranks: Any, operator: str) -> None:
    for free, invariant in ranks(2).run(_batches_that_differ, operator):
        assert free
        assert invariant == []


def _named_in_the_mode(operator: str) -> list[Any]:
    case = SequenceCase(operator, "auto", "float32", False, 8, 16, 80, True)
    tensors, options = case.tensors(dist.get_rank(), 2, 0), case.column_options(2)
    call = functools.partial(getattr(interlace, operator), **tensors, **options)
    with interlace.batch_invariant():
        results = [call(impl=impl) for impl in ("auto", "fused", "batch_invariant")]
        refused = error_of(call, impl="unfused")
    results.append(call(impl="batch_invariant"))
    return [all(each.equal(results[0]) for each in results), refused]


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_runs_with_the_same_bits(ranks: Any, operator: str) -> None:
    for are_same, (kind, message, _) in ranks(2).run(_named_in_the_mode, operator):
        assert are_same
        assert kind == "ArgumentError"
        assert message.startswith(f"{operator}: impl must be 'auto' or 'fused' within")
    with interlace.batch_invariant(), pytest.raises(ArgumentError, match="ranks that share memory"):
        AllToAllGemm().explain(torch.ones(4, 8), torch.ones(16, 16), world_size=2, nodes=2)


# Traffic and faults


def _call(rows: Sequence[int], operator: str, ranks: int, config: Any = None) -> torch.Tensor:
    """A call with uneven rows."""
    case = SequenceCase(operator, "fused", "float32", False, 0, 9, 33, True, tuple(rows))
    options = case.column_options(ranks) | {"splits": list(rows), "impl": "fused", "config": config}
    tensors = case.tensors(dist.get_rank(), ranks, 0)
    y: torch.Tensor = getattr(interlace, operator)(**tensors, **options)
    return y


@pytest.mark.parametrize("operator", OPERATORS)
def test_costs_are_the_counted_traffic(ranks: Any, operator: str) -> None:
    calls = [(20, 20, 20, 20), (3, 0, 40, 17)]
    call = functools.partial(_call, operator=operator, ranks=4, config=CONFIGS[operator])
    answers = ranks(4).run(with_traffic, call, calls)
    for rank, of_rank in enumerate(answers):
        for rows, (y, nbytes, *_, bytes_to) in zip(calls, of_rank, strict=True):
            case = SequenceCase(operator, "fused", head=9, other=33, splits=rows)
            tensors = case.tensors(rank, 4, 0)
            columns, inner = tensors["w"].shape
            sizes: dict[str, Any] = {"columns": columns, "inner": inner, "splits": rows}
            if operator == TO_COLUMNS:
                sizes["column_counts"] = [4 * 9] * 4
            else:
                sizes["column_splits"] = case.column_options(4)["column_splits"]
            cost = find_cost(operator).formula(
                rows=rows[rank], itemsize=4, world_size=4, rank=rank, **sizes
            )
            assert nbytes == cost.link_bytes + 3 * GRANT_BYTES, (rank, rows)
            assert sum(bytes_to.values()) == nbytes
            assert rank not in bytes_to
            assert cost.memory_bytes > 4 * (tensors["x"].numel() + y.numel())


def test_an_even_cost_is_the_default() -> None:
    sizes = {"rows": 6, "columns": 8, "inner": 12, "itemsize": 2, "world_size": 2}
    formula = find_cost(TO_COLUMNS).formula
    assert formula(**sizes) == formula(**sizes, splits=[6, 6], column_counts=[4, 4], rank=1)
    assert formula(**sizes).link_bytes == 6 * 4 * 2
    formula = find_cost(TO_ROWS).formula
    assert formula(**sizes) == formula(**sizes, splits=[6, 6], column_splits=[6, 6], rank=1)
    assert formula(**sizes).link_bytes == 6 * 6 * 2


@pytest.mark.parametrize("operator", OPERATORS)
def test_calls_back_to_back_with_slow_ranks(ranks: Any, operator: str) -> None:
    """Rows change from call to call, and a rank has none; puts come in any order."""
    call = functools.partial(_call, operator=operator, ranks=2, config=CONFIGS[operator])
    calls = [(20, 36), (0, 50), (17, 0), (1, 1)]
    assert ranks(2).run(changing_shapes, call, calls, 12) == [[]] * 2


def _absent(operator: str) -> Any:
    """What a rank sees of a peer that never calls, and is left with."""
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    case = SequenceCase(operator, "fused", "float32", False, 4, 9, 33, True)
    tensors = case.tensors(dist.get_rank(), 2, 0)
    options = case.column_options(2) | {"impl": "fused", "group": process_group}
    if operator == TO_ROWS:
        options["return_gathered"] = True

    def call() -> Any:
        return getattr(interlace, operator)(**tensors, **options)

    call()
    interlace.set_deadline(1.0, process_group)
    dist.barrier()
    outcome = None
    if dist.get_rank() == 0:
        # As on a GPU, where the error comes with the next call.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "check", lambda: None)
            results = call()
        results = results if isinstance(results, tuple) else (results,)
        outcome = [bool(each.isnan().all()) for each in results], error_of(call)
    dist.barrier()
    return outcome


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_peer_that_never_calls(ranks: Any, operator: str) -> None:
    (are_nan, (kind, text, _)), outcome = ranks(2).run(_absent, operator)
    assert all(are_nan)
    assert kind == "PeerTimeoutError"
    assert text.startswith(f"{operator}: rank 0 waited 1 s for rank 1 ")
    assert outcome is None


def _kept(operator: str) -> bool:
    """Whether results stay as they are: more are alive at once than there are buffers for."""
    results = [_call((9, 9), operator, 2) for _ in range(4)]
    return all(each.equal(results[0]) for each in results)


@pytest.mark.parametrize("operator", OPERATORS)
def test_results_stay_as_they_are(ranks: Any, operator: str) -> None:
    assert ranks(2).run(_kept, operator) == [True, True]


# Torch


def _compiled(operator: str) -> list[Any]:
    case = SequenceCase(operator, "fused", "float32", False, 6, 8, 16, True)
    tensors, options = case.tensors(dist.get_rank(), 2, 0), case.column_options(2)
    function = functools.partial(getattr(interlace, operator), **options)

    def call(x: torch.Tensor) -> torch.Tensor:
        others = {name: each for name, each in tensors.items() if name != "x"}
        y: torch.Tensor = function(2 * x, **others)
        return y

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    x = tensors["x"].requires_grad_()
    (wanted,) = torch.autograd.grad(call(x).square().sum(), x)
    y = compiled(x)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    return [torch.allclose(y, call(x)), torch.allclose(found, wanted), _opcheck(operator, tensors)]


def _opcheck(operator: str, tensors: dict[str, torch.Tensor]) -> Any:
    x, w, bias = (tensors[name].detach() for name in ("x", "w", "bias"))
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    case = SequenceCase(operator, "fused", head=8, other=16)
    if operator == TO_COLUMNS:
        columns: Any = flat_ranges(case.column_options(2)["column_ranges"])
        arguments = (x, w, bias, columns, None, name, "unfused", "")
    else:
        columns = case.column_options(2)["column_splits"]
        arguments = (x, w, bias, columns, None, True, name, "unfused", "")
    op = getattr(torch.ops.interlace, operator).default
    return torch.library.opcheck(
        op, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


@pytest.mark.parametrize("operator", OPERATORS)
def test_compiles_into_one_graph(ranks: Any, operator: str) -> None:
    for same, same_gradient, checked in ranks(2).run(_compiled, operator):
        assert same
        assert same_gradient
        assert set(checked.values()) == {"SUCCESS"}


def test_what_is_said_of_a_call() -> None:
    x, w = torch.ones(4, 8), torch.ones(16, 8)
    said = interlace.explain(TO_COLUMNS, x, w, column_ranges=[[(0, 16)]])
    assert said.startswith(f"{TO_COLUMNS} of x [4, 8] and w [16, 8], float32, on 1 rank: fused (")
    said = interlace.explain(TO_ROWS, x, w, splits=[4])
    assert said.startswith(f"{TO_ROWS} of x [4, 8] and w [16, 8], float32, on 1 rank: fused (")
    arguments, ranges = (x, torch.ones(16, 16)), interlace.qkv_column_ranges(2, 1, 4, 2)
    declared = AllToAllGemm()
    assert declared.explain(*arguments, world_size=2, nodes=2)[1:] == (
        "unfused", "the ranks are on 2 nodes, between which no kernel of this operator sends"
    )  # fmt: skip
    lacking = {"fused": "more than the limit"}
    assert GemmAllToAllColumns().explain(
        x, w, column_ranges=ranges, world_size=2, lacking=lacking
    )[1:] == (
        "unfused", "fused needs more than the limit"
    )  # fmt: skip


# Wrong use


def test_numbers_of_heads_that_cannot_be_shared_out() -> None:
    assert interlace.qkv_column_ranges(4, 1, 64, 2) == [
        [(0, 128), (256, 320), (320, 384)],
        [(128, 256), (256, 320), (320, 384)],
    ]
    for numbers, message in (
        ((6, 2, 8, 4), "heads must be a multiple of world_size, 4, and of kv_heads, 2; got 6."),
        ((8, 3, 8, 4), "heads must be a multiple of world_size, 4, and of kv_heads, 3; got 8."),
        ((12, 6, 8, 4), "kv_heads must be a multiple or a divisor of world_size, 4; got 6."),
        ((4, 0, 8, 4), "kv_heads must be at least 1; got 0."),
    ):
        with pytest.raises(ArgumentError) as caught:
            interlace.qkv_column_ranges(*numbers)
        assert str(caught.value).startswith(f"qkv_column_ranges: {message}")


X, W, RANGES = (4, 8), (6, 8), [[(0, 3)], [(3, 6)]]
MISMATCH = "must be the same on every rank; got"
# Operator, the arguments on each rank, the error on both.
REFUSED: list[tuple[str, list[dict[str, Any]], str]] = [
    (TO_COLUMNS, [{"column_ranges": [[(0, 6)]]}] * 2,
        "column_ranges must have a list for each of 2 ranks; got 1."),
    (TO_COLUMNS, [{"column_ranges": [[(0, 6)]]}, {}],
        f"the columns of each rank {MISMATCH}"),
    (TO_COLUMNS, [{"column_ranges": [[(0, 7)], []]}] * 2,
        "column_ranges[0] must hold ranges (first, end) of the 6 columns; got (0, 7)."),
    (TO_COLUMNS, [{"column_ranges": [[], [(3, 2)]]}] * 2,
        "column_ranges[1] must hold ranges (first, end) of the 6 columns; got (3, 2)."),
    (TO_COLUMNS, [{"column_ranges": [[(0, 3), (2, 4)], []]}] * 2,
        "column_ranges[0] must have no column twice; got [(0, 3), (2, 4)]."),
    (TO_COLUMNS, [{"column_ranges": [[(0, 3.0)], []]}] * 2,
        "column_ranges[0] must hold ranges (first, end) of two integers; got 3.0."),
    (TO_COLUMNS, [{"column_ranges": 6}] * 2,
        "column_ranges must be a list, of ranges (first, end) for each rank; got 6."),
    (TO_COLUMNS, [{"splits": [4, 4, 4]}] * 2,
        "splits must have an entry for each of 2 ranks; got [4, 4, 4]."),
    (TO_COLUMNS, [{"splits": [3]}] * 2, "splits must have an entry for each of 2 ranks; got [3]."),
    (TO_COLUMNS, [{"splits": [torch.ones(2), 4]}] * 2, "splits must hold integers; got tensor("),
    (TO_COLUMNS, [{"column_ranges": [[(0, torch.ones(2))], []]}] * 2,
        "column_ranges[0] must hold ranges (first, end) of two integers; got tensor("),
    (TO_COLUMNS, [{"splits": [4, 5]}] * 2, f"rows of x beyond their split {MISMATCH}"),
    (TO_COLUMNS, [{"splits": [3, 3]}] * 2,
        "x must have as many rows as splits say, 3 on rank"),
    (TO_COLUMNS, [{"x": (3, 8)}, {}], f"the rows of each rank {MISMATCH}"),
    (TO_COLUMNS, [{"dtype": torch.float8_e4m3fn}] * 2,
        "x must be float16, bfloat16 or float32; got torch.float8_e4m3fn."),
    (TO_COLUMNS, [{"impl": "chunked"}] * 2,
        "impl must be one of auto, batch_invariant, fused, unfused; got 'chunked'."),
    (TO_COLUMNS, [{"impl": "unfused"}, {}], f"impl {MISMATCH}"),
    (TO_ROWS, [{"x": (3, 3)}] * 2,
        "rows of x must divide evenly over 2 ranks unless splits are given; got 3."),
    (TO_ROWS, [{"splits": [1, 2]}] * 2, "splits must sum to the rows of x, 4; got [1, 2]."),
    (TO_ROWS, [{"splits": [1, 3]}, {"splits": [3, 1]}], f"the rows of each rank {MISMATCH}"),
    (TO_ROWS, [{"column_splits": [3, 3]}, {"column_splits": [3, 5]}],
        f"columns of x beyond their split {MISMATCH}"),
    (TO_ROWS, [{"x": (4, 4)}, {"x": (4, 2)}], f"the columns of each rank {MISMATCH}"),
    (TO_ROWS, [{"x": (4, 4)}] * 2,
        "w must be [N, K] with K = 8, the columns of x on all ranks; got shape [5, 6]."),
    (TO_ROWS, [{"column_splits": [4, 4]}] * 2,
        "x must have as many columns as column_splits say, 4 on rank"),
    (TO_ROWS, [{"column_splits": [torch.tensor(3.0), 3]}] * 2,
        "column_splits must hold integers; got tensor(3.)."),
    (TO_ROWS, [{"column_splits": [3]}] * 2,
        "column_splits must have an entry for each of 2 ranks; got [3]."),
    (TO_ROWS, [{"column_splits": "33"}] * 2,
        "column_splits must be a list of rows, an integer for each rank; got str."),
    (TO_ROWS, [{"dtype": torch.float64}] * 2,
        "x must be float16, bfloat16 or float32; got torch.float64."),
    (TO_ROWS, [{"impl": None}] * 2,
        "impl must be one of auto, batch_invariant, fused, unfused; got None."),
    (TO_ROWS, [{"config": CONFIGS[TO_COLUMNS]}] * 2,
        "config must be of type AllToAllGemmConfig; got GemmAllToAllColumnsConfig."),
]  # fmt: skip


def _refused() -> list[tuple[Any, bool]]:
    """The error of each call, and whether a good one follows."""
    found = []
    for operator, arguments, _ in REFUSED:
        group = dist.new_group()
        good: dict[str, Any] = {"x": X, "w": W, "column_ranges": RANGES, "splits": None}
        if operator == TO_ROWS:
            good = {"x": (4, 3), "w": (5, 6), "splits": None}

        def call(operator: str = operator, group: Any = group, **given: Any) -> torch.Tensor:
            dtype = given.pop("dtype", torch.float32)
            x, w = (torch.zeros(given.pop(name)).to(dtype) for name in "xw")
            y: torch.Tensor = getattr(interlace, operator)(x, w, group=group, **given)
            return y

        error = error_of(call, **good | arguments[dist.get_rank()])
        found.append((error, bool((call(**good) == 0).all())))
    return found


def test_wrong_arguments_are_refused_on_every_rank(ranks: Any) -> None:
    for found in ranks(2).run(_refused):
        for (operator, _, message), (error, is_good) in zip(REFUSED, found, strict=True):
            assert error is not None, message
            assert error[1].startswith(f"{operator}: {message}"), error[1]
            is_mismatch = MISMATCH in message
            assert error[0] == ("RankMismatchError" if is_mismatch else "ArgumentError"), message
            assert is_good


def _lists_of_other_integers() -> list[torch.Tensor]:
    """Results with lists of torch's and of NumPy's integers."""
    found = []
    for integer in (torch.tensor, np.int64):
        group, rows = dist.new_group(), [integer(4), integer(4)]
        halves = [[(integer(0), integer(3))], [(integer(3), integer(6))]]
        x, w = torch.ones(4, 8), torch.ones(6, 8)
        options: dict[str, Any] = {"splits": rows, "group": group}
        columns = interlace.gemm_all_to_all_columns(x, w, column_ranges=halves, **options)
        options["column_splits"] = [integer(3), integer(3)]
        found += [columns, interlace.all_to_all_gemm(columns, torch.ones(5, 6), **options)]
    return found


def test_lists_may_hold_integers_of_torch_and_numpy(ranks: Any) -> None:
    for columns, rows, *others in ranks(2).run(_lists_of_other_integers):
        assert columns.equal(torch.full((8, 3), 8.0))
        assert rows.equal(torch.full((4, 5), 48.0))
        assert columns.equal(others[0])
        assert rows.equal(others[1])


def _second_derivatives() -> list[Any]:
    x = torch.ones(4, 3, requires_grad=True)
    calls = {
        TO_COLUMNS: lambda: interlace.gemm_all_to_all_columns(x, torch.ones(2, 3)),
        TO_ROWS: lambda: interlace.all_to_all_gemm(x, torch.ones(2, 6)),
    }
    found = []
    for call in calls.values():
        (first,) = torch.autograd.grad(call().square().sum(), x, create_graph=True)
        found.append(error_of(lambda: torch.autograd.grad(first.sum(), x)))  # noqa: B023
    return found


def test_second_derivatives_are_refused(ranks: Any) -> None:
    for errors in ranks(2).run(_second_derivatives):
        for operator, error in zip((TO_COLUMNS, TO_ROWS), errors, strict=True):
            assert error[0] == "ArgumentError"
            assert error[1].startswith(
                f"{operator}: this operator cannot be differentiated twice; got a second derivative"
            )
