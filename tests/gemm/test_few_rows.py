"""Products of few rows by the kernel of ``interlace.gemm.few_rows``: results, and tiles for GPUs
that are not here. Several weights at once are in ``tests/operators/linears``.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.errors import ArgumentError
from interlace.gemm import few_rows, operands
from interlace.gemm.few_rows import FewRowsConfig
from interlace.gemm.operands import FLOAT8
from interlace.gemm.scaled import block_scale_shapes, dequantised
from interlace.tuning.gpu import Gpu
from interlace.units import ceil_div


def _errors(dtype: torch.dtype) -> dict[Any, float]:
    """Errors relative to float64: rows, columns, K, tiles, and whether the weight is along K."""
    torch.manual_seed(1)
    errors = {}
    for rows, columns, inner, tiles, along_k in (
        (5, 40, 33, (16, 16, 32, 4, 1, 1), True),  # what no tile divides
        (20, 33, 64, (16, 32, 16, 4, 1, 1), True),  # several tiles of rows
        (20, 33, 64, (16, 32, 16, 4, 1, 0), True),  # x is the first operand
        (7, 24, 20, (16, 16, 16, 4, 1, 1), False),  # along N x is the first whatever is asked for
        (1, 9, 40, (1, 4, 16, 1, 1, 1), True),  # one row without the matrix unit
        (1, 9, 40, None, True),
        (3, 9, 40, None, True),
        (1, 9, 40, None, False),
    ):
        x, w = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
        w = w if along_k else w.T.contiguous().T
        bias, y = torch.randn(columns).to(dtype), torch.empty(rows, columns, dtype=dtype)
        few_rows.multiply(x, [w], [bias], [y], tiles and FewRowsConfig(*tiles))
        exact = x.double() @ w.double().T + bias.double()
        error = (y.double() - exact).norm() / exact.norm()
        errors[rows, columns, inner, tiles, along_k] = float(error)
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_results(ranks: Any, dtype: torch.dtype) -> None:
    (errors,) = ranks(1).run(_errors, dtype)
    # The interpreter truncates where it converts to bfloat16.
    assert {case: e for case, e in errors.items() if e > 2 * torch.finfo(dtype).eps} == {}


def _errors_with_scales() -> dict[Any, float]:
    """Errors relative to float64, of float8 operands with scales of rows and of blocks: rows,
    columns, K, tiles, and whether scales are of blocks.
    """
    torch.manual_seed(1)
    errors = {}
    for (rows, columns, inner, tiles), in_blocks in itertools.product(
        (
            (5, 40, 300, (16, 16, 32, 4, 1, 1)),  # what no tile divides
            (20, 150, 256, (16, 32, 64, 4, 1, 0)),  # x is the first operand
            (3, 260, 260, (16, 128, 256, 4, 1, 1)),  # a tile of as many rows as a block has
            (1, 140, 400, (1, 4, 256, 1, 1, 1)),  # one row without the matrix unit
            (1, 140, 384, (1, 4, 128, 1, 1, 1)),
            (7, 33, 130, None),
        ),
        (False, True),
    ):
        x, w = torch.randn(rows, inner).to(FLOAT8), torch.randn(columns, inner).to(FLOAT8)
        shapes = block_scale_shapes(x, w) if in_blocks else ([rows], [columns])
        x_scale, w_scale = (torch.rand(shape) + 0.5 for shape in shapes)
        y = torch.empty(rows, columns)
        few_rows.multiply(
            x, [w], [None], [y], tiles and FewRowsConfig(*tiles), scales=(x_scale, w_scale)
        )
        exact = dequantised(x, x_scale, 1).double() @ dequantised(w, w_scale, 128).double().T
        error = (y.double() - exact).norm() / exact.norm()
        errors[rows, columns, inner, tiles, in_blocks] = float(error)
    return errors


def test_results_with_scales(ranks: Any) -> None:
    (errors,) = ranks(1).run(_errors_with_scales)
    assert {case: e for case, e in errors.items() if e > 1e-6} == {}


GPUS = [
    Gpu("H200", 132, 232448), Gpu("A100", 108, 166912), Gpu("L4", 58, 101376),
    Gpu("MI300X", 304, 65536),
]  # fmt: skip


@given(
    st.sampled_from(GPUS),
    st.integers(1, 5000),
    st.integers(1, 40000),
    st.integers(1, 30000),
    st.sampled_from([2, 4]),
    st.booleans(),
)
def test_tiles_fit_into_shared_memory(
    gpu: Gpu, rows: int, columns: int, inner: int, itemsize: int, along_k: bool
) -> None:
    tiles = few_rows.tiles_for(gpu, rows, columns, inner, itemsize, along_k)
    stage_bytes = (tiles.rows + tiles.columns) * tiles.block_k * itemsize
    assert tiles.num_stages * stage_bytes <= gpu.shared_bytes
    assert along_k or not tiles.weight_first
    # A tile has rows for no more than twice those that there are, beyond the smallest.
    assert tiles.rows <= max(64, 2 * rows)


@pytest.mark.parametrize(
    ("rows", "columns", "inner"), [(1, 8192, 2048), (16, 4096, 7168), (64, 8192, 8192)]
)
def test_a_decoders_weight_is_read_by_most_processors(rows: int, columns: int, inner: int) -> None:
    tiles = few_rows.tiles_for(GPUS[0], rows, columns, inner, 2)
    programs = ceil_div(columns, tiles.columns) * ceil_div(rows, tiles.rows)
    assert 0.45 * 132 < programs <= 132
    # Enough of the weight is on its way to hide the time until it comes.
    assert programs * tiles.num_stages * tiles.columns * tiles.block_k * 2 > 8e6


def _refused() -> str:
    w = torch.ones(16, 8).T
    with pytest.raises(ArgumentError) as raised:
        few_rows.multiply(torch.ones(2, 16), [w, w], [None, None], [torch.empty(2, 8)] * 2)
    return str(raised.value)


def test_several_weights_along_n_are_refused(ranks: Any) -> None:
    (message,) = ranks(1).run(_refused)
    assert message == "several weights must be contiguous along K; copy those that are not."


def test_what_hardware_loads_as_tiles() -> None:
    rows = torch.empty(8, 64, dtype=torch.bfloat16)
    assert operands.is_aligned(rows)
    assert operands.is_aligned(rows.T)
    assert operands.is_aligned(rows[:, :13])
    assert not operands.is_aligned(rows[:, 1:])
    assert not operands.is_aligned(rows[:1].expand(8, -1))
    assert not operands.is_aligned(torch.empty(8, 63, dtype=torch.bfloat16))


def test_what_cublas_keeps() -> None:
    """Without a GPU of which times are known, cuBLAS multiplies."""
    assert not few_rows.is_faster(torch.ones(4, 64).bfloat16(), torch.ones(64, 64).bfloat16())
