"""``torch.ops.symm_mem.fused_*`` by Interlace, compared with PyTorch's plain pairs; two programs
that call these operators: Inductor's asynchronous tensor parallelism, and torchtitan's linears.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from interlace.gemm.implementations.stock import own_kernel
from interlace.integrations import symm_mem
from tests.pool import COMPILING_S

RTOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@contextmanager
def _installed() -> Iterator[None]:
    symm_mem.install()
    try:
        yield
    finally:
        symm_mem.uninstall()


def _values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Different on every rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator).to(dtype)


def _group_name() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def _flat(results: Any) -> list[torch.Tensor | None]:
    if isinstance(results, torch.Tensor) or results is None:
        return [results]
    return [tensor for result in results for tensor in _flat(result)]


def _compare(
    operator: str, *args: Any, expected: Any = None, **kwargs: Any
) -> tuple[int, list[str], float]:
    """Run the operator, and PyTorch's plain pair unless ``expected`` is given.

    Returns:
        How many calls Interlace took, the reasons of those that it left, and the largest error
        relative to the largest element. Shapes, dtypes and strides must be the same.
    """
    expected = _flat(expected or own_kernel(operator, "CPU")(*args, **kwargs))
    with _installed():
        found = _flat(getattr(torch.ops.symm_mem, operator)(*args, **kwargs))
    assert len(found) == len(expected)
    error = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is None or ours is None:
            assert ours is theirs
            continue
        if not theirs.numel():
            continue
        assert (ours.shape, ours.dtype, ours.stride()) == (
            theirs.shape,
            theirs.dtype,
            theirs.stride(),
        )
        difference = (ours.float() - theirs.float()).abs().max()
        error = max(error, float(difference / theirs.float().abs().max()))
    left = [reason for _, reason in symm_mem.calls.left.elements()]
    return symm_mem.calls.taken.total(), left, error


def _reduce_scatter(
    shape: tuple[int, ...], dim: int, reduce_op: str, dtype: torch.dtype, along_k: bool
) -> tuple[int, list[str], float]:
    x = _values(*shape, seed=1, dtype=dtype)
    w = (
        _values(24, shape[-1], seed=2, dtype=dtype).T
        if along_k
        else _values(shape[-1], 24, seed=2, dtype=dtype)
    )
    return _compare("fused_matmul_reduce_scatter", x, w, reduce_op, dim, _group_name())


@pytest.mark.parametrize(
    ("world_size", "shape", "dim", "reduce_op", "dtype", "along_k"),
    [
        (2, (8, 16), 0, "sum", torch.float32, True),
        (2, (8, 16), 0, "avg", torch.float32, False),
        (2, (3, 8, 16), 1, "sum", torch.float32, True),
        (2, (4, 3, 16), 0, "avg", torch.bfloat16, True),
        (3, (2, 3, 9, 16), 2, "sum", torch.float32, False),
    ],
)
def test_matmul_reduce_scatter(
    ranks: Any,
    world_size: int,
    shape: tuple[int, ...],
    dim: int,
    reduce_op: str,
    dtype: torch.dtype,
    along_k: bool,
) -> None:
    for taken, left, error in ranks(world_size).run(
        _reduce_scatter, shape, dim, reduce_op, dtype, along_k
    ):
        assert (taken, left) == (1, [])
        assert error < RTOL[dtype]


def _all_gather(
    shape: tuple[int, ...], dim: int, columns: tuple[int, ...], returns_x: bool, strided: bool
) -> tuple[int, list[str], float]:
    x = _values(*shape, seed=1)
    if strided:  # as Inductor lays it out: contiguous once dim comes first
        x = x.movedim(dim, 0).contiguous().movedim(0, dim)
    weights = [
        _values(shape[-1], count, seed=2 + index)
        if index % 2
        else _values(count, shape[-1], seed=2 + index).T
        for index, count in enumerate(columns)
    ]
    return _compare("fused_all_gather_matmul", x, weights, dim, _group_name(), return_A=returns_x)


@pytest.mark.parametrize(
    ("world_size", "shape", "dim", "columns", "returns_x", "strided"),
    [
        (2, (4, 16), 0, (24,), True, False),
        (2, (4, 16), 0, (24,), False, False),
        (2, (3, 4, 16), 1, (8, 24, 16), True, False),
        (2, (3, 4, 16), 1, (8, 24), False, True),
        (3, (2, 3, 2, 16), 2, (8,), True, True),
    ],
)
def test_all_gather_matmul(
    ranks: Any,
    world_size: int,
    shape: tuple[int, ...],
    dim: int,
    columns: tuple[int, ...],
    returns_x: bool,
    strided: bool,
) -> None:
    for taken, left, error in ranks(world_size).run(
        _all_gather, shape, dim, columns, returns_x, strided
    ):
        assert (taken, left) == (1, [])
        assert error < 1e-5


def _float8(*shape: int, seed: int) -> torch.Tensor:
    return _values(*shape, seed=seed).to(torch.float8_e4m3fn)


def _scales(*shape: int, seed: int) -> torch.Tensor:
    return _values(*shape, seed=seed).abs() + 0.5


def _scaled_reduce_scatter(by_rows: bool, dim: int) -> tuple[int, list[str], float]:
    x = _float8(4, 8, 16, seed=1)
    w = _float8(32, 16, seed=2).T
    x_scale = _scales(4, 8, 1, seed=3) if by_rows else _scales(1, seed=3)
    w_scale = _scales(1, 32, seed=4) if by_rows else _scales(1, seed=4)
    # Inductor flattens the operand, which then has another dimension to scatter.
    flat_x, flat_scale = x.flatten(0, 1), x_scale.flatten(0, -2) if by_rows else x_scale
    arguments = ("sum", dim, 0, _group_name(), [4, 8, 32], None, None, torch.bfloat16)
    if by_rows:
        flat_scale = flat_scale.view(-1, 1)
    return _compare(
        "fused_scaled_matmul_reduce_scatter", flat_x, w, flat_scale, w_scale, *arguments
    )


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("by_rows", [True, False])
def test_scaled_matmul_reduce_scatter(ranks: Any, by_rows: bool, dim: int) -> None:
    for taken, left, error in ranks(2).run(_scaled_reduce_scatter, by_rows, dim):
        assert (taken, left) == (1, [])
        assert error < 2e-2


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' ``[B, S, K]`` as ``[R S B, K]``, gathered along S."""
    shard = tensor.movedim(-2, 0).contiguous() if tensor.dim() > 1 else tensor
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    return torch.cat(parts).view(-1, tensor.shape[-1])


