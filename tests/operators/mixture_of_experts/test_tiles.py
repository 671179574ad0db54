"""Tiles that only GPUs compute, by descriptors: in the interpreter, which has them, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace import MixtureOfExpertsConfig
from interlace.gemm.operands import FLOAT8
from interlace.gemm.scaled import dequantised
from interlace.operators.mixture_of_experts import decode


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


@pytest.mark.parametrize(
    ("tile", "stages", "itemsize", "along_k", "programs"),
    [
        ((16, 64, 128), 3, 2, True, 3),
        ((64, 128, 64), 3, 2, True, 3),
        ((64, 128, 64), 3, 2, False, 2),
        ((16, 128, 128), 3, 1, True, 3),
        ((32, 64, 128), 4, 1, True, 3),
        ((64, 64, 128), 4, 1, True, 2),
        ((64, 128, 128), 8, 2, True, 1),
    ],
)
def test_programs_that_a_processor_holds(
    monkeypatch: pytest.MonkeyPatch,
    tile: tuple[int, int, int],
    stages: int,
    itemsize: int,
    along_k: bool,
    programs: int,
) -> None:
    """By shared memory, and by the registers that compiled kernels have (``decode``)."""
    properties = SimpleNamespace(shared_memory_per_multiprocessor=228 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(decode, "processors", lambda _: 132)
    monkeypatch.setattr(decode, "_stages", lambda config, *_: config.num_stages)
    config = MixtureOfExpertsConfig(*tile, num_warps=4, num_stages=stages)
    count = decode.resident_programs.__wrapped__
    found = count(config, itemsize, torch.device("cuda"), along_k=along_k)
    assert found == programs * 132
