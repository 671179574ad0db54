"""vLLM's own layers, traced from its source, with its own groups and its own custom operators: what
is fused, and that results stay.

vLLM's wheel has kernels for GPUs only, which are not needed here. vLLM takes a machine without a
GPU for a platform that it does not know; it spells collectives as on GPUs there once that platform
says so, which is all that is changed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from examples.integrations.vllm_llama_mlp import worker_of_vllm

from interlace.compile import InductorPass, eager_backend, foreign, recording, uninstall
from interlace.gemm.operands import FLOAT8
from interlace.integrations import vllm
from tests.integrations import float8_kernels

HIDDEN, INTERMEDIATE = 16, 32
BLOCKS = 2  # of 128 elements, along both dimensions of a rank's weight

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: its wheel has 340 MB", allow_module_level=True)
linear = pytest.importorskip("vllm.model_executor.layers.linear", exc_type=ImportError)


@contextmanager
def _vllm() -> Iterator[None]:
    """The state of a worker of vLLM, which later tests of the process do not see."""
    from torch._inductor import config
    from vllm import plugins
    from vllm.distributed import parallel_state

    plugins.plugins_loaded = False
    try:
        with worker_of_vllm():
            assert isinstance(config.post_grad_custom_pre_pass, InductorPass)
            yield
    finally:
        uninstall()
        for name in (*vllm.COLLECTIVES, *vllm.NORMS, *vllm.PRODUCTS):
            foreign.unregister(name)
        vllm._biased_columns.clear()
        parallel_state._WORLD = None


def _filled(layer: torch.nn.Module) -> Any:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer.requires_grad_(False)


def _program(name: str) -> Any:
    """A function of the tokens ``[T, hidden]``, and of their residual."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.models.llama import LlamaMLP

    if name in ("row-parallel linear", "a bias"):
        rows = linear.RowParallelLinear(2 * HIDDEN, HIDDEN, bias=name == "a bias", prefix="rows")
        rows = _filled(rows)
        return lambda x, _: rows(x)[0]
    if name == "columns and rows":
        columns = linear.QKVParallelLinear(HIDDEN, 8, 4, 4, bias=False, prefix="qkv")
        rows = linear.RowParallelLinear(4 * 8, HIDDEN, bias=False, prefix="rows")
        columns, rows = _filled(columns), _filled(rows)
        return lambda x, _: rows(columns(x)[0][:, : 2 * 8].contiguous())[0]
    mlp, norm = _filled(LlamaMLP(HIDDEN, INTERMEDIATE, "silu", prefix="mlp")), RMSNorm(HIDDEN)
    return lambda x, residual: torch.cat(norm(mlp(x), residual.clone()))


def _run(name: str, tokens: int, changing: bool) -> tuple[list[str | None], float]:
    """What was fused, and the largest error."""
    torch.manual_seed(5 + dist.get_rank())
    errors = []
    with _vllm(), torch.no_grad(), recording() as findings:
        program = _program(name)
        torch.compiler.reset()
        compiled = torch.compile(program, backend=eager_backend, fullgraph=True)
        for count in (tokens, tokens + 3) if changing else (tokens,):
            x, residual = torch.randn(count, HIDDEN), torch.randn(count, HIDDEN)
            if changing:
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(residual, 0)
            expected = program(x, residual)
            found = compiled(x, residual)
            errors.append(float((found - expected).norm() / expected.norm()))
    return [finding.operator for finding in findings], max(errors)


@pytest.mark.parametrize(
    ("name", "tokens", "changing", "operators"),
    [
        ("row-parallel linear", 6, False, ["gemm_all_reduce"]),
        ("a bias", 6, False, [None]),
        ("columns and rows", 130, False, ["gemm_all_reduce"]),
        ("the MLP of a Llama", 6, False, ["gemm_all_reduce"]),
        ("the MLP of a Llama", 130, True, ["gemm_all_reduce"]),
    ],
)
def test_layers(
    ranks: Any, name: str, tokens: int, changing: bool, operators: list[str | None]
) -> None:
    """The norm is an operator of vLLM's own, which comes behind the fused one."""
    for found, error in ranks(2).run(_run, name, tokens, changing):
        assert found == operators
        assert error < 1e-5


@contextmanager
def _float8(kernel: str) -> Iterator[None]:
    """A worker whose layers in float8 run a kernel, for which there is a stand-in on the CPU.

    Without a GPU vLLM has no such layers, so it is told which kernel to take, and to quantise as on
    GPUs; DeepGEMM's scales are powers of two, as on Hopper.
    """
    from torch._inductor import config
    from vllm.config import get_current_vllm_config

    with (
        _vllm(),
        float8_kernels.kernels(),
        config.patch(enable_auto_functionalized_v2=False),  # as vLLM does
        ExitStack() as stack,
    ):
        settings = get_current_vllm_config()
        settings.compilation_config.custom_ops.append("+quant_fp8")
        settings.model_config = SimpleNamespace(dtype=torch.bfloat16)
        for target, name, value in float8_kernels.patches(kernel):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def _layer_of_blocks() -> Any:
    """A row-parallel layer whose weight is random blocks of float8."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    width, default = 128 * BLOCKS, torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = linear.RowParallelLinear(
            width * dist.get_world_size(), width, bias=False, prefix="rows",
            quant_config=Fp8Config(True, "dynamic", None, [128, 128]),
        )  # fmt: skip
    finally:
        torch.set_default_dtype(default)
    layer.weight.copy_(torch.randn(layer.weight.shape).to(FLOAT8))
    layer.weight_scale_inv.copy_(torch.rand(layer.weight_scale_inv.shape) + 0.5)
    layer.quant_method.process_weights_after_loading(layer)
    return layer.requires_grad_(False)


def _run_float8(kernel: str, is_normed: bool) -> tuple[list[str | None], list[float]]:
    """What was fused, and the errors for several numbers of tokens."""
    torch.manual_seed(5 + dist.get_rank())
    errors = []
    with _float8(kernel), torch.no_grad(), recording() as findings:
        rows, norm = _layer_of_blocks(), torch.ops.vllm_ir.fused_add_rms_norm

        def program(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = rows(x)[0]
            return torch.cat(norm(y, residual, None, 1e-6)) if is_normed else y

        torch.compiler.reset()
        compiled = torch.compile(program, backend=eager_backend, fullgraph=True)
        for tokens in (6, 33, 5):
            x, residual = torch.randn(2, tokens, 128 * BLOCKS).bfloat16()
            for operand in (x, residual):
                torch._dynamo.mark_dynamic(operand, 0)
            expected = program(x, residual).float()
            error = compiled(x, residual).float() - expected
            errors.append(float(error.norm() / expected.norm()))
    return [finding.operator for finding in findings], errors


@pytest.mark.parametrize(
    ("is_normed", "operators"), [(False, ["gemm_all_reduce"]), (True, ["gemm_all_reduce_norm"])]
)
@pytest.mark.parametrize("kernel", float8_kernels.CLASSES)
def test_layers_in_float8(
    ranks: Any, kernel: str, is_normed: bool, operators: list[str | None]
) -> None:
    """One graph is right for any number of tokens, and as vLLM's own where that changes kernels."""
    for found, errors in ranks(2).run(_run_float8, kernel, is_normed):
        assert found == operators
        # Parts and sums are rounded to bfloat16, by truncation in the interpreter.
        assert max(errors) < 2**-6
