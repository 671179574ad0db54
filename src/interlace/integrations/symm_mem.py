"""Interlace behind ``torch.ops.symm_mem.fused_*``, PyTorch's operators for a matrix product and a
collective.

Inductor's asynchronous tensor parallelism inserts these operators, and other programs call them.
:func:`install` registers Interlace's kernels for them on CUDA and on the CPU, where PyTorch has
none. A call that Interlace cannot take is run by PyTorch's own kernel.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.compile.choice import overload, usable_ranks
from interlace.compile.findings import LeftAlone
from interlace.counting import calls_of
from interlace.gemm.implementations.stock import own_kernel
from interlace.gemm.operands import FLOAT8, FLOATS, contiguous_dimension
from interlace.registry import operator_matching

calls = calls_of("symm_mem")
"""Counts of the calls since :func:`install`."""

_library: torch.library.Library | None = None
_DEVICES = ("CUDA", "CPU")


def install() -> None:
    """Put Interlace's operators in the place of ``torch.ops.symm_mem.fused_*`` in this process.

    These are ``fused_matmul_reduce_scatter``, ``fused_all_gather_matmul`` and their variants with
    scales. ``impl="auto"`` chooses how each call runs; PyTorch's own kernel is among the
    choices. Every rank of a group must install. A second call does nothing.

    Example:
        >>> from interlace.integrations import symm_mem
        >>> symm_mem.install()
        >>> torch._inductor.config._micro_pipeline_tp = True  # now inserts Interlace's operators
    """
    global _library
    if _library is not None:
        return
    import interlace.operators  # noqa: F401  # registers torch.ops.interlace

    calls.clear()
    library = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns of a replaced kernel, which is the purpose here.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, take in _TAKE.items():
            for device in _DEVICES:
                # This also looks PyTorch's own kernel up, before it is replaced.
                kernel = _kernel(name, take, own_kernel(name, device))
                library.impl(name, kernel, device, allow_override=True)
    _library = library


def uninstall() -> None:
    """Undo :func:`install`: PyTorch's own kernels run again."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _kernel(
    name: str, take: Callable[..., Any], own: Callable[..., Any]
) -> Callable[..., torch.Tensor]:
    """Return a kernel that runs ``take``, or ``own`` if ``take`` raises :class:`LeftAlone`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
                # PyTorch's operators have no gradient, and its kernels say so.
                raise LeftAlone("an operand requires a gradient")
            with torch.no_grad():
                result = take(*args, **kwargs)
        except LeftAlone as refusal:
            calls.leave(name, str(refusal))
            return own(*args, **kwargs)
        calls.take(name)
        return result

    return run


def _leading(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``x`` as a matrix whose rows are in the order of dimension ``dim``."""
    return x.movedim(dim, 0).flatten(0, -2)


def _require_factors(
    x: torch.Tensor, weights: Sequence[torch.Tensor], dim: int, dtypes: Sequence[torch.dtype]
) -> None:
    """Raise :class:`LeftAlone` unless Interlace can multiply ``x`` by each weight, ``[K, N]``."""
    if x.dim() < 2 or not weights or any(w.dim() != 2 for w in weights):
        raise LeftAlone("the operands are not matrices")
    if not 0 <= dim < x.dim():
        raise LeftAlone("there is no such dimension")
    if dim == x.dim() - 1:
        raise LeftAlone("the collective is along the last dimension, not along rows")
    if x.dtype not in dtypes or any(w.dtype != x.dtype for w in weights):
        raise LeftAlone("operators take operands of one floating dtype")
    if any(w.shape[0] != x.shape[-1] for w in weights):
        raise LeftAlone("the operands' sizes do not fit")
    if any(contiguous_dimension(w.T) is None for w in weights):
        raise LeftAlone("a weight is contiguous along neither dimension")
    if not all(tensor.numel() for tensor in (x, *weights)):
        raise LeftAlone("an operand is empty")


