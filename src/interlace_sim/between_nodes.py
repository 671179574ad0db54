"""Embeddings between two nodes: simulated and predicted times beside those that were measured.

The measurements are documents of ``benchmarks/between_nodes.py``. The simulator runs the workload
on a machine of two nodes; the predictions are those by which ``impl="auto"`` decides, from a
measured network.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from interlace.costs.embedding_all_to_all import (
    POOLING_FACTOR,
    floor_memory_bytes,
    fused_between_nodes,
    pooling_us,
    stock_between_nodes,
)
from interlace.costs.network import (
    STEP_US,
    NetworkRates,
    cut_in_words,
    in_slices,
    one_after_the_other,
    parse_network,
)
from interlace.costs.time import MachineProfile
from interlace.errors import ConfigError
from interlace_sim.configfile import integer, mapped, number
from interlace_sim.machine import Machine, Sourced
from interlace_sim.operators import Operator, embedding_all_to_all
from interlace_sim.step import run
from interlace_sim.work import Fused, Kernel

_RANKS = 2
_ITEMSIZE, _INDEX_ITEMSIZE = 2, 4
_MOST_SLICES = 9999
_DEFAULT_SLICES = 8
"""Slices of calls without a configuration in documents that do not say: 2 MiB of 16 MiB."""

_PAIR: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One measured time and ours, in microseconds.

    Attributes:
        lookups: Rows per bag.
        name: The implementation as the document calls it.
        slices: The slices in words, such as ``"4"`` or ``"1/4 + 3/4"``; empty for the pair.
        measured_us: The measured time.
        simulated_us: The simulator's time.
        predicted_us: The time that ``impl="auto"`` would go by.
    """

    lookups: int
    name: str
    slices: str
    measured_us: float
    simulated_us: float
    predicted_us: float

    @property
    def simulated_error(self) -> float:
        """Relative error of the simulated time."""
        return self.simulated_us / self.measured_us - 1

    @property
    def predicted_error(self) -> float:
        """Relative error of the predicted time."""
        return self.predicted_us / self.measured_us - 1


def measured_network(document: Any, source: str = "a document") -> NetworkRates | None:
    """Return the network that a document's run has measured; None if it has none.

    Raises:
        ConfigError: it is no network; the message names ``source``.
    """
    try:
        rates = document["network"]["rates"]
    except (KeyError, TypeError):
        return None
    try:
        return parse_network(rates)
    except ConfigError as error:
        raise ConfigError(f"{source}: network.rates: {error}") from error


def with_network(machine: Machine, network: NetworkRates) -> Machine:
    """Return a machine whose links carry messages as a measured network does.

    A message takes a fixed time, and its bytes at the rate between the two largest measured sizes;
    of a collective, too. The link is busy with a message for at most ``STEP_US`` of its fixed time,
    and carries another one during the rest. The GPU, and what the library's kernels take, stay the
    machine's.
    """
    message_rate, message_us = _rate_and_fixed_us(
        network.exchange_us, [nbytes for nbytes, _ in network.slice_us]
    )
    rate, fixed_us = _rate_and_fixed_us(
        network.all_to_all_us, [nbytes for nbytes, _ in network.collective_us]
    )
    step_us = min(message_us, STEP_US)
    link_rate = max(message_rate, rate)

    def figure(value: float) -> Sourced:
        return Sourced(value=value, source=network.source, confidence="measured")

    collectives = machine.collectives.model_copy(
        update={
            "efficiency": figure(rate / link_rate),
            "efficiency_of": {},
            "step_ns": figure(max(0.0, 1e3 * fixed_us - machine.collectives.launch_ns.value)),
            "fused_efficiency": figure(message_rate / link_rate),
            "message_ns": figure(1e3 * step_us),
            "slice_ns": figure(1e3 * (message_us - step_us)),
        }
    )
    links = {"link_bytes_per_s": figure(1e6 * link_rate), "latency_ns": figure(0.0)}
    return machine.model_copy(
        update={
            "collectives": collectives,
            "network": machine.network.model_copy(update=links),
        }
    )


def _rate_and_fixed_us(
    us_of: Callable[[float], float], sizes: Sequence[int]
) -> tuple[float, float]:
    """Return the bytes per microsecond of large messages, and the fixed time of the others.

    Where the largest one took no longer than a smaller one, or is the only one, all of its time
    counts for its bytes.
    """
    *smaller, largest = sizes
    if not smaller or us_of(largest) <= us_of(smaller[-1]):
        return largest / us_of(largest), 0.0
    rate = (largest - smaller[-1]) / (us_of(largest) - us_of(smaller[-1]))
    return rate, max(0.0, statistics.median(us_of(size) - size / rate for size in smaller))


