"""One call of one implementation, program by program: the timeline that a trace would show.

Where :mod:`interlace_sim.step` simulates a training step on many nodes, with a fused kernel as
slices that leave evenly, this package simulates one call on the ranks of a node, on the same engine
and links: each tile of each program, in the order of the real kernels, each copy and each library's
product. It records the events that the real kernels record, so whatever reads a trace reads both.

The time of a product is that of the machine's profile, as ``impl="auto"`` and the steps have it;
bytes, signals and launches are those of the machine. Ranks begin together, and none is slow.

Example:
    >>> sizes = Call(8192, 8192, 2048, 2, world_size=4)
    >>> call = simulate_product(load_machine("h200-node"), "gemm_reduce_scatter", "fused", sizes)
    >>> len(call.launches[0][0].programs)
    132
"""

from __future__ import annotations

import functools

from interlace.costs import find_cost
from interlace.costs import gemv_all_reduce as gemv_costs
from interlace.costs.known_profiles import shipped_profile
from interlace.costs.time import MachineProfile, SizedCall
from interlace.errors import ArgumentError, ConfigError
from interlace.units import ceil_div
from interlace_sim.call.streams import Streams
from interlace_sim.call.tiles import TiledKernel, Tiling
from interlace_sim.call.words import WordsKernel
from interlace_sim.call.world import Activity, Event, Launch, SimulatedCall, World
from interlace_sim.machine import Machine, load_machine, presets
from interlace_sim.operators import Operator, product_operator
from interlace_sim.step import run
from interlace_sim.work import Collective

__all__ = [
    "IMPLEMENTATIONS",
    "Activity",
    "Event",
    "Launch",
    "SimulatedCall",
    "Tiling",
    "machine_with",
    "simulate_pair",
    "simulate_product",
    "simulate_words",
]

IMPLEMENTATIONS = ("fused", "chunked", "remote_stores", "pushed", "unfused")
"""The implementations of operators around one product that are simulated."""


def machine_with(gpu: str) -> Machine:
    """Return the preset of a node of GPUs of this name, as profiles spell it.

    Raises:
        ConfigError: there is none.
    """
    for name in presets("machines"):
        machine = load_machine(name)
        if machine.gpu.profile == gpu and machine.node is None:
            return machine
    raise ConfigError(f"the simulator must have a machine of {gpu}; it has none.")


def simulate_product(
    machine: Machine,
    operator: str,
    implementation: str,
    call: SizedCall,
    tiling: Tiling | None = None,
) -> SimulatedCall:
    """Simulate a call of an operator around one product.

    Args:
        machine: Machine whose GPU has a profile.
        operator: Name under which the operator's cost is declared.
        implementation: One of :data:`IMPLEMENTATIONS`.
        call: Sizes; M counts the rows of all ranks.
        tiling: How its kernel cuts the product.

    Raises:
        ArgumentError: no such operator or implementation, or a computation that is not one product.
        ConfigError: the machine has no profile.
    """
    declared = find_cost(operator)
    if declared.computation != "GEMM":
        raise ArgumentError(
            f"the simulated operator must be one around a single product; got {operator}, whose "
            f"computation is {declared.computation}."
        )
    if implementation == "unfused":
        pair = product_operator(
            operator,
            rows=call.rows,
            columns=call.columns,
            inner=call.inner,
            itemsize=call.itemsize,
            world_size=call.world_size,
        )
        return simulate_pair(machine, pair, call.world_size)
    if implementation not in IMPLEMENTATIONS:
        raise ArgumentError(
            f"a simulated implementation must be one of {', '.join(IMPLEMENTATIONS)}; got "
            f"{implementation!r}."
        )
    profile, world = _profile(machine), World(machine, call.world_size)
    collective, tiling = declared.collective, tiling or Tiling()
    is_behind_copies = (implementation, collective) == ("chunked", "reduce_scatter")
    name = "multiply_and_sum" if is_behind_copies else operator
    kernel = TiledKernel(world, name, collective, profile, call, tiling)
    _require_few(kernel.tiles * world.ranks**2)
    for rank in range(world.ranks):
        streams = Streams(world, rank, profile, call)
        match implementation, collective:
            case "fused", "all_gather":
                streams.gather(kernel)
            case "fused", _:
                streams.fused(kernel, collective)
            case "chunked", "all_gather":
                streams.gather(None)
            case "chunked", "reduce_scatter":
                streams.chunked_sum(kernel)
            case "chunked", _:
                streams.chunked(collective)
            case "remote_stores", "all_gather":
                raise ArgumentError(
                    f"{implementation} must send what a product has made; all_gather is none of "
                    "these collectives. Take another implementation."
                )
            case "remote_stores", _:
                streams.remote_stores(collective)
            case _:
                streams.pushed(collective)
    return world.finish()


