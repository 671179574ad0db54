"""The operands of ``x @ w.T``: the rules that they obey, checked on every rank before anything is
sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import _C
from torch._subclasses.fake_tensor import FakeTensor

from interlace.comm.replay.replays import places
from interlace.comm.replay.tapes import step
from interlace.errors import ArgumentError, BackendError
from interlace.gemm.scaled import block_scale_shapes, has_block_scales
from interlace.gemm.terms import Terms, default_output_dtype
from interlace.registry import Operator
from interlace.units import round_up

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = torch.float8_e4m3fn
FLOAT8_CAPABILITY = (8, 9)
ALIGNMENT_BYTES = 16
"""Of the address and the rows of a matrix that a kernel loads as tiles through a descriptor."""


def output_dtype(x: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a product: ``out_dtype`` if given, else that of x, but bfloat16 for
    float8.
    """
    return default_output_dtype(x.dtype) if out_dtype is None else out_dtype


def integer(rule: str, value: Any) -> int:
    """Return an integer as Python's, which NumPy's and torch's are not; one of a compiler that
    traces the call stays what it is.

    Ranks exchange and remember such numbers, which NumPy's and torch's do not allow.

    Args:
        rule: What the error begins with: the rule that other values break.

    Raises:
        ArgumentError: It is no integer.
    """
    if not isinstance(value, bool):
        if isinstance(value, (int, torch.SymInt)):
            return value  # type: ignore[return-value]
        # What torch raises of a tensor depends on its kind.
        with contextlib.suppress(TypeError, RuntimeError):
            return operator.index(value)
    raise ArgumentError(f"{rule}; got {value!r}.")


def number(rule: str, value: Any) -> float:
    """Return a real number as Python's float; see :func:`integer`.

    Raises:
        ArgumentError: It is no real number of Python or NumPy.
    """
    # The first two are what a compiler that traces the call knows.
    if isinstance(value, (int, float, numbers.Real)):
        return float(value)
    raise ArgumentError(f"{rule}; got {value!r}.")


def require_float(subject: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that is not in ``FLOATS``; ``subject`` is the operator and the argument."""
    if dtype not in FLOATS:
        raise ArgumentError(f"{subject} must be float16, bfloat16 or float32; got {dtype}.")


def require_tensor(subject: str, value: object) -> None:
    """Refuse what is no tensor, a DTensor, and tensors that are not dense."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{subject} must be a torch.Tensor; got {type(value).__name__}.")
    # By an attribute: importing DTensor takes longer than importing this package. Every call comes
    # here, and an attribute that is absent takes long to look for, as do types that compare.
    kind = type(value)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter and hasattr(value, "to_local"):
        raise ArgumentError(
            f"{subject} must be this rank's tensor; got a DTensor. Pass .to_local(), or leave the "
            'model as it is and call torch.compile(model, backend="interlace").'
        )
    if value.layout != torch.strided:
        raise ArgumentError(f"{subject} must be dense; got {value.layout}. Call .to_dense().")
    if value.is_nested:
        raise ArgumentError(
            f"{subject} must be dense; got a nested tensor. Concatenate its parts, or pad them."
        )


def require_tensors(operator: str, optional: Sequence[str] = (), **arguments: object) -> None:
    """Refuse arguments that :func:`require_tensor` refuses.

    Args:
        operator: Name of the operator.
        optional: Names of the arguments that may be None.
        arguments: The arguments by name.
    """
    for name, value in arguments.items():
        if value is not None or name not in optional:
            require_tensor(f"{operator}: {name}", value)


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether the host can read a tensor, or what is computed from it.

    A compiler that traces the call knows itself what to do where it cannot.
    """
    if torch.compiler.is_compiling():
        return True
    mode = _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE)
    return mode is None and not (tensor.is_meta or isinstance(tensor, FakeTensor))


def require_values(subject: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values the host must read, and which has none."""
    if not has_values(tensor):
        raise ArgumentError(
            f"{subject} must have values, which the host reads; got a tensor without, on the meta "
            "device or of FakeTensorMode. Call it with real tensors, or outside of the mode."
        )


def require_device(subject: str, tensor: torch.Tensor, other: str, device: torch.device) -> None:
    """Refuse a tensor that is not on the device of another one, whose name is ``other``."""
    if tensor.device != device:
        raise ArgumentError(
            f"{subject} must be on the device of {other}, {device}; got {tensor.device}."
        )


