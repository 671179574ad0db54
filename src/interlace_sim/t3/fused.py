"""T3 itself: a product whose output is tracked and sent while it is produced, and a product whose
input is sent to it while it is gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from interlace.units import ceil_div
from interlace_sim.collectives import TITLES
from interlace_sim.engine import Join, Server
from interlace_sim.results import Span
from interlace_sim.t3.addresses import AddressMap, Target
from interlace_sim.t3.collectives import PIECE_BYTES, Collective
from interlace_sim.t3.gpu import Flow, Gpu, Group, Part, Store
from interlace_sim.t3.machine import T3Machine
from interlace_sim.t3.memory import Kind
from interlace_sim.t3.product import ELEMENT_BYTES, OUTPUT_RUN_BYTES, Plan, Product, Running
from interlace_sim.t3.tracker import COUNTER_BYTES, Tracker


class _Fused:
    """A GPU's tracker, its DMA engines, and the rule of its memory controller."""

    def __init__(
        self, gpu: Gpu, kind: Collective, plan: Plan, *, prefer_product: bool, slowness: float
    ) -> None:
        machine = gpu.machine
        self._gpu, self._kind, self._plan, self._slowness = gpu, kind, plan, slowness
        self._units = int(machine.gpu.compute_units.value)
        self._engines = [
            Server(f"DMA {number}") for number in range(int(machine.dma.engines.value))
        ]
        self._start_ns = round(machine.dma.start_ns.value)
        self.tracker = Tracker(
            int(machine.tracker.sets.value), int(machine.tracker.ways.value), self._spill
        )
        self.flows: list[Flow] = []
        self._stored_ns: dict[int, int] = {}
        self._updated_ns: dict[int, int] = {}
        self._prefer_product = prefer_product
        if prefer_product:
            # Until the first stage has been measured, communication enters whenever there is room.
            gpu.memory.threshold = float("inf")

    def _choose_threshold(self) -> None:
        """Set the threshold by the DRAM bandwidth that the product's first stage used."""
        if not self._prefer_product:
            return
        gpu = self._gpu
        moved = sum(size for (cause, _), size in gpu.memory.bytes.items() if cause == "product")
        intensity = 1e9 * moved / (gpu.engine.now * gpu.machine.memory.bytes_per_s.value)
        gpu.memory.threshold = gpu.machine.arbitration.threshold(intensity)

    def _transfer(
        self, block: int, size: float, run_bytes: float, send: Callable[[], None]
    ) -> None:
        """Carry out a trigger: a DMA engine starts and reads the block, and ``send()`` follows."""
        now = self._gpu.engine.now
        stored_ns, updated_ns = self._stored_ns.get(block, now), self._updated_ns.get(block, now)

        def read() -> None:
            self._gpu.memory.request("communication", self._kind, "read", size, sent, run_bytes)

        def sent() -> None:
            self.flows.append(Flow(block, stored_ns, updated_ns, now, self._gpu.engine.now))
            send()

        # Blocks are spread over the engines round robin.
        server = self._engines[block % len(self._engines)]
        self._gpu.engine.at(server.reserve(now, self._start_ns) + self._start_ns, read)

    def report(self, part: Part) -> Part:
        """Add the records of the tracker and the engines to ``part``, and the collective's row."""
        # The memory is in use all the time; the collective's own time is that of the links.
        uses = [use for use in part.uses if use.link != "memory"]
        if uses:
            start, end = min(use.start_ns for use in uses), max(use.end_ns for use in uses)
            part.spans.append(Span(self._kind, f"{TITLES[self._kind]}, triggered", start, end))
        return dataclasses.replace(
            part,
            flows=tuple(self.flows),
            tracker_entries=self.tracker.most_entries,
            tracker_overflows=self.tracker.overflows,
            threshold=self._gpu.memory.threshold,
        )

    def _spill(self, counted: Callable[[], None]) -> None:
        memory = self._gpu.memory

        def write() -> None:
            memory.request("communication", "tracker", "write", COUNTER_BYTES, counted)

        memory.request("communication", "tracker", "read", COUNTER_BYTES, write)