def _scaled_all_gather(by_rows: bool) -> tuple[int, list[str], float]:
    x = _float8(2, 4, 16, seed=1)
    weights = [_float8(32, 16, seed=2).T, _float8(16, 16, seed=3).T]
    # One scale of all of x is the same on every rank.
    x_scale = _scales(2, 4, 1, seed=4) if by_rows else torch.full([1], 0.75)
    w_scales = [_scales(1, w.shape[1], seed=5) if by_rows else _scales(1, seed=5) for w in weights]
    bias = _values(32, seed=6, dtype=torch.bfloat16)
    # Gloo does not gather float8, so PyTorch's pair is spelled out here.
    rows, row_scales = _gathered(x.view(torch.uint8)).view(x.dtype), _gathered(x_scale)
    expected = [rows.view(8, 2, 16).movedim(0, 1)]
    for w, w_scale, added in zip(weights, w_scales, (bias, None), strict=True):
        y = torch._scaled_mm(
            rows, w, row_scales if by_rows else x_scale, w_scale, added, None, torch.bfloat16
        )
        expected.append(y.view(8, 2, -1).movedim(0, 1))
    return _compare(
        "fused_all_gather_scaled_matmul",
        x,
        weights,
        x_scale,
        w_scales,
        1,
        _group_name(),
        [bias, None],
        [None, None],
        [torch.bfloat16, torch.bfloat16],
        [False, False],
        expected=expected,
    )


@pytest.mark.parametrize("by_rows", [True, False])
def test_all_gather_scaled_matmul(ranks: Any, by_rows: bool) -> None:
    for taken, left, error in ranks(2).run(_scaled_all_gather, by_rows):
        assert (taken, left) == (1, [])
        assert error < 2e-2


def _left_alone() -> dict[str, tuple[int, list[str], float]]:
    x, w, name = _values(8, 16, seed=1), _values(16, 8, seed=2), _group_name()
    scatter, gather = "fused_matmul_reduce_scatter", "fused_all_gather_matmul"
    return {
        "the last dimension": _compare(scatter, x, w, "sum", 1, name),
        "the last dimension, too": _compare(gather, x, [torch.cat([w, w])], 1, name),
        "one floating dtype": _compare(scatter, x.double(), w.double(), "sum", 0, name),
        "neither dimension": _compare(
            scatter, x, _values(16, 2, 16, seed=3)[:, 0, ::2], "sum", 0, name
        ),
        "is empty": _compare(gather, x[:0], [w], 0, name),
    }


def test_other_calls_are_left_to_pytorch(ranks: Any) -> None:
    for cases in ranks(2).run(_left_alone):
        for reason, (taken, left, error) in cases.items():
            assert taken == 0
            assert len(left) == 1
            assert reason.removesuffix(", too") in left[0]
            assert error == 0