def require_kind(
    subject: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device, like: str
) -> None:
    """Refuse a tensor that has not the dtype and the device of another one, whose name is
    ``like``.
    """
    if tensor.dtype != dtype or tensor.device != device:
        raise ArgumentError(
            f"{subject} must be {dtype} on {device}, like {like}; got {tensor.dtype} on "
            f"{tensor.device}."
        )


def require_bias(
    subject: str, bias: object, w: torch.Tensor, dtype: torch.dtype, like: str, axis: str = "N"
) -> None:
    """Refuse a bias that is no vector with a number for each row of w, on w's device.

    Args:
        subject: Names of the operator and the argument.
        bias: What the caller has given for it.
        w: The weight whose product it is added to.
        dtype: The dtype that it must have.
        like: Name of the tensor whose dtype that is.
        axis: Name of the number of w's rows.
    """
    require_tensor(subject, bias)
    assert isinstance(bias, torch.Tensor)
    columns = w.shape[0]
    if list(bias.shape) != [columns]:
        raise ArgumentError(
            f"{subject} must be [{axis}] with {axis} = {columns}; got shape {list(bias.shape)}."
        )
    require_kind(subject, bias, dtype, w.device, like)


def validate(
    operator: Operator,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    impl: str,
    config: object,
    *,
    takes_float8: bool = True,
) -> None:
    """Refuse what no rank could compute; the operators' ``api`` modules state the rules.

    Args:
        takes_float8: Whether the operator multiplies float8 operands.

    Raises:
        ArgumentError: An operand breaks a rule. The message has the operator's name, the rule, the
            value, and a remedy.
    """
    name = operator.name
    _validate_matrices(name, x, w, takes_float8)
    if out_dtype is not None:
        require_float(f"{name}: out_dtype", out_dtype)
    if bias is not None:
        require_bias(f"{name}: bias", bias, w, output_dtype(x, out_dtype), "the output")
    in_blocks = x.dtype == FLOAT8 and has_block_scales(
        x,
        w,
        *(scale if isinstance(scale, torch.Tensor) else None for scale in (x_scale, w_scale)),
    )
    of_x, of_w = map(list, block_scale_shapes(x, w))
    of_blocks = "" if in_blocks else f"x_scale {of_x} and w_scale {of_w}"
    _validate_scale(name, "x", x, "M", x_scale, (x.shape[0], 1), of_blocks)
    _validate_scale(name, "w", w, "N", w_scale, (1, w.shape[0]), of_blocks)
    if (
        x.dtype == FLOAT8
        and torch.is_grad_enabled()
        and _C._any_requires_grad(x, w, bias, x_scale, w_scale)
    ):
        raise ArgumentError(
            f"{name}: float8 operands must not require gradients; got one that does. "
            f"Detach them or use torch.no_grad(); to train, multiply in bfloat16."
        )
    operator.validate_options(impl, config)


def _validate_matrices(operator: str, x: torch.Tensor, w: torch.Tensor, takes_float8: bool) -> None:
    """Refuse matrices that cannot be multiplied with each other, or not by these operators."""
    require_tensors(operator, x=x, w=w)
    if x.dim() != 2:
        raise ArgumentError(
            f"{operator}: x must be [M, K]; got shape {list(x.shape)}. Flatten leading dimensions "
            "first."
        )
    if w.dim() != 2:
        raise ArgumentError(f"{operator}: w must be [N, K]; got shape {list(w.shape)}.")
    if x.shape[1] != w.shape[1]:
        remedy = " Pass w.T: w is [N, K], as in nn.Linear." if x.shape[1] == w.shape[0] else ""
        raise ArgumentError(
            f"{operator}: x and w must have the same last dimension, K; got {x.shape[1]} and "
            f"{w.shape[1]}.{remedy}"
        )
    require_operand_dtype(operator, x.dtype, takes_float8)
    if w.dtype != x.dtype:
        raise ArgumentError(
            f"{operator}: w must have the dtype of x, {x.dtype}; got {w.dtype}. Cast one of them: "
            "autocast reaches the layers of interlace.nn, and no operators."
        )
    require_device(f"{operator}: w", w, "x", x.device)
    if contiguous_dimension(w) is None:
        raise ArgumentError(
            f"{operator}: w must be contiguous along K or along N; got strides {list(w.stride())}. "
            "Keep w as nn.Linear does, [N, K], pass .T of a contiguous [K, N], or call "
            ".contiguous() once."
        )


