"""Small programs of a product and a collective, as a compiler sees them, and how ranks trace and
run them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from interlace.comm import default_device_type
from interlace.compile import Finding, choice, fuse, norms, sent
from interlace.compile.choice import are_small
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import Writer
from interlace.compile.producers import Product
from interlace.registry import Operator

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
M, K, N = 128, 8, 12  # as many tokens as gemm_all_reduce is for
FEW = 6


def wait(tensor: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(tensor)


def group() -> str:
    return dist.group.WORLD.group_name


def all_reduce(x: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    return wait(c10d.all_reduce(x, reduction, group()))


def reduce_scatter(x: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    return wait(c10d.reduce_scatter_tensor(x, reduction, 2, group()))


def all_gather(x: torch.Tensor) -> torch.Tensor:
    return wait(c10d.all_gather_into_tensor(x, 2, group()))


def all_to_all(x: torch.Tensor, splits: list[int] | None = None) -> torch.Tensor:
    splits = splits or [len(x) // 2] * 2
    return wait(c10d.all_to_all_single(x, splits, splits, group()))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Another tensor of each shape on every rank."""
    torch.manual_seed(17 + dist.get_rank())
    device = default_device_type()  # of the ranks: the CPU's, or a GPU each
    return [torch.randn(shape, dtype=dtype).to(device) for shape in shapes]


def traced(
    program: Callable[..., Any], arguments: list[torch.Tensor], mode: str = "fake"
) -> GraphModule:
    module = make_fx(program, tracing_mode=mode)(*arguments)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def with_linear(module: GraphModule) -> GraphModule:
    """The same with ``mm(x, t(w))`` as ``linear(x, w)``, which tracing takes apart."""
    for node in module.graph.find_nodes(op="call_function", target=aten.mm.default):
        x, w = node.args
        node.replace_all_uses_with(Writer(node, node).call(aten.linear.default, x, w.args[0]))
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def fuse_everything(patch: pytest.MonkeyPatch) -> None:
    """Let the pass fuse on a GPU what it fuses on the CPU, whatever the model of time says."""
    patch.setattr(choice, "choose", lambda *_: "tests want it")
    patch.setattr(norms, "choose", choice.choose)
    patch.setattr(sent, "choose_sum", _choose_sum)


def _choose_sum(
    operator: Operator, products: list[Product], rows: int, *_: object
) -> tuple[bool, str]:
    side_by_side = are_small(products, rows)
    if operator.name == "gemm_all_reduce" and not side_by_side:
        raise LeftAlone("tests want it, but they are large")
    return side_by_side, "tests want it"


def operators(module: GraphModule) -> list[str]:
    """Names of the fused operators in a graph."""
    targets = [
        str(node.target).split(".") for node in module.graph.nodes if node.op == "call_function"
    ]
    return [target[1] for target in targets if target[0] == "interlace"]


def fused(
    module: GraphModule, arguments: list[torch.Tensor]
) -> tuple[list[str], list[Finding], float]:
    """Run the pass: the operators that it put in, its findings, and how far results are off,
    relative to their size.
    """
    before = module(*arguments)
    findings = fuse(module.graph)
    module.recompile()
    after = module(*arguments)
    pairs = list(zip(_list(before), _list(after), strict=True))
    assert _memory(before) == _memory(after)
    assert all(
        a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype for a, b in pairs
    )
    return (
        operators(module),
        findings,
        max(float((a - b).double().norm() / b.double().norm()) for b, a in pairs),
    )


def _list(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _memory(results: Any) -> list[int]:
    """For each result the number of the first one in the same memory: a program may write to it."""
    addresses = [each.untyped_storage().data_ptr() for each in _list(results)]
    return [addresses.index(address) for address in addresses]


def gather_along(x: torch.Tensor, dimension: int) -> torch.Tensor:
    """As DTensor gathers."""
    return torch.cat(all_gather(x).chunk(2), dimension)


def scatter_along(x: torch.Tensor, dimension: int) -> torch.Tensor:
    """As DTensor scatters sums."""
    return reduce_scatter(torch.cat(x.chunk(2, dimension)))
