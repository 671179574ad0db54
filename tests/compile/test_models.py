"""Whole models, compiled without an edit: results and gradients are those of eager execution, and
the report names every pair.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import interlace
from interlace.compile import (
    Finding,
    InductorPass,
    Report,
    eager_backend,
    explain,
    foreign,
    installed,
    recording,
    sent,
)
from tests.compile.models import WIDTH, Experts, parallel_block
from tests.compile.programs import K, N, all_reduce, tensors


def _step(call: Any, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """A result and all gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    assert x.grad is not None
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad} | {
        name: getattr(grad, "_local_tensor", grad) for name, grad in named.items()
    }


def _compare(model: nn.Module, x: torch.Tensor) -> tuple[list[Finding], dict[str, float]]:
    """Findings, and relative errors against eager execution."""
    compiled = torch.compile(model, backend=interlace.compile.eager_backend, fullgraph=True)
    with recording() as report:
        actual = _step(compiled, model, x)
    expected = _step(model, model, x)
    # Keys' biases have no gradient but rounding: softmax does not see them.
    return report, {
        name: float((actual[name] - expected[name]).norm() / expected[name].norm().clamp(min=1))
        for name in expected
    }


def _block(sequence_parallel: bool, bias: bool) -> tuple[list[Finding], dict[str, float]]:
    torch.manual_seed(11 + (dist.get_rank() if sequence_parallel else 0))
    x = torch.randn(2, 4, WIDTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sent, "_FEW_TOKENS", 8)  # 128 take the interpreter a while
        return _compare(parallel_block(sequence_parallel, bias), x)


def test_tensor_parallel_block(ranks: Any) -> None:
    """With biases, which PyTorch shares out over the ranks before it sums."""
    for findings, errors in ranks(2).run(_block, False, True):
        assert max(errors.values()) < 2e-6, errors
        assert [(f.graph, f.module, f.operator) for f in findings] == [
            ("forward", "attention.wo", "gemm_all_reduce"),
            ("forward", "feed_forward.w2", "gemm_all_reduce"),
            *[("backward", f"feed_forward.w{name}", "gemm_all_reduce") for name in "31"],
            *[("backward", f"attention.w{name}", "gemm_all_reduce") for name in "vkq"],
        ]


def test_sequence_parallel_block(ranks: Any) -> None:
    """Gathers and scatters along the second dimension of ``[2, 8, width]``."""
    for findings, errors in ranks(2).run(_block, True, False):
        assert max(errors.values()) < 2e-6, errors
        forward = [f.operator for f in findings if f.graph == "forward"]
        assert forward == ["all_gather_gemm", "gemm_reduce_scatter"] * 2
        backward = [f for f in findings if f.graph == "backward"]
        assert [f.operator for f in backward] == ["all_gather_gemm", "gemm_sum_reduce_scatter"] * 2


def _experts(experts: int, separate: bool) -> tuple[Report, list[Finding], dict[str, float]]:
    model = Experts(experts, separate)
    torch.manual_seed(7 + dist.get_rank())
    x = torch.randn(6, WIDTH)
    return explain(model, x.clone().requires_grad_()), *_compare(model, x)


