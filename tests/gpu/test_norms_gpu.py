"""Residual and norm after an all-reduce, put into one operator by the pass, on GPUs, whatever the
tables say. Run with ``-m gpu``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from interlace.gemm.operands import FLOAT8
from interlace.gemm.scaled import block_scale_shapes, dequantised
from interlace.operators.gemm_all_reduce import normed_launch
from tests.compile.norms import FUSED, NORMED, ROUNDINGS
from tests.compile.programs import fuse_everything, fused, tensors, traced

pytestmark = pytest.mark.gpu


def _norms(dtype: torch.dtype) -> dict[str, tuple[list[str], float]]:
    outcomes = {}
    with pytest.MonkeyPatch.context() as patch:
        fuse_everything(patch)
        for name, (program, shapes, _) in FUSED.items():
            arguments = tensors(*shapes, dtype=dtype)
            names, _, error = fused(traced(program, arguments), arguments)
            outcomes[name] = names, error
    return outcomes


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_norms(ranks: Any, dtype: torch.dtype) -> None:
    for outcomes in ranks(2).run(_norms, dtype):
        assert {name: names for name, (names, _) in outcomes.items()} == {
            name: [NORMED] * case[2] for name, case in FUSED.items()
        }
        # Products and sums are in another order than PyTorch's.
        allowed = max(ROUNDINGS[dtype], 1e-5)
        assert {name: error for name, (_, error) in outcomes.items() if not error < allowed} == {}


def _in_blocks(columns: int) -> list[tuple[str, int, float]]:
    """The largest error of float8 norms with scales of blocks, as a part of their block's largest
    element, by implementation and rows.
    """
    columns, results = 512, []
    own = torch.Generator().manual_seed(1 + dist.get_rank())
    w = torch.randn(columns, 256, generator=own).bfloat16().cuda()
    for impl, rows in (("fused", 1), ("fused", 5), ("pushed", 5), ("pushed", 300), ("gemm", 5)):
        x = torch.randn(rows, 256, generator=own).bfloat16().cuda()
        y, h, scales = interlace.gemm_all_reduce(
            x, w, norm="rms", impl=impl, out_dtype=FLOAT8, block_scales=True
        )
        exact = h.float() * h.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        by_element = scales.repeat_interleave(128, 1)[:, :columns]
        blocks = F.pad((y.float() * by_element - exact).abs(), (0, -columns % 128))
        largest = F.pad(exact.abs(), (0, -columns % 128)).unflatten(1, (-1, 128)).amax(-1)
        error = (blocks.unflatten(1, (-1, 128)).amax(-1) / largest).max().item()
        results.append((impl, rows, error))
    return results


@pytest.mark.parametrize("columns", [384, 1536, 2000])
def test_scales_of_blocks(ranks: Any, columns: int) -> None:
    for results in ranks(2).run(_in_blocks, columns):
        # Half a unit in the last place of the largest numbers.
        assert [each for each in results if not each[2] < 1.1 * 2**-4] == []


def _of_float8(inner: int) -> list[tuple[str, int, float]]:
    """The largest error of sums of float8 products with scales of blocks, by implementation and
    rows; each call comes twice, with other scales in the same memory.
    """
    columns, results = 512, []
    own = torch.Generator().manual_seed(1 + dist.get_rank())
    w = torch.randn(columns, inner, generator=own).to(FLOAT8).cuda()
    for impl, rows in (("pushed", 1), ("pushed", 300), ("gemm", 5), ("gemm", 70), ("unfused", 6)):
        x = torch.randn(rows, inner, generator=own).to(FLOAT8).cuda()
        x_scale, w_scale = (torch.ones(each).cuda() for each in block_scale_shapes(x, w))
        for factor in (1.0, 2.0, 3.0):
            x_scale.copy_(torch.rand(x_scale.shape, generator=own) + factor)
            _, h, _ = interlace.gemm_all_reduce(
                x, w, x_scale=x_scale, w_scale=w_scale, norm="rms", impl=impl
            )
            total = dequantised(x, x_scale, 1) @ dequantised(w, w_scale, 128).T
            dist.all_reduce(total)
            error = ((h.float() - total).abs().max() / total.abs().max()).item()
            results.append((impl, rows, error))
    return results


def test_products_of_float8(ranks: Any) -> None:
    for results in ranks(2).run(_of_float8, 640):
        assert [each for each in results if not each[2] < 2e-2] == []


_NUMBERS = {512: (4096, 300, 1000, 257, 999), 8192: (4096, 2049, 3000, 2056, 2999)}
"""Numbers of rows by columns: what one kernel behind the product sums, and what it does not."""


def _many_rows(columns: int, inner: int, scales_of: str) -> list[tuple[int, float, bool]]:
    """Calls of a server: other rows and other memory in each, one weight for each layer. The first
    one has most rows, as memory that grows makes ranks forget.

    Args:
        columns, inner: N and K.
        scales_of: What has a scale in float8: ``"rows"`` or ``"blocks"``; empty for bfloat16.
    """
    group = interlace.group_of()
    found: list[bool] = []
    recall = group.recall_form

    def recorded(*arguments: Any) -> Any:
        result = recall(*arguments)
        found.append(result is not None)
        return result

    results = []
    own = torch.Generator().manual_seed(1 + dist.get_rank())
    shared = torch.Generator().manual_seed(0)
    weights = [torch.randn(columns, inner, generator=own).bfloat16().cuda() for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "recall_form", recorded)
        for rows in _NUMBERS[columns]:
            for w in weights:
                x = torch.randn(rows, inner, generator=own).bfloat16().cuda()
                residual = torch.randn(rows, columns, generator=shared).bfloat16().cuda()
                found.clear()
                operands = _scaled(x, w, scales_of)
                y, h, _ = interlace.gemm_all_reduce(
                    **operands, residual=residual, norm="rms", eps=1e-6
                )
                total = _product(**operands)
                dist.all_reduce(total)
                exact = (total + residual.float()).bfloat16().float()
                normed = exact * exact.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
                errors = [
                    ((result.float() - right).abs().max() / right.abs().max()).item()
                    for result, right in ((y, normed), (h, exact))
                ]
                results.append((rows, max(errors), any(found)))
    return results


def _scaled(x: torch.Tensor, w: torch.Tensor, scales_of: str) -> dict[str, torch.Tensor]:
    """x and w, in float8 with scales around 1 if these are of something."""
    if not scales_of:
        return {"x": x, "w": w}
    x, w = x.to(FLOAT8), w.to(FLOAT8)
    shapes = ((len(x), 1), (1, len(w))) if scales_of == "rows" else block_scale_shapes(x, w)
    x_scale, w_scale = (torch.rand(shape, device="cuda") + 0.5 for shape in shapes)
    return {"x": x, "w": w, "x_scale": x_scale, "w_scale": w_scale}


def _product(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product in float32."""
    if x_scale is None or w_scale is None:
        return x.float() @ w.float().T
    if x_scale.shape[1] == 1:
        x_scale, w_scale = x_scale[:, 0], w_scale[0]
    return dequantised(x, x_scale, 1) @ dequantised(w, w_scale, 128).T


