"""Sizes and layout of a call's rows, signals and plan: numbers that host and device must agree on.

Shapes depend on sizes and capacity alone, never on where tokens go, so that nothing waits for the
device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from interlace.units import ceil_div, next_power_of_2, round_up

ROWS: Final = 128
"""Rows of the tallest tile.

An expert's rows arrive from a multiple of it on, so that tiles of an expert may run past its end;
results come back with as many spare rows between two experts, so that tiles may run past either.
"""

MAX_RANKS: Final = 8
MAX_EXPERTS: Final = 1024
MAX_TOP_K: Final = 16
MAX_TOKENS: Final = 1 << 17
MAX_DECODE_TOKENS: Final = 1 << 12

# int32 signals of a rank, the same in the forward and the backward pass.
# Sets take turns by the epoch's parity.
# [set][source]: the rank is in this call, and its memory may be written. Kernels omit the offset 0.
GRANTED: Final = 0
DONE: Final = 2 * MAX_RANKS  # [set][source]: all results of the source have arrived
FINISHED: Final = 4 * MAX_RANKS  # number of programs that have stored their results; local
HEADER: Final = 8 * MAX_RANKS
# HEADER is followed by a signal [local expert][source], then by a local counter [expert].
SIGNALS: Final = HEADER + MAX_EXPERTS * MAX_RANKS + MAX_EXPERTS

# int32 signals of a rank in ``impl="decode"``, which has a workspace of its own.
# [set][source][sender]: what the source's program has sent has arrived. Kernels omit the offset 0.
SENDERS: Final = 64  # maximum number of programs that send tokens
DECODE_DONE: Final = 2 * MAX_RANKS * SENDERS  # [set][source]: all results of the source are there
# Number of programs that have stored their results; local.
DECODE_FINISHED: Final = DECODE_DONE + 2 * MAX_RANKS
DECODE_SIGNALS: Final = DECODE_FINISHED + 1

# The plan, int32, for R ranks and E experts: three tables [R, E], then a list [E] and a flag.
COUNTS: Final = 0  # rows of expert e from source s; kernels omit the offset 0
ARRIVALS: Final = 1  # the first of these rows in the buffer of e's rank
RETURNS: Final = 2  # the first of these rows among the results of s
# Then: rows of each expert, from all ranks; 1 if every rank is in the call, else 0.
TABLES: Final = 3


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """One call's sizes, the same on every rank.

    Attributes:
        tokens: Tokens of each rank.
        top_k: Slots of a token, each with an expert or empty.
        experts: Experts of all ranks; rank r holds ``local`` of them, from ``r * local`` on.
        hidden: Width of a token.
        ffn: Width of an expert's inner layer.
        world_size: Number of ranks.
        capacity: Maximum number of rows that an expert takes from a rank.
        gates: 2 if experts have gate and up, 1 if they have no gate.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    ffn: int
    world_size: int
    capacity: int
    gates: int = 2

    @staticmethod
    def of(
        x: torch.Tensor,
        experts: torch.Tensor,
        w_in: torch.Tensor,
        world_size: int,
        capacity: int,
    ) -> ExpertSizes:
        """Return the sizes of a call of these tensors."""
        (tokens, hidden), (local, ffn, gates, _) = x.shape, w_in.shape
        count = world_size * local
        return ExpertSizes(
            tokens, experts.shape[1], count, hidden, ffn, world_size, capacity, gates
        )

    @property
    def chosen(self) -> int:
        """Maximum number of experts that a token goes to: slots beyond them are empty."""
        return min(self.top_k, self.experts)

    @property
    def local(self) -> int:
        return self.experts // self.world_size

    @property
    def slots(self) -> int:
        """Number of (token, expert) pairs of a rank."""
        return self.tokens * self.top_k

    @property
    def arrivals(self) -> int:
        """Maximum number of rows that arrive at a rank, its own included.

        An expert's rows begin at a multiple of ``ROWS``.
        """
        of_source = min(self.tokens * min(self.top_k, self.local), self.local * self.capacity)
        return round_up(self.world_size * of_source, ROWS) + self.local * ROWS

    @property
    def returns(self) -> int:
        """Maximum number of rows of results that come back to a rank.

        ``ROWS`` spare rows lie before, between and behind experts.
        """
        return min(self.slots, self.experts * self.capacity) + (self.experts + 1) * ROWS

    @property
    def plan(self) -> int:
        """Number of elements of the plan."""
        return (TABLES * self.world_size + 1) * self.experts + 1