@pytest.mark.parametrize(
    ("experts", "separate"),
    [pytest.param(1, False, marks=pytest.mark.quick), (2, False), (1, True), (2, True)],
)
def test_experts(ranks: Any, experts: int, separate: bool) -> None:
    """The way back of one expert's rows is fused with its last product; and, in the backward pass,
    the way back of gradients with the first product's gradient. Tokens of several experts are
    multiplied in a batch, which runs as the program has it.
    """
    way_back = "gemm_all_to_all" if experts == 1 else None
    for report, findings, errors in ranks(2).run(_experts, experts, separate):
        assert max(errors.values()) < 2e-6, errors
        assert [(f.graph, f.operator) for f in findings] == [
            ("forward", None),
            ("forward", way_back),
            ("backward", None),
            ("backward", None if separate else way_back),
        ]
        assert report.findings == tuple(findings)
        fused = sum(finding.operator is not None for finding in findings)
        assert (len(report.fused), len(report.left)) == (fused, 4 - fused)
        head, *lines = str(report).splitlines()
        assert head == f"4 collectives: {fused} fused, {4 - fused} left alone"
        rows = f"all_to_all_single of [{12 * experts}, 16]"
        assert re.fullmatch(
            rf"forward: {re.escape(rows)} \(all_to_all_single\) left alone: what goes into it is "
            r"\w+, not a product",
            lines[0],
        )
        if experts == 1:
            assert lines[1].startswith(
                f"forward: {rows} (all_to_all_single_1) fused by {way_back}: the cpu backend"
            )
        else:
            assert re.fullmatch(r"bmm\w* is a batch of products", findings[1].reason)
        if separate and experts == 1:
            assert findings[3].reason == (
                "it is a sum of products, which no operator sends by an all-to-all"
            )


class _RowParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensors((N, K))[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.weight.t())


def _inductor() -> tuple[dict[str, float], list[str]]:
    """Inductor itself, by the backend and by its own pass, and what code it made."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    x, model, codes = tensors((6, K))[0], _RowParallel(), []
    expected, outputs = model(x), {}
    with config.patch(force_disable_caches=True):
        torch.compiler.reset()
        outputs["backend"], code = run_and_get_code(
            torch.compile(
                model,
                backend=interlace.compile.backend,
                options={"max_fusion_size": 8},
                fullgraph=True,
            ),
            x,
        )
        codes += code
        torch.compiler.reset()
        with installed(), torch.no_grad():
            outputs["installed"], code = run_and_get_code(torch.compile(model, fullgraph=True), x)
        codes += code
        torch.compiler.reset()
        # By its name, as programs say it that take a backend's name.
        named = torch.compile(model, backend="interlace", fullgraph=True)
        outputs["by name"], code = run_and_get_code(named, x)
        codes += code
    torch.compiler.reset()
    return {
        name: float((y - expected).norm() / expected.norm()) for name, y in outputs.items()
    }, codes


def test_inductor(ranks: Any) -> None:
    """The one test that waits for Inductor: one to three seconds, as there is nothing that its C++
    compiler would have to do.
    """
    for errors, codes in ranks(2).run(_inductor):
        assert max(errors.values()) < 1e-6
        assert len(codes) == 3
        for code in codes:
            assert "torch.ops.interlace.gemm_all_reduce.default.from_inductor(" in code
            assert "_c10d_functional.all_reduce_" not in code


def _slots() -> list[bool]:
    """What is in Inductor's slot while the pass is installed, and afterwards."""
    from torch._inductor import config

    class Other(InductorPass):
        """Another project's."""

    def slot() -> Any:
        return config.post_grad_custom_pre_pass

    other = Other()
    with config.patch(post_grad_custom_pre_pass=other):
        interlace.compile.install()
        ours = slot()
        interlace.compile.install()
        found = [ours is not other, ours.first is other, slot() is ours]
        interlace.compile.uninstall()
        interlace.compile.uninstall()
        found.append(slot() is other)
        # A pass that has been put around this one stays, and this one does nothing any more.
        interlace.compile.install()
        outer = Other(slot())
        config.post_grad_custom_pre_pass = outer
        on = outer.uuid()
        interlace.compile.uninstall()
        return [*found, slot() is outer, outer.uuid() != on, outer.first.uuid()[1] == "off"]


def test_the_pass_can_be_installed_for_the_whole_process(ranks: Any) -> None:
    assert ranks(2).run(_slots) == [[True] * 7] * 2


