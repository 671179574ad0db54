"""Mapped outputs of products, which a group keeps: the memory that ``remote_stores`` and
``chunked`` write to.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch

from interlace.comm import Group, process_group_named
from interlace.comm.groups.reservation import MappedSize, Reservation
from interlace.comm.host.channel import GivenUpError
from interlace.comm.replay.deferred import DeferredCall, New
from interlace.errors import ArgumentError, BackendError, WorkspaceError
from interlace.gemm.call import GemmCall
from interlace.gemm.operands import Operands
from interlace.mapped import Fused, fuse
from interlace.mapped.collectives import memory_of
from interlace.mapped.meeting import memory_of as meeting_memory
from interlace.mapped.output import OPERATOR
from interlace.units import round_up

MOST_OUTPUTS = 4
"""The number of outputs that a group keeps. Mapping an output takes a tenth of a second, so a
program whose sizes keep changing should not map one for each size; one that repeats a few sizes, as
layers of a model do, has one of each.
"""


_REPEATED_ROWS = 64
"""Numbers of rows that this divides get an output without having been asked for: batches and chunks
that a program repeats are round, and a prompt's length seldom comes again.
"""

_MOST_ABSENT = 1024
"""The number of sizes of which a group remembers that it has no output."""


@dataclasses.dataclass(frozen=True)
class KeptOutput:
    """The properties that identify an output within the group that keeps it.

    Attributes:
        implementation: Who writes it.
        collective: One of :data:`interlace.mapped.COLLECTIVES`.
        producer: Computes the product into the output, as :func:`interlace.mapped.fuse` takes it.
        shape: The output's shape.
        dtype: The output's dtype.
        settings: Further arguments of :func:`interlace.mapped.fuse`.
    """

    implementation: str
    collective: str
    producer: Callable[..., Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Return what tells outputs apart, as does its text; both are the same on every rank."""
        return self.implementation, self.collective, self.shape, self.dtype

    def mapped(self, ranks: int, granularity: int) -> tuple[MappedSize, ...]:
        """Return the memory of the output.

        Raises:
            ArgumentError: More than half would be padding.
        """
        transport = self.settings.get("transport", "stores")
        pieces = memory_of(self.collective, self.shape, self.dtype, transport, ranks, granularity)
        return tuple(MappedSize(self.key, nbytes, count) for nbytes, count in pieces)


def kept_reservation(call: GemmCall, output: KeptOutput) -> Reservation | None:
    """Return the symmetric memory of an output; None if it would be padded too much to be made."""
    ranks = call.group.world_size
    try:
        mapped = output.mapped(ranks, call.group.granularity)
    except ArgumentError:
        return None
    return Reservation((meeting_memory(OPERATOR, ranks),), mapped=mapped)


def run_into_output(
    original: GemmCall,
    output: KeptOutput,
    arguments: Callable[[Operands], tuple[object, ...]] = lambda operands: (operands,),
) -> DeferredCall | None:
    """Return the work of a product and the collective of its rows, written into an output that the
    group keeps; None if there is no output for these sizes. Collective where it is new.

    If the caller has asked for the implementation, a new output takes the place of the one that was
    not used for longest (but of none that a CUDA graph has captured on any rank). Else there is
    none for new sizes once as many as a group keeps are in use, nor for sizes that seldom come
    again.

    Args:
        original: The call. X is copied if its rows are not contiguous.
        arguments: Returns what the producer is called with, of the operands.

    Raises:
        ArgumentError: The caller has asked for it, and the output would be padded to more than
            twice its size.
        BackendError: The caller has asked for it, and the driver cannot map memory or let copies
            wait.
    """
    if not original.is_explicit and original.operands.rows % _REPEATED_ROWS:
        return None
    call = original.with_operands(original.operands.with_contiguous_rows())
    product = _kept_output(output, call, replace=call.is_explicit)
    if product is None:
        return None
    mapped = product.output
    operands, rows = call.operands, call.rows.result
    # An all-reduce gives every rank as many rows to sum, also where the last ones are no rows of x.
    padded_rows = math.prod(output.shape[:-1]) if output.collective == "all_reduce" else rows
    new = New(operands.x.device, (([padded_rows, operands.columns], operands.out_dtype),))

    def prepare(y: torch.Tensor) -> Callable[[], None]:
        place = mapped.place

        def enqueue() -> None:
            mapped.go_back(place)  # where an epoch was captured and there is no graph
            product.run_into(y, *arguments(operands))

        return enqueue

    # What is deferred outlives the call, and must not be what keeps the output.
    reference = weakref.ref(mapped)
    again = functools.partial(
        _run_again, output.key, arguments, new, rows, original.operands.out_dtype
    )
    return DeferredCall(
        (output.implementation, output.collective, operands.memory()),
        new,
        prepare,
        functools.partial(_first_rows, rows=rows),
        where=functools.partial(_place, reference),
        replayed=functools.partial(_advance, reference, output.key),
        # The graph reads a copy that every call makes anew.
        is_of_operands=call is original,
        again=(lambda: again) if call is original else None,
    )


