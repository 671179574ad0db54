"""The same bits for 1, 2, 4 and 8 ranks (``interlace.batch_invariant(ranks=8)``).

The leaves of K have integer products of very different sizes. So a leaf's own sum is exact in any
order, and what a test sees is the order in which leaves and ranks are added, and the rounding on
the way: what Interlace decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.gemm import few_rows, invariance, launch
from interlace.gemm.config import GemmConfig
from interlace.gemm.operands import Operands
from interlace.gemm.operator import GemmOperator, product_operator
from interlace.nn import ColumnParallelLinear, RowParallelLinear
from interlace.registry import BATCH_INVARIANT, operators
from interlace.tuning.choice import Choice
from tests.gemm.row_calls import bits

LEAVES, LEAF, COLUMNS = 8, 16, 24
WORLD_SIZES = (1, 2, 4, 8)
MOST_ROWS = 20

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """All of x, weight, bias and residual."""
    generator = torch.Generator().manual_seed(0)
    growth = 8.0 if dtype == torch.float32 else 1.375
    powers = torch.tensor([0, 7, 3, 5, 1, 6, 2, 4])
    scale = (growth**powers).to(dtype).float().repeat_interleave(LEAF)
    x = torch.randint(-8, 9, (MOST_ROWS, LEAVES * LEAF), generator=generator) * scale
    w = torch.randint(-8, 9, (COLUMNS, LEAVES * LEAF), generator=generator) / 64
    if dtype == torch.float16:
        # The sums of a row underflow, most of them to -0.0.
        x[0] = x[0].abs() * -(2.0**-20)
        w[:, :] = torch.where(torch.arange(COLUMNS)[:, None] % 2 == 0, w.abs() * 2.0**-4, w)
    bias = torch.randn(COLUMNS, generator=generator)
    residual = torch.randn(MOST_ROWS, COLUMNS, generator=generator)
    return tuple(each.to(dtype) for each in (x, w, bias, residual))


def _shards(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """This rank's columns of x and of the weight; all of bias and residual."""
    x, w, bias, residual = _operands(dtype)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, w = (each.tensor_split(ranks, 1)[rank].contiguous() for each in (x, w))
    return x, w, bias, residual


