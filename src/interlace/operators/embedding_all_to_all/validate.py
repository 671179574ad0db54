"""Rules for the arguments of ``embedding_all_to_all``, checked on every rank before anything is
sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch._C._dynamo.guards import TensorGuards

from interlace import environment
from interlace.comm.groups.registration import is_ordinary, is_unobserved, past_autograd
from interlace.errors import ArgumentError
from interlace.gemm.operands import (
    require_device,
    require_float,
    require_tensor,
    require_tensors,
)
from interlace.operators.embedding_all_to_all.config import MAX_WIDTH, OPERATOR
from interlace.operators.embedding_all_to_all.layout import MAX_TABLES
from interlace.optim import SGD, RowWiseAdagrad

_INTEGERS = (torch.int32, torch.int64)

_ORDINARY = (torch.nn.Parameter, torch.Tensor)
_MOST_SETS = 256


class SeenTensors:
    """Ordinary tensors that a call has had, of which kernels can read the memory as it is.

    A model passes the same tables and states in every step. To look at each of them from Python
    takes the host longer than all else, so they are compared all at once, by what
    ``torch.compile`` guards its graphs with: type, dispatch keys (and so device and layout), dtype,
    shape, strides, and whether a gradient is required. Their addresses come on top, because a
    program may give a tensor other memory. Objects are equal only to themselves, so one can stand
    for its tensors in the key of a call.
    """

    __slots__ = ("_addresses", "_first", "_guards")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        place_of: dict[int, int] = {}
        self._first = [place_of.setdefault(id(tensor), at) for at, tensor in enumerate(tensors)]
        # Guards take no tensor twice, as a table that several features share stands in a list.
        distinct = [tensors[index] for index in place_of.values()]
        if len(distinct) == len(tensors):
            self._first = []
        self._addresses = tuple(map(_address, tensors))
        with past_autograd():
            self._guards = TensorGuards(
                *distinct, dynamic_dims_sizes=None, dynamic_dims_strides=None
            )

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether ``tensors`` have the properties and the memory of the tensors seen."""
        if len(tensors) != len(self._addresses):
            return False
        distinct = tensors
        if self._first:
            if any(tensors[self._first[at]] is not tensor for at, tensor in enumerate(tensors)):
                return False
            distinct = [tensors[index] for index in sorted(set(self._first))]
        # Guards ask about the thread as well: a backward pass need not be within the autocast of
        # its forward pass.
        with past_autograd():
            are_alike = self._guards.check(*distinct)
        return are_alike and tuple(map(_address, tensors)) == self._addresses


_address = torch.Tensor.data_ptr


class TableSet(NamedTuple):
    """The properties of a rank's tables that a call asks for.

    Attributes:
        widths: Columns of each table.
        dtype: Their element type, as text; None without tables.
        trains: Whether one of them requires a gradient.
        seen: The tables and then the states of an update, as they were found valid; None where a
            tensor is no ordinary one, or something listens to calls.
    """

    widths: tuple[int, ...]
    dtype: str | None
    trains: bool
    seen: SeenTensors | None = None


_MOST_ALIKE = 7  # other sets with the same first table

_known: dict[Hashable, list[TableSet]] = {}
"""Tables that were valid, with everything that is asked about them."""


def validate(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    mode: str,
    output_dtype: torch.dtype | None,
    gradient: object,
) -> TableSet:
    """Refuse arguments that no rank could compute with; see ``api`` for the rules. Return what the
    tables are.
    """
    if isinstance(weights, torch.Tensor):
        raise ArgumentError(
            f"{OPERATOR}: weights must be a list of tables; got one tensor. Write [weights]."
        )
    # An nn.ParameterList is no Sequence.
    if not hasattr(weights, "__getitem__"):
        raise ArgumentError(
            f"{OPERATOR}: weights must be a list of tables; got {type(weights).__name__}."
        )
    if len(weights) > MAX_TABLES:
        raise ArgumentError(
            f"{OPERATOR}: a rank must have at most {MAX_TABLES} tables; got {len(weights)}."
        )
    require_tensors(OPERATOR, indices=indices, offsets=offsets)
    tables = _tables(weights, indices.device, gradient)
    for name, numbers in (("indices", indices), ("offsets", offsets)):
        if numbers.dim() != 1:
            raise ArgumentError(
                f"{OPERATOR}: {name} must have one dimension; got shape {list(numbers.shape)}."
            )
        if numbers.dtype not in _INTEGERS:
            raise ArgumentError(f"{OPERATOR}: {name} must be int32 or int64; got {numbers.dtype}.")
        require_device(f"{OPERATOR}: {name}", numbers, "indices", indices.device)
    if mode not in ("sum", "mean"):
        raise ArgumentError(f"{OPERATOR}: mode must be sum or mean; got {mode!r}.")
    if per_sample_weights is not None:
        _validate_scale(per_sample_weights, indices, mode)
    if output_dtype is not None:
        require_float(f"{OPERATOR}: output_dtype", output_dtype)
    return tables


