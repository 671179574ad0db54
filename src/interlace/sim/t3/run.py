"""The sub-layer, by each configuration: a matrix product, the reduce-scatter of its partial sums, and the all-gather.

One GPU is simulated in detail. All of the ring do the same at the same time, so what it sends arrives as well (*mirrored*
traffic): its chunk p is chunk p + 1 of the next GPU, and chunk p of the previous GPU is its own chunk p + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from interlace.errors import ConfigError
from interlace.sim import topology
from interlace.sim.bounds import Bound, largest
from interlace.sim.engine import Engine, Join, Server
from interlace.sim.fabric import Fabric
from interlace.sim.results import LinkUse, Result, Span, TaskTime
from interlace.sim.t3.addresses import AddressMap, ring_reduce_scatter
from interlace.sim.t3.machine import T3Machine
from interlace.sim.t3.memory import Kind, Memory
from interlace.sim.t3.product import Product, Schedule, schedule
from interlace.sim.t3.tracker import COUNTER_BYTES, Tracker

CONFIGURATIONS = ("sequential", "split-8", "split-16", "t3", "t3-mca", "ideal", "ideal-nmc")
"""One after the other; the product and an all-reduce at once on separate compute units, memory contention left out, as the paper
does; T3; T3 with the controller's arbitration; perfect overlap of product and reduce-scatter; the same with near-memory compute."""

PIECE_BYTES = 32768
"""In which a library's collective and its links work: a tile's output."""

BytesBy = dict[tuple[str, Kind], float]


@dataclasses.dataclass(frozen=True)
class Flow:
    """A block's way: complete product tiles, its last update, the transfer's first and last byte on the link."""

    block: int
    stored_ns: int
    triggered_ns: int
    sent_ns: int


@dataclasses.dataclass(frozen=True)
class Part:
    """One piece of a sub-layer, simulated: the product, a collective, or both at once."""

    name: str
    time_ns: int
    product_ns: int
    memory: BytesBy
    memory_busy_ns: float
    sent_bytes: float
    spans: list[Span]
    uses: list[LinkUse]
    events: int
    queue_entries: float
    waited_ns: int = 0
    tracker_entries: int = 0
    tracker_overflows: int = 0
    threshold: float | None = None
    flows: tuple[Flow, ...] = ()


@dataclasses.dataclass(frozen=True)
class SubLayer:
    """Outcome of one configuration.

    Attributes:
        result: times, rows, link uses and the physical bound, as of every other simulation.
        memory_bytes: by (cause, kind): causes ``product``, ``reduce-scatter``, ``all-gather``, ``tracker``; kinds ``read``,
            ``write``, ``update``.
        parts: what was simulated.
    """

    configuration: str
    product: Product
    result: Result
    memory_bytes: BytesBy
    parts: tuple[Part, ...]

    @property
    def total_ns(self) -> int:
        return self.result.total_ns

    def moved(self, cause: str, *kinds: Kind) -> float:
        """Bytes of DRAM traffic of a cause, of some kinds (all, where none is named)."""
        return sum(size for (whose, kind), size in self.memory_bytes.items() if whose == cause and (not kinds or kind in kinds))

    def to_json(self) -> dict[str, Any]:
        """Everything but single spans."""
        fused = self.parts[0]
        return {
            "configuration": self.configuration,
            "product": dataclasses.asdict(self.product),
            **self.result.to_json(),
            "memory_bytes": {f"{cause} {kind}": round(size) for (cause, kind), size in sorted(self.memory_bytes.items())},
            "parts": {part.name: part.time_ns for part in self.parts},
            "queue_entries": max(part.queue_entries for part in self.parts),
            "communication_waited_ns": fused.waited_ns,
            "tracker_entries": fused.tracker_entries,
            "tracker_overflows": fused.tracker_overflows,
            "threshold": fused.threshold if fused.threshold != float("inf") else None,
        }


