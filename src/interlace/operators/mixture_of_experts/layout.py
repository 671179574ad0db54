"""Sizes and layout of a call's rows, signals and plan: numbers that host and device must agree on.

Shapes depend on sizes and capacity alone, never on where tokens go, so that nothing waits for the
device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from interlace.units import next_power_of_2, round_up

ROWS: Final = 128
"""Rows of the tallest tile.

An expert's rows arrive from a multiple of it on, so that tiles of an expert may run past its end;
results come back with as many spare rows between two experts, so that tiles may run past either.
"""

FEW_BLOCKS: Final = 16
"""Blocks of slots whose counts each program of the plan adds up itself; more are added before."""

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


def dimensions_in_memory(weight: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of ``w_in`` or ``w_out`` as they follow each other in memory, or None
    if kernels cannot read them in that order.
    """
    if weight.is_contiguous():
        return tuple(range(weight.dim()))
    for dimensions in _ORDERS:
        if len(dimensions) == weight.dim() and weight.permute(dimensions).is_contiguous():
            return dimensions
    return None


def order_of(weight: torch.Tensor) -> Order:
    """Return the order in which kernels read ``w_in`` or ``w_out``.

    It is that of a contiguous copy if they cannot read the weight where it is.
    """
    return _ORDERS[dimensions_in_memory(weight) or tuple(range(weight.dim()))]


def is_copied(weight: torch.Tensor) -> bool:
    """Return whether ``w_in`` or ``w_out`` must be copied, since kernels cannot read it where it
    is: in its order, or from an address that no vector begins at, as that of a view into memory
    that parameters share may be.
    """
    return dimensions_in_memory(weight) is None or weight.data_ptr() % 16 != 0


def _laid_out(weight: torch.Tensor, dimensions: tuple[int, ...]) -> torch.Tensor:
    """Return a weight with its dimensions as they follow each other in memory."""
    view = weight.permute(dimensions)
    return view.clone(memory_format=torch.contiguous_format) if is_copied(weight) else view