def _tables(weights: Sequence[torch.Tensor], device: torch.device, gradient: object) -> TableSet:
    """Refuse tables, or the result of a backward pass, that no rank could compute with."""
    updates = not isinstance(gradient, str)
    states = gradient.states if isinstance(gradient, RowWiseAdagrad) else ()
    tensors = None
    if is_unobserved() and hasattr(states, "__iter__"):
        tensors = [*weights, *states]
    sets: list[TableSet] = []
    if tensors is not None:
        # Found by the first table, as the hash of all of them takes longer.
        has_address = (
            bool(tensors) and type(tensors[0]) in _ORDINARY and tensors[0].layout is torch.strided
        )
        kind = type(gradient) if updates else gradient
        key = (device, kind, len(weights), tensors[0].data_ptr() if has_address else None)
        sets = _known.get(key, [])
        for tables in sets:
            if tables.seen is not None and tables.seen.are(tensors):
                # A tensor may become a computed one while all else about it stays as it was.
                if updates:
                    _require_leaves(weights)
                return tables
    for table, weight in enumerate(weights):
        require_tensor(f"{OPERATOR}: weights[{table}]", weight)
    for table, weight in enumerate(weights):
        _validate_table(table, weight, weights[0].dtype, device)
    _validate_gradient(weights, gradient)
    tables = TableSet(
        widths=tuple(int(weight.shape[1]) for weight in weights),
        dtype=str(weights[0].dtype) if weights else None,
        trains=any(weight.requires_grad for weight in weights),
    )
    # The memory of all must be that of their elements.
    if tensors is not None and all(
        is_ordinary(tensor) and tensor.layout is torch.strided for tensor in tensors
    ):
        tables = tables._replace(seen=SeenTensors(tensors))
        if len(_known) >= _MOST_SETS:
            _known.clear()
        _known[key] = [tables, *sets[:_MOST_ALIKE]]
    return tables


def batch_of(tables: int, offsets: torch.Tensor, batch_size: int | None) -> int:
    """Return the samples of all ranks, from the offsets or, without tables, from the caller."""
    count = offsets.shape[0]
    if not tables:
        if batch_size is None:
            raise ArgumentError(
                f"{OPERATOR}: a rank without tables must be told the global batch; got "
                "batch_size=None."
            )
        if batch_size < 0:
            raise ArgumentError(f"{OPERATOR}: batch_size must not be negative; got {batch_size}.")
        return int(batch_size)
    if count < 1 or (count - 1) % tables:
        raise ArgumentError(
            f"{OPERATOR}: offsets must be [T * B + 1] for T = {tables} tables; got {count}. "
            f"They are table-major over the global batch: table 0's bags of all samples first."
        )
    batch = (count - 1) // tables
    if batch_size is not None and batch_size != batch:
        raise ArgumentError(
            f"{OPERATOR}: batch_size must be what offsets say, {batch}; got {batch_size}."
        )
    return batch


def checks_indices(check_indices: bool | None, device: torch.device) -> bool:
    """Decide whether a call looks at the numbers in indices and offsets."""
    if check_indices is not None:
        return bool(check_indices)
    return device.type == "cpu" or bool(environment.switch("INTERLACE_CHECK_INDICES"))


def check_values(
    weights: Sequence[torch.Tensor], indices: torch.Tensor, offsets: torch.Tensor, batch: int
) -> str | None:
    """Describe the first error in the numbers of ``indices`` and ``offsets``; None without one.

    The host waits for the device.
    """
    lookups = indices.shape[0]
    if not weights:
        return (
            f"indices must be empty on a rank without tables; got {lookups}." if lookups else None
        )
    ends = offsets[[0, -1]].tolist()
    if ends[0] != 0 or ends[1] != lookups:
        return (
            f"offsets must go from 0 to the number of indices, {lookups}; got {ends[0]} to "
            f"{ends[1]}."
        )
    falls = (offsets.diff() < 0).nonzero()
    if falls.numel():
        position = int(falls[0])
        values = offsets[position : position + 2].tolist()
        return (
            f"offsets must not decrease; got {values[0]} and then {values[1]} at position "
            f"{position + 1}."
        )
    # Every table has ``batch`` offsets, so each table's indices begin at every ``batch``-th one.
    bounds = offsets[:: max(batch, 1)].tolist()
    for table, weight in enumerate(weights):
        part = indices[bounds[table] : bounds[table + 1]] if batch else indices[:0]
        outside = ((part < 0) | (part >= weight.shape[0])).nonzero()
        if outside.numel():
            position = bounds[table] + int(outside[0])
            return (
                f"indices of table {table} must be at least 0 and below {weight.shape[0]}, its "
                "rows; "
                f"got {int(indices[position])} at position {position}."
            )
    return None


