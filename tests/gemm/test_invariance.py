"""Batch invariance: bits of a row in batches of any size, at any place; and what is refused.

Elements are small integers, so that products of different kernels do not depend on the order of
their own sums. What differs between batches here is what Interlace decides: which rank adds up a
row, how parts are rounded on their way, and which of the kernels runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from benchmarks.batch_invariance import table
from interlace.gemm import few_rows, invariance
from interlace.gemm.invariance import effective_impl, invariant_implementations
from interlace.gemm.operator import GemmOperator, product_operator
from interlace.nn import RowParallelLinear
from interlace.registry import BATCH_INVARIANT, operators
from interlace.tuning.choice import Choice
from interlace.tuning.gpu import Gpu
from tests.gemm import row_calls
from tests.gemm.row_calls import Run, bits

INNER, COLUMNS, MOST_ROWS = 48, 40, 36
FEW_ROWS = 16
"""Up to so many rows ``gemv`` runs where a call need not be invariant."""


def _whole(y: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, in rank order; ranks may have unequally many."""
    rows = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(rows, y)
    return torch.cat(rows)


def _share(x: torch.Tensor) -> torch.Tensor:
    """This rank's share of rows that all ranks hold."""
    return x.tensor_split(dist.get_world_size())[dist.get_rank()].contiguous()


OPERATORS: dict[str, Run] = {
    **row_calls.OPERATORS,
    "gemm_reduce_scatter": lambda x, w, bias: _whole(interlace.gemm_reduce_scatter(x, w, bias)),
    "all_gather_gemm": lambda x, w, bias: interlace.all_gather_gemm(
        _share(x), w, bias, splits=[len(part) for part in x.tensor_split(dist.get_world_size())]
    ),
    "all_to_all_gemm": lambda x, w, bias: _whole(row_calls.gathered_product(x, w, bias)),
}