def _identities() -> list[Any]:
    """Of the pass: on its own, after one that can be told apart, after one that cannot; with a
    group more, and one that only rank 0 is a member of; with that group on two nodes; with another
    program's norm, with its collective, and with its product in the place of PyTorch's.
    """

    class Other(InductorPass):
        def uuid(self) -> str:
            return "other"

    ids = [InductorPass().uuid(), InductorPass(Other()).uuid(), InductorPass(lambda _: None).uuid()]
    both = dist.new_group([0, 1])
    dist.new_group([0])
    ids.append(InductorPass().uuid())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTERLACE_NODES", "2")
        interlace.group_of(both)
    ids.append(InductorPass().uuid())
    foreign.register(foreign.ForeignNorm("tests::norm", has_residual=False))
    ids.append(InductorPass().uuid())
    for collective in ("all_reduce", "all_gather"):
        foreign.register(foreign.Foreign("tests::sum", collective, lambda _: both))
        ids.append(InductorPass().uuid())
    foreign.unregister("tests::sum")
    foreign.unregister("tests::norm")
    library = torch.library.Library("aten", "IMPL")
    library.impl("aten::linear", lambda *arguments: None, "CPU")
    ids.append(InductorPass().uuid())
    library._destroy()
    return [*ids, InductorPass().uuid()]


def test_inductor_caches_by_what_decides(ranks: Any) -> None:
    for alone, after_other, after_unknown, *others in ranks(2).run(_identities):
        assert after_other == ("other", alone)
        assert after_unknown is None
        assert len({alone, *others}) == len(others), "the last one is the second one again"
        assert others[-1] == others[1]


def _keys_of_dynamic_rows() -> list[tuple[Any, str | None]]:
    """The pass's key, and the operator, of a program for any number of rows, which is traced with
    few, with many, and with few again.
    """
    w, bias = tensors((N, K), (N,))
    keys: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        keys.append(InductorPass().uuid())
        return eager_backend(graph, inputs)

    def program(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(torch.addmm(bias, x, w.t()))

    with recording() as findings:
        for rows in (6, 130, 6):
            torch.compiler.reset()
            x = torch.randn(rows, K)
            torch._dynamo.mark_dynamic(x, 0)
            torch.compile(program, backend=backend, fullgraph=True)(x)
    return list(zip(keys, [finding.operator for finding in findings], strict=True))


def test_inductor_caches_by_the_rows_that_decide(ranks: Any) -> None:
    """Else a rank that finds such a graph may have another one than its peers, which compile it."""
    for few, many, again in ranks(2).run(_keys_of_dynamic_rows):
        assert (few[1], many[1]) == (None, "gemm_all_reduce")
        assert few == again
        assert few[0] != many[0]


class _Uneven(nn.Module):
    """Seven hidden columns, of which two ranks have four and three."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 7, bias=False), nn.Linear(7, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _with_uneven_shards() -> tuple[float, list[str | None], bool]:
    """The error, the operators, and whether the pass says so to Inductor's cache."""
    torch.manual_seed(0)
    model, x = _Uneven(), torch.randn(6, 8)
    expected = model(x)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    torch.compiler.reset()
    keys = []

    def backend(graph: Any, inputs: Any) -> Any:
        keys.append(InductorPass().uuid())
        return eager_backend(graph, inputs)

    with recording() as findings:
        y = torch.compile(model, backend=backend)(x)
    error = float((y - expected).norm() / expected.norm())
    return error, [each.operator for each in findings], keys[0] != InductorPass().uuid()


def test_ranks_with_uneven_shards_decide_alike(ranks: Any) -> None:
    """Rows of the second weight begin at multiples of 16 bytes on the first rank alone."""
    for error, found, is_in_the_key in ranks(2).run(_with_uneven_shards):
        assert error < 1e-6
        assert set(found) == {None}
        assert is_in_the_key


def test_passes_that_were_there_run_first() -> None:
    from torch._inductor import config

    graph = torch.fx.Graph()
    for slot_of in (lambda ran: ran.append, lambda ran: [ran.append]):
        ran: list[torch.fx.Graph] = []
        with config.patch(post_grad_custom_pre_pass=slot_of(ran)), installed():
            config.post_grad_custom_pre_pass(graph)
        assert ran == [graph]
    assert not isinstance(config.post_grad_custom_pre_pass, InductorPass)