def simulate(
    machine: T3Machine, product: Product, ranks: int, configuration: str, address_map: AddressMap | None = None
) -> SubLayer:
    """A sub-layer on one GPU of a ring of ``ranks``.

    Args:
        configuration: one of :data:`CONFIGURATIONS`.
        address_map: for T3, what becomes of the output's chunks; :func:`ring_reduce_scatter` by default.

    Raises:
        ConfigError: no such configuration, fewer than 2 ranks, or an address map for another number of chunks.
        UnphysicalError: the result is below the physical bound; the model has a fault.
    """
    if configuration not in CONFIGURATIONS:
        raise ConfigError(f"a configuration must be one of {', '.join(CONFIGURATIONS)}; got {configuration!r}.")
    addresses = address_map or ring_reduce_scatter(ranks)
    if addresses != ring_reduce_scatter(ranks):
        raise ConfigError(
            f"the address map must be a ring reduce-scatter over {ranks} chunks; got another. Use ring_reduce_scatter."
        )
    size, units = product.output_bytes, int(machine.gpu.compute_units.value)
    gather = _collective(machine, "all-gather", size, ranks)
    if configuration in ("t3", "t3-mca"):
        fused = _fused(machine, product, addresses, prefer_product=configuration == "t3-mca")
        return _result(machine, product, ranks, configuration, [(0, fused), (fused.time_ns, gather)])
    if configuration in ("ideal", "ideal-nmc"):
        near = configuration == "ideal-nmc"
        alone = _product(machine, product, units, outputs_bypass=near)
        reduce = _collective(machine, "reduce-scatter", size, ranks, near_memory=near)
        both = max(alone.time_ns, reduce.time_ns)
        return _result(machine, product, ranks, configuration, [(0, alone), (0, reduce), (both, gather)])
    if configuration.startswith("split-"):
        kept = int(configuration.removeprefix("split-"))
        if kept >= units:
            raise ConfigError(f"{configuration} needs more than {kept} compute units; the machine has {units}.")
        share = min(1.0, kept * machine.gpu.copy_bytes_per_s.value / machine.network.link_bytes_per_s.value)
        alone = _product(machine, product, units - kept, outputs_bypass=False)
        reduce = _collective(machine, "reduce-scatter", size, ranks, share=share)
        slow = _collective(machine, "all-gather", size, ranks, share=share)
        return _result(machine, product, ranks, configuration, [(0, alone), (0, reduce), (reduce.time_ns, slow)])
    alone = _product(machine, product, units, outputs_bypass=False)
    reduce = _collective(machine, "reduce-scatter", size, ranks)
    parts = [(0, alone), (alone.time_ns, reduce), (alone.time_ns + reduce.time_ns, gather)]
    return _result(machine, product, ranks, configuration, parts)


class _Gpu:
    """The pieces of one simulated GPU, and what is recorded of them."""

    def __init__(self, machine: T3Machine, ranks: int) -> None:
        self.machine = machine
        self.engine = Engine()
        self.spans: list[Span] = []
        self.uses: list[LinkUse] = []
        self.memory = Memory(self.engine, machine, self._memory_used)
        ring = topology.build(
            "ring",
            max(2, ranks),
            bytes_per_s=machine.network.link_bytes_per_s.value,
            latency_ns=round(machine.network.latency_ns.value),
        )
        self.fabric = Fabric(self.engine, ring, observe=self._link_used)
        self.product_ns = 0

    def part(self, name: str, **more: Any) -> Part:
        """Run to the end; what happened."""
        time_ns = self.engine.run()
        return Part(
            name=name,
            time_ns=time_ns,
            product_ns=self.product_ns,
            memory=self.memory.bytes,
            memory_busy_ns=self.memory.busy_ns,
            sent_bytes=sum(self.fabric.sent_bytes),
            spans=self.spans,
            uses=self.uses,
            events=self.engine.events,
            queue_entries=self.memory.most_entries,
            waited_ns=self.memory.waited_ns,
            **more,
        )

    def send(self, size: float, traffic: str, arrived: Callable[[], None], share: float = 1.0) -> None:
        """To the next GPU; ``arrived`` is what the previous one's transfer does here."""
        self.fabric.send(0, 1, size, arrived, traffic=traffic, efficiency=share)  # type: ignore[arg-type]

    def _link_used(self, link: str, traffic: str, start: int, end: int, size: float) -> None:
        self.uses.append(LinkUse(link, traffic, start, end, size))

    def _memory_used(self, cause: str, start: int, end: int, size: float) -> None:
        self.uses.append(LinkUse("memory", cause, start, end, size))


class _Running:
    """A product on its way: the inputs of a step are read while the one before is computed, within a stage."""

    def __init__(self, gpu: _Gpu, plan: Schedule, stage_done: Callable[[int, int], None]) -> None:
        self._gpu, self._plan, self._stage_done = gpu, plan, stage_done
        self._step_ns = round(plan.step_ns)
        self._stage = self._step = self._loaded = 0
        self._computing = False
        self._stage_start = 0
        self._load(0)

    def _load(self, step: int) -> None:
        self._gpu.memory.request("compute", "product", "read", self._plan.read_bytes[self._stage][step], self._ready)

    def _ready(self) -> None:
        self._loaded += 1
        self._compute()

    def _compute(self) -> None:
        if self._computing or self._loaded <= self._step:
            return
        self._computing = True
        self._gpu.engine.after(self._step_ns, self._computed)
        if self._step + 1 < len(self._plan.read_bytes[self._stage]):
            self._load(self._step + 1)

    def _computed(self) -> None:
        self._computing = False
        self._step += 1
        if self._step < len(self._plan.read_bytes[self._stage]):
            self._compute()
            return
        now = self._gpu.engine.now
        self._gpu.spans.append(Span("compute", f"product, stage {self._stage}", self._stage_start, now))
        self._gpu.product_ns = now
        self._stage_done(*self._plan.stages[self._stage])
        self._stage += 1
        self._step = self._loaded = 0
        self._stage_start = now
        if self._stage < len(self._plan.stages):
            self._load(0)


