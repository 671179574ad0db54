"""Add a residual to a sum over ranks, normalise it, and cast it, as decoders do after a product."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

import torch

from interlace.comm.replay.replays import places
from interlace.errors import ArgumentError
from interlace.gemm.operands import FLOAT8, FLOATS, output_dtype
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.units import ceil_div

NORMS = ("rms", "layer")


Norm = Literal["rms", "layer"]


class Normed(NamedTuple):
    """The results of a product that is summed over ranks and normalised.

    Attributes:
        y: ``[B, N]``: the norm of ``residual``, in the dtype that was asked for.
        residual: ``[B, N]`` of x's dtype, or bfloat16 for float8: the sum over ranks, with bias and
            residual added.
        scale: float32 ``[B, 1]``: what each row of y is to be multiplied by, if y is float8 and no
            scale was given; or ``[B, ceil(N / 128)]``: what each 128 elements of a row are, if that
            was asked for; else an empty tensor.
    """

    y: torch.Tensor
    residual: torch.Tensor
    scale: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """Describe the steps between a sum over ranks, ``total [B, N]``, and the stored results.

    ``h = total + bias + residual``, rounded to the sums' dtype (x's, or bfloat16 for float8), is
    one result; ``norm(h) * norm_weight + norm_bias``, in float32 and rounded once, is the other.

    Attributes:
        residual: ``[B, N]`` of the sums' dtype, contiguous; or None.
        norm_weight: ``[N]``, float16, bfloat16 or float32; or None for ones.
        norm_bias: ``[N]``, the same; or None.
        norm: ``"rms"`` or ``"layer"``.
        eps: What is added to the mean square or to the variance.
        scale: float32, one element: what y is to be multiplied by later, so it is divided by it
            now; None for a scale per row where y is float8.
        out_dtype: The dtype of y: float16, bfloat16, float32 or float8_e4m3fn.
        block_scales: Whether each 128 elements of a row of a float8 y have a scale of their own.
    """

    residual: torch.Tensor | None
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None
    norm: str
    eps: float
    scale: torch.Tensor | None
    out_dtype: torch.dtype
    block_scales: bool = False

    @staticmethod
    def of(
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        norm: str,
        eps: float,
        scale: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        block_scales: bool,
    ) -> Epilogue:
        """Return an epilogue whose tensors are contiguous; y has the sums' dtype by default."""
        residual, norm_weight, norm_bias = (
            None if tensor is None else tensor.contiguous()
            for tensor in (residual, norm_weight, norm_bias)
        )
        dtype = output_dtype(x, out_dtype)
        return Epilogue(residual, norm_weight, norm_bias, norm, eps, scale, dtype, block_scales)

    def with_tensors(
        self,
        residual: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        norm_bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> Epilogue:
        """Return the same steps with other tensors, which are contiguous."""
        return dataclasses.replace(
            self, residual=residual, norm_weight=norm_weight, norm_bias=norm_bias, scale=scale
        )

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the residual, the norm's weight and bias, and the scale."""
        return self.residual, self.norm_weight, self.norm_bias, self.scale

    @property
    def quantization(self) -> str:
        """Return ``"none"``, or what has a scale of its own: ``"tensor"``, ``"row"`` or
        ``"block"``.
        """
        if self.out_dtype != FLOAT8:
            return "none"
        if self.scale is not None:
            return "tensor"
        return "block" if self.block_scales else "row"

    def agreed(self) -> dict[str, Any]:
        """Return what all ranks must have in common, for ``Group.agree``."""
        vectors = {"norm_weight": self.norm_weight, "norm_bias": self.norm_bias}
        return {
            "residual": self.residual is not None,
            **{
                name: str(vector.dtype) if vector is not None else ""
                for name, vector in vectors.items()
            },
            "norm": self.norm,
            "eps": self.eps,
            "quantization": self.quantization,
            "dtype_of_y": str(self.out_dtype),
        }

    def signature(self) -> tuple[Hashable, ...]:
        """Return a key of everything but the tensors' values and addresses."""
        return tuple(self.agreed().values())

    def memory(self) -> tuple[Hashable, ...]:
        """Return where the tensors lie, by which ``Replays.run`` tells calls apart."""
        return places(*self.tensors)

    def result_shapes(
        self, rows: int, columns: int, dtype: torch.dtype
    ) -> tuple[tuple[list[int], torch.dtype], ...]:
        """Return shapes and dtypes of the results.

        Args:
            rows, columns: B and N.
            dtype: The sums'.
        """
        blocks = ceil_div(columns, SCALE_BLOCK)
        scales = {"row": [rows, 1], "block": [rows, blocks]}.get(self.quantization, [0])
        sums = [rows, columns]
        return (sums, self.out_dtype), (sums, dtype), (scales, torch.float32)

    def empty_results(self, rows: int, columns: int, like: torch.Tensor) -> Normed:
        """Return uninitialised results.

        Args:
            like: X, whose device and dtype count.
        """
        shapes = self.result_shapes(rows, columns, output_dtype(like, None))
        return Normed(*(like.new_empty(shape, dtype=dtype) for shape, dtype in shapes))


def validate_epilogue(operator: str, x: torch.Tensor, columns: int, epilogue: Epilogue) -> None:
    """Refuse an epilogue that does not fit ``x [B, K]`` and N ``columns``.

    Raises:
        ArgumentError: A shape, a dtype, a device or a value breaks a rule.
    """
    if epilogue.norm not in NORMS:
        raise ArgumentError(
            f"{operator}: norm must be one of {', '.join(NORMS)}; got {epilogue.norm!r}."
        )
    if epilogue.out_dtype not in (*FLOATS, FLOAT8):
        raise ArgumentError(
            f"{operator}: out_dtype must be float16, bfloat16, float32 or float8_e4m3fn; got "
            f"{epilogue.out_dtype}."
        )
    if not epilogue.eps >= 0:
        raise ArgumentError(f"{operator}: eps must be at least 0; got {epilogue.eps}.")
    residual = epilogue.residual
    if residual is not None:
        shape = [x.shape[0], columns]
        dtype = output_dtype(x, None)
        if list(residual.shape) != shape or residual.dtype != dtype:
            raise ArgumentError(
                f"{operator}: residual must be [B, N] = {shape} of the sum's dtype, {dtype}; got "
                f"{list(residual.shape)} of {residual.dtype}."
            )
    for name in ("norm_weight", "norm_bias"):
        vector = getattr(epilogue, name)
        if vector is None:
            continue
        if list(vector.shape) != [columns] or vector.dtype not in FLOATS:
            raise ArgumentError(
                f"{operator}: {name} must be [N] with N = {columns}, of float16, bfloat16 or "
                f"float32; got {list(vector.shape)} of {vector.dtype}."
            )
    scale = epilogue.scale
    if epilogue.block_scales and epilogue.quantization != "block":
        got = "a scale" if scale is not None else epilogue.out_dtype
        raise ArgumentError(
            f"{operator}: block_scales must come with out_dtype=torch.float8_e4m3fn and no scale; "
            f"got {got}."
        )
    if scale is None:
        return
    if epilogue.out_dtype != FLOAT8:
        raise ArgumentError(
            f"{operator}: scale must be given for out_dtype=torch.float8_e4m3fn only; got "
            f"{epilogue.out_dtype}."
        )
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ArgumentError(
            f"{operator}: scale must be one float32 element; got {list(scale.shape)} of "
            f"{scale.dtype}."
        )
