"""Launches of the forward pass in groups that span nodes: staging, slices, landing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from interlace.comm import Group
from interlace.comm.groups.outputs import Destination
from interlace.comm.groups.slices import Message, SliceQueue, Step, Trigger, run_in_slices
from interlace.comm.groups.symmetric_memory import Workspace
from interlace.comm.launching.kernels import Launch, triton_dtype
from interlace.comm.replay.replays import places
from interlace.comm.runtime.interpreter import require
from interlace.operators.embedding_all_to_all import pooling
from interlace.operators.embedding_all_to_all.call import EmbeddingCall
from interlace.operators.embedding_all_to_all.config import OPERATOR, in_short_blocks
from interlace.operators.embedding_all_to_all.layout import HEADER, Layout
from interlace.units import ceil_div, next_power_of_2, round_up

_NAME = f"{OPERATOR}.between_nodes"
_STAMP_BYTES = 16
_SLICE_SAMPLES = 64  # a multiple of every number of bags in a block

_COLLECT_ROWS, _COLLECT_COLUMNS = 16, 256


@dataclasses.dataclass(frozen=True)
class Cut:
    """The division of every destination's samples into slices, the same on every rank.

    Attributes:
        layout: The columns of all tables and the samples of all ranks.
        itemsize: Bytes of an element of the output.
        first_rows: Samples of one destination in the first slice.
        rows: Samples in every other slice, not fewer; the last one may have fewer.
    """

    layout: Layout
    itemsize: int
    first_rows: int
    rows: int

    @staticmethod
    def of(layout: Layout, itemsize: int, shares: Sequence[int]) -> Cut:
        """Cut slices of 64 samples or a multiple of that.

        Args:
            layout: The columns and samples.
            itemsize: Bytes of an element of the output.
            shares: Relative sizes of the slices, one of ``SLICES_OF_VECTORS``.
        """
        unit = round_up(ceil_div(layout.chunk, sum(shares)), _SLICE_SAMPLES)
        return Cut(layout, itemsize, shares[0] * unit, shares[-1] * unit)

    @property
    def count(self) -> int:
        """Number of slices of a full chunk of samples."""
        return 1 + ceil_div(max(0, self.layout.chunk - self.first_rows), self.rows)

    def samples(self, number: int) -> tuple[int, int]:
        """Return the first sample of a slice in its chunk, and how many a full slice has."""
        if number == 0:
            return 0, self.first_rows
        return self.first_rows + (number - 1) * self.rows, self.rows

    def offset(self, source: int, number: int) -> int:
        """Return the bytes before a slice of ``source``'s tables, and with ``count`` those of all
        slices of one destination.
        """
        if number == 0:
            return 0
        return self.full_bytes(source, 0) + (number - 1) * self.full_bytes(source, 1)

    def full_bytes(self, source: int, number: int) -> int:
        """Return the bytes of a slice that is full, with its stamp."""
        return self._padded(self.samples(number)[1], source) + _STAMP_BYTES

    def nbytes(self, source: int, destination: int, number: int) -> int:
        """Return the bytes of a slice with its stamp; 0 if it has no vectors and is not sent."""
        first, most_samples = self.samples(number)
        rows = min(most_samples, self.layout.samples(destination) - first)
        if rows <= 0 or not self.layout.rank_columns[source]:
            return 0
        return self._padded(rows, source) + _STAMP_BYTES

    def _padded(self, rows: int, source: int) -> int:
        return round_up(rows * self.layout.rank_columns[source] * self.itemsize, _STAMP_BYTES)


def in_turn(group: Group) -> tuple[list[int], list[int]]:
    """Return the ranks of other nodes and those of this node, from the next rank on.

    This rank is the last one of its node. As ranks begin with different destinations, none is sent
    to by all at once.
    """
    ranks = [(group.rank + step) % group.world_size for step in range(1, group.world_size)]
    local = set(group.members.local_ranks)
    remote = [rank for rank in ranks if rank not in local]
    return remote, [*(rank for rank in ranks if rank in local), group.rank]


def run(call: EmbeddingCall) -> torch.Tensor:
    """Run the forward pass; return ``[samples of this rank, columns]``.

    Collective when memory must grow, and in the group's first call.
    """
    group, layout, itemsize = call.group, call.layout, call.dtype.itemsize
    require(group.backend)
    if call.is_config_given:
        rows = call.config.slice_blocks * call.config.block_bags
        cut = Cut(layout, itemsize, rows, rows)
    else:
        # A tuned configuration may differ between ranks, so it says nothing about slices; and it
        # was tuned on one node.
        cut = Cut.of(layout, itemsize, call.plan.shares)
        call = dataclasses.replace(call, config=in_short_blocks(call.config))
    output = group.outputs.take(layout.chunk * layout.columns * itemsize)
    y = output.tensor([layout.samples(call.rank), layout.columns], call.dtype, group.device)
    remote, _ = in_turn(group)
    staging = _bytes(call, len(remote) * cut.offset(call.rank, cut.count))
    landing = _bytes(call, landing_places(cut, remote)[-1])
    counters = group.network().counters(_NAME, cut.count)
    # Collective, so it comes before anything is enqueued.
    _workspace(group)

    def enqueue() -> None:
        counter = counters.data_ptr()
        vectors = len(call.weights) * len(remote)  # of one sample of each destination
        bags = call.config.block_bags
        values = [vectors * cut.samples(number)[1] // bags for number in range(cut.count)]
        steps = steps_of(cut, call.rank, remote, staging, landing, counter, values)
        queue = SliceQueue(group, OPERATOR, steps, call.mark)
        pool = prepare(call, output.destination, cut, staging, counter)
        close = prepare_close(call, output.destination)
        collect = prepare_collect(call, cut, y, landing)
        counters.zero_()
        queue.arm()
        try:
            pool()
            queue.release()
            close()
        except BaseException:
            queue.disarm()
            raise
        queue.join()
        if collect is not None:
            collect()

    memory = call.memory(), output.destination, places(y, staging, landing)
    key = (call.config, call.mark, cut, call.mode, *memory)
    run_in_slices(group, OPERATOR, key, enqueue, (staging, landing))
    # Memory that is not lent is the group's landing, which the next call writes again.
    return y if output.lent else y.clone()


def steps_of(
    cut: Cut,
    rank: int,
    remote: Sequence[int],
    staging: torch.Tensor,
    landing: torch.Tensor,
    counters: int,
    values: Sequence[int],
) -> list[Step]:
    """Return the exchanges of a call: slice k of all destinations leaves in step k.

    Args:
        cut: The division into slices.
        rank: This rank.
        remote: The ranks of other nodes, in the order in which slices are staged.
        staging: Bytes of this rank's slices, ``[destination, slice]``.
        landing: Bytes of the slices that arrive; see :func:`landing_places`.
        counters: Address of the counters, one per slice.
        values: Number of blocks of each slice, of all destinations.
    """
    destination_bytes, starts = cut.offset(rank, cut.count), landing_places(cut, remote)
    steps = []
    for number in range(cut.count):
        departures, arrivals = [], []
        for index, peer in enumerate(remote):
            sent = cut.nbytes(rank, peer, number)
            if sent:
                start = index * destination_bytes + cut.offset(rank, number)
                departures.append(Message(peer, staging.narrow(0, start, sent)))
            received = cut.nbytes(peer, rank, number)
            if received:
                start = starts[index] + cut.offset(peer, number)
                arrivals.append(Message(peer, landing.narrow(0, start, received)))
        triggers = (Trigger(counters + 4 * number, values[number]),) if departures else ()
        steps.append(Step(triggers, tuple(departures), tuple(arrivals)))
    return steps


def landing_places(cut: Cut, remote: Sequence[int]) -> list[int]:
    """Return the offset of each source's slices in the landing, and the landing's size."""
    starts = [0]
    for source in remote:
        starts.append(starts[-1] + cut.offset(source, cut.count))
    return starts


def _workspace(group: Group) -> Workspace:
    """Return the memory of the exchange within the node. Collective in the group's first call."""
    return group.workspace(_NAME, 4096, HEADER)


