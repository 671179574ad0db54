"""The group that is simulated: GPUs with their memories, and the links between them.

With *mirrored* traffic one GPU stands for its group, whose GPUs do everything at the same time: a
message that it sends also arrives at it. In detail all GPUs are simulated, and each may be slower
than its peers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from interlace_sim import topology
from interlace_sim.engine import Engine
from interlace_sim.fabric import Fabric
from interlace_sim.results import LinkUse, Span
from interlace_sim.t3.machine import T3Machine
from interlace_sim.t3.memory import QUEUE_STEP_NS, Kind, Memory

BytesBy = dict[tuple[str, Kind], float]
Store = Literal["memory", "link"]
"""Where a tile's output goes: into this GPU's memory, or over the link into another GPU's."""
Cause = Literal["computing", "inputs", "memory", "link", "stage", "idle"]
"""What a compute unit's time goes to: a tile's steps; their inputs; the acknowledgement of its
stores, by :data:`Store`; other tiles of its stage, in lockstep; no tile that is left.
"""

TOPOLOGIES = ("ring", "full", "switch")
"""Topologies of a group: a ring's link carries all bytes that leave a GPU, a full mesh splits them
over its links, and a switch has one port per GPU.
"""
CLOSE_NS = 50
"""Nanoseconds; recorded uses of the memory by one cause with shorter gaps are merged."""
USE_BYTES = 1 << 18
"""Bytes up to which recorded uses of the memory are merged."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """The times of a block: stored by its tile, updated in memory, triggered by its last update,
    and sent to the link.
    """

    block: int
    stored_ns: int
    updated_ns: int
    triggered_ns: int
    sent_ns: int


@dataclasses.dataclass(frozen=True)
class Part:
    """A simulated part of a sub-layer: the product, a collective, or both at once.

    All attributes but the time are those of GPU 0.

    Attributes:
        time_ns: Nanoseconds until the last GPU has ended.
        product_ns: End of the product; 0 without a product.
        unit_ns: Nanoseconds of the mean compute unit by cause, ``product_ns`` in all.
        queue: Mean entries of a DRAM channel's queue in successive steps of
            :data:`~interlace_sim.t3.memory.QUEUE_STEP_NS`.
        late_bytes: Bytes of ``memory`` that may be moved after the part's end: nothing waits for
            what a cache writes back.
    """

    name: str
    time_ns: int
    product_ns: int
    memory: BytesBy
    memory_busy_ns: float
    sent_bytes: dict[str, float]
    spans: list[Span]
    uses: list[LinkUse]
    events: int
    queue_entries: float
    mean_queue_entries: float
    row_misses: float
    waited_ns: int = 0
    tracker_entries: int = 0
    tracker_overflows: int = 0
    threshold: float | None = None
    flows: tuple[Flow, ...] = ()
    unit_ns: dict[Cause, float] = dataclasses.field(default_factory=dict)
    queue: tuple[float, ...] = ()
    late_bytes: float = 0.0


class Gpu:
    """A GPU of the group, with its memory."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank = group, rank
        self.machine, self.engine = group.machine, group.engine
        self.memory = Memory(group.engine, group.machine, group.used_memory if rank == 0 else None)
        self.spans: list[Span] = []
        self.product_ns = 0
        # Nanoseconds of all compute units together.
        self.unit_ns: dict[Cause, int] = {}

    def send(
        self, to: int, size: float, traffic: str, arrived: Callable[[Gpu], None], share: float = 1.0
    ) -> None:
        """Send to the GPU ``to`` further on, and call ``arrived(gpu)`` when the bytes are there.

        Args:
            share: Share of the link's bandwidth that the sender reaches.
        """
        group = self.group
        # In a mirrored group there is one GPU, so the index wraps round to the sender itself.
        receiver = group.gpus[(self.rank + to) % len(group.gpus)]
        source, destination = (
            (0, to) if group.mirrored else (self.rank, (self.rank + to) % group.ranks)
        )
        group.fabric.send(
            source, destination, size, lambda: arrived(receiver), traffic=traffic, efficiency=share
        )


class Group:
    """All GPUs of a group, or one GPU that stands for them."""

    def __init__(
        self, machine: T3Machine, ranks: int, network: str, *, mirrored: bool = True
    ) -> None:
        self.machine, self.ranks, self.mirrored = machine, ranks, mirrored
        self.engine = Engine()
        self.uses: list[LinkUse] = []
        # Start, end and bytes of the use that each cause's next access may continue.
        self._open_uses: dict[str, tuple[int, int, float]] = {}
        # A mesh splits a GPU's bandwidth over its links; a message crosses two links of a switch.
        links = ranks - 1 if network == "full" else 1
        self.topology = topology.build(
            network,
            ranks,
            bytes_per_s=machine.network.bytes_per_s.value / links,
            latency_ns=round(machine.network.latency_ns.value / (2 if network == "switch" else 1)),
        )
        self.fabric = Fabric(self.engine, self.topology, mirrored=mirrored, observe=self._used_link)
        self.gpus = [Gpu(self, rank) for rank in range(1 if mirrored else ranks)]

    def run(self, name: str) -> Part:
        """Run all events, and return the records of GPU 0."""
        time_ns = self.engine.run()
        for cause, use in self._open_uses.items():
            self._used_link("memory", cause, *use)
        first = self.gpus[0]
        memory = first.memory
        names = [link.name for link in self.topology.classes]
        sent = zip(names, self.fabric.sent_bytes, strict=True)
        return Part(
            name=name,
            time_ns=time_ns,
            product_ns=first.product_ns,
            memory=memory.bytes,
            memory_busy_ns=memory.busy_ns,
            sent_bytes={link: size / len(self.gpus) for link, size in sent if size},
            spans=first.spans,
            uses=self.uses,
            events=self.engine.events,
            queue_entries=memory.most_entries,
            mean_queue_entries=memory.mean_entries(),
            row_misses=memory.row_misses / max(1, memory.accesses),
            waited_ns=memory.waited_ns,
            unit_ns={
                cause: first.product_ns * time / sum(first.unit_ns.values())
                for cause, time in first.unit_ns.items()
            },
            queue=tuple(
                memory.queued_ns.get(step, 0.0) / QUEUE_STEP_NS
                for step in range(1 + time_ns // QUEUE_STEP_NS)
            ),
        )

    def latency_ns(self, to: int) -> int:
        """Return the nanoseconds of a message without bytes to the GPU ``to`` further on."""
        return self.topology.path_latency_ns(0, to)

    def used_memory(self, cause: str, start: int, end: int, size: float) -> None:
        """Record a use of GPU 0's memory; close accesses of one cause are merged into one use."""
        # A run has millions of accesses; merged uses keep the records small.
        first, last, moved = self._open_uses.get(cause, (start, start, 0.0))
        if start - last >= CLOSE_NS or moved >= USE_BYTES:
            self._used_link("memory", cause, first, last, moved)
            first, moved = start, 0.0
        self._open_uses[cause] = first, end, moved + size

    def _used_link(self, link: str, traffic: str, start: int, end: int, size: float) -> None:
        self.uses.append(LinkUse(link, traffic, start, end, size))