def _product(machine: T3Machine, product: Product, units: int, *, outputs_bypass: bool) -> Part:
    """The product alone; it ends with its last write."""
    gpu = _Gpu(machine, 2)
    plan = schedule(machine, product, units, outputs_bypass)
    tile = product.output_bytes / plan.tiles

    def store(first: int, last: int) -> None:
        gpu.memory.request("compute", "product", "write", tile * (last - first), lambda: None)

    _Running(gpu, plan, store)
    return gpu.part("product")


def _collective(
    machine: T3Machine,
    kind: Literal["reduce-scatter", "all-gather"],
    size: float,
    ranks: int,
    *,
    share: float = 1.0,
    near_memory: bool = False,
) -> Part:
    """A ring collective alone, step by step, each step's pieces pipelined through memory and link.

    Compute units read what they send (from the second step of a reduce-scatter on, their own and what came), and write what comes;
    in the end the owner adds up. With ``near_memory`` what comes is added where it is written.

    Args:
        share: of the link's bandwidth that the sender reaches.
    """
    gpu = _Gpu(machine, ranks)
    chunk = size / ranks
    pieces = max(1, -(-int(chunk) // PIECE_BYTES))
    piece = chunk / pieces
    adds = kind == "reduce-scatter" and not near_memory
    arriving: Kind = "update" if near_memory else "write"
    started = 0

    def step(number: int) -> None:
        nonlocal started
        if number:
            gpu.spans.append(Span(kind, f"{_TITLES[kind]}, step {number - 1}", started, gpu.engine.now))
        started = gpu.engine.now
        if number == ranks - 1:
            if adds:
                gpu.memory.request("communication", kind, "read", 2 * chunk, finish)
            return
        everything = Join(pieces, lambda: step(number + 1))
        reads = 2 if adds and number else 1

        def arrived() -> None:
            gpu.memory.request("communication", kind, arriving, piece, everything.done)

        for _ in range(pieces):
            gpu.memory.request(
                "communication", kind, "read", reads * piece, lambda: gpu.send(piece, _TRAFFIC[kind], arrived, share)
            )

    def finish() -> None:
        gpu.memory.request("communication", kind, "write", chunk, end)

    def end() -> None:
        gpu.spans.append(Span(kind, f"{_TITLES[kind]}, last sum", started, gpu.engine.now))

    step(0)
    return gpu.part(kind)


_TITLES = {"reduce-scatter": "ReduceScatter", "all-gather": "AllGather"}
_TRAFFIC = {"reduce-scatter": "reduce_scatter", "all-gather": "all_gather"}


class _Fused:
    """T3: the product's stores, the tracker, and the transfers that it triggers."""

    def __init__(self, machine: T3Machine, product: Product, addresses: AddressMap, *, prefer_product: bool) -> None:
        self._gpu = gpu = _Gpu(machine, addresses.chunks)
        self._addresses = addresses
        self._plan = schedule(machine, product, int(machine.gpu.compute_units.value), True)
        self._blocks = -(-self._plan.tiles // addresses.chunks)  # of a chunk; none is larger than a tile
        self._size = product.output_bytes / (self._blocks * addresses.chunks)
        self._stored = 0
        self._prefer_product = prefer_product
        self._stored_ns: dict[int, int] = {}
        self._flows: list[Flow] = []
        self._engines = [Server(f"DMA {number}", "dma") for number in range(int(machine.dma.engines.value))]
        self._start_ns = round(machine.dma.start_ns.value)
        self._ended_ns = 0
        self._tracker = Tracker(int(machine.tracker.sets.value), int(machine.tracker.ways.value), self._spill)
        if prefer_product:
            gpu.memory.threshold = float("inf")
        self._running = _Running(gpu, self._plan, self._stage_done)

    def part(self) -> Part:
        part = self._gpu.part("product and reduce-scatter")
        self._gpu.spans.append(
            Span("reduce-scatter", "ReduceScatter, triggered", min((f.sent_ns for f in self._flows), default=0), part.time_ns)
        )
        return dataclasses.replace(
            part,
            flows=tuple(self._flows),
            tracker_entries=self._tracker.most_entries,
            tracker_overflows=self._tracker.overflows,
            threshold=self._gpu.memory.threshold,
        )

    def _stage_done(self, first: int, last: int) -> None:
        memory, chunks = self._gpu.memory, self._addresses.chunks
        ready = last * self._blocks * chunks // self._plan.tiles
        if first == 0 and self._prefer_product:
            self._choose_threshold(ready * self._size)
        for block in range(self._stored, ready):
            self._stored_ns[block] = self._gpu.engine.now
            if block // self._blocks in self._addresses.remote_map:
                self._send(block)
            else:
                memory.request("compute", "product", "update", self._size, lambda block=block: self._updated(block))  # type: ignore[misc]
        self._stored = ready

    def _choose_threshold(self, stored: float) -> None:
        """By the DRAM bandwidth that the first stage used."""
        gpu = self._gpu
        moved = gpu.memory.bytes.get(("product", "read"), 0.0) + stored
        intensity = 1e9 * moved / (gpu.engine.now * gpu.machine.memory.bytes_per_s.value)
        gpu.memory.threshold = gpu.machine.arbitration.threshold(intensity)

    def _updated(self, block: int) -> None:
        self._tracker.update(block, self._addresses.expected(block // self._blocks), lambda: self._complete(block))

    def _complete(self, block: int) -> None:
        """The trigger."""
        if block // self._blocks not in self._addresses.dma_map:
            return
        now = self._gpu.engine.now
        server = self._engines[block % len(self._engines)]
        start = server.reserve(now, self._start_ns) + self._start_ns
        self._gpu.engine.at(start, self._read, block, now)

    def _read(self, block: int, triggered_ns: int) -> None:
        def send() -> None:
            self._flows.append(Flow(block, self._stored_ns[block], triggered_ns, self._gpu.engine.now))
            self._send(block)

        self._gpu.memory.request("communication", "reduce-scatter", "read", self._size, send)

    def _send(self, block: int) -> None:
        """And, as all GPUs do the same, the previous one's block arrives for the next chunk."""
        following = block + self._blocks

        def arrived() -> None:
            self._gpu.memory.request("communication", "reduce-scatter", "update", self._size, lambda: self._updated(following))

        self._gpu.send(self._size, "reduce_scatter", arrived)

    def _spill(self, counted: Callable[[], None]) -> None:
        memory = self._gpu.memory

        def write() -> None:
            memory.request("communication", "tracker", "write", COUNTER_BYTES, counted)

        memory.request("communication", "tracker", "read", COUNTER_BYTES, write)


def _fused(machine: T3Machine, product: Product, addresses: AddressMap, *, prefer_product: bool) -> Part:
    return _Fused(machine, product, addresses, prefer_product=prefer_product).part()


def _result(machine: T3Machine, product: Product, ranks: int, configuration: str, parts: list[tuple[int, Part]]) -> SubLayer:
    """Put the parts on one time axis, and hold the whole against physics."""
    total = max(start + part.time_ns for start, part in parts)
    memory: BytesBy = {}
    for _, part in parts:
        for key, size in part.memory.items():
            memory[key] = memory.get(key, 0.0) + size
    spans = [
        dataclasses.replace(span, start_ns=span.start_ns + start, end_ns=span.end_ns + start)
        for start, part in parts
        for span in part.spans
    ]
    uses = [
        dataclasses.replace(use, start_ns=use.start_ns + start, end_ns=use.end_ns + start)
        for start, part in parts
        for use in part.uses
    ]
    sent = sum(part.sent_bytes for _, part in parts)
    link = next(use.link for use in uses if use.link != "memory")
    computing = sum(part.product_ns for _, part in parts)
    busy = {
        "compute": computing,
        "memory": round(sum(part.memory_busy_ns for _, part in parts)),
        link: sum(use.end_ns - use.start_ns for use in uses if use.link == link),
    }
    moved = sum(memory.values())
    bound = largest(
        [
            Bound(1e9 * product.flops / machine.gpu.flops_per_s, "the product at peak"),
            Bound(1e9 * moved / machine.memory.bytes_per_s.value, "the DRAM traffic"),
            Bound(1e9 * sent / machine.network.link_bytes_per_s.value, "the link"),
        ]
    )
    name = f"{product.name}, {configuration}"
    bound.check(total, name)
    tasks = [
        TaskTime(part.name, part.spans[0].row, start, start + part.time_ns, None if start == 0 else parts[number - 1][1].name)
        for number, (start, part) in enumerate(parts)
    ]
    result = Result(
        name=name,
        total_ns=total,
        exposed_ns=total - computing,
        busy_ns=busy,
        sent_bytes={link: sent},
        traffic_bytes={traffic: sum(use.size for use in uses if use.traffic == traffic) for traffic in _TRAFFIC.values()},
        memory_bytes=moved,
        tasks=tasks,
        spans=spans,
        link_uses=uses,
        bound=bound,
        events=sum(part.events for _, part in parts),
        ranks=ranks,
        topology=f"ring of {ranks}",
        machine=machine.name,
        all_ranks=False,
    )
    return SubLayer(configuration, product, result, memory, tuple(part for _, part in parts))