def _validate_table(
    table: int, weight: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    name = f"{OPERATOR}: weights[{table}]"
    if weight.dim() != 2:
        raise ArgumentError(f"{name} must be [rows, width]; got shape {list(weight.shape)}.")
    require_float(name, weight.dtype)
    if weight.dtype != dtype:
        raise ArgumentError(
            f"{name} must have the dtype of weights[0], {dtype}; got {weight.dtype}."
        )
    require_device(name, weight, "indices", device)
    if not 1 <= weight.shape[1] <= MAX_WIDTH:
        raise ArgumentError(
            f"{name} must be between 1 and {MAX_WIDTH} wide; got {weight.shape[1]}. Cut a wider "
            "table by columns into several."
        )
    if weight.shape[0] > 1 and weight.stride(1) != 1 and weight.shape[1] > 1:
        raise ArgumentError(
            f"{name} must have contiguous rows; got strides {list(weight.stride())}. Call "
            ".contiguous() once."
        )


def _validate_scale(scale: torch.Tensor, indices: torch.Tensor, mode: str) -> None:
    name = f"{OPERATOR}: per_sample_weights"
    require_tensor(name, scale)
    if mode != "sum":
        raise ArgumentError(f"{name} must go with mode='sum'; got mode={mode!r}.")
    if scale.shape != indices.shape:
        raise ArgumentError(
            f"{name} must be {list(indices.shape)}, one for each index; got shape "
            f"{list(scale.shape)}."
        )
    require_float(name, scale.dtype)
    require_device(name, scale, "indices", indices.device)
    if torch.is_grad_enabled() and scale.requires_grad:
        raise ArgumentError(
            f"{name} must not require a gradient, which this operator does not compute; got one "
            "that does. Detach it, or use interlace.nn.ShardedEmbeddingBags."
        )


def _validate_gradient(weights: Sequence[torch.Tensor], gradient: object) -> None:
    if isinstance(gradient, (SGD, RowWiseAdagrad)):
        addresses = [
            weight.data_ptr()
            for weight in weights
            if weight.numel() and weight.device.type != "meta"
        ]
        # A table that stands twice would be updated by two programs at once. Traced tensors have
        # no addresses to compare.
        if not torch.compiler.is_compiling() and len(set(addresses)) != len(addresses):
            raise ArgumentError(
                f"{OPERATOR}: a fused update must have each table once; got the same memory twice "
                "in weights."
            )
        for table, weight in enumerate(weights):
            # Two programs would update the elements that rows share.
            if weight.shape[0] > 1 and weight.stride(0) < weight.shape[1]:
                raise ArgumentError(
                    f"{OPERATOR}: a fused update must have tables whose rows do not overlap; "
                    f"weights[{table}] has strides {list(weight.stride())}."
                )
        _require_leaves(weights)
        if isinstance(gradient, RowWiseAdagrad):
            _validate_states(weights, gradient.states)
    elif gradient not in ("dense", "sparse"):
        raise ArgumentError(
            f"{OPERATOR}: gradient must be 'dense', 'sparse', interlace.optim.SGD or "
            "interlace.optim.RowWiseAdagrad; "
            f"got {gradient!r}."
        )


def _require_leaves(weights: Sequence[torch.Tensor]) -> None:
    """Refuse computed tables: the kernel updates the tensor's own memory, and a computed tensor is
    discarded after use.
    """
    for table, weight in enumerate(weights):
        if not weight.is_leaf:
            raise ArgumentError(
                f"{OPERATOR}: a fused update must have tables that are leaves of the graph; "
                f"weights[{table}] was computed. Pass the parameter itself."
            )


def _validate_states(weights: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> None:
    if not hasattr(states, "__getitem__"):
        raise ArgumentError(
            f"{OPERATOR}: RowWiseAdagrad's states must be a list of tensors; got "
            f"{type(states).__name__}."
        )
    if len(states) != len(weights):
        raise ArgumentError(
            f"{OPERATOR}: RowWiseAdagrad's states must be one for each of {len(weights)} tables; "
            f"got {len(states)}."
        )
    for table, (weight, state) in enumerate(zip(weights, states, strict=True)):
        name = f"{OPERATOR}: RowWiseAdagrad's states[{table}]"
        require_tensor(name, state)
        if (
            list(state.shape) != [weight.shape[0]]
            or state.dtype != torch.float32
            or not state.is_contiguous()
        ):
            raise ArgumentError(
                f"{name} must be contiguous float32 [{weight.shape[0]}]; got {state.dtype} "
                f"{list(state.shape)}."
            )
        require_device(name, state, "its table", weight.device)