def require_operand_dtype(operator: str, dtype: torch.dtype, takes_float8: bool) -> None:
    """Refuse operands of a dtype that an operator does not multiply."""
    if dtype in FLOATS or (takes_float8 and dtype == FLOAT8):
        return
    names = "bfloat16, float32 or float8_e4m3fn" if takes_float8 else "bfloat16 or float32"
    raise ArgumentError(f"{operator}: x must be float16, {names}; got {dtype}.")


def _validate_scale(
    operator: str,
    name: str,
    matrix: torch.Tensor,
    axis: str,
    scale: torch.Tensor | None,
    broadcast: tuple[int, int],
    of_blocks: str,
) -> None:
    """Refuse a scale that does not fit its matrix.

    Args:
        axis: Name of the number of rows.
        broadcast: The shape of a scale for each row of two dimensions.
        of_blocks: What scales of blocks would be; empty if both are.
    """
    if matrix.dtype != FLOAT8:
        if scale is not None:
            raise ArgumentError(
                f"{operator}: {name}_scale must be given for float8 only; {name} is {matrix.dtype}."
            )
        return
    if scale is None:
        raise ArgumentError(
            f"{operator}: {name}_scale must be given, as {name} is float8; got none. Pass "
            "torch.ones(1) if there is none."
        )
    require_tensor(f"{operator}: {name}_scale", scale)
    count = matrix.shape[0]
    # One number may be [1, 1], too, as blocks have the scale of a matrix that is one of them.
    if of_blocks and list(scale.shape) not in ([], [1], [1, 1], [count], list(broadcast)):
        raise ArgumentError(
            f"{operator}: {name}_scale must be [] or [1], or [{axis}] or {list(broadcast)} with "
            f"{axis} = {count}; or both for blocks, {of_blocks}; got shape {list(scale.shape)}."
        )
    if scale.dtype != torch.float32 or scale.device != matrix.device:
        raise ArgumentError(
            f"{operator}: {name}_scale must be float32 on {matrix.device}, like {name}; got "
            f"{scale.dtype} on {scale.device}."
        )


def contiguous_dimension(matrix: torch.Tensor) -> int | None:
    """Return 1 if rows are contiguous, 0 if columns are, None if neither are."""
    rows, columns = matrix.shape
    if matrix.stride(1) == 1 or columns <= 1 or rows == 0:
        return 1
    return 0 if matrix.stride(0) == 1 or rows == 1 else None


class RowPart(NamedTuple):
    """Rows of a product's x, ``[m, K]`` and contiguous, as the library multiplies them.

    ``scale`` is that of float8 rows, as ``Operands`` has it; else None.
    """

    x: torch.Tensor
    scale: torch.Tensor | None = None


class Weight(NamedTuple):
    """A product's weight, ``[N, K]``, with its scale if it is float8, as ``Operands`` has it.

    ``transposed`` is a view ``[K, N]``: making one costs the host as much time as enqueueing a
    copy.
    """

    w: torch.Tensor
    transposed: torch.Tensor
    scale: torch.Tensor | None = None

    @staticmethod
    def of(w: torch.Tensor) -> Weight:
        """Return a weight without scales, its view as a step of a tape."""
        return Weight(w, step(torch.t, w))


