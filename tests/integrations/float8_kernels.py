"""Stand-ins on the CPU for kernels of float8; the schemas of vLLM's are its own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from interlace.gemm.operands import FLOAT8
from interlace.gemm.scaled import SCALE_BLOCK, dequantised

_KERNELS = {
    "per_token_group_fp8_quant": (
        "Tensor input, Tensor(a!) output_q, Tensor(b!) output_s, int group_size, float eps, "
        "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, "
        "bool dummy_is_tma_aligned"
    ),
    "cutlass_scaled_mm": (
        "Tensor(a!) out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias"
    ),
}
"""Arguments of the operators of vLLM's compiled library, which return nothing."""

_PRODUCTS = {
    "fp8_gemm_nt_op": (
        "Tensor q_input, Tensor input_scale, Tensor weight, Tensor weight_scale, "
        "Tensor(a!) output, bool use_deep_gemm_e8m0) -> ()"
    ),
    "w8a8_triton_block_scaled_mm_func": (
        "Tensor qx, Tensor weight, Tensor x_scale, Tensor weight_scale, SymInt[] block_size, "
        "ScalarType output_dtype) -> Tensor"
    ),
    "dynamic_flashinfer_deepgemm_blockscale_gemm": (
        "Tensor input, Tensor weight, Tensor weight_scale, SymInt group_size, "
        "bool use_deep_gemm_e8m0) -> Tensor"
    ),
}
"""Schemas of the operators that vLLM defines in Python, behind their names."""


def multiplied(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor
) -> torch.Tensor:
    """Return ``x @ w.T`` times the scales, of blocks or of rows, in bfloat16."""
    if x_scale.shape[1] == 1:
        x_scale, w_scale = x_scale.flatten(), w_scale.flatten()
    wide_x, wide_w = dequantised(x, x_scale, 1), dequantised(w, w_scale, SCALE_BLOCK)
    return (wide_x @ wide_w.T).bfloat16()


def quantised(
    x: torch.Tensor, group_size: int, use_ue8m0: bool, least: float = 1e-10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in float8 and the scales of its groups, which may be powers of two."""
    groups = x.float().unflatten(-1, (-1, group_size))
    largest = torch.finfo(FLOAT8).max
    scale = groups.abs().amax(-1).clamp(min=least) / largest
    if use_ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    quotients = (groups / scale.unsqueeze(-1)).clamp(-largest, largest)
    return quotients.flatten(-2).to(FLOAT8), scale


def _quantise(
    x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, group_size: int, least: float,
    lowest: float, highest: float, use_ue8m0: bool, *_: bool,
) -> None:  # fmt: skip
    for target, source in zip((y, scale), quantised(x, group_size, use_ue8m0, least), strict=True):
        target.copy_(source)


def _multiply(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:  # fmt: skip
    product = multiplied(x, w.T, x_scale, w_scale.T if w_scale.dim() == 2 else w_scale)
    y.copy_(product if bias is None else product + bias)


def _by_deep_gemm(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor,
    y: torch.Tensor, _: bool,
) -> None:  # fmt: skip
    y.copy_(multiplied(x, w, x_scale, w_scale))


def _by_triton(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, _: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return multiplied(x, w, x_scale, w_scale).to(dtype)


def _by_flashinfer(
    x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, group_size: int, use_ue8m0: bool
) -> torch.Tensor:
    x, x_scale = quantised(x, group_size, use_ue8m0 and len(x) >= 32)
    return multiplied(x, w, x_scale, w_scale)


@contextmanager
def kernels() -> Iterator[None]:
    """Define the operators of vLLM's compiled library."""
    library = torch.library.Library("_C", "FRAGMENT")
    runs: tuple[Any, ...] = (_quantise, _multiply)
    for (name, arguments), run in zip(_KERNELS.items(), runs, strict=True):
        library.define(f"{name}({arguments}) -> ()")
        library.impl(name, run, "CPU")
        torch.library.register_fake(f"_C::{name}", lambda *_: None, lib=library)
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def products() -> Iterator[None]:
    """Define the products that vLLM defines in Python, for a process without vLLM."""
    library = torch.library.Library("vllm", "FRAGMENT")
    runs: tuple[Any, ...] = (_by_deep_gemm, _by_triton, _by_flashinfer)
    fakes: tuple[Any, ...] = (
        lambda *_: None,
        lambda x, w, *settings: x.new_empty([len(x), len(w)], dtype=settings[-1]),
        lambda x, w, *_: x.new_empty([len(x), len(w)]),
    )
    for (name, schema), run, fake in zip(_PRODUCTS.items(), runs, fakes, strict=True):
        library.define(f"{name}({schema}")
        library.impl(name, run, "CPU")
        torch.library.register_fake(f"vllm::{name}", fake, lib=library)
    try:
        yield
    finally:
        library._destroy()


CLASSES = {
    "deep_gemm": "DeepGemmFp8BlockScaledMMKernel",
    "cutlass": "CutlassFp8BlockScaledMMKernel",
    "triton": "TritonFp8BlockScaledMMKernel",
    "flashinfer": "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
}
"""vLLM's classes of products with scales of blocks, by the module that each is in."""


def patches(kernel: str) -> list[tuple[Any, str, Any]]:
    """Return what must stand in vLLM's modules so that its layers run one of ``CLASSES`` on the
    CPU: the module, the name, and the value.
    """
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm, flashinfer
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    module = importlib.import_module(f"{linear.__name__}.scaled_mm.{kernel}")
    chosen = getattr(module, CLASSES[kernel])

    class Gpu(type(fp8_utils.current_platform)):  # type: ignore[misc]
        def is_cuda_alike(self) -> bool:
            return True

    def by_deep_gemm(x: Any, w: Any, y: torch.Tensor, **_: Any) -> None:
        _by_deep_gemm(*x, *w, y, True)

    def by_triton(x: Any, w: Any, x_scale: Any, w_scale: Any, *_: Any) -> torch.Tensor:
        return multiplied(x, w, x_scale, w_scale)

    def by_flashinfer(input: Any, weight: Any, weight_scale: Any, **_: Any) -> torch.Tensor:
        x, x_scale = quantised(input, SCALE_BLOCK, False)
        return multiplied(x, weight, x_scale, weight_scale)

    return [
        (linear, "choose_scaled_mm_linear_kernel", lambda **_: chosen),
        (fp8_utils, "current_platform", Gpu()),
        (fp8_utils, "w8a8_triton_block_scaled_mm", by_triton),
        (deep_gemm, "is_deep_gemm_e8m0_used", lambda: True),
        (deep_gemm, "fp8_gemm_nt", by_deep_gemm),
        (flashinfer, "fp8_gemm_nt", by_deep_gemm),
        (flashinfer, "flashinfer_fp8_blockscale_gemm", by_flashinfer),
    ]