def _run_again(
    key: tuple[Hashable, ...],
    arguments: Callable[[Operands], tuple[object, ...]],
    new: New,
    rows: int,
    dtype: torch.dtype,
    group: Group,
    _: Hashable,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """Run a call like an earlier one of :func:`run_into_output`; return None if its output is not
    kept any more.
    """
    product = group.kept.get(key)
    if product is None:
        return None
    (y,) = new(group)
    with group.running():
        product.run_into(y, *arguments(Operands(x, w, bias, None, None, dtype)))
    group.kept.move_to_end(key)
    return _first_rows(y, rows=rows)


def _kept_output(output: KeptOutput, call: GemmCall, *, replace: bool) -> Fused | None:
    """Return the producer with the output that the group keeps for it; None if there is none.

    All ranks make the same calls, so a key is new on every rank or on none. What is new is settled
    by all of them: a rank may have captured other outputs than its peers, or fail to map memory,
    and must not go its own way then. That there is none is remembered, too, and the more sizes have
    none, the seldomer ranks ask one another about another one: they would in each call of a server
    whose sizes keep changing.

    Args:
        replace: Whether another output may be given up for a new one.
    """
    key, group = output.key, call.group
    if group.kept.get(key) is None and (replace or key not in group.kept):
        absent = [other for other, value in group.kept.items() if value is None]
        if len(absent) >= _MOST_ABSENT:  # on every rank at once
            for other in absent:
                del group.kept[other]
        made = None
        count = sum(isinstance(value, Fused) for value in group.kept.values())
        # With none, one, two, four absent ones and so on.
        is_asked = len(absent) & (len(absent) - 1) == 0
        if replace or is_asked or count < MOST_OUTPUTS:
            with group.indivisible("making a mapped output"):
                made = _make_output(output, call, replace=replace)
        group.kept[key] = made
    group.kept.move_to_end(key)
    return cast("Fused | None", group.kept[key])


def _make_output(output: KeptOutput, call: GemmCall, *, replace: bool) -> Fused | None:
    """Return a producer with a new output, for which another one may be given up. Collective."""
    group, name = call.group, f"{call.operator.name}.{output.implementation}"
    if group.capture_id() is not None:
        raise WorkspaceError(
            "a mapped output must be made before a CUDA graph is captured. Call the operator once "
            "with these shapes first."
        )
    made = {str(key): key for key, value in group.kept.items() if isinstance(value, Fused)}
    # A CUDA graph refers to its output's memory, so an output that any rank has captured must stay
    # on all ranks. Which graphs a rank has captured, only that rank knows; and each rank has used
    # its outputs in an order of its own, as a graph of the program uses one without the host. So
    # outputs are exchanged by name, and rank 0's order counts for all.
    free = []
    if len(made) >= MOST_OUTPUTS:
        captured_by_rank: list[dict[str, bool]] = group.exchange(
            "mapped outputs in CUDA graphs",
            {name: group.kept[key].output.captured for name, key in made.items()},
        )
        free = [
            made[name]
            for name in captured_by_rank[0]
            if not any(captured[name] for captured in captured_by_rank)
        ]
    if len(free) >= MOST_OUTPUTS and not replace:
        return None
    try:
        pieces = output.mapped(group.world_size, group.granularity)
        nbytes = sum(piece.pieces * round_up(piece.nbytes, group.granularity) for piece in pieces)
        group.memory.require_room(name, nbytes)
        product = fuse(
            output.producer,
            output.collective,
            shape=output.shape,
            dtype=output.dtype,
            group=process_group_named(call.group_name),
            device=group.device,
            **output.settings,
        )
    except (ArgumentError, BackendError, WorkspaceError) as error:  # on every rank alike
        if replace or isinstance(error, GivenUpError):
            raise
        return None
    given_up = free[: max(0, len(free) + 1 - MOST_OUTPUTS)]
    if given_up:
        # Graphs may refer to the memory that goes.
        group.replays.clear()
    group.memory.mapped[name, output.key] = nbytes
    for key in given_up:
        del group.kept[key]
        for owner in [entry for entry in group.memory.mapped if entry[1] == key]:
            del group.memory.mapped[owner]
    group.memory.show()
    return product


def _first_rows(y: torch.Tensor, *, rows: int) -> torch.Tensor:
    return y if len(y) == rows else y[:rows]


def _place(reference: weakref.ref[Any], y: torch.Tensor) -> Hashable:
    """Return what a graph depends on of an output and a result: it contains the addresses of the
    buffers of its epoch, so it can only be replayed in an epoch with the same buffers.
    """
    output = reference()
    assert output is not None
    return *output.place, output.captured, y.data_ptr()


def _advance(
    reference: weakref.ref[Any], key: tuple[Hashable, ...], group: Group, y: torch.Tensor
) -> None:
    """Count an epoch, as a replay does not run the host code that does; note that it was used."""
    output = reference()
    assert output is not None
    output.advance()
    group.kept.move_to_end(key)
