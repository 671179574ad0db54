"""A sub-layer in each configuration: a matrix product and the collective that follows its output or
feeds its input.

Either one GPU is simulated in detail and stands for its group, whose GPUs do everything at the same
time (*mirrored* traffic), or all GPUs of the group are simulated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from interlace.errors import ConfigError
from interlace_sim.bounds import Bound, largest
from interlace_sim.results import Result
from interlace_sim.t3 import addresses as maps
from interlace_sim.t3 import fused
from interlace_sim.t3.addresses import AddressMap
from interlace_sim.t3.collectives import Collective, alone
from interlace_sim.t3.gpu import TOPOLOGIES, Group, Part, Store
from interlace_sim.t3.machine import T3Machine
from interlace_sim.t3.product import OUTPUT_RUN_BYTES, Plan, Product, Running
from interlace_sim.t3.sublayer import Schedule, SubLayer, moved_by, spent, tasks

Key = TypeVar("Key")

CONFIGURATIONS = ("sequential", "split-8", "split-16", "t3", "t3-mca", "ideal", "ideal-nmc")
"""Configurations in order: product and collective one after the other; both at once on separate
compute units, memory contention left out, as in the paper; T3; T3 with the controller's
arbitration; perfect overlap of product and collective; perfect overlap with near-memory compute.
"""

COLLECTIVES: tuple[Collective, ...] = ("reduce_scatter", "all_to_all", "all_gather")
"""Collectives in order: after the product, and then an all-gather; after the product; before it."""


_MOST_RANKS = 2**10
_MOST_SLOWNESS = 1000
"""The records of a memory's queue grow with a run's time."""


def simulate(
    machine: T3Machine,
    product: Product,
    ranks: int,
    configuration: str,
    collective: Collective = "reduce_scatter",
    *,
    network: Literal["ring", "full", "switch"] | None = None,
    address_map: AddressMap | None = None,
    slowness: Sequence[float] | None = None,
) -> SubLayer:
    """Simulate a sub-layer on ``ranks`` GPUs.

    Collectives are rings on a ring, and direct (all GPUs at once) on a mesh or a switch; an
    all-to-all is always direct.

    Args:
        configuration: One of :data:`CONFIGURATIONS`.
        collective: One of :data:`COLLECTIVES`. A reduce-scatter is followed by an all-gather; an
            ``all_gather`` gathers the rows of the product's first input.
        machine: The GPUs and their links.
        product: The matrix product on each GPU.
        ranks: Number of GPUs, at least 2.
        network: Topology of the group; the machine's by default.
        address_map: T3's destinations of the output's chunks; by default those of the collective.
        slowness: Computing time of each GPU over the machine's; all GPUs are simulated then, and
            the last one to end counts.

    Raises:
        ConfigError: no such configuration, collective or network, fewer than 2 ranks, or an address
            map or slownesses that do not fit.
        UnphysicalError: the result is below the physical bound; the model has a fault.
    """
    network = network or machine.network.topology
    for role, value, known in (
        ("a configuration", configuration, CONFIGURATIONS),
        ("a collective", collective, COLLECTIVES),
        ("a network", network, TOPOLOGIES),
    ):
        if value not in known:
            raise ConfigError(f"{role} must be one of {', '.join(known)}; got {value!r}.")
    if ranks > _MOST_RANKS:
        raise ConfigError(f"a group must have at most {_MOST_RANKS} GPUs; got {ranks}.")
    chunks = _address_map(collective, product, ranks, network, address_map)
    if slowness is not None and not (
        len(slowness) == ranks and all(1 <= factor <= _MOST_SLOWNESS for factor in slowness)
    ):
        raise ConfigError(
            f"slowness must have a factor from 1 to {_MOST_SLOWNESS} for each of {ranks} GPUs; got "
            f"{tuple(slowness)}."
        )
    sublayer = _SubLayer(machine, product, ranks, network, collective, max(slowness or (1.0,)))
    if configuration in ("t3", "t3-mca"):
        part = fused.run(
            machine,
            product,
            ranks,
            network,
            collective,
            chunks,
            prefer_product=configuration == "t3-mca",
            slowness=slowness,
        )
        schedule = sublayer.then_gathered([(0, part)])
    elif configuration in ("ideal", "ideal-nmc"):
        schedule = sublayer.ideal(near_memory=configuration == "ideal-nmc")
    elif configuration.startswith("split-"):
        schedule = sublayer.split(int(configuration.removeprefix("split-")))
    else:
        schedule = sublayer.sequential()
    return _result(sublayer, configuration, schedule)


def _address_map(
    collective: Collective, product: Product, ranks: int, network: str, requested: AddressMap | None
) -> AddressMap | None:
    """Return the collective's address map, or the user's if it makes equal sums."""
    if collective == "all_gather":
        if ranks < 2 or product.rows % ranks:
            raise ConfigError(
                "an all-gather must have at least 2 ranks, and rows that divide evenly over them; "
                f"got {product.rows} rows and {ranks} ranks."
            )
        if requested is not None:
            raise ConfigError(
                "an address map must be for a product's output; got one for an all-gather. Leave "
                "it out."
            )
        return None
    if requested is None:
        ring = network == "ring" and collective == "reduce_scatter"
        direct = maps.all_to_all if collective == "all_to_all" else maps.direct_reduce_scatter
        return (maps.ring_reduce_scatter if ring else direct)(ranks)
    if requested.chunks != ranks:
        raise ConfigError(
            f"an address map must have a chunk for each of {ranks} GPUs; got {requested.chunks}."
        )
    addends = 1 if collective == "all_to_all" else ranks
    for chunk in set(range(ranks)) - requested.targets().keys():
        if requested.addends(chunk) != addends:
            raise ConfigError(
                f"a chunk that stays must be the sum of {addends} products for "
                f"{'an' if addends == 1 else 'a'} {collective}; "
                f"chunk {chunk} is that of {requested.addends(chunk)}."
            )
    return requested


class _SubLayer:
    """The parts of a sub-layer, and the configurations that consist of separate parts."""

    def __init__(
        self,
        machine: T3Machine,
        product: Product,
        ranks: int,
        network: str,
        collective: Collective,
        slowest: float,
    ) -> None:
        self.machine, self.product, self.ranks, self.network = machine, product, ranks, network
        self.collective, self._slowest = collective, slowest
        self.units = int(machine.gpu.compute_units.value)
        self.size = product.gathered_bytes if collective == "all_gather" else product.output_bytes

    def _moved(self, share: float = 1.0, *, near_memory: bool = False) -> Part:
        # Only a reduce-scatter adds anything that near-memory compute could add.
        near = near_memory and self.collective == "reduce_scatter"
        return alone(
            self.machine, self.collective, self.size, self.ranks, self.network, share, near
        )

    def _product(self, units: int, *, bypass: bool = False) -> Part:
        return product_alone(self.machine, self.product, units, bypass, self._slowest)

    def then_gathered(self, schedule: Schedule, share: float = 1.0) -> Schedule:
        """Append a reduce-scatter's all-gather, which starts when all other parts have ended."""
        if self.collective != "reduce_scatter":
            return schedule
        gather = alone(self.machine, "all_gather", self.size, self.ranks, self.network, share)
        return [*schedule, (max(start + part.time_ns for start, part in schedule), gather)]

    def sequential(self) -> Schedule:
        parts = [self._product(self.units), self._moved()]
        if self.collective == "all_gather":
            parts.reverse()
        return self.then_gathered([(0, parts[0]), (parts[0].time_ns, parts[1])])

    def ideal(self, *, near_memory: bool) -> Schedule:
        bypass = near_memory and self.collective != "all_gather"
        return self.then_gathered(
            [
                (0, self._product(self.units, bypass=bypass)),
                (0, self._moved(near_memory=near_memory)),
            ]
        )

    def split(self, kept: int) -> Schedule:
        """Give ``kept`` compute units to the collective, and the others to the product."""
        if kept >= self.units:
            raise ConfigError(
                f"split-{kept} needs more than {kept} compute units; the machine has {self.units}."
            )
        network = self.machine.network
        library = network.bytes_per_s.value * network.library_efficiency.value
        share = min(1.0, kept * self.machine.gpu.copy_bytes_per_s.value / library)
        # As in the paper, the two parts do not contend for memory.
        moved = self._moved(share)
        gathered = self.then_gathered([(0, moved)], share)
        return [(0, self._product(self.units - kept)), *gathered]