def _scattered(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    out_dtype: torch.dtype,
    reduce_op: str,
    dim: int,
    group_name: str,
) -> torch.Tensor:
    """Multiply ``x [..., K]`` by ``w [K, N]`` and reduce-scatter the result along ``dim``.

    Args:
        scales: float32 scales of x, one per row in x's order along ``dim``, and of w; or None.
    """
    if reduce_op not in ("sum", "avg"):
        raise LeftAlone("it reduces by something else than a sum or a mean")
    ranks = usable_ranks(group_name, x.device)
    if x.shape[dim] % ranks:
        raise LeftAlone("its rows do not divide evenly over the ranks")
    operator = overload(operator_matching("gemm", "reduce_scatter").name)
    y: torch.Tensor = operator(
        _leading(x, dim), w.T, None, *scales, None, out_dtype, group_name, "auto", ""
    )
    if reduce_op == "avg":
        y = y.div_(ranks)
    rows, *dimensions = x.movedim(dim, 0).shape[:-1]
    # PyTorch's operator returns contiguous memory, which Inductor relies on.
    return y.view(rows // ranks, *dimensions, -1).movedim(0, dim).contiguous()


def _matmul_reduce_scatter(
    x: torch.Tensor, w: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """Compute ``reduce_scatter(x @ w)`` along ``scatter_dim``."""
    _require_factors(x, [w], scatter_dim, FLOATS)
    return _scattered(x, w, (None, None), x.dtype, reduce_op, scatter_dim, group_name)


def _scaled_matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Compute ``reduce_scatter(_scaled_mm(x, w))`` along ``orig_scatter_dim`` of the product, whose
    shape is ``output_shape``.
    """
    if output_shape is None:
        raise LeftAlone("the product's shape is not given")
    if bias is not None:
        raise LeftAlone("every rank adds a bias before the sum")
    if result_scale is not None or out_dtype not in FLOATS:
        raise LeftAlone("the result is not float16, bfloat16 or float32")
    x_rows = x.reshape(*output_shape[:-1], x.shape[-1])
    _require_factors(x_rows, [w], orig_scatter_dim, [FLOAT8])
    if x_scale.numel() > 1:
        if x_scale.shape[:-1] != x.shape[:-1]:
            raise LeftAlone("the scales of x are neither one nor one per row")
        x_scale = _leading(x_scale.reshape(*output_shape[:-1], 1), orig_scatter_dim)
    scales = x_scale, _weight_scale(w, w_scale)
    return _scattered(x_rows, w, scales, out_dtype, reduce_op, orig_scatter_dim, group_name)


def _weight_scale(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype != torch.float32 or scale.numel() not in (1, w.shape[1]):
        raise LeftAlone("the scales of w are neither one nor one per column, in float32")
    return scale.reshape(-1)


def _gathered(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    fused: tuple[int, Any, torch.Tensor | None, torch.Tensor | None, torch.dtype],
    product: Callable[[int, torch.Tensor], torch.Tensor],
    dim: int,
    group_name: str,
    returns_x: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gather ``x`` along ``dim`` and multiply it by each of ``weights [K, N]``.

    Args:
        fused: Of the product that runs with the gather: its index, bias, scale of x, scale of w
            and dtype.
        product: Computes another product, from its index and the gathered rows ``[M, K]``.
        returns_x: Whether to return the gathered x.
    """
    ranks = usable_ranks(group_name, x.device)
    index, bias, x_scale, w_scale, dtype = fused
    gather = returns_x or len(weights) > 1
    y, rows = overload(operator_matching("all_gather", "gemm").name)(
        _leading(x, dim),
        weights[index].T,
        bias,
        x_scale,
        w_scale,
        None,
        dtype,
        gather,
        group_name,
        "auto",
        "",
    )
    shard_rows, *dimensions = x.movedim(dim, 0).shape[:-1]

    def unflatten(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.view(ranks * shard_rows, *dimensions, -1).movedim(0, dim)

    results = [
        unflatten(y if other == index else product(other, rows)) for other in range(len(weights))
    ]
    return unflatten(rows) if returns_x else None, results


def _widest(weights: Sequence[torch.Tensor]) -> int:
    """Return the index of the weight with most columns, whose product hides most of the gather."""
    return max(range(len(weights)), key=lambda index: weights[index].shape[1])


def _all_gather_matmul(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,  # PyTorch's name
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Compute ``all_gather(x) @ w`` for each weight."""
    _require_factors(x, weights, gather_dim, FLOATS)
    return _gathered(
        x,
        weights,
        (_widest(weights), None, None, None, x.dtype),
        lambda index, rows: rows @ weights[index],
        gather_dim,
        group_name,
        return_A,
    )


def _all_gather_scaled_matmul(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    w_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Compute ``_scaled_mm(all_gather(x), w)`` for each weight."""
    from torch.distributed._symmetric_memory import _maybe_convert_scalar_types_to_dtypes

    _require_factors(x, weights, gather_dim, [FLOAT8])
    index = _widest(weights)
    # A list of dtypes arrives as numbers.
    dtypes = _maybe_convert_scalar_types_to_dtypes(list(out_dtypes))
    dtype, bias = dtypes[index], biases[index]
    if any(scale is not None for scale in result_scales) or dtype not in FLOATS:
        raise LeftAlone("the result is not float16, bfloat16 or float32")
    if bias is not None and (bias.dtype != dtype or bias.shape != weights[index].shape[1:]):
        raise LeftAlone("a bias has another dtype than the result")
    one_per_row = x_scale.shape == (*x.shape[:-1], 1)
    if x_scale.dtype != torch.float32 or not (one_per_row or x_scale.numel() == 1):
        raise LeftAlone("the scales of x are neither one nor one per row of this rank, in float32")
    scale = _leading(x_scale, gather_dim) if one_per_row else x_scale.reshape(1)

    def product(other: int, rows: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            rows,
            weights[other],
            all_scales(),
            w_scales[other],
            biases[other],
            None,
            dtypes[other],
            use_fast_accum[other],
        )

    @functools.cache
    def all_scales() -> torch.Tensor:
        """Gather the rows' scales, which only the products beside the fused one need."""
        if not one_per_row:
            return x_scale
        ranks = usable_ranks(group_name, x.device)
        functional = torch.ops._c10d_functional
        gathered = functional.all_gather_into_tensor(scale.contiguous(), ranks, group_name)
        waited: torch.Tensor = functional.wait_tensor(gathered)
        return waited

    fused = index, bias, scale, _weight_scale(weights[index], w_scales[index]), dtype
    return _gathered(x, weights, fused, product, gather_dim, group_name, True)


_TAKE: dict[str, Callable[..., Any]] = {
    "fused_matmul_reduce_scatter": _matmul_reduce_scatter,
    "fused_scaled_matmul_reduce_scatter": _scaled_matmul_reduce_scatter,
    "fused_all_gather_matmul": _all_gather_matmul,
    "fused_all_gather_scaled_matmul": _all_gather_scaled_matmul,
}
"""What takes each operator's calls. It sends nothing before it has raised LeftAlone, or will not.
"""
