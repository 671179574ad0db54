"""Batch invariance on real GPUs: the bits of a row in batches of 1 to 256 rows and of thousands, as
calls and in CUDA graphs. Run with ``-m gpu``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.gemm import few_rows, invariance
from interlace.gemm.invariance import ONE_ARITHMETIC
from tests.gemm import row_calls
from tests.gemm.row_calls import Run, bits

pytestmark = pytest.mark.gpu

MOST_ROWS = 256
MANY_ROWS = (777, 4096, 32768)
IN_GRAPHS = (1, 2, 3, 7, 16, 17, 64, 100, 200, MOST_ROWS)
SHAPES = {"even": (4096, 2048), "odd": (1000, 1160)}  # N, K


def _whole(y: torch.Tensor, rows: int) -> torch.Tensor:
    """The rows of all ranks, by a collective that a CUDA graph may hold."""
    ranks = dist.get_world_size()
    shares = [len(part) for part in torch.empty(rows).tensor_split(ranks)]
    padded = y.new_zeros(max(shares), y.shape[1])
    padded[: len(y)] = y
    gathered = y.new_empty(ranks * max(shares), y.shape[1])
    dist.all_gather_into_tensor(gathered, padded)
    parts = gathered.split(max(shares))
    return torch.cat([part[:share] for part, share in zip(parts, shares, strict=True)])


def _reduce_scatter(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _whole(interlace.gemm_reduce_scatter(x, w, bias), len(x))


def _all_gather(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    parts = x.tensor_split(dist.get_world_size())
    share = parts[dist.get_rank()].contiguous()
    return interlace.all_gather_gemm(share, w, bias, splits=[len(part) for part in parts])


def _to_rows(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _whole(row_calls.gathered_product(x, w, bias), len(x))


OPERATORS: dict[str, Run] = {
    **row_calls.OPERATORS,
    "all_to_all_gemm": _to_rows,
    "gemm_reduce_scatter": _reduce_scatter,
    "all_gather_gemm": _all_gather,
}


def _operands(
    name: str, shape: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    columns, inner = SHAPES[shape]
    # An all-gather shares out the same rows on every rank; the others sum or send each rank's own.
    seed = 0 if name == "all_gather_gemm" else dist.get_rank()
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(MOST_ROWS, inner, generator=generator, device="cuda").to(dtype)
    generator.manual_seed(100 + dist.get_rank())
    w = (torch.randn(columns, inner, generator=generator, device="cuda") / 32).to(dtype)
    bias = torch.randn(columns, generator=generator.manual_seed(9), device="cuda").to(dtype)
    return x, w, bias


def _chosen(rows: int) -> torch.Tensor:
    """So many of the rows, in some order, the same on every rank."""
    order = torch.randperm(MOST_ROWS, generator=torch.Generator().manual_seed(rows))
    return order[:rows].cuda()


def _check(found: torch.Tensor, wanted: torch.Tensor, what: str, wrong: list[str]) -> None:
    different = (bits(found) != wanted).any(1).nonzero().flatten().tolist()
    if different:
        wrong.append(f"{what}: {len(different)} of {len(found)} rows, first {different[:3]}")


def _differing(name: str, shape: str, dtype: torch.dtype, step: int) -> list[str]:
    """Batches in which some row has other bits than in the batch of all rows."""
    x, w, bias = _operands(name, shape, dtype)
    run, wrong = OPERATORS[name], []
    with torch.no_grad(), interlace.batch_invariant():
        wanted = bits(run(x, w, bias)).clone()
        # 1. Calls of every size.
        for rows in range(1, MOST_ROWS + 1, step):
            chosen = _chosen(rows)
            _check(run(x[chosen], w, bias), wanted[chosen], f"{rows} rows", wrong)
            if len(wrong) > 20:
                return wrong
        # 2. Graphs of some sizes, whose calls are not alone in them.
        inputs = {rows: x[_chosen(rows)] for rows in IN_GRAPHS}
        for rows in IN_GRAPHS:
            run(inputs[rows], w, bias)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = {rows: run(inputs[rows], w, bias).clone() for rows in IN_GRAPHS}
        for turn in range(3):
            graph.replay()
            for rows, found in results.items():
                _check(found, wanted[_chosen(rows)], f"graph, turn {turn}, {rows} rows", wrong)
        torch.cuda.synchronize()
        del graph, results
        # 3. Batches of very many rows, with ours among them.
        for rows in MANY_ROWS if name != "gemv_all_reduce" and shape == "even" else ():
            many = x.repeat(-(-rows // MOST_ROWS), 1)[:rows]
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).cuda()
            found = run(many[order].contiguous(), w, bias)
            _check(found, wanted[order % MOST_ROWS], f"{rows} rows", wrong)
    interlace.synchronize()
    interlace.group_of().release()
    torch.cuda.empty_cache()
    return wrong


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_bits_of_every_batch(ranks: Any, world_size: int, name: str, shape: str) -> None:
    step = 1 if shape == "even" else 5
    for wrong in ranks(world_size).run(
        _differing, name, shape, torch.bfloat16, step, timeout_s=500
    ):
        assert wrong == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("name", ["gemv_all_reduce", "gemm_all_reduce", "gemm_all_to_all"])
def test_bits_of_other_dtypes(ranks: Any, world_size: int, name: str, dtype: torch.dtype) -> None:
    for wrong in ranks(world_size).run(_differing, name, "odd", dtype, 17, timeout_s=500):
        assert wrong == []


def _error(name: str) -> float:
    """Relative error of batch-invariant results."""
    x, w, bias = _operands(name, "even", torch.bfloat16)
    with interlace.batch_invariant():
        found = OPERATORS[name](x, w, bias).float()
    expected = OPERATORS[name](x, w, bias).float()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", OPERATORS)
def test_the_results_are_right(ranks: Any, world_size: int, name: str) -> None:
    for error in ranks(world_size).run(_error, name):
        assert error < 1e-2


EXPERTS, TOP_K = 16, 4


def _experts_that_differ(hidden: int, ffn: int, dtype: torch.dtype, biased: bool) -> list[str]:
    """Batches in which some token of a mixture of experts has other bits than among all."""
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    most, local = MANY_ROWS[1], EXPERTS // dist.get_world_size()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    x = random(most, hidden).to(dtype)
    w_in = (random(local, ffn, 2, hidden) / 16).to(dtype)
    w_out = (random(local, hidden, ffn) / 16).to(dtype)
    biases = random(local, ffn, 2).to(dtype), random(local, hidden).to(dtype)
    weights, experts = torch.softmax(random(most, EXPERTS), -1).topk(TOP_K)

    def call(tokens: torch.Tensor) -> torch.Tensor:
        return interlace.mixture_of_experts(
            x[tokens], experts[tokens], weights[tokens], w_in, w_out,
            *(biases if biased else (None, None)),
        )  # fmt: skip

    wrong: list[str] = []
    with torch.no_grad(), interlace.batch_invariant():
        wanted = bits(call(torch.arange(most, device="cuda")))
        for count in (*IN_GRAPHS, 300, MANY_ROWS[0]):
            order = torch.randperm(most, generator=torch.Generator().manual_seed(count))
            tokens = order[:count].cuda()
            _check(call(tokens), wanted[tokens], f"{count} tokens", wrong)
            if count not in IN_GRAPHS[::3]:
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = call(tokens)
            graph.replay()
            _check(found, wanted[tokens], f"{count} tokens in a graph", wrong)
            torch.cuda.synchronize()
            del graph, found
    interlace.group_of().release()
    return wrong


@pytest.mark.parametrize("biased", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("hidden", "ffn"), [(512, 768), (1032, 392)])
def test_bits_of_experts(
    ranks: Any, world_size: int, hidden: int, ffn: int, dtype: torch.dtype, biased: bool
) -> None:
    """By the kernels for few tokens and by those for many, as calls and from CUDA graphs."""
    for wrong in ranks(world_size).run(
        _experts_that_differ, hidden, ffn, dtype, biased, timeout_s=500
    ):
        assert wrong == []


def _kernels(dtype: torch.dtype) -> tuple[tuple[int, int], dict[str, float]]:
    """The GPU's compute capability, and the share of elements that have the bits of the fused
    kernel by the kernels for few rows.
    """
    shares = {}
    with pytest.MonkeyPatch.context() as patch, interlace.batch_invariant():
        patch.setattr(invariance, "has_one_arithmetic", lambda *_: True)
        interlace.group_of().release()
        for shape in SHAPES:
            x, w, bias = _operands("gemm_all_reduce", shape, dtype)
            for rows in (1, 16, 64, MOST_ROWS):
                fused = interlace.gemm_all_reduce(x[:rows], w, bias, impl="fused")
                others = {
                    "gemv": interlace.gemv_all_reduce(x[:rows], w, bias),
                    "pushed": interlace.gemm_all_reduce(x[:rows], w, bias, impl="pushed"),
                }
                for name, found in others.items():
                    share = float((bits(found) == bits(fused)).float().mean())
                    shares[f"{name}, {shape}, {rows} rows"] = share
    interlace.group_of().release()
    return torch.cuda.get_device_capability(), shares


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_whether_the_kernels_agree(ranks: Any, world_size: int, dtype: torch.dtype) -> None:
    """If all shares are 1, and no tile differs in the test below, this GPU belongs in
    ``interlace.gemm.invariance.ONE_ARITHMETIC``, and batch-invariant calls take the faster kernels
    and tiles for few rows.
    """
    capability, shares = ranks(world_size).run(_kernels, dtype)[0]
    print(f"{dtype}, compute capability {capability}: {shares}")
    if capability in ONE_ARITHMETIC:
        assert set(shares.values()) == {1.0}


TILES = [
    (16, 64, 256, 4, 3, 1),
    (16, 64, 64, 4, 4, 1),
    (32, 128, 128, 4, 2, 1),
    (64, 64, 128, 4, 3, 1),
    (128, 128, 64, 8, 3, 1),
    (256, 64, 64, 4, 3, 1),
    (16, 16, 128, 4, 3, 1),
    (64, 16, 128, 4, 4, 0),
    (64, 128, 64, 4, 3, 0),
    (128, 256, 64, 8, 3, 0),
    (16, 32, 64, 2, 2, 0),
]


# Columns, K, and whether the weight is contiguous along K.
WEIGHTS = [(4096, 2048, True), (1000, 1160, True), (999, 1003, True), (512, 640, False)]


def _sums(x: torch.Tensor, w: torch.Tensor, tiles: tuple[int, ...]) -> torch.Tensor:
    """The product in float32, by these tiles."""
    height, width, block_k, warps, stages, weight_first = tiles
    # Blocks of float32 have as many bytes, and the matrix unit takes the weight first along K only.
    block_k, weight_first = block_k * 2 // x.itemsize, weight_first * int(w.stride(1) == 1)
    config = few_rows.FewRowsConfig(height, width, block_k, warps, stages, weight_first)
    y = torch.full((len(x), len(w)), torch.nan, device="cuda")
    few_rows.multiply(x, [w], [None], [y], config)
    return y


def _tiles_that_differ(dtype: torch.dtype) -> tuple[tuple[int, int], list[str]]:
    """Tiles of few rows by which some unrounded sum has other bits than by large ones."""
    generator, wrong = torch.Generator("cuda").manual_seed(5), []
    for columns, inner, along_k in WEIGHTS:
        x = torch.randn(200, inner, generator=generator, device="cuda").to(dtype)
        w = (torch.randn(columns, inner, generator=generator, device="cuda") / 32).to(dtype)
        w = w if along_k else w.T.contiguous().T
        expected = _sums(x, w, (128, 128, 64, 8, 3, 0))
        exact = x.double() @ w.double().T
        assert float((expected - exact).norm() / exact.norm()) < 1e-4
        for tiles in TILES:
            # Without the matrix unit, large tiles have more registers than there are.
            if dtype == torch.float32 and tiles[0] * tiles[1] > 1 << 14:
                continue
            for rows in (1, 5, 16, 100, 200):
                if not torch.equal(_sums(x[:rows], w, tiles), expected[:rows]):
                    wrong.append(f"{columns} x {inner}, {rows} rows, {tiles}")
    return torch.cuda.get_device_capability(), wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_whether_tiles_change_bits(ranks: Any, dtype: torch.dtype) -> None:
    ((capability, wrong),) = ranks(1).run(_tiles_that_differ, dtype)
    print(f"{dtype}, compute capability {capability}: {wrong}")
    if capability in ONE_ARITHMETIC:
        assert wrong == []