@pytest.mark.parametrize("columns", _NUMBERS)
@pytest.mark.parametrize("scales_of", ["", "rows", "blocks"])
def test_many_rows_of_one_form(ranks: Any, scales_of: str, columns: int) -> None:
    """Calls are found by their form, whatever their rows and addresses are."""
    for results in ranks(2).run(_many_rows, columns, 256, scales_of):
        assert [(rows, error) for rows, error, _ in results if not error < 2e-2] == []
        found = [is_found for _, _, is_found in results]
        # What sums larger numbers may need memory at each, by which ranks forget; not at the next
        # weight.
        assert found[1::2] == [True] * len(_NUMBERS[columns])
        assert columns > 512 or found == [False] + [True] * (len(results) - 1)


def _compiled_ahead(inner: int) -> tuple[list[str], float]:
    """The kernels that calls of few tokens compile or load after one of many tokens of a product
    that any number of tokens is expected of, and the largest error.
    """
    from triton import knobs

    columns, loaded, worst = 512, [], 0.0
    own = torch.Generator().manual_seed(1 + dist.get_rank())
    w = torch.randn(columns, inner, generator=own).bfloat16().cuda()

    def call(tokens: int) -> float:
        x = torch.randn(tokens, inner, generator=own).bfloat16().cuda()
        residual = torch.zeros(tokens, columns, dtype=torch.bfloat16, device="cuda")
        _, h, _ = interlace.gemm_all_reduce(x, w, residual=residual, norm="rms", eps=1e-6)
        total = x.float() @ w.float().T
        dist.all_reduce(total)
        return ((h.float() - total).abs().max() / total.abs().max()).item()

    normed_launch.expect_any_tokens(columns, inner, torch.bfloat16)
    call(300)
    # What is compiled ahead must not be taken for what the calls below compile.
    for wait in [*normed_launch._compiling.values()]:
        wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            knobs.compilation, "listener", lambda src, **_: loaded.append(src.name), raising=False
        )
        for tokens in (1, 2, 4, 8, 24, 64):
            worst = max(worst, call(tokens))
    return loaded, worst


def test_kernels_of_all_numbers_of_tokens_are_compiled_ahead(ranks: Any) -> None:
    for loaded, error in ranks(2).run(_compiled_ahead, 640):
        # Where the sum and the norm are two kernels, those of the sum are not compiled ahead.
        assert not {"multiply_sum_and_norm", "sum_and_norm_rows"} & set(loaded)
        assert error < 2e-2
