"""Tiles that only GPUs compute, by descriptors: in the interpreter, which has them, too."""

from __future__ import annotations

from typing import Any

import torch

from interlace.gemm.operands import FLOAT8
from interlace.gemm.scaled import dequantised


def _gate_and_up() -> list[float]:
    """The error of gate and up in a tile of the second expert's second block, whose last rows are
    not there, relative to the largest element.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    from interlace.gemm.kernels.tiles import Tiling
    from tests.operators.mixture_of_experts.kernels import gate_and_up

    experts, width, inner, rows, column = 2, 256, 384, 40, 192
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner, generator=generator).to(FLOAT8)
    w = torch.randn(experts, 2, width, inner, generator=generator).to(FLOAT8)
    x_scale = torch.rand(rows, inner // 128, generator=generator) + 0.5
    w_scale = torch.rand(experts, 2 * width // 128, inner // 128, generator=generator) + 0.5
    gate, up = torch.zeros(16, 64), torch.zeros(16, 64)
    tiling = Tiling(16, 128, 128, 8, True, w_along_k=True, block_scales="x")
    lines = w.flatten(0, 1)
    row, end = 32, 40
    gate_and_up[(1,)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [16, 128]),
        TensorDescriptor(lines, list(lines.shape), list(lines.stride()), [2, 64, 128]),
        x_scale, w_scale, gate, up, row, end, 1, column, width, inner, TILING=tiling,
    )  # fmt: skip
    wide_x = dequantised(x, x_scale, 1)[row:end].double()
    both = dequantised(w[1].flatten(0, 1), w_scale[1], 128).double()
    errors = []
    for found, before in ((gate, 0), (up, width)):
        expected = wide_x @ both[before + column : before + column + 64].T
        difference = (found[: end - row].double() - expected).abs().max()
        errors.append((difference / expected.abs().max()).item())
    return errors


def test_gate_and_up_at_once(ranks: Any) -> None:
    (errors,) = ranks(1).run(_gate_and_up)
    assert all(error < 1e-5 for error in errors), errors