def _inductor(
    shape: tuple[int, ...], sequence_dim: int, trains: bool
) -> tuple[list[str], dict[str, int], float]:
    """Inductor's asynchronous tensor parallelism of a sequence-parallel MLP.

    Returns:
        The operators that Inductor inserted, the calls that Interlace took, and the largest
        error of the result and the gradients.
    """
    from torch._inductor import config
    from torch.distributed._functional_collectives import (
        all_gather_tensor_autograd,
        reduce_scatter_tensor_autograd,
    )
    from torch.distributed._symmetric_memory import _test_mode

    group = dist.group.WORLD
    inserted: list[str] = []

    def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(all_gather_tensor_autograd(x, sequence_dim, group) @ up)
        return reduce_scatter_tensor_autograd(hidden @ down, "sum", sequence_dim, group)

    def record(graph: torch.fx.Graph) -> None:
        names = [str(node.target) for node in graph.nodes]
        inserted.extend(name for name in names if name.startswith("symm_mem"))

    torch.compiler.reset()
    settings = {
        "_micro_pipeline_tp": True,
        "post_grad_custom_post_pass": record,
        "force_disable_caches": True,
    }
    values = _values(*shape, seed=1), _values(16, 24, seed=2), _values(24, 16, seed=3)
    results = []
    for run in (mlp, torch.compile(mlp)):
        leaves = [value.clone().requires_grad_(trains) for value in values]
        # Inductor takes only groups of GPUs, of a PyTorch that has NCCL.
        with (
            _installed(),
            config.patch(settings),
            _test_mode(),
            mock.patch.object(dist, "is_nccl_available", return_value=True),
        ):
            y = run(*leaves)
            if trains:
                y.square().sum().backward()
            taken = dict(symm_mem.calls.taken)
        results.append([y.detach(), *[leaf.grad for leaf in leaves if trains]])
    errors = [
        float((found - expected).norm() / expected.norm())
        for expected, found in zip(*results, strict=True)
    ]
    return inserted, taken, max(errors)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("shape", "sequence_dim", "trains", "counts"),
    [
        # Inductor does not insert its operators in three dimensions where a gradient needs x, too.
        ((8, 16), 0, True, (2, 2)),
        ((2, 8, 16), 0, False, (1, 1)),
        ((2, 8, 16), 1, False, (1, 1)),
    ],
)
def test_asynchronous_tensor_parallelism_of_inductor(
    ranks: Any, shape: tuple[int, ...], sequence_dim: int, trains: bool, counts: tuple[int, int]
) -> None:
    gathers, scatters = counts
    for inserted, taken, error in ranks(2).run(
        _inductor, shape, sequence_dim, trains, timeout_s=COMPILING_S
    ):
        assert len(inserted) == gathers + scatters
        assert taken == {
            "fused_all_gather_matmul": gathers,
            "fused_matmul_reduce_scatter": scatters,
        }
        assert error < 1e-5


def _torchtitan() -> tuple[int, list[str], float]:
    """The linears of torchtitan's ``tp_gemm_backend="dist_gemm"``, forward and backward.

    Returns:
        How many calls Interlace took, the reasons of those that it left, and the largest error of
        results and gradients compared with PyTorch's plain pairs.
    """
    from torchtitan.distributed import linear

    group, name = dist.group.WORLD, _group_name()
    values = [
        _values(*shape, seed=seed)
        for seed, shape in enumerate([(4, 16), (24, 16), (24, 16), (24, 16), (24,), (16, 24)])
    ]

    def run() -> list[torch.Tensor]:
        leaves = [value.clone().requires_grad_() for value in values]
        x, gate, up, single, bias, down = leaves
        ya, yb = linear.AllGatherLinearMulti.apply(x, gate, up, group, name)
        yc = linear.AllGatherLinear.apply(x, single, bias, group, name)
        hidden = torch.relu(ya) * yb + yc
        y = linear.LinearReduceScatter.apply(hidden, down, None, group, name)
        # PyTorch has no product with a dtype of its own on the CPU; all of this is float32.
        with mock.patch.object(torch, "mm", lambda a, b, out_dtype: a @ b):
            y.square().sum().backward()
        return [y.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]

    with _installed():
        found = run()
        taken, left = symm_mem.calls.taken.total(), list(symm_mem.calls.left)
    with _plain():
        expected = run()
    errors = [
        float((ours - theirs).norm() / theirs.norm())
        for ours, theirs in zip(found, expected, strict=True)
    ]
    assert len(errors) == 1 + len(values)
    return taken, [reason for _, reason in left], max(errors)


@contextmanager
def _plain() -> Iterator[None]:
    """PyTorch's plain pairs on the CPU, where it has no kernel of these operators."""
    library = torch.library.Library("symm_mem", "IMPL")
    for operator in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(operator, own_kernel(operator, "CPU"), "CPU")
    try:
        yield
    finally:
        library._destroy()


def test_linears_of_torchtitan(ranks: Any) -> None:
    """Gathers: two forward, one for each of three gradients. Scatters: one and two."""
    pytest.importorskip("torchtitan", reason="make test-integrations installs it")
    for taken, left, error in ranks(2).run(_torchtitan):
        assert (taken, left) == (2 + 3 + 1 + 2, [])
        assert error < 1e-5