def compare(
    document: Any,
    machine: Machine,
    profile: MachineProfile,
    network: NetworkRates,
    source: str = "a document of benchmarks/between_nodes.py",
) -> list[Comparison]:
    """Return every measured pair and every measured call in slices, beside what we expect.

    Args:
        document: What ``benchmarks/between_nodes.py --json`` wrote.
        machine: Two GPUs in a network.
        profile: The GPU's profile.
        network: The network between the nodes.
        source: The document's name, for errors.

    Raises:
        ConfigError: the document is of something else.
    """
    keys = document if isinstance(document, dict) else {}
    if "sizes" not in keys or "lookups" not in mapped(keys.get("results"), f"{source}: results"):
        raise ConfigError(
            f"{source} must have sizes and results.lookups, as benchmarks/between_nodes.py writes "
            f"them; it has {', '.join(map(str, list(keys)[:8])) or 'no keys'}. Name a document "
            "that it wrote."
        )
    given = mapped(keys["sizes"], f"{source}: sizes")
    sizes = {
        name: integer(given.get(name), f"{source}: sizes.{name}", least=1, most=most)
        for name, most in (("tables", 2**16), ("width", 2**20), ("batch", 2**30))
    }
    comparisons = []
    results = mapped(keys["results"]["lookups"], f"{source}: results.lookups")
    for text, entry in results.items():
        location = f"{source}: results.lookups.{str(text)[:20]}"
        if not re.fullmatch(r"[0-9]{1,9}", str(text)) or not int(text):
            raise ConfigError(f"{location} must be a number of rows per bag above 0; it is not.")
        measured = mapped(mapped(entry, location).get("us"), f"{location}.us")
        slices = _slices(entry.get("slices", _DEFAULT_SLICES), f"{location}.slices")
        for name, value in measured.items():
            for shares in _shares_of(name, slices):
                us = number(value, f"{location}.us.{str(name)[:40]}", least=1e-3, most=1e15)
                comparisons.append(
                    _compared(int(text), name, us, shares, sizes, machine, profile, network)
                )
    return sorted(comparisons, key=lambda row: row.lookups)


def _slices(value: Any, location: str) -> tuple[int, ...]:
    """Return the relative sizes of slices, of which a document may have the number only."""
    if isinstance(value, list) and value:
        return tuple(integer(share, location, least=1) for share in value)
    return (1,) * integer(value, location, least=1, most=_MOST_SLICES)


def _shares_of(name: str, default: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the relative sizes of a measurement's slices; none if it is neither pair nor fused.

    Args:
        name: The measurement's name.
        default: The sizes of calls without a configuration.
    """
    if name in ("pair", "pair, graph"):
        return [_PAIR]
    if name in ("fused", "fused, graph"):
        return [default]
    found = re.fullmatch(r"fused, ([1-9][0-9]{0,3}) slices", name)
    return [(1,) * int(found[1])] if found else []


def _compared(
    lookups: int,
    name: str,
    measured_us: float,
    shares: tuple[int, ...],
    sizes: Mapping[str, int],
    machine: Machine,
    profile: MachineProfile,
    network: NetworkRates,
) -> Comparison:
    operator = _operator(lookups, shares or (1,), **sizes)
    tasks = operator.tasks(shares != _PAIR)
    simulated = run(machine, machine.build_topology(_RANKS), tasks).total_ns / 1e3
    predicted = _predicted_us(lookups, shares, profile, network, **sizes)
    return Comparison(lookups, name, cut_in_words(shares), measured_us, simulated, predicted)


def _operator(
    lookups: int, shares: tuple[int, ...], *, tables: int, width: int, batch: int
) -> Operator:
    """Return the workload on the simulator, whose landing is copied as the real one's is, and whose
    rows are only read.
    """
    operator = embedding_all_to_all(
        bags=tables * batch,
        pooling_factor=lookups,
        dim=width,
        itemsize=_ITEMSIZE,
        exchange_itemsize=_ITEMSIZE,
        index_itemsize=_INDEX_ITEMSIZE,
        unpack=True,
    )
    landed = 2 * tables * width * batch // _RANKS * _ITEMSIZE
    fused, ((name, lane, pooling), *others) = operator.fused, operator.unfused
    assert isinstance(fused, Fused)
    assert isinstance(pooling, Kernel)
    # The machine's kernels take as long as copies do.
    pooling = dataclasses.replace(pooling, memory_bytes=POOLING_FACTOR * pooling.memory_bytes)
    return dataclasses.replace(
        operator,
        fused=dataclasses.replace(
            fused, kernel=pooling, receive_bytes=landed, slices=len(shares), shares=shares
        ),
        unfused=((name, lane, pooling), *others),
    )


def _predicted_us(
    lookups: int,
    shares: tuple[int, ...],
    profile: MachineProfile,
    network: NetworkRates,
    *,
    tables: int,
    width: int,
    batch: int,
) -> float:
    """Return the time by the model that ``impl="auto"`` has, with our own pooling in the pair."""
    widths = ((width,) * tables,) * _RANKS
    memory_bytes = floor_memory_bytes(
        widths=widths,
        batch=batch,
        rank=0,
        lookups=[lookups * batch] * tables,
        itemsize=_ITEMSIZE,
        output_itemsize=_ITEMSIZE,
        index_itemsize=_INDEX_ITEMSIZE,
    )
    rate = profile.product.memory_bytes_per_s
    computation_us = pooling_us(memory_bytes, profile.product.launch_us, rate)
    shared: dict[str, Any] = {
        "rank": 0,
        "widths": widths,
        "batch": batch,
        "output_itemsize": _ITEMSIZE,
        "node_of_rank": (0, 1),
    }
    if shares != _PAIR:
        cost = fused_between_nodes(**shared, shares=shares)
        return in_slices(network, computation_us, cost, rate).us
    return one_after_the_other(network, computation_us, stock_between_nodes(**shared), rate).us