def _gathered(y: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, in rank order."""
    rows = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(rows, y)
    return torch.cat(rows)


def _normed(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> Any:
    results = interlace.gemm_all_reduce(
        x, w, bias, residual=residual, norm_weight=bias, norm="layer"
    )
    return torch.cat([results.y, results.residual], 1)


Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SUMS: dict[str, Run] = {
    "gemm_all_reduce": lambda x, w, *_: interlace.gemm_all_reduce(x, w),
    "gemv_all_reduce": lambda x, w, bias, _: interlace.gemv_all_reduce(x, w, bias),
    "w along N": lambda x, w, *_: interlace.gemm_all_reduce(x, w.T.contiguous().T),
    "gemm_reduce_scatter": lambda x, w, bias, _: _gathered(
        interlace.gemm_reduce_scatter(x, w, bias)
    ),
    "gemm_all_reduce_norm": _normed,
}


def _in_turn(rows: int) -> str:
    """The kernel of so many rows where kernels take turns."""
    return "gemv" if rows <= 3 else "pushed" if rows <= 16 else "fused"


def _batches(
    dtype: torch.dtype, takes_turns: bool, most_waiting: int | None = None
) -> dict[tuple[str, int], torch.Tensor]:
    """The bits of every sum of every batch. Kernels take turns as on a GPU with one arithmetic, or
    one of them has all batches. With ``most_waiting`` they load through descriptors, and beside
    tiles with more numbers of a thread sums wait in memory.
    """
    x, w, bias, residual = _shards(dtype)

    def in_turn(free_choice: Callable[..., Choice[Any]]) -> Callable[..., Choice[Any]]:
        def choose(declaration: GemmOperator, *, rows: int, **call: Any) -> Choice[Any]:
            choice = free_choice(declaration, rows=rows, **call)
            order = [_in_turn(rows), "pushed", "fused"]
            return dataclasses.replace(choice, impl=order[0], times_us=dict.fromkeys(order, 1.0))

        return choose

    interlace.group_of().release()  # what was decided otherwise
    with pytest.MonkeyPatch.context() as patch, interlace.batch_invariant(ranks=LEAVES):
        if takes_turns:
            patch.setattr(invariance, "has_one_arithmetic", lambda *_: True)
            for name in ("gemm_all_reduce", "gemm_reduce_scatter"):
                operator = type(product_operator(name))
                patch.setattr(operator, "choose", in_turn(operator.choose))
        if most_waiting is not None:
            for module in (launch, few_rows):
                patch.setattr(module, "moves_tiles", lambda _: True)
            patch.setattr(launch, "_MOST_WAITING", most_waiting)
        found = {
            (name, rows): bits(run(x[:rows].contiguous(), w, bias, residual[:rows]))
            for name, run in SUMS.items()
            for rows in ((2, 16, MOST_ROWS) if takes_turns else (3, MOST_ROWS))
        }
    interlace.group_of().release()
    return found


def _tree(dtype: torch.dtype) -> torch.Tensor:
    """The sum without bias, by its definition."""
    x, w, *_ = (each.float() for each in _operands(dtype))
    leaves = zip(x.split(LEAF, 1), w.split(LEAF, 1), strict=True)
    nodes = [part @ weight.T for part, weight in leaves]
    while len(nodes) > 1:
        rounded = [node.to(dtype).float() for node in nodes]
        nodes = [left + right for left, right in zip(rounded[::2], rounded[1::2], strict=True)]
    return nodes[0].to(dtype)


@pytest.mark.parametrize(
    ("dtype", "takes_turns"),
    [("bfloat16", True), ("bfloat16", False), ("float16", True), ("float32", True)],
)
def test_numbers_of_ranks_have_the_same_bits(ranks: Any, dtype: str, takes_turns: bool) -> None:
    found = {size: ranks(size).run(_batches, DTYPES[dtype], takes_turns) for size in WORLD_SIZES}
    alone = found[1][0]
    for size, results in found.items():
        for rank, result in enumerate(results):
            for (name, rows), y in result.items():
                wanted = alone[name, MOST_ROWS][:rows]
                assert torch.equal(y, wanted), f"{name}, {rows} rows, rank {rank} of {size}"
    # The interpreter truncates to bfloat16, and PyTorch rounds.
    if dtype != "bfloat16":
        expected = _tree(DTYPES[dtype])
        y = alone["gemm_all_reduce", MOST_ROWS].view(DTYPES[dtype])
        assert torch.equal(y, expected)
        x, w, *_ = _operands(DTYPES[dtype])
        assert not torch.equal(y, (x.double() @ w.double().T).to(DTYPES[dtype]))  # it matters here


@pytest.mark.parametrize("most_waiting", [0, 64])
def test_leaves_through_descriptors_have_the_same_bits(ranks: Any, most_waiting: int) -> None:
    """A rank alone has eight leaves, so sums of two and of four wait; with two ranks those of two
    do.
    """
    (expected,) = ranks(1).run(_batches, torch.float32, True)
    for size in (1, 2):
        for found in ranks(size).run(_batches, torch.float32, True, most_waiting):
            assert all(torch.equal(y, expected[key]) for key, y in found.items())


def _of_layers(sequence_parallel: bool) -> torch.Tensor:
    """The rows of an MLP of random numbers, whose layers are sharded."""
    torch.manual_seed(0)
    up, down = torch.nn.Linear(40, 128), torch.nn.Linear(128, COLUMNS)
    x = torch.randn(16, 40)
    with interlace.batch_invariant(ranks=True):
        up = ColumnParallelLinear.from_linear(up, sequence_parallel=sequence_parallel)
        down = RowParallelLinear.from_linear(down, sequence_parallel=sequence_parallel)
        if sequence_parallel:
            x = x.tensor_split(dist.get_world_size())[dist.get_rank()]
        y = down(torch.relu(up(x))).detach()
    return _gathered(y) if sequence_parallel else y


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_of_any_number_of_ranks(ranks: Any, sequence_parallel: bool) -> None:
    wanted, *found = (ranks(size).run(_of_layers, sequence_parallel)[-1] for size in WORLD_SIZES)
    for y in found:
        assert torch.equal(bits(y), bits(wanted))


def _refused(inner: int, dtype: torch.dtype = torch.float32) -> str:
    x, w = torch.ones(2, inner).to(dtype), torch.ones(8, inner).to(dtype)
    scales = (
        {} if dtype == torch.float32 else {"x_scale": torch.ones([]), "w_scale": torch.ones([])}
    )
    with interlace.batch_invariant(ranks=8), pytest.raises(interlace.ArgumentError) as caught:
        interlace.gemm_all_reduce(x, w, **scales)
    return str(caught.value)


def test_what_is_refused(ranks: Any) -> None:
    where = "within interlace.batch_invariant(ranks=8)"
    assert set(ranks(3).run(_refused, 64)) == {
        f"gemm_all_reduce: the number of ranks must divide 8 {where}; got 3. Use 1, 2, 4 or 8 "
        "ranks, or interlace.batch_invariant() without ranks."
    }
    assert set(ranks(2).run(_refused, 96)) == {
        f"gemm_all_reduce: K of all ranks must be a multiple of 128 {where}; got 192. Pad K with "
        "zeros, or take fewer ranks."
    }
    for message in ranks(2).run(_refused, 64, torch.float8_e4m3fn):
        assert f"operands must be float16, bfloat16 or float32 {where}" in message


def _disagreement() -> str:
    x, w = torch.ones(6, 64), torch.ones(8, 64)
    with (
        interlace.batch_invariant(ranks=2 * dist.get_rank() + 2),
        pytest.raises(interlace.RankMismatchError) as caught,
    ):
        interlace.gemm_all_reduce(x, w)
    return str(caught.value)


def test_ranks_must_agree_on_their_number(ranks: Any) -> None:
    for message in ranks(2).run(_disagreement):
        assert "impl must be the same on every rank" in message
        assert "ranks=4" in message


def _waits_in_memory() -> list[bool]:
    """Whether sums of 1, 2, 4 and 8 leaves wait in memory, of a large tile and of a small one."""
    x, w = torch.ones(4, 64), torch.ones(4, 64)
    operands = Operands(x, w, None, None, None, x.dtype)
    large = GemmConfig(block_m=128, block_n=256, num_warps=8)
    small = dataclasses.replace(large, block_n=128)
    return [
        launch.describe_waiting(interlace.group_of(), operands, config, leaves, True) is not None
        for config in (large, small)
        for leaves in (1, 2, 4, 8)
    ]


def test_sums_wait_in_memory_where_registers_do_not_suffice(ranks: Any) -> None:
    """128 x 256 numbers of eight warps are 128 registers of a thread, as are two sums that wait."""
    assert ranks(1).run(_waits_in_memory) == [[False, False, True, True] + [False] * 4]


def test_what_the_mode_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = operators()["gemm_all_reduce"]
    with interlace.batch_invariant(ranks=True):
        assert invariance.mode() == LEAVES
        word = invariance.effective_impl(gemm, "auto")
        assert invariance.effective_impl(gemm, BATCH_INVARIANT) == word
        named = invariance.effective_impl(gemm, "gemv")
        with interlace.batch_invariant():
            assert invariance.mode() == 1
        with interlace.batch_invariant(False, ranks=8):
            assert not invariance.is_enabled()
    assert (invariance.name_in(word), invariance.most_ranks_in(word)) == ("", LEAVES)
    assert (invariance.name_in(named), invariance.most_ranks_in(named)) == ("gemv", LEAVES)
    assert invariance.is_invariant(word)
    assert invariance.most_ranks_in(BATCH_INVARIANT) == 1
    with (
        pytest.raises(interlace.ArgumentError, match="ranks must be 2, 4 or 8, or True for 8"),
        interlace.batch_invariant(ranks=3),
    ):
        pass
    monkeypatch.setenv("INTERLACE_BATCH_INVARIANT", "4")
    assert invariance.mode() == 4
    monkeypatch.setenv("INTERLACE_BATCH_INVARIANT", "6")
    with pytest.raises(interlace.ArgumentError, match="INTERLACE_BATCH_INVARIANT must be"):
        invariance.mode()