def _bytes(call: EmbeddingCall, nbytes: int) -> torch.Tensor:
    return torch.empty(max(nbytes, 16), dtype=torch.uint8, device=call.indices.device)


def prepare(
    call: EmbeddingCall,
    destination: Destination,
    cut: Cut,
    staging: torch.Tensor,
    counters: int,
) -> Launch:
    """Prepare the launch that pools."""
    from interlace.operators.embedding_all_to_all.kernels.between_nodes import (
        RanksByNode,
        SlicedMemory,
        embedding_all_to_all_between_nodes,
    )

    group, layout, config = call.group, call.layout, call.config
    remote, local = in_turn(group)
    workspace = _workspace(group)
    arguments, constants = pooling.arguments(call)
    blocks = ceil_div(layout.chunk, config.block_bags)
    sliced_blocks = cut.samples(cut.count)[0] // config.block_bags
    tasks = len(call.weights) * (sliced_blocks * len(remote) + blocks * len(local))
    # Long programs would keep the network's kernel from its SMs until they end.
    program_tasks = pooling.tasks_of_program(call, tasks)
    arguments |= {
        "ranks": group.cache.tables.on_device([[*remote, *local]]),
        "memory": SlicedMemory(
            buffers=destination.address,
            grants=workspace.data.address,
            signals=workspace.signals.address,
            staging=staging.data_ptr(),
            counters=counters,
        ),
        "epochs": workspace.epochs,
        "ctx": group.context(_NAME),
        "call": call.mark,
        "buffer_bytes": destination.buffer_bytes,
        "buffer_index": destination.own_index,
        "chunk": layout.chunk,
        "own_groups": layout.rank_columns[call.rank] // constants["VECTORS"].align,
        "first_blocks": cut.first_rows // config.block_bags,
        "first_bytes": cut.full_bytes(call.rank, 0),
        "slice_blocks": cut.rows // config.block_bags,
        "slice_bytes": cut.full_bytes(call.rank, 1),
        "first_local": min(local),
        "tasks": tasks,
        "program_tasks": program_tasks,
    }
    constants["RANKS"] = RanksByNode(layout.world_size, len(remote))
    # A rank without tables has a program that grants its output.
    programs = max(1, ceil_div(tasks, program_tasks))
    return Launch(embedding_all_to_all_between_nodes, (programs,), arguments, constants, (staging,))