@dataclasses.dataclass(frozen=True)
class Operands:
    """Operands of one call, whose shapes and devices are validated.

    Their dtypes are checked here, too: a gradient's formula calls an operator without its ``api``.

    Attributes:
        x: ``[M, K]``, any strides.
        w: ``[N, K]``, contiguous along either.
        bias: ``[N]`` of ``out_dtype``, or None. It is copied unless it is contiguous.
        x_scale, w_scale: float32 ``[1]``, or ``[M]`` and ``[N]``, copied unless they are
            contiguous; or both those of blocks (:mod:`interlace.gemm.scaled`), with any strides.
            None unless x and w are float8.
        out_dtype: Of the result, and of parts that travel.
    """

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    x_scale: torch.Tensor | None
    w_scale: torch.Tensor | None
    out_dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.w.dtype != self.x.dtype:
            raise ArgumentError(
                f"a product's operands x and w must have the same dtype; got {self.x.dtype} and "
                f"{self.w.dtype}. "
                f"Convert one of them."
            )
        if self.bias is not None and self.bias.dtype != self.out_dtype:
            raise ArgumentError(
                f"a product's bias must have the dtype of its result, {self.out_dtype}; got "
                f"{self.bias.dtype}. Convert it."
            )
        vectors = ("bias",) if self.has_block_scales else ("bias", "x_scale", "w_scale")
        for name in vectors:
            vector = getattr(self, name)
            if vector is not None and not (vector.dim() == 1 and vector.is_contiguous()):
                # Kernels read one element behind the other, and one scale per row, whether it came
                # as a row or as a column.
                object.__setattr__(self, name, vector.reshape(-1).contiguous())

    @property
    def rows(self) -> int:
        """M, the rows of x."""
        return self.x.shape[0]

    @property
    def columns(self) -> int:
        """N, the columns of the product."""
        return self.w.shape[0]

    @property
    def inner(self) -> int:
        """K, the length of the sums."""
        return self.x.shape[1]

    @functools.cached_property
    def has_block_scales(self) -> bool:
        """Whether scales are those of blocks."""
        return self.x_scale is not None and has_block_scales(
            self.x, self.w, self.x_scale, self.w_scale
        )

    def all_rows(self) -> RowPart:
        """Return all rows of x."""
        return RowPart(self.x, self.x_scale)

    def split(self, counts: Sequence[int]) -> list[RowPart]:
        """Return so many rows of x, one part after the other."""
        parts, scale = self.x.split(counts), self.x_scale
        if scale is None or scale.numel() == 1:
            return [RowPart(part, scale) for part in parts]
        return [RowPart(*part) for part in zip(parts, scale.split(counts), strict=True)]

    def weight(self) -> Weight:
        """Return the weight as the library multiplies by it."""
        return Weight(self.w, self.w.T, self.w_scale)

    @property
    def w_along_k(self) -> bool:
        """Whether w is contiguous along K, as in ``nn.Linear``; else it is along N."""
        return contiguous_dimension(self.w) == 1

    def agreed(self) -> dict[str, Any]:
        """Return the properties that all ranks' operands must share, for ``Group.agree``.

        M is not among them: some operators let it differ by rank.
        """
        return {
            "the_shape_of_w": tuple(self.w.shape),
            "the_layout_of_w": "along K" if self.w_along_k else "along N",
            "dtype": str(self.x.dtype),
            "out_dtype": str(self.out_dtype),
            "bias": self.bias is not None,
            "scales": "of blocks" if self.has_block_scales else "of rows or matrices",
        }

    def signature(self) -> tuple[Hashable, ...]:
        """Return a key of everything about the operands that decides how a call runs.

        It consists of M and the properties that :meth:`agreed` returns.
        """
        shapes = self.x.shape, self.w.shape, self.w_along_k
        kinds = self.x.dtype, self.out_dtype, self.has_block_scales
        return *shapes, *kinds, self.bias is None

    def memory(self) -> tuple[Hashable, ...]:
        """Return where the operands lie, by which ``Replays.run`` tells calls apart."""
        return *places(self.x, self.w, self.bias, self.x_scale, self.w_scale), self.out_dtype

    def terms(self, is_even: bool, world_size: int, node_of_rank: tuple[int, ...] = ()) -> Terms:
        """Return the properties by which an implementation may refuse a call of these operands.

        Args:
            is_even: Whether every rank gets as many rows from every rank.
            world_size: The number of ranks.
            node_of_rank: Number of each rank's node; empty if all ranks are on one node.
        """
        return Terms(
            self.rows,
            self.x.device.type,
            self.x.dtype,
            result_bytes=self.rows * self.columns * self.out_dtype.itemsize,
            world_size=world_size,
            has_bias=self.bias is not None,
            converts=self.out_dtype != default_output_dtype(self.x.dtype),
            is_even=is_even,
            node_of_rank=node_of_rank,
            w_along_k=self.w_along_k,
        )

    def sizes(self, rows: int) -> dict[str, Any]:
        """Return the properties by which an implementation is chosen; ``rows`` must be the same on
        every rank.
        """
        return {
            "rows": rows,
            "columns": self.columns,
            "inner": self.inner,
            "dtype": self.x.dtype,
            "device": self.x.device,
        }

    def with_contiguous_rows(self) -> Operands:
        """Return the operands with contiguous rows of x, which may be cut by rows for cuBLAS, and
        for float8 a w that is contiguous along K, as tensor cores take it. Others are copied.
        """
        x, w = self.x, self.w
        if contiguous_dimension(x) != 1:
            x = x.contiguous()
        if w.dtype == FLOAT8 and contiguous_dimension(w) != 1:
            w = w.contiguous()
        return self if x is self.x and w is self.w else dataclasses.replace(self, x=x, w=w)

    def for_kernel(self) -> Operands:
        """Return the operands as kernels load them: x contiguous along K, w along K or N, and rows
        aligned to 16 bytes; scales of blocks contiguous. Operands that are not so are copied.

        A copy moves little beside a product, and each rank may need another one without its peers
        having to know.
        """
        # Tensor cores take float8 along K only.
        along = 1 if self.w.dtype == FLOAT8 else contiguous_dimension(self.w) or 0
        x, w = _laid_out(self.x, 1), _laid_out(self.w, along)
        scales = {}
        for name in ("x_scale", "w_scale"):
            scale = getattr(self, name)
            if scale is not None and not scale.is_contiguous():
                scales[name] = scale.contiguous()
        is_as_it_is = x is self.x and w is self.w and not scales
        return self if is_as_it_is else dataclasses.replace(self, x=x, w=w, **scales)

    def require_supported(self, operator: str, takes_float8: bool) -> None:
        """Refuse operands that the operator, or this GPU, cannot multiply.

        Args:
            operator: The operator's name.
            takes_float8: Whether it multiplies float8 operands.

        Raises:
            ArgumentError: The operands are float8, and the operator takes none.
            BackendError: The GPU cannot multiply their dtype.
        """
        # ``torch.ops.interlace`` is called with scales whatever the public function takes.
        require_operand_dtype(operator, self.x.dtype, takes_float8)
        if self.x.dtype == FLOAT8:
            require_float8(operator, self.x.device)