def _require_few(tiles: int) -> None:
    """Refuse more tiles, each rank's for each rank, than this machine's memory has room for."""
    if tiles > _MOST_TILES:
        raise ConfigError(
            f"a simulated call must have at most {_MOST_TILES} tiles on all ranks; got {tiles}. "
            "Take fewer rows or columns."
        )


_MOST_TILES = 2**18


def simulate_words(
    machine: Machine,
    name: str,
    *,
    tokens: int,
    rows: int,
    columns: int,
    itemsize: int,
    world_size: int,
    block_n: int,
    programs: int,
    two_phase: bool,
) -> SimulatedCall:
    """Simulate a fused all-reduce of ``x [tokens, columns] @ w[rows, columns].T`` by packed words.

    Args:
        name: Name of the kernel.
        columns: Columns of this rank's shard of w.
        itemsize: Bytes of an element of x and w.
        block_n: Rows of w that a tile covers.
        programs: Number of programs at most.
        two_phase: Whether parts go to the owners of rows, and their sums to all.
    """
    world, tiles = World(machine, world_size), ceil_div(rows, block_n)
    _require_few(tiles * world_size**2)
    sizes = {"tokens": tokens, "rows": rows, "itemsize": itemsize}
    kernel = WordsKernel(
        world,
        name,
        tiles,
        min(tiles, programs),
        gemv_costs.floor_memory_bytes(columns=columns, **sizes),
        ceil_div(gemv_costs.part_bytes(**sizes), tiles),
    )
    for rank in range(world_size):
        kernel.start(rank, two_phase=two_phase)
    return world.finish()


def simulate_pair(machine: Machine, operator: Operator, ranks: int) -> SimulatedCall:
    """Simulate an unfused operator: the computation and the library's collective, in their order.

    Args:
        operator: Its timelines, as :mod:`interlace_sim.operators` builds them.
    """
    result = run(machine, machine.build_topology(ranks), operator.tasks(False))
    work = {name: each for name, _, each in operator.unfused}
    activities = []
    for span in result.spans:
        is_collective = isinstance(work[span.name], Collective)
        name = f"nccl {span.name}" if is_collective else f"{span.name} of the library"
        activities.append(
            Activity(name, 8 if is_collective else 7, span.start_ns, span.end_ns - span.start_ns)
        )
    sent_bytes = ranks * sum(result.traffic_bytes.values())
    return SimulatedCall(
        result.total_ns, [[] for _ in range(ranks)], [activities] * ranks, sent_bytes
    )


@functools.cache
def _profile_of(gpu: str) -> MachineProfile:
    profile = shipped_profile(gpu)
    assert profile is not None, "a machine's profile is checked when it is loaded"
    return profile


def _profile(machine: Machine) -> MachineProfile:
    if machine.gpu.profile is None:
        raise ConfigError(
            f"a simulated call must have a machine whose GPU has a profile; got {machine.name}. "
            "Set gpu.profile."
        )
    return _profile_of(machine.gpu.profile)