def prepare_close(call: EmbeddingCall, destination: Destination) -> Launch:
    """Prepare the launch that ends the exchange within the node."""
    from interlace.operators.embedding_all_to_all.kernels.between_nodes import (
        RanksByNode,
        embedding_all_to_all_close,
    )

    group, layout = call.group, call.layout
    remote, local = in_turn(group)
    workspace = _workspace(group)
    arguments = {
        "ranks": group.cache.tables.on_device([[*remote, *local]]),
        "own_buffer": destination.own_address,
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(_NAME),
        "call": call.mark,
        "elements": layout.samples(call.rank) * layout.columns,
        "first_local": min(local),
    }
    constants = {
        "RANKS": RanksByNode(layout.world_size, len(remote)),
        "OUT": triton_dtype(call.dtype),
        "num_warps": 4,
    }
    return Launch(embedding_all_to_all_close, (1,), arguments, constants)


def prepare_collect(
    call: EmbeddingCall, cut: Cut, y: torch.Tensor, landing: torch.Tensor
) -> Launch | None:
    """Prepare the launch that copies what has arrived into ``y``; None if nothing arrives."""
    from interlace.operators.embedding_all_to_all.kernels.between_nodes import (
        embedding_all_to_all_collect,
    )

    group, layout = call.group, call.layout
    remote, _ = in_turn(group)
    if not y.numel() or not any(layout.rank_columns[source] for source in remote):
        return None
    starts = landing_places(cut, remote)
    sources = [
        (
            source,
            start,
            layout.rank_columns[source],
            layout.first_column(source),
            cut.full_bytes(source, 0),
            cut.full_bytes(source, 1),
        )
        for source, start in zip(remote, starts[:-1], strict=True)
    ]
    on_cpu = group.backend == "cpu"
    rows = next_power_of_2(cut.rows) if on_cpu else _COLLECT_ROWS
    tasks = len(remote) * cut.count * ceil_div(cut.rows, rows)
    arguments = {
        "sources": group.cache.tables.on_device(sources),
        "output": y.data_ptr(),
        "landing": landing.data_ptr(),
        "epochs": _workspace(group).epochs,
        "ctx": group.context(_NAME),
        "call": call.mark,
        "samples": len(y),
        "first_rows": cut.first_rows,
        "slice_rows": cut.rows,
        "columns": layout.columns,
    }
    constants = {
        "REMOTE": len(remote),
        "ROWS": rows,
        "COLUMNS": _COLLECT_COLUMNS,
        "OUT": triton_dtype(call.dtype),
        "num_warps": 4,
    }
    return Launch(embedding_all_to_all_collect, (min(tasks, 4096),), arguments, constants, (y,))
