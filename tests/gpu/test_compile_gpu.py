"""The pass for ``torch.compile`` on real GPUs, two ranks, with every pair fused whatever the tables
say. Run with ``-m gpu``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

import interlace
from interlace.compile import Finding, recording
from tests.compile.models import WIDTH, Experts, parallel_block
from tests.compile.programs import fuse_everything, fused, tensors, traced
from tests.compile.test_in_place import ROWS, _compiled
from tests.compile.test_models import _step
from tests.compile.test_patterns import FUSED

pytestmark = pytest.mark.gpu


def _patterns() -> dict[str, tuple[list[str], float]]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        fuse_everything(patch)
        for name, (program, shapes, _) in FUSED.items():
            arguments = tensors(*shapes)
            names, _, error = fused(traced(program, arguments), arguments)
            found[name] = names, error
    return found


def test_patterns(ranks: Any) -> None:
    for found in ranks(2).run(_patterns):
        assert {name: names for name, (names, _) in found.items()} == {
            name: case[2] for name, case in FUSED.items()
        }
        assert {name: error for name, (_, error) in found.items() if error > 1e-5} == {}


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_norms_write_where_peers_fetch(ranks: Any, mode: str | None) -> None:
    for error, code, places, _ in ranks(2).run(_compiled, "_named", ROWS, None, mode):
        assert error < 1e-3
        assert code.count("memory_for_peers.default(") == 2
        assert places
        assert all(places)


def _steps(
    model: nn.Module, x: torch.Tensor, mode: str | None
) -> tuple[list[Finding], list[float]]:
    """Findings, and the largest error of each of four steps."""
    torch._dynamo.reset()  # it counts how often one function was compiled
    wanted = _step(model, model, x)
    with (
        pytest.MonkeyPatch.context() as patch,
        recording() as findings,
        config.patch(force_disable_caches=True),
    ):
        fuse_everything(patch)
        compiled: Any = torch.compile(
            model, backend=interlace.compile.backend, fullgraph=True, mode=mode, dynamic=False
        )
        errors = []
        for _ in range(4):
            found = _step(compiled, model, x)
            errors.append(
                max(
                    float((found[name] - wanted[name]).norm() / wanted[name].norm())
                    for name in wanted
                )
            )
    return findings, errors


def _block(sequence_parallel: bool, mode: str | None) -> tuple[list[Finding], list[float]]:
    block = parallel_block(sequence_parallel, bias=False)
    (x,) = tensors((2, 32, WIDTH))
    if not sequence_parallel:
        torch.distributed.broadcast(x, 0)
    return _steps(block, x, mode)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize(("sequence_parallel", "pairs"), [(False, 7), (True, 8)])
def test_a_block_through_inductor(
    ranks: Any, sequence_parallel: bool, pairs: int, mode: str | None
) -> None:
    """With ``reduce-overhead`` from the third step on in CUDA graphs."""
    for findings, errors in ranks(2).run(_block, sequence_parallel, mode):
        assert sum(finding.operator is not None for finding in findings) == pairs
        assert max(errors) < 1e-4


def _experts(experts: int) -> tuple[list[Finding], list[float]]:
    (x,) = tensors((128, WIDTH))
    return _steps(Experts(experts), x, None)


@pytest.mark.parametrize("experts", [1, 3])
def test_experts_through_inductor(ranks: Any, experts: int) -> None:
    """One product for each way back is fused; a batch of three runs as it was."""
    operator = None if experts > 1 else "gemm_all_to_all"
    for findings, errors in ranks(2).run(_experts, experts):
        assert [(finding.graph, finding.operator) for finding in findings] == [
            ("forward", None),
            ("forward", operator),
            ("backward", None),
            ("backward", operator),
        ]
        assert max(errors) < 1e-4