class ReadableParameters(NamedTuple):
    """The parameters of a rank's experts as they lie in memory: as kernels and grouped products
    read them.

    Attributes:
        w_in: ``[L, gates * F, hidden]`` if ``in_order.along_k``, else ``[L, hidden, gates * F]``.
        w_out: ``[L, hidden, F]`` if ``out_order.along_k``, else ``[L, F, hidden]``.
        in_order, out_order: The orders of w_in and w_out.
        b_in: ``[L, gates * F]``, in the order of w_in's lines; or None.
        b_out: ``[L, hidden]``; or None.
    """

    w_in: torch.Tensor
    w_out: torch.Tensor
    in_order: Order
    out_order: Order
    b_in: torch.Tensor | None
    b_out: torch.Tensor | None

    @property
    def right_operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return w_in ``[L, hidden, gates * F]`` and w_out ``[L, F, hidden]``."""
        return (
            self.w_in.transpose(1, 2) if self.in_order.along_k else self.w_in,
            self.w_out.transpose(1, 2) if self.out_order.along_k else self.w_out,
        )


class Parameters(NamedTuple):
    """The parameters of a rank's experts, as ``interlace.mixture_of_experts`` takes them."""

    w_in: torch.Tensor
    w_out: torch.Tensor
    b_in: torch.Tensor | None
    b_out: torch.Tensor | None

    def readable(self) -> ReadableParameters:
        """Return the parameters as they lie in memory; copies of those that kernels cannot read
        where they are.
        """
        in_dimensions, out_dimensions, bias_dimensions, _ = self._memory_dimensions()
        in_order, out_order = _ORDERS[in_dimensions], _ORDERS[out_dimensions]
        w_in, w_out = _laid_out(self.w_in, in_dimensions), _laid_out(self.w_out, out_dimensions)
        b_in, b_out = self.b_in, self.b_out
        if b_in is not None:
            b_in = b_in.permute(bias_dimensions).contiguous().flatten(1)
        return ReadableParameters(
            w_in.flatten(1, 2) if in_order.along_k else w_in.flatten(2, 3),
            w_out,
            in_order,
            out_order,
            b_in,
            None if b_out is None else b_out.contiguous(),
        )

    def gradients(
        self, needed: Sequence[bool], device: torch.device | str | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return a tensor for each parameter's gradient, to be written by kernels.

        That of a weight has the weight's order in memory, that of b_in the order of w_in's lines.
        Those that are not needed, and those of biases that are not there, are empty.

        Args:
            needed: Which parameters' gradients are needed.
            device: Default: that of the parameters.
        """
        return tuple(
            self.w_in.new_empty(0, device=device)
            if parameter is None or not is_needed
            else self.arranged(number, parameter.new_empty(parameter.numel(), device=device))
            for number, (parameter, is_needed) in enumerate(zip(self, needed, strict=True))
        )

    def arranged(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a parameter, whose memory is in the order of :meth:`readable`, in
        the parameter's dimensions.

        Args:
            number: The parameter's, from 0 on.
            gradient: Contiguous.
        """
        parameter, dimensions = self[number], self._memory_dimensions()[number]
        assert parameter is not None
        inverse = sorted(range(len(dimensions)), key=dimensions.__getitem__)
        return gradient.view([parameter.shape[dim] for dim in dimensions]).permute(inverse)

    def _memory_dimensions(self) -> tuple[tuple[int, ...], ...]:
        """Return the dimensions of each parameter as they follow each other in memory; those of a
        contiguous copy where kernels cannot read the parameter as it is.
        """
        in_dimensions, out_dimensions = (
            dimensions_in_memory(weight) or tuple(range(weight.dim()))
            for weight in (self.w_in, self.w_out)
        )
        bias_dimensions = (0, 2, 1) if _ORDERS[in_dimensions].halves else (0, 1, 2)
        return in_dimensions, out_dimensions, bias_dimensions, (0, 1)


class WeightScales(NamedTuple):
    """The scales of float8 weights, float32: one for each 128 x 128 of an expert's gate, up and
    second weight.

    Attributes:
        of_in: ``[L, F / 128, 2, hidden / 128]``, in memory ``[L, 2, F / 128, hidden / 128]``.
        of_out: ``[L, hidden / 128, F / 128]``, contiguous.
    """

    of_in: torch.Tensor
    of_out: torch.Tensor


class Saved(NamedTuple):
    """The tensors of the forward pass that the backward pass needs, besides the call's arguments.

    They have no elements if nothing is saved; otherwise their shapes follow from the call's sizes.

    Attributes:
        plan: int32; see the tables above.
        slot_rows: int32 ``[T, k]``: the row at which a slot's result comes back; -1 if it was
            dropped.
        slot_at: int32 ``[returns]``: the slot of each row of results.
        received: ``[arrivals, hidden]``: rows of this rank's experts.
        kept: ``[gates, arrivals, ffn]``: gate and up of these rows.
    """

    plan: torch.Tensor
    slot_rows: torch.Tensor
    slot_at: torch.Tensor
    received: torch.Tensor
    kept: torch.Tensor

    @staticmethod
    def empty(
        sizes: ExpertSizes,
        x: torch.Tensor,
        saves: bool,
        new: Callable[..., torch.Tensor] = torch.empty,
    ) -> Saved:
        """Return tensors of a call's shapes, not filled; or of none if it saves nothing.

        Args:
            sizes: The call's sizes.
            x: The call's tokens, for dtype and device.
            saves: Whether the call saves anything.
            new: Makes a tensor of a shape, a dtype and a device.
        """
        if not saves:
            return _without_elements(x.dtype, x.device)
        rows = (sizes.arrivals, sizes.hidden), (sizes.gates, sizes.arrivals, sizes.ffn)
        return Saved(
            *numbers(sizes, x.device, new),
            *(new(shape, dtype=x.dtype, device=x.device) for shape in rows),
        )

    @staticmethod
    def nothing(x: torch.Tensor) -> Saved:
        """Return tensors without elements, the same ones in each call: five new ones would take the
        host longer than to replay the call's graph.
        """
        return _nothing(x.dtype, x.device)


def numbers(
    sizes: ExpertSizes, device: torch.device, new: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return memory for the numbers of a call: ``plan``, ``slot_rows`` and ``slot_at``, as
    :class:`Saved` has them.
    """
    shapes = sizes.plan, (sizes.tokens, sizes.top_k), sizes.returns
    return tuple(new(shape, dtype=torch.int32, device=device) for shape in shapes)


def _without_elements(dtype: torch.dtype, device: torch.device) -> Saved:
    dtypes = *(torch.int32,) * 3, dtype, dtype
    return Saved(*(torch.empty(0, dtype=each, device=device) for each in dtypes))


@functools.lru_cache(maxsize=64)
def _nothing(dtype: torch.dtype, device: torch.device) -> Saved:
    # Tensors made in inference mode could not be used outside of it.
    with torch.inference_mode(False):
        return _without_elements(dtype, device)


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