def capacity_of(tokens: int, top_k: int, experts: int, factor: float | None) -> int:
    """Return the rows that an expert takes from a rank.

    They are ``factor`` times the expert's share if all experts got equally many rows, rounded up.
    None: the maximum, so that no token is dropped.
    """
    if factor is None:
        return max(tokens, 1)
    return max(1, min(tokens, -int(-factor * tokens * top_k // experts)))


class Order(NamedTuple):
    """The order of a weight's numbers in memory.

    Attributes:
        along_k: Whether the numbers that a token is multiplied by lie side by side, as in
            ``nn.Linear``, or else those that it becomes.
        halves: Whether an expert's gate lies before its up, or else a line of each in turn.
    """

    along_k: bool
    halves: bool


# By the dimensions of w_in ([L, F, 2, hidden]) and w_out ([L, hidden, F]) as they follow each other
# in memory.
_ORDERS = {
    (0, 1, 2, 3): Order(True, False),
    (0, 2, 1, 3): Order(True, True),
    (0, 3, 1, 2): Order(False, False),
    (0, 3, 2, 1): Order(False, True),
    (0, 1, 2): Order(True, False),
    (0, 2, 1): Order(False, False),
}


def _dimensions(weight: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of ``w_in`` or ``w_out`` as they follow each other in memory, or None
    if kernels cannot read them in that order.
    """
    if weight.is_contiguous():
        return tuple(range(weight.dim()))
    for dimensions in _ORDERS:
        if len(dimensions) == weight.dim() and weight.permute(dimensions).is_contiguous():
            return dimensions
    return None


def is_readable(weight: torch.Tensor) -> bool:
    """Return whether kernels can read ``w_in`` or ``w_out`` where it is."""
    return _dimensions(weight) is not None


def order_of(weight: torch.Tensor) -> Order:
    """Return the order in which kernels read ``w_in`` or ``w_out``.

    It is that of a contiguous copy if they cannot read the weight where it is.
    """
    return _ORDERS[_dimensions(weight) or tuple(range(weight.dim()))]


def in_memory_order(weight: torch.Tensor) -> tuple[torch.Tensor, Order]:
    """Return ``w_in`` or ``w_out`` with its dimensions as they follow each other in memory, and
    their order; a contiguous copy if kernels cannot read the weight in its order.
    """
    dimensions = _dimensions(weight)
    if dimensions is None:
        weight, dimensions = weight.contiguous(), tuple(range(weight.dim()))
    return weight.permute(dimensions), _ORDERS[dimensions]


def as_in_memory(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``w_in`` or ``w_out`` whose dimensions follow each other as those of
    :func:`in_memory_order`, some of them as one, in the weight's dimensions.
    """
    dimensions = _dimensions(weight) or tuple(range(weight.dim()))
    inverse = sorted(range(len(dimensions)), key=dimensions.__getitem__)
    return gradient.view([weight.shape[dim] for dim in dimensions]).permute(inverse)


def bias_in_order(bias: torch.Tensor, order: Order) -> torch.Tensor:
    """Return ``b_in [L, F, 2]`` in the order of w_in's lines; a copy if it has another one."""
    return (bias.transpose(1, 2) if order.halves else bias).contiguous()


class Parameters(NamedTuple):
    """The parameters of a rank's experts, as ``interlace.mixture_of_experts`` takes them."""

    w_in: torch.Tensor
    w_out: torch.Tensor
    b_in: torch.Tensor | None
    b_out: torch.Tensor | None

    def gradients(self, needed: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """Return a tensor for each parameter's gradient, to be written by kernels; see
        :meth:`gradient_shapes`.
        """
        new = self.w_in.new_empty_strided
        return tuple(new(shape, stride) for shape, stride in self.gradient_shapes(needed))

    def gradient_shapes(
        self, needed: Sequence[bool]
    ) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Return shape and strides of each parameter's gradient.

        That of a weight has the weight's order in memory, that of b_in the order of w_in's lines.
        Those that are not needed, and those of biases that are not there, are empty.
        """
        w_in, w_out, b_in, b_out = (
            parameter if need else None for parameter, need in zip(self, needed, strict=True)
        )
        of_b_in = _contiguous(b_in)
        if b_in is not None and order_of(self.w_in).halves:
            _, ffn, gates = b_in.shape
            of_b_in = b_in.shape, (ffn * gates, 1, ffn)
        return _like(w_in), _like(w_out), of_b_in, _contiguous(b_out)


def _like(weight: torch.Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a weight, or of a contiguous copy if kernels cannot read it in
    its order.
    """
    if weight is None or _dimensions(weight) is None:
        return _contiguous(weight)
    return weight.shape, weight.stride()


def _contiguous(tensor: torch.Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = (0,) if tensor is None else tensor.shape
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return shape, tuple(reversed(strides))


def alignment(width: int, itemsize: int) -> int:
    """Return the elements, a power of two of at most 16 bytes, that ``width`` is a multiple of."""
    align = 16 // itemsize
    while width % align:
        align //= 2
    return align


def blocks(slots: int, block: int) -> int:
    """Return the number of programs that number the slots."""
    return max(1, ceil_div(slots, block))


def push_tile(hidden: int, itemsize: int, num_warps: int, push_rows: int) -> tuple[int, int]:
    """Return the rows and columns that a program sends at a time: 128 bytes per thread."""
    columns = min(next_power_of_2(max(hidden, 16)), 2048)
    return max(1, min(push_rows, 4096 * num_warps // (columns * itemsize))), columns


def activation_tile(ffn: int) -> tuple[int, int]:
    """Return the rows and columns that a program computes gradients of at a time.

    A program has four warps, and a thread 16 numbers.
    """
    columns = min(next_power_of_2(max(ffn, 16)), 1024)
    return 2048 // columns, columns