def require_float8(operator: str, device: torch.device) -> None:
    """Refuse a GPU that does not multiply float8 operands.

    Raises:
        BackendError: It is one.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FLOAT8_CAPABILITY:
            raise BackendError(
                f"{operator}: float8_e4m3fn must run on a GPU of compute capability "
                f"{_dotted(FLOAT8_CAPABILITY)} or later; got {torch.cuda.get_device_name(device)} "
                f"with {_dotted(capability)}. It supports float16, bfloat16 and float32."
            )


def is_aligned(matrix: torch.Tensor) -> bool:
    """Return whether a descriptor can address the lines of a matrix, its rows if they are
    contiguous and else its columns.
    """
    lines = matrix if contiguous_dimension(matrix) == 1 else matrix.T
    stride_bytes = lines.stride(0) * lines.element_size()
    # A matrix of one row has no distance between rows; an expanded row (a gradient, often) has none
    # that a descriptor takes.
    rows_aligned = len(lines) <= 1 or (stride_bytes > 0 and stride_bytes % ALIGNMENT_BYTES == 0)
    return matrix.data_ptr() % ALIGNMENT_BYTES == 0 and rows_aligned


def _laid_out(matrix: torch.Tensor, dimension: int) -> torch.Tensor:
    """Return ``matrix``, or a copy that is contiguous along ``dimension`` and aligned along the
    other.
    """
    # Most matrices are as they should be, and every call comes here.
    stride = matrix.stride()
    is_aligned_whole = (
        stride[dimension] == 1
        and stride[1 - dimension] > 0
        and stride[1 - dimension] * matrix.itemsize % ALIGNMENT_BYTES == 0
        and matrix.data_ptr() % ALIGNMENT_BYTES == 0
    )
    if is_aligned_whole:
        return matrix
    if dimension == 0:
        return _laid_out(matrix.T, 1).T
    rows, columns = matrix.shape
    if (columns <= 1 or matrix.stride(1) == 1) and is_aligned(matrix):
        return matrix
    # Rows of the copy are padded, so that each begins at an address that a descriptor accepts.
    padded = round_up(max(columns, 1), ALIGNMENT_BYTES // matrix.element_size())
    return matrix.new_empty(rows, padded)[:, :columns].copy_(matrix)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
