"""Sizes and layout of a call's rows, signals and plan: numbers that host and device must agree on.

Shapes depend on sizes and capacity alone, never on where tokens go, so that nothing waits for the
device.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from interlace.units import ceil_div, next_power_of_2, round_up

ROWS: Final = 128
"""Rows of the tallest tile.

An expert's rows arrive from a multiple of it on, so that tiles of an expert may run past its end;
results come back with as many spare rows between two experts, so that tiles may run past either.
"""

MAX_RANKS: Final = 8
MAX_EXPERTS: Final = 1024
MAX_TOP_K: Final = 8
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
class Sizes:
    """One call's sizes, the same on every rank.

    Attributes:
        tokens: Tokens of each rank.
        top_k: Experts that a token goes to.
        experts: Experts of all ranks; rank r holds ``local`` of them, from ``r * local`` on.
        hidden: Width of a token.
        ffn: Width of an expert's inner layer.
        world_size: Number of ranks.
        capacity: Maximum number of rows that an expert takes from a rank.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    ffn: int
    world_size: int
    capacity: int

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


def has_halves(w_in: torch.Tensor) -> bool:
    """Return whether the memory of ``w_in [L, F, 2, hidden]`` holds an expert's gate before its up.

    That is the memory of a contiguous ``[L, 2 F, hidden]``, seen through a transposed view. Memory
    in w_in's own order has a row of the gate and a row of up in turn.
    """
    return not w_in.is_contiguous() and w_in.transpose(1, 2).is_contiguous()


def in_memory_order(w_in: torch.Tensor) -> torch.Tensor:
    """Return ``w_in`` contiguous: ``[L, 2, F, hidden]`` if it :func:`has_halves`, else itself, or a
    copy if its memory has another order.
    """
    return w_in.transpose(1, 2) if has_halves(w_in) else w_in.contiguous()


def like(weight: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor for the gradient of a weight, its memory in the weight's order."""
    if weight.dim() == 4 and has_halves(weight):
        return torch.empty_like(weight.transpose(1, 2)).transpose(1, 2)
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


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
