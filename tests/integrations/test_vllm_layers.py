"""vLLM's own layers, traced from its source, with its own groups and its own custom operators: what
is fused, and that results stay.

vLLM's wheel has kernels for GPUs only, which are not needed here. vLLM takes a machine without a
GPU for a platform that it does not know; it spells collectives as on GPUs there once that platform
says so, which is all that is changed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples.integrations.vllm_llama_mlp import worker_of_vllm

from interlace.compile import InductorPass, eager_backend, foreign, recording, uninstall
from interlace.integrations import vllm

HIDDEN, INTERMEDIATE = 16, 32

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
        for name in vllm.COLLECTIVES:
            foreign.unregister(name)
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

    if name == "row-parallel linear":
        rows = linear.RowParallelLinear(2 * HIDDEN, HIDDEN, bias=False, prefix="rows")
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