def _operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, weight and bias of this rank. Ranks have parts of very different sizes, so that their
    sum depends on its order.
    """
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (MOST_ROWS, INNER), generator=generator) * 37.0**rank
    w = torch.randint(-8, 9, (COLUMNS, INNER), generator=generator)
    bias = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(9))
    return x.to(dtype), w.to(dtype), bias.to(dtype)


def _differing(name: str, dtype: torch.dtype) -> list[str]:
    """Batches in which some row has other bits than in the batch of all rows."""
    x, w, bias = _operands(dtype)
    if name == "all_gather_gemm":
        # All ranks hold the rows that they share out.
        dist.broadcast(x, 0)
    run, wrong = OPERATORS[name], []
    with interlace.batch_invariant():
        wanted = bits(run(x, w, bias))
        for rows in (1, 3, 16, 17, MOST_ROWS):
            # At another place of the batch: the rows are the last ones of all, in another order.
            chosen = torch.arange(MOST_ROWS - rows, MOST_ROWS).roll(rows // 2)
            found = bits(run(x[chosen].contiguous(), w, bias))
            different = (found != wanted[chosen]).any(1).nonzero().flatten().tolist()
            if different:
                wrong.append(f"{rows} rows: rows {different}")
    return wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", OPERATORS)
def test_rows_have_the_same_bits_in_every_batch(ranks: Any, name: str, dtype: torch.dtype) -> None:
    for wrong in ranks(3).run(_differing, name, dtype):
        assert wrong == []


def _handed_over(name: str, dtype: torch.dtype) -> tuple[list[str], int]:
    """As :func:`_differing`, on a device with one arithmetic: up to 3 rows run by the GEMV's kernel
    where there is one, up to 17 by the product of few rows; and how often that has run.
    """
    operator = type(product_operator(name))
    free_choice, multiply, products = operator.choose, few_rows.multiply, []

    def choose(declaration: GemmOperator, *, rows: int, **call: Any) -> Choice[Any]:
        order = ["gemv"] * (rows <= 3) + ["pushed"] * (rows <= 17) + ["fused"]
        choice = free_choice(declaration, rows=rows, **call)
        return dataclasses.replace(choice, impl=order[0], times_us=dict.fromkeys(order, 1.0))

    def counted(*arguments: Any, **options: Any) -> None:
        products.append(arguments)
        multiply(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariance, "has_one_arithmetic", lambda *_: True)
        patch.setattr(operator, "choose", choose)
        patch.setattr(few_rows, "multiply", counted)
        interlace.group_of().release()  # what was decided without
        wrong = _differing(name, dtype)
    interlace.group_of().release()
    return wrong, len(products)


PRODUCTS = ["gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "gemm_all_to_all"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_kernels_hand_over(ranks: Any, name: str, dtype: torch.dtype) -> None:
    """The kernels for few rows and for many round alike, and add ranks up in the same order."""
    for wrong, products in ranks(3).run(_handed_over, name, dtype):
        assert wrong == []
        assert products > 0


def test_kernels_hand_over_on_one_rank(ranks: Any) -> None:
    # The interpreter truncates to bfloat16, and PyTorch, which adds the bias here, rounds.
    ((wrong, products),) = ranks(1).run(_handed_over, "gemm_all_reduce", torch.float32)
    assert wrong == []
    assert products > 0


def _named() -> tuple[bool, str]:
    """Whether an implementation that is named in the mode runs, and what is said where it may give
    other bits.
    """
    x, w, bias = _operands(torch.bfloat16)
    with interlace.batch_invariant(), pytest.MonkeyPatch.context() as patch:
        with pytest.raises(interlace.ArgumentError) as caught:
            interlace.gemm_all_reduce(x[:5], w, bias, impl="pushed")
        expected = interlace.gemm_all_reduce(x[:6], w, bias, impl="fused")
        patch.setattr(invariance, "has_one_arithmetic", lambda *_: True)
        found = interlace.gemm_all_reduce(x[:6], w, bias, impl="pushed")
    return torch.equal(found, expected), str(caught.value)


def test_implementations_are_named_in_the_mode(ranks: Any) -> None:
    for is_same, message in ranks(2).run(_named):
        assert is_same
        assert message == (
            "gemm_all_reduce: impl='pushed' must run on a GPU that is known to add up products in "
            "one way to be batch-invariant. Take impl='auto' or 'fused'."
        )


def _of_a_layer(dtype: torch.dtype) -> list[str]:
    """Batches of a layer in which some row has other bits; it goes by their size from one kernel to
    another. Elements are no integers.
    """
    torch.manual_seed(0)
    layer = RowParallelLinear(80 * dist.get_world_size(), 24, dtype=dtype)
    x = torch.randn(FEW_ROWS + 12, 80).to(dtype)
    with torch.no_grad(), interlace.batch_invariant():
        whole = layer(x)
        batches = {f"{rows} rows": range(rows) for rows in (2, FEW_ROWS - 1, FEW_ROWS)}
        batches["the last ones"] = range(FEW_ROWS, len(x))
        found = {name: layer(x[list(rows)]) for name, rows in batches.items()}
        is_alone = torch.equal(layer(x[-1]), whole[-1])
    different = [
        name for name, y in found.items() if not torch.equal(y, whole[list(batches[name])])
    ]
    return different + ["a vector"] * (not is_alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_a_layer_of_few_and_of_many_rows(ranks: Any, dtype: torch.dtype) -> None:
    for different in ranks(2).run(_of_a_layer, dtype):
        assert different == []


def _differ_without() -> dict[str, bool]:
    found = {}
    for name in ("gemv_all_reduce", "gemm_all_reduce"):
        x, w, bias = _operands(torch.bfloat16)
        whole = OPERATORS[name](x, w, bias)
        found[name] = not torch.equal(OPERATORS[name](x[-1:], w, bias)[0], whole[-1])
    return found


def test_the_test_would_notice(ranks: Any) -> None:
    """Without the mode rows do differ: by who adds them up, and by how words round them."""
    for found in ranks(3).run(_differ_without):
        assert found == {"gemv_all_reduce": True, "gemm_all_reduce": True}


def _refusals() -> list[str]:
    x, w = torch.ones(4, 32), torch.ones(8, 32)
    messages = []
    calls: list[Callable[[], object]] = [
        lambda: interlace.gemm_all_reduce(x, w, impl="chunked"),
        lambda: interlace.gemv_all_reduce(x, w, impl="unfused"),
        lambda: torch.ops.interlace.gemm_sum_reduce_scatter([x], [w], ""),
    ]
    with interlace.batch_invariant():
        for call in calls:
            with pytest.raises(interlace.ArgumentError) as caught:
                call()
            messages.append(str(caught.value))
        interlace.gemm_all_reduce(x, w, impl="fused")
        with interlace.batch_invariant(False):
            interlace.gemm_all_reduce(x, w, impl="chunked")
    return messages


def test_what_is_refused(ranks: Any) -> None:
    """Before anything is sent, so all ranks refuse the call and the next one works."""
    for messages in ranks(2).run(_refusals):
        assert messages[0] == (
            "gemm_all_reduce: impl must be 'auto' or 'fused' or 'gemv' or 'pushed' within "
            "interlace.batch_invariant(); "
            "got 'chunked', which may give a row other bits in another batch."
        )
        assert "got 'unfused'" in messages[1]
        for message in messages[2:]:
            assert "must have a batch-invariant implementation; this operator has none" in message


def _disagreement() -> str:
    x, w = torch.ones(6, 32), torch.ones(8, 32)  # a call that no rank knows yet
    enabled = dist.get_rank() == 0
    with (
        interlace.batch_invariant(enabled),
        pytest.raises(interlace.RankMismatchError) as caught,
    ):
        interlace.gemm_all_reduce(x, w)
    return str(caught.value)


def test_ranks_must_agree_on_the_mode(ranks: Any) -> None:
    for message in ranks(2).run(_disagreement):
        assert "impl must be the same on every rank" in message
        assert BATCH_INVARIANT in message


def test_where_tiles_may_follow_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPUs and in the dtypes that were tested: not in float8, nor on a GPU of next year."""
    gpu, capability = torch.device("cuda", 0), (9, 0)
    monkeypatch.setattr(invariance, "capability", lambda _: capability)
    assert invariance.has_one_arithmetic(gpu, torch.bfloat16)
    assert not invariance.has_one_arithmetic(gpu, torch.float8_e4m3fn)
    assert not invariance.has_one_arithmetic(torch.device("cpu"), torch.bfloat16)
    capability = (99, 0)
    assert not invariance.has_one_arithmetic(gpu, torch.bfloat16)