class _Producer(_Fused):
    """A product whose stores go to the destinations of an address map.

    Blocks are equal parts of a chunk, none larger than a tile.
    """

    def __init__(
        self,
        gpu: Gpu,
        kind: Collective,
        plan: Plan,
        addresses: AddressMap,
        *,
        prefer_product: bool,
        slowness: float,
    ) -> None:
        super().__init__(gpu, kind, plan, prefer_product=prefer_product, slowness=slowness)
        self._addresses, self._targets = addresses, addresses.targets()
        self._tiles = len(plan.tiles)
        self._blocks = ceil_div(self._tiles, addresses.chunks)
        self._size = plan.product.output_bytes / (self._blocks * addresses.chunks)
        self._expected = [addresses.expected(chunk) for chunk in range(addresses.chunks)]
        self._posted = bool(gpu.machine.network.posted.value)
        self._peers: Sequence[_Producer] = ()

    def start(self, peers: Sequence[_Producer]) -> None:
        """Start the product.

        Args:
            peers: The objects like this one of all GPUs, this one among them.
        """
        self._peers = peers
        Running(
            self._gpu, self._plan, self._units, self._store, stage_done=self._choose_threshold,
            slowness=self._slowness
        )  # fmt: skip

    def _store(self, tile: int, acknowledged: Callable[[Store], None]) -> None:
        total = self._blocks * self._addresses.chunks
        # Tiles and blocks need not divide: a tile stores the blocks that end in it.
        blocks = range(tile * total // self._tiles, (tile + 1) * total // self._tiles)
        leaves = any(block // self._blocks in self._addresses.remote_map for block in blocks)
        join = Join(len(blocks), lambda: acknowledged("link" if leaves else "memory"))
        for block in blocks:
            chunk = block // self._blocks
            self._stored_ns[block] = self._gpu.engine.now
            remote = self._addresses.remote_map.get(chunk)
            if remote is not None:
                self._send(block, remote, join.done)
                continue

            def stored(block: int = block) -> None:
                self._updated_ns[block] = self._gpu.engine.now
                join.done()
                self._updated(block)

            # A chunk that gets one update is simply written: there is nothing to add it to.
            kind: Kind = "update" if self._expected[chunk] > 1 else "write"
            self._gpu.memory.request(
                "compute", "product", kind, self._size, stored, OUTPUT_RUN_BYTES
            )

    def _send(
        self, block: int, target: Target, acknowledged: Callable[[], None] | None = None
    ) -> None:
        receiver_block = target.chunk * self._blocks + block % self._blocks
        # A posted store is acknowledged as it leaves; otherwise the acknowledgement travels back.
        if acknowledged is not None and self._posted:
            acknowledged()
            acknowledged = None

        def arrived(receiver: Gpu) -> None:
            if acknowledged is not None:
                self._gpu.engine.after(self._gpu.group.latency_ns(target.to), acknowledged)
            self._peers[receiver.rank].receive(receiver_block, target)

        self._gpu.send(target.to, self._size, self._kind, arrived)

    def receive(self, block: int, target: Target) -> None:
        """Receive a block of another GPU: it is added and counted, or written."""

        def done() -> None:
            if target.operation == "update":
                self._updated(block)

        self._gpu.memory.request(
            "communication", self._kind, target.operation, self._size, done, OUTPUT_RUN_BYTES
        )

    def _updated(self, block: int) -> None:
        chunk = block // self._blocks
        if chunk in self._addresses.dma_map:
            self.tracker.update(block, self._expected[chunk], lambda: self._complete(block))

    def _complete(self, block: int) -> None:
        target = self._targets[block // self._blocks]
        self._transfer(block, self._size, OUTPUT_RUN_BYTES, lambda: self._send(block, target))


class _Consumer(_Fused):
    """A product whose first input's rows lie on all GPUs.

    Tiles of the GPU's own rows come first, and those of its peers' rows as the rows arrive. In a
    ring a shard is sent on when it has arrived; otherwise its owner sends it to all.
    """

    def __init__(
        self, gpu: Gpu, plan: Plan, *, ring: bool, prefer_product: bool, slowness: float
    ) -> None:
        super().__init__(gpu, "all_gather", plan, prefer_product=prefer_product, slowness=slowness)
        self._ring, self._ranks = ring, gpu.group.ranks
        # A row of tiles arrives in pieces, so that a ring's next hop starts before the row is
        # complete.
        self._pieces = [
            max(1, ceil_div(self._row_bytes(row), PIECE_BYTES)) for row in range(len(plan.heights))
        ]
        self._left = [
            0 if row < plan.part_rows else pieces for row, pieces in enumerate(self._pieces)
        ]
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._peers: Sequence[_Consumer] = ()

    def start(self, peers: Sequence[_Consumer]) -> None:
        """Start the product.

        Args:
            peers: The objects like this one of all GPUs, this one among them.
        """
        self._peers = peers
        for row in range(self._plan.part_rows):
            for piece in range(self._pieces[row]):
                for to in (1,) if self._ring else range(1, self._ranks):
                    self._pass_on(row, piece, to, to)
        Running(
            self._gpu, self._plan, self._units, gate=self._gate, stage_done=self._choose_threshold,
            slowness=self._slowness
        )  # fmt: skip

    def _row_bytes(self, row: int) -> int:
        return ELEMENT_BYTES * self._plan.heights[row] * self._plan.product.depth

    def _gate(self, row: int, start: Callable[[], None]) -> None:
        if self._left[row]:
            self._waiting.setdefault(row, []).append(start)
        else:
            start()

    def _pass_on(self, row: int, piece: int, to: int, part: int) -> None:
        """Send a piece of a row of tiles ``to`` GPUs on.

        It belongs to shard ``part`` there, counted backwards from that GPU.
        """
        size = self._row_bytes(row) / self._pieces[row]
        receiver_row = part * self._plan.part_rows + row % self._plan.part_rows

        def send() -> None:
            self._gpu.send(
                to,
                size,
                "all_gather",
                lambda receiver: self._peers[receiver.rank].receive(receiver_row, piece, size),
            )

        # A row has fewer than 1024 pieces, so row and piece make one number for a block.
        self._transfer(row << 10 | piece, size, 0, send)

    def receive(self, row: int, piece: int, size: float) -> None:
        """Write and count a piece.

        The tiles of a complete row may start, and in a ring the piece goes on.
        """

        def written() -> None:
            self.tracker.update(row << 10 | piece, 1, lambda: self._complete(row, piece))

        self._gpu.memory.request("communication", "all_gather", "write", size, written)

    def _complete(self, row: int, piece: int) -> None:
        part = row // self._plan.part_rows
        if self._ring and part + 1 < self._ranks:
            self._pass_on(row, piece, 1, part + 1)
        self._left[row] -= 1
        if not self._left[row]:
            for start in self._waiting.pop(row, ()):
                start()


def run(
    machine: T3Machine,
    product: Product,
    ranks: int,
    network: str,
    kind: Collective,
    addresses: AddressMap | None,
    *,
    prefer_product: bool,
    slowness: Sequence[float] | None,
) -> Part:
    """Simulate a product and its collective at once.

    Args:
        machine: The GPUs and their links.
        product: The matrix product on each GPU.
        ranks: Number of GPUs.
        network: Topology of the group.
        kind: Name of the collective.
        addresses: Address map of the output; None if the product's input is gathered.
        prefer_product: Whether the memory controller prefers the product (T3-MCA).
        slowness: Computing time of each GPU over the machine's; without it one GPU stands for all.
    """
    group = Group(machine, ranks, network, mirrored=slowness is None)
    factors = list(zip(group.gpus, slowness or (1.0,), strict=True))
    first: _Fused
    # An all-gather feeds the product, and has no stores to map.
    if addresses is None:
        plan = Plan(machine, product, row_parts=ranks)
        consumers = [
            _Consumer(
                gpu, plan, ring=network == "ring", prefer_product=prefer_product, slowness=factor
            )
            for gpu, factor in factors
        ]
        for consumer in consumers:
            consumer.start(consumers)
        first = consumers[0]
    else:
        plan = Plan(machine, product)
        producers = [
            _Producer(gpu, kind, plan, addresses, prefer_product=prefer_product, slowness=factor)
            for gpu, factor in factors
        ]
        for producer in producers:
            producer.start(producers)
        first = producers[0]
    part = group.run("all_gather and product" if addresses is None else f"product and {kind}")
    return first.report(part)
