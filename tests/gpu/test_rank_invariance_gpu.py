"""The same bits for 1, 2, 4 and 8 ranks on real GPUs, which ranks may share: batches of one row to
thousands, as calls and in CUDA graphs. Run with ``-m gpu``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.nn import ColumnParallelLinear, RowParallelLinear
from tests.gemm.row_calls import bits

# A process has 1 to 3 GiB of a GPU, and 15 of them wait here for their turn: those of ten tests at
# once do not fit on one GPU.
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

WORLD_SIZES = (1, 2, 4, 8)
MOST_ROWS = 2048
BATCHES = (1, 3, 16, 17, 64, 200, 777)
IN_GRAPHS = (1, 16, 200)
SHAPES = {"even": (2048, 8192), "odd": (1000, 128 * 37)}  # N, K of all ranks


def _cut(full: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's share."""
    return full.tensor_split(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def _gathered(y: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """All ranks' shares of ``size`` rows or columns, by a collective that a graph may hold."""
    ranks = dist.get_world_size()
    shares = [len(part) for part in torch.empty(size).tensor_split(ranks)]
    lines = y if dim == 0 else y.T
    padded = y.new_zeros(max(shares), lines.shape[1])
    padded[: len(lines)] = lines
    whole = y.new_empty(ranks * max(shares), lines.shape[1])
    dist.all_gather_into_tensor(whole, padded)
    parts = zip(whole.split(max(shares)), shares, strict=True)
    joined = torch.cat([part[:share] for part, share in parts])
    return joined if dim == 0 else joined.T.contiguous()


class _Products:
    """Sums over ranks of x by a weight that is cut along K, and products by one cut along N."""

    def __init__(self, shape: str, dtype: torch.dtype) -> None:
        (columns, inner), generator = SHAPES[shape], torch.Generator("cuda").manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device="cuda")

        self.x = random(MOST_ROWS, inner).to(dtype)
        self.w = (random(columns, inner) / 32).to(dtype)
        self.bias, self.residual = random(columns).to(dtype), random(MOST_ROWS, columns).to(dtype)
        self.w_shard_k, self.w_shard_n = _cut(self.w, 1), _cut(self.w, 0)

    def all_reduce(self, rows: int) -> torch.Tensor:
        return interlace.gemm_all_reduce(_cut(self.x[:rows], 1), self.w_shard_k, self.bias)

    def reduce_scatter(self, rows: int) -> torch.Tensor:
        shard = interlace.gemm_reduce_scatter(_cut(self.x[:rows], 1), self.w_shard_k, self.bias)
        return _gathered(shard, 0, rows)

    def normed(self, rows: int) -> torch.Tensor:
        results = interlace.gemm_all_reduce(
            _cut(self.x[:rows], 1), self.w_shard_k, residual=self.residual[:rows],
            norm_weight=self.bias,
        )  # fmt: skip
        return torch.cat([results.y, results.residual], 1)

    def all_gather(self, rows: int) -> torch.Tensor:
        shares = [len(part) for part in self.x[:rows].tensor_split(dist.get_world_size())]
        y = interlace.all_gather_gemm(_cut(self.x[:rows], 0), self.w_shard_n, splits=shares)
        return _gathered(y, 1, len(self.w))


CALLS: dict[str, Callable[[_Products, int], torch.Tensor]] = {
    "all_reduce": _Products.all_reduce,
    "reduce_scatter": _Products.reduce_scatter,
    "normed": _Products.normed,
    "all_gather": _Products.all_gather,
}


def _batches(name: str, shape: str, dtype: torch.dtype) -> tuple[str, float, list[str]]:
    """A digest of the bits of all rows, their relative error, and the batches in which some row has
    other bits.
    """
    products, call, wrong = _Products(shape, dtype), CALLS[name], []
    with torch.no_grad(), interlace.batch_invariant(ranks=True):
        y = call(products, MOST_ROWS).clone()
        for rows in BATCHES:
            if not torch.equal(bits(call(products, rows)), bits(y[:rows])):
                wrong.append(f"{rows} rows")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = {rows: call(products, rows).clone() for rows in IN_GRAPHS}
        for turn in range(2):
            graph.replay()
            for rows, found in captured.items():
                if not torch.equal(bits(found), bits(y[:rows])):
                    wrong.append(f"{rows} rows in a graph, turn {turn}")
        torch.cuda.synchronize()
        del graph, captured
    interlace.synchronize()
    interlace.group_of().release()
    bias = 0 if name in ("normed", "all_gather") else products.bias.double()
    exact = products.x.double() @ products.w.double().T + bias
    if name == "normed":
        exact += products.residual.double()
    sums = y.double()[:, -exact.shape[1] :]
    error = float((sums - exact).norm() / exact.norm())
    return hashlib.sha256(bits(y).cpu().numpy().tobytes()).hexdigest(), error, wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CALLS)
def test_bits_of_every_number_of_ranks(
    ranks: Any, name: str, shape: str, dtype: torch.dtype
) -> None:
    if (shape, dtype) == ("odd", torch.float16):
        pytest.skip("the shape is tried in two dtypes")
    results = {
        size: ranks(size).run(_batches, name, shape, dtype, timeout_s=500) for size in WORLD_SIZES
    }
    wanted = results[1][0][0]
    for size, of_ranks in results.items():
        for digest, error, wrong in of_ranks:
            assert wrong == [], size
            assert digest == wanted, size
            # Twice one rounding to the result's dtype: leaves, pairs, fours and the sum.
            assert error < 4 * torch.finfo(dtype).eps + 1e-5


def _of_layers() -> str:
    """A digest of an MLP's rows, by layers that are sharded."""
    torch.manual_seed(0)
    up = torch.nn.Linear(1024, 4096, device="cuda", dtype=torch.bfloat16)
    down = torch.nn.Linear(4096, 1024, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16)
    with interlace.batch_invariant(ranks=True):
        layers = ColumnParallelLinear.from_linear(up), RowParallelLinear.from_linear(down)
        y = layers[1](torch.relu(layers[0](x))).detach()
    return hashlib.sha256(bits(y).cpu().numpy().tobytes()).hexdigest()


def test_bits_of_layers(ranks: Any) -> None:
    found = {digest for size in WORLD_SIZES for digest in ranks(size).run(_of_layers)}
    assert len(found) == 1