@functools.lru_cache(maxsize=8)
def product_alone(
    machine: T3Machine, product: Product, units: int, bypass: bool = False, slowness: float = 1.0
) -> Part:
    """Simulate the product alone on ``units`` compute units.

    It ends with its last tile; with ``bypass``, its stores bypass the cache and it ends with its
    last write to DRAM. Output left in the cache is written back under the next part, and counted.
    """
    # A product alone needs no group; two GPUs are the smallest that a network has.
    group = Group(machine, 2, "ring")
    gpu, plan = group.gpus[0], Plan(machine, product)

    def store(tile: int, acknowledged: Callable[[Store], None]) -> None:
        gpu.memory.request(
            "compute",
            "product",
            "write",
            plan.output_bytes(tile),
            lambda: acknowledged("memory"),
            OUTPUT_RUN_BYTES,
        )

    Running(gpu, plan, units, store if bypass else None, slowness=slowness)
    part = group.run("product")
    if bypass:
        return part
    return dataclasses.replace(
        part,
        time_ns=part.product_ns,
        memory_busy_ns=min(part.memory_busy_ns, part.product_ns),
        late_bytes=part.memory.get(("product", "write"), 0.0),
    )


def _result(sublayer: _SubLayer, configuration: str, schedule: Schedule) -> SubLayer:
    """Put the parts on one time axis, and check the result against its physical bound."""
    total = max(start + part.time_ns for start, part in schedule)
    memory, sent = (
        _sums(part.memory for _, part in schedule),
        _sums(part.sent_bytes for _, part in schedule),
    )
    uses = [moved_by(use, start) for start, part in schedule for use in part.uses]
    began, computing = next((start, part.product_ns) for start, part in schedule if part.product_ns)
    busy = {"compute": computing, "memory": round(sum(part.memory_busy_ns for _, part in schedule))}
    busy |= {
        link: sum(use.end_ns - use.start_ns for use in uses if use.link == link) for link in sent
    }
    needed = {True: 0.0, False: 0.0}  # with the product, and without
    for _, part in schedule:
        needed[bool(part.product_ns)] += sum(part.memory.values()) - part.late_bytes
    # Where the product and the others run at once, they do not contend for memory.
    are_apart = configuration in ("sequential", "t3", "t3-mca")
    bound = _bound(sublayer, (sum if are_apart else max)(needed.values()), sent)
    name = f"{sublayer.product.name}, {configuration}"
    bound.check(total, name)
    result = Result(
        name=name,
        total_ns=total,
        exposed_ns=total - computing,
        busy_ns=busy,
        sent_bytes=sent,
        # On a switch the bytes pass two links, of which the way up is counted.
        traffic_bytes={
            kind: sum(use.size for use in uses if use.traffic == kind and use.link != "down")
            for kind in COLLECTIVES
        },
        memory_bytes=sum(memory.values()),
        tasks=tasks(schedule),
        spans=[moved_by(span, start) for start, part in schedule for span in part.spans],
        link_uses=uses,
        bound=bound,
        events=sum(part.events for _, part in schedule),
        ranks=sublayer.ranks,
        topology=f"{sublayer.network} of {sublayer.ranks}",
        machine=sublayer.machine.name,
        all_ranks=False,
    )
    # All links of a GPU work at the same times, so any of them shows the overlap.
    first_link = next(iter(sent))
    overlapped = sum(
        max(0, min(use.end_ns, began + computing) - max(use.start_ns, began))
        for use in uses
        if use.link == first_link
    )
    return SubLayer(
        configuration,
        sublayer.collective,
        sublayer.product,
        result,
        memory,
        tuple(part for _, part in schedule),
        overlapped,
        spent(schedule, sublayer.collective),
    )


def _bound(sublayer: _SubLayer, moved: float, sent: dict[str, float]) -> Bound:
    """Return the bound by compute units, DRAM and links at their peaks."""
    machine = sublayer.machine
    link_rate = machine.network.bytes_per_s.value / (
        sublayer.ranks - 1 if sublayer.network == "full" else 1
    )
    return largest(
        [
            Bound(1e9 * sublayer.product.flops / machine.gpu.flops_per_s, "the product at peak"),
            Bound(1e9 * moved / machine.memory.bytes_per_s.value, "the DRAM traffic"),
            *(Bound(1e9 * size / link_rate, "the link") for size in sent.values()),
        ]
    )


def _sums(mappings: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    for sizes in mappings:
        for key, size in sizes.items():
            sums[key] = sums.get(key, 0.0) + size
    return sums