def test_every_call_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("", False), ("1", True), ("0", False)):
        monkeypatch.setenv("INTERLACE_BATCH_INVARIANT", value)
        assert invariance.is_enabled() is expected
        with interlace.batch_invariant(not expected):
            assert invariance.is_enabled() is not expected


def test_the_word_counts_without_the_context() -> None:
    gemm = operators()["gemm_all_reduce"]
    assert effective_impl(gemm, "auto") == "auto"
    assert effective_impl(gemm, BATCH_INVARIANT) == BATCH_INVARIANT
    with interlace.batch_invariant():
        assert effective_impl(gemm, "measured") == BATCH_INVARIANT
        with interlace.batch_invariant(False):
            assert effective_impl(gemm, "measured") == "measured"


@pytest.mark.parametrize(
    "name", ["gemv_all_reduce", "gemm_all_reduce", "gemm_all_to_all_columns", "all_to_all_gemm"]
)
def test_what_explain_says(name: str) -> None:
    w = torch.ones(64, 64)
    with interlace.batch_invariant():
        few, many = (interlace.explain(name, torch.ones(rows, 64), w) for rows in (1, 200))
    assert "calls must be batch-invariant" in few
    tiles = [re.findall(r"block_\w=\d+", text) for text in (few, many)]
    assert tiles[0] == tiles[1]


def _bench(name: str) -> dict[str, Any]:
    from benchmarks import batch_invariance
    from interlace.bench import benchmark
    from interlace.bench.timing import Timing

    def measure(step: Any, **_: object) -> Timing:
        step(0)
        return Timing(10.0, 9.0, 11.0, 1.0, 5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "measure", measure)
        return batch_invariance.measure((name, 3, 16, 64), dtype="float32")[0]


@pytest.mark.parametrize("name", ["gemm_all_reduce", "all_gather_gemm"])
def test_what_it_costs_is_measured(ranks: Any, name: str) -> None:
    for result in ranks(2).run(_bench, name):
        assert list(result["times"]) == ["auto", BATCH_INVARIANT, "ranks=2", "ranks=8"]
        assert result["tokens"] == (3 if name == "gemm_all_reduce" else 4)
        (row,) = zip(*(column.cells for column in table([result]).columns), strict=True)
        assert row[-7:] == ("10.0", "10.0", "+0 %", "10.0", "+0 %", "10.0", "+0 %")


def test_what_is_declared_invariant() -> None:
    found = {
        name: [each.name for each in invariant_implementations(operator)]
        for name, operator in operators().items()
    }
    assert {name: names for name, names in found.items() if names} == {
        "all_gather_gemm": ["fused", "pushed"],
        "all_to_all_gemm": ["fused"],
        "gemm_all_reduce": ["fused", "gemv", "pushed"],
        "gemm_all_reduce_norm": ["gemm"],
        "gemm_all_to_all": ["fused", "pushed"],
        "gemm_all_to_all_columns": ["fused"],
        "gemm_reduce_scatter": ["fused", "pushed"],
        "mixture_of_experts": ["fused", "decode"],
    }


@pytest.mark.parametrize("name", ["gemm_reduce_scatter", "all_gather_gemm", "gemm_all_to_all"])
def test_a_rank_alone_takes_the_librarys_product(name: str) -> None:
    """Within the mode, which has no library's product, it takes the kernel for few rows, unless the
    result is too large for ``pushed``.
    """
    operator = operators()[name]
    h200 = Gpu("NVIDIA H200", 132, 232448)
    sizes = {"columns": 8192, "inner": 7168, "dtype": torch.bfloat16}
    for rows in (1, 256, 4096):
        choice = operator.choose(rows=rows, **sizes, world_size=1, device=h200)
        assert choice.impl == "unfused"
        invariant = [each.name for each in invariant_implementations(operator)]
        first = next(impl for impl in choice.candidates if impl in invariant)
        is_refused = rows == 4096 and name != "all_gather_gemm"
        assert first == ("fused" if is_refused else "pushed")
