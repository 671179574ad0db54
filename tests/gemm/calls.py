"""Calls of the operators around a product, and their exact results, computed in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.gemm.scaled import block_scale_shapes
from interlace.registry import operator_named
from interlace.testing.cases.base import DTYPES
from interlace.testing.cases.products import exact_results, split_options

IMPLS = {
    "gemm_all_to_all": ["unfused", "fused"],
    "gemm_reduce_scatter": ["unfused", "fused", "chunked"],
    "gemm_all_reduce": ["unfused", "fused"],
    "all_gather_gemm": ["unfused", "fused", "pushed", "chunked"],
}
"""What the tests of each operator run."""

ANY_ROWS = [
    ("all_gather_gemm", "chunked"),
    ("all_gather_gemm", "pushed"),
    ("gemm_reduce_scatter", "chunked"),
]
"""Implementations beside the fused kernels that do not need rows to be split evenly."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call on every rank; ``inner`` and ``columns`` are those of a rank's product, ``rows``
    those of its x without ``splits``.

    Attributes:
        splits: None, or ``splits[s][d]`` rows from rank s to rank d (all-to-all), or a rank's rows
            (reduce-scatter, all-gather).
        w_along: What w is contiguous along, ``"K"`` or ``"N"``.
        scale: float8's scales, one a ``"tensor"``, a ``"row"`` or a ``"block"``.
    """

    operator: str
    rows: int
    columns: int
    inner: int
    dtype: str = "float32"
    bias: bool = False
    splits: Any = None
    out_dtype: str | None = None
    w_along: str = "K"
    scale: str = "row"
    impl: str = "unfused"
    config: Any = None
    seed: int = 0

    @property
    def collective(self) -> str:
        return operator_named(self.operator).collective

    def rows_of(self, rank: int) -> int:
        """Rows of x on a rank."""
        if self.splits is None or self.operator in ("gemm_reduce_scatter", "gemm_all_reduce"):
            return self.rows
        return sum(self.splits[rank]) if self.operator == "gemm_all_to_all" else self.splits[rank]

    @property
    def can_run(self) -> bool:
        """Whether ``impl`` takes these operands."""
        if self.impl not in ("remote_stores", "chunked", "pushed"):
            return True
        # What one kernel stores cannot be of 8 bits.
        is_pushed_apart = self.operator == "all_gather_gemm" and self.impl == "pushed"
        return self.out_dtype is None and not (self.dtype == "float8" and is_pushed_apart)

    @property
    def result_dtype(self) -> torch.dtype:
        if self.out_dtype is not None:
            return DTYPES[self.out_dtype]
        return torch.bfloat16 if self.dtype == "float8" else DTYPES[self.dtype]

    def inputs(self, rank: int) -> dict[str, Any]:
        """A rank's tensors by the operator's names."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        shared = torch.Generator().manual_seed(1000 * self.seed + 999)
        summed = self.operator in ("gemm_reduce_scatter", "gemm_all_reduce")
        rows = self.rows_of(rank)
        tensors = {
            "x": torch.randn(rows, self.inner, generator=generator).to(DTYPES[self.dtype]),
            "w": torch.randn(self.columns, self.inner, generator=generator).to(DTYPES[self.dtype]),
        }
        if self.w_along == "N":
            tensors["w"] = tensors["w"].T.contiguous().T
        if self.bias:
            tensors["bias"] = torch.randn(
                self.columns, generator=shared if summed else generator
            ).to(self.result_dtype)
        if self.dtype == "float8":
            shapes = {
                "row": ([rows, 1], [1, self.columns]),
                "tensor": ([], [1]),
                "block": block_scale_shapes(tensors["x"], tensors["w"]),
            }[self.scale]
            for name, shape in zip(("x_scale", "w_scale"), shapes, strict=True):
                tensors[name] = torch.rand(shape, generator=generator) + 0.5
            if self.scale == "block" and self.seed % 2:
                # As cuBLAS reads them.
                tensors["x_scale"] = tensors["x_scale"].T.contiguous().T
        return tensors

    def make(self, group: dist.ProcessGroup | None = None, **more: Any) -> Any:
        """On a rank: make the call on its device; ``more`` replaces arguments, all tensors where it
        has x and w.
        """
        tensors = (
            {} if {"x", "w"} <= more.keys() else self.placed(group)
        )  # copies to a GPU cannot be captured in a graph
        arguments = tensors | self.options(group) | more
        return getattr(interlace, self.operator)(**arguments)

    def placed(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """On a rank: its tensors on its device."""
        device = interlace.group_of(group).device
        return {
            name: tensor.to(device) for name, tensor in self.inputs(dist.get_rank(group)).items()
        }

    def options(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        rank = dist.get_rank(group)
        options: dict[str, Any] = {"group": group, "impl": self.impl, "config": self.config}
        if self.out_dtype is not None:
            options["out_dtype"] = DTYPES[self.out_dtype]
        options |= split_options(self.collective, self.splits, rank)
        return options

    # In float64

    def exact(self, rank: int) -> dict[str, torch.Tensor]:
        """A rank's x, w and bias, dequantised."""
        tensors = {name: tensor.double() for name, tensor in self.inputs(rank).items()}
        if self.dtype == "float8":
            for name, rows in (("x", 1), ("w", 128)):
                matrix, scale = tensors[name], tensors.pop(f"{name}_scale")
                if self.scale == "block":
                    scale = scale.repeat_interleave(rows, 0)[: len(matrix)]
                    scale = scale.repeat_interleave(128, 1)[:, : matrix.shape[1]]
                else:
                    scale = scale.reshape(-1, 1)
                tensors[name] = matrix * scale
        return tensors

    def results(self, inputs: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Every rank's result from every rank's inputs."""
        nothing = torch.zeros(self.columns, dtype=torch.float64)
        return exact_results(
            self.collective,
            [tensors["x"] for tensors in inputs],
            [tensors["w"] for tensors in inputs],
            [tensors.get("bias", nothing) for tensors in inputs],
            self.splits,
        )

    def check(self, results: list[torch.Tensor]) -> None:
        """Every rank's result is as right as the arithmetic allows.

        Products and sums over K are float32: at most ``(K + 4) u`` times the sum of absolute
        values, scales included. What is rounded to the result's dtype: the result; parts that
        travel; and, unfused, every step of their sum, and the bias. The
        CPU backend truncates to bfloat16: a whole unit in the last place instead of half of one.
        """
        ranks = len(results)
        inputs = [self.exact(rank) for rank in range(ranks)]
        expected = self.results(inputs)
        sizes = self.results(
            [{name: tensor.abs() for name, tensor in tensors.items()} for tensors in inputs]
        )
        u = torch.finfo(torch.float32).eps / 2
        out = torch.finfo(self.result_dtype)
        unit = out.eps if self.result_dtype == torch.bfloat16 else out.eps / 2
        roundings = 2 if self.impl == "fused" else ranks + 2
        for rank, (y, exact, size) in enumerate(zip(results, expected, sizes, strict=True)):
            assert y.dtype == self.result_dtype
            assert y.shape == exact.shape, self
            bound = (
                (self.inner + ranks + 4) * u + roundings * unit
            ) * size + out.smallest_normal * out.eps
            error = (y.double() - exact).abs()
            assert (error <= bound).all(), (
                f"{self}: rank {rank} is wrong by {(error / bound).max():.3g} times the bound"
            )


def run(calls: list[Call]) -> list[Any]:
    """On a rank: make the calls one after another; results on the CPU."""
    return [call.make().cpu() for call in calls]


def check_all(calls: list[Call], results: list[list[Any]]) -> None:
    """``results[rank][i]`` against ``calls[i]``."""
    for i, call in enumerate(calls):
        call.check([result[i] for result in results])


def differentiate(call: Call) -> dict[str, torch.Tensor]:
    """On a rank: gradients of ``sum over ranks of <y, target>`` by every input, and what they
    should be in float64.

    ``gemm_all_reduce``'s target is the same on every rank, and counted once.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs = [
        {name: tensor.requires_grad_() for name, tensor in call.exact(peer).items()}
        for peer in range(ranks)
    ]
    expected = call.results(inputs)
    targets = [
        torch.randn(y.shape, generator=torch.Generator().manual_seed(77)).to(call.result_dtype)
        for y in expected
    ]
    is_replicated = call.operator == "gemm_all_reduce"
    losses = [(y * target).sum() for y, target in zip(expected, targets, strict=True)]
    (losses[0] if is_replicated else torch.stack(losses).sum()).backward()
    placed = call.placed()
    for tensor in placed.values():
        tensor.requires_grad_()
    y = call.make(**placed)
    y.backward(targets[rank].to(y.device))
    actual = {name: tensor.grad.cpu() for name, tensor in placed.items()}
    # The bias of a sum is one parameter, of which rank 0's copy was used.
    summed = call.operator in ("gemm_reduce_scatter", "gemm_all_reduce")
    expected_grads = {
        name: inputs[0 if summed and name == "bias" else rank][name].grad for name in placed
    }
    return {name: torch.stack([actual[name].double(), expected_grads[name]]) for name in placed}


def check_gradients(
    call: Call, outcomes: list[dict[str, torch.Tensor]], factor: float = 40.0
) -> None:
    """Within ``factor`` roundings of the dtypes; by default, of sums of some dozen products of
    normally distributed numbers.
    """
    tolerance = factor * max(
        torch.finfo(dtype).eps for dtype in (call.result_dtype, DTYPES[call.dtype])
    )
    for rank, outcome in enumerate(outcomes):
        for name, (actual, exact) in outcome.items():
            error, size = (actual - exact).norm(), exact.norm()  # 0 for a rank without rows
            assert error <= tolerance * size, (
                f"{call}: the gradient of {name} on rank {rank} is wrong by {error:.2g} of "
                f"{size:.2g}"
            )


# As torch's own tools see an operator


# How the operator was registered, and what a compiler makes of it, for any implementation.
_OF_THE_OPERATOR = ("test_autograd_registration", "test_aot_dispatch_dynamic")
# What the operator does to its arguments, and whether results are as fake tensors say.
_OF_A_CALL = ("test_schema", "test_faketensor")


def opcheck(call: Call, arguments: tuple[Any, ...], is_of_operator: bool) -> dict[str, str]:
    """On a rank: schema and fake tensors, and with ``is_of_operator`` autograd registration and AOT
    dispatch; ``arguments`` follow the five tensors.
    """
    tensors = {
        name: tensor.requires_grad_() for name, tensor in call.inputs(dist.get_rank()).items()
    }
    # The first use of the name registers the op
    assert getattr(interlace, call.operator) is not None
    op = getattr(torch.ops.interlace, call.operator).default
    return torch.library.opcheck(
        op,
        (tensors["x"], tensors["w"], tensors["bias"], None, None, *arguments),
        test_utils=(*_OF_A_CALL, *(_OF_THE_OPERATOR if is_of_operator else ())),
    )


def compiled(call: Call) -> list[Any]:
    """On a rank: results and gradients in eager mode, and as one graph with its gradients."""
    torch._dynamo.reset()  # it counts how often one function was compiled
    operator = getattr(interlace, call.operator)
    options = call.options()

    def layer(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.relu(operator(x * 2, w, bias, **options)).sum(-1)

    outcomes = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        tensors = [tensor.requires_grad_() for tensor in call.placed().values()]
        y = function(*tensors)
        y.sum().backward()
        outcomes.append([y.detach(), *(tensor.grad for tensor in tensors)])
    return outcomes
