"""Embedding + All-to-All between two hosts, which are two GPUs of one machine for NCCL.

    python benchmarks/between_nodes.py --json FILE

Each rank has a GPU and is a host of its own (``NCCL_HOSTID``), so NCCL sends through sockets; its
log must say NET/Socket. Its settings are those that docs/nodes.md recommends for sockets, for its
own collectives as well as for slices. Every result is compared with the pair's, bit for bit, before
anything is timed. Times are those of the slowest rank: medians of samples, each the mean of several
calls. What is compared is measured in turn, as other work on the hosts makes sockets slower for
seconds.

    pair       our pooling kernel on one rank, then all_to_all_single, then the copy that unpacks
    torch      impl="unfused": F.embedding_bag for each table, then the same
    pooled     impl="pooled": the pair as one call
    fused      impl="fused": slices leave while later ones are pooled
    auto       impl="auto": one of these two, by times that are predicted for the measured network

Of the balanced call, the kernel that pools is timed by itself as well, while slices leave and with
nothing sent: what the exchange takes from it.

The network is measured first, as ``interlace tune machine`` does; then the number of lookups at
which pooling takes as long as the exchange is found. At the end rank 1 does not come to a call:
rank 0 must say so within the deadline, and both must recover.

``between_nodes_causes.py`` measures why slices take as long as they do.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import itertools
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import documents
import torch
import torch.distributed as dist

import interlace
from interlace.comm.groups import carrier
from interlace.comm.groups.network_rates import SIZES, measure_network
from interlace.costs.known_profiles import adopt, profile_of
from interlace.costs.network import NetworkRates
from interlace.operators.embedding_all_to_all import between_nodes, network_choice
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.tuning.gpu import Gpu
from interlace.units import ceil_div, next_power_of_2

TABLES, WIDTH, ROWS, BATCH = 8, 128, 500_000, 16384
LOOKUPS = (1, 4, 8, 20, 64)
SLICES = (1, 2, 4, 8, 16)
IMPLS = ("pooled", "fused", "auto")
SOCKETS = {
    "NCCL_SOCKET_NTHREADS": "2",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_P2P_NET_CHUNKSIZE": "1048576",
}
"""Settings of NCCL's sockets, where the environment has none.

Both hosts are one machine, and NCCL has threads per rank, channel and direction, which poll. With
four of each, they are more than 32 processors, and single calls take milliseconds longer.
"""
DEADLINE_S = 3.0

_MOST_LOOKUPS = 1024
_SAMPLES, _CALLS, _WARM_UPS = 7, 8, 10
_STACKS_S = 115.0
_BUDGET_S = 40.0  # after which no further number of lookups is measured


def main() -> None:
    """Measure the forward pass of embeddings."""
    run(measure, {"tables": TABLES, "width": WIDTH, "rows": ROWS, "batch": BATCH})


def run(measure: Callable[[], dict[str, Any]], sizes: dict[str, Any]) -> None:
    """Run ``measure`` on ranks of two hosts for NCCL, and write what rank 0 returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--backend", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks, half on each host")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            NCCL_NET="Socket",
            NCCL_SOCKET_IFNAME="lo",
            NCCL_NVLS_ENABLE="0",
            NCCL_DEBUG="INFO",
            NCCL_DEBUG_FILE=f"{folder}/nccl.%p",
            INTERLACE_DEADLINE_S="20",
        )
        settings = {name: os.environ.setdefault(name, value) for name, value in SOCKETS.items()}
        results = interlace.launch(measure, arguments.ranks, backend=arguments.backend, nodes=2)
        log = "".join(file.read_text(errors="replace") for file in Path(folder).glob("nccl.*"))
    transports = sorted(set(re.findall(r"via (\S+)", log)))
    networks = sorted(set(re.findall(r"Using network (\S+)", log)))
    print(f"NCCL: network {networks}, transports {transports}", flush=True)
    if arguments.json is not None:
        # ``interlace sim compare`` takes the rates from here.
        rates = {**results[0].pop("network"), "network": f"NCCL over {', '.join(transports)}"}
        seen = {
            "NCCL": networks, "transports": transports, "settings": settings, "rates": rates,
        }  # fmt: skip
        more = {"ranks": arguments.ranks, "network": seen, "sizes": sizes}
        documents.write(arguments.json, results[0], **more)
    if arguments.backend == "cuda" and not any("NET/Socket" in name for name in transports):
        raise SystemExit("NCCL's log must say NET/Socket; the times above are of something else.")


@dataclasses.dataclass
class Workload:
    """The tables of a rank, and lookups for the entire batch."""

    tables: list[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor
    alone: dist.ProcessGroup

    @staticmethod
    def of(lookups: int, tables: list[torch.Tensor], alone: dist.ProcessGroup) -> Workload:
        bags, rows, device = len(tables) * _batch(tables), len(tables[0]), tables[0].device
        generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
        indices = torch.randint(
            rows, (bags * lookups,), generator=generator, device=device, dtype=torch.int32
        )
        offsets = torch.arange(bags + 1, dtype=torch.int32, device=device) * lookups
        return Workload(tables, indices, offsets, alone)

    @property
    def lookups(self) -> int:
        """Return the number of lookups per bag."""
        return self.indices.numel() // (self.offsets.numel() - 1)

    def call(self, impl: str = "fused", **more: Any) -> torch.Tensor:
        """Run the operator."""
        return interlace.embedding_all_to_all(
            self.tables, self.indices, self.offsets, name="bench", impl=impl, check_indices=False,
            **more,
        )  # fmt: skip

    def pool(self) -> torch.Tensor:
        """Pool the entire batch on this rank: ``[B, columns of this rank]``."""
        return interlace.embedding_all_to_all(
            self.tables, self.indices, self.offsets, name="bench", group=self.alone,
            check_indices=False,
        )  # fmt: skip

    def exchange(
        self, pooled: torch.Tensor, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Send each rank its samples: ``[R, samples, columns of a rank]``."""
        received = torch.empty_like(pooled)
        dist.all_to_all_single(received, pooled, group=group)
        return received.view(dist.get_world_size(), -1, pooled.shape[1])

    def pair(self, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Pool, exchange, unpack."""
        return torch.cat(list(self.exchange(self.pool(), group)), 1)


def _batch(tables: list[torch.Tensor]) -> int:
    return BATCH if tables[0].is_cuda else 32


@torch.no_grad()
def measure() -> dict[str, Any]:
    """On a rank: find the balance, measure every number of lookups, and try a late rank."""
    begun = time.monotonic()
    faulthandler.dump_traceback_later(_STACKS_S)  # where it hangs, if it does
    on_gpu = interlace.group_of().backend == "cuda"
    rates = learn_network()
    weights, alone = tables_of_rank()
    first = Workload.of(20, weights, alone)
    pooled = first.pool()
    exchange_us = timed(lambda: first.exchange(pooled))

    def pooling_us(lookups: int) -> float:
        return timed(Workload.of(lookups, weights, alone).pool)

    balanced = lookups_that_take(exchange_us, pooling_us) if on_gpu else 2
    say(f"exchange {exchange_us:.0f} us; pooling takes as long with {balanced} lookups")
    results: dict[str, Any] = {"exchange_us": exchange_us, "balanced_lookups": balanced}
    results["network"] = dataclasses.asdict(rates)
    results["lookups"] = {}
    results["lookups"][balanced] = compare(Workload.of(balanced, weights, alone), sweep=True)
    for lookups in LOOKUPS if on_gpu else (1,):
        if slowest(time.monotonic() - begun) > _BUDGET_S:
            say("out of time")
            break
        results["lookups"][lookups] = compare(Workload.of(lookups, weights, alone))
    results["late_rank"] = try_late_rank(Workload.of(4, weights, alone))
    faulthandler.cancel_dump_traceback_later()
    say(f"{time.monotonic() - begun:.0f} s in all")
    return results


def learn_network() -> NetworkRates:
    """Measure the network, by which predictions go from here on."""
    group = interlace.group_of()
    on_gpu = group.backend == "cuda"
    sizes = SIZES if on_gpu else (1 << 10, 1 << 12, 1 << 14)
    _, rates = measure_network(group, "benchmarks/between_nodes.py", sizes)
    rates = dataclasses.replace(rates, network="two hosts on one machine")
    if on_gpu:
        gpu = Gpu.of(group.device)
        adopt(dataclasses.replace(profile_of(gpu.name, gpu.processors), network=rates))
    say(f"network: {dataclasses.asdict(rates)}")
    return rates


def lookups_that_take(us: float, time_us: Callable[[int], float]) -> int:
    """Return the number of lookups with which a computation takes so many microseconds.

    It has a fixed part as well, so two numbers of lookups are measured.

    Args:
        time_us: Measures it with a number of lookups.
    """
    few, many = 32, 128
    few_us, many_us = time_us(few), time_us(many)
    us_per_lookup = max(many_us - few_us, 1.0) / (many - few)
    return min(max(1, round(many + (us - many_us) / us_per_lookup)), _MOST_LOOKUPS)


def tables_of_rank() -> tuple[list[torch.Tensor], dist.ProcessGroup]:
    """Return a rank's tables, and a group of this rank alone."""
    group = interlace.group_of()
    rows, tables = (ROWS, TABLES) if group.backend == "cuda" else (50, 2)
    generator = torch.Generator(group.device).manual_seed(dist.get_rank())
    weights = [
        torch.randn(rows, WIDTH, device=group.device, generator=generator).half()
        for _ in range(tables)
    ]
    return weights, group_alone()


def group_alone() -> dist.ProcessGroup:
    """Return a group of this rank alone. Collective."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return alone[dist.get_rank()]


def compare(workload: Workload, sweep: bool = False) -> dict[str, Any]:
    """Check our calls, then time them and the pair; with all numbers of slices if ``sweep``."""
    lookups, expected = workload.lookups, workload.pair()
    # All calls of a group with the same tables run alike, so "auto" chooses anew in another one;
    # and communicators differ by some percent, so the pair has the same one.
    group = dist.new_group()
    calls: dict[str, Callable[[], torch.Tensor]] = {
        impl: lambda impl=impl: workload.call(impl, group=group) for impl in IMPLS
    }
    ways = {"pooling": workload.pool, "pair": lambda: workload.pair(group), **calls}
    # Twice: the second call finds what the first one has left.
    for name in (*calls, *calls):
        require_equal(calls[name](), expected, f"{name}, {lookups} lookups")
    # The sockets of a communicator that was just made are slow at first, and calls that come again
    # become graphs.
    for call in ways.values():
        for _ in range(_WARM_UPS):
            call()
    times, spread = timed_in_turn(ways)
    if workload.indices.is_cuda:
        # Afterwards, as results of a group whose calls a program has captured are copied.
        graphs: dict[str, Callable[[], object]] = {}
        for name in ("pair", *calls):
            replay, result = captured(ways[name])
            result.zero_()
            replay()
            require_equal(result, expected, f"{name} in a graph, {lookups} lookups")
            graphs[f"{name}, graph"] = replay
        of_graphs, spread_of_graphs = timed_in_turn(graphs)
        times, spread = times | of_graphs, spread | spread_of_graphs
    times["torch"] = timed(lambda: workload.call("unfused"), samples=2)
    if sweep:
        times |= time_variants(workload, expected)
        if workload.indices.is_cuda:
            times |= time_kernel(workload)
        for slices in SLICES:
            config = config_of(workload, slices)
            if config is not None:
                require_equal(workload.call(config=config), expected, f"{slices} slices")
                times[f"fused, {slices} slices"] = timed(
                    lambda config=config: workload.call(config=config)
                )
    ratios = {
        f"{impl} / pair{way}": times[f"{impl}{way}"] / times[f"pair{way}"]
        for way in ("", ", graph")
        for impl in calls
        if f"pair{way}" in times
    }
    plan = plan_of(workload)
    said = ", ".join(f"{name} {us:.0f}" for name, us in times.items())
    say(f"{lookups} lookups, us: {said}")
    said = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    say(f"    auto runs {plan.impl}; {said}")
    return {
        "us": times, "lowest and highest us": spread, **ratios, "auto": plan.impl,
        "slices": list(plan.shares),
    }  # fmt: skip


def plan_of(workload: Workload) -> network_choice.NetworkPlan:
    """Return what ``impl="auto"`` runs, and the slices of a fused call without a configuration."""
    widths = (tuple(table.shape[1] for table in workload.tables),) * dist.get_world_size()
    layout, itemsize = Layout(widths, _batch(workload.tables)), workload.tables[0].element_size()
    group = interlace.group_of()
    sizes = network_choice.LookupSizes(layout, workload.lookups, itemsize, itemsize, group.nodes)
    return network_choice.plan_by(network_choice.times_between_nodes(sizes, group.device))


def time_variants(workload: Workload, expected: torch.Tensor) -> dict[str, float]:
    """Time the fused call without its exchange, in a launch per slice, and with other channels and
    lanes.
    """
    times = {}
    with sending_nothing():
        times["fused, nothing sent"] = timed(workload.call)
    prepare = between_nodes.prepare

    def split(*arguments: Any) -> list[Any]:
        (launch,) = prepare(*arguments)
        return launch_per_slice(launch)

    with replaced(prepare=split):
        require_equal(workload.call(), expected, "a launch per slice")
        times["fused, a launch per slice"] = timed(workload.call)
    for name, value in (("CHANNELS", 1), ("CHANNELS", 4), ("LANES", 1)):
        with mock.patch.object(carrier, name, value):
            group, said = dist.new_group(), f"fused, {name.lower()} {value}"
            require_equal(workload.call(group=group), expected, said)
            times[said] = timed(lambda group=group: workload.call(group=group))
    return times


def time_kernel(workload: Workload) -> dict[str, float]:
    """Time the kernel that pools, in calls that are enqueued one by one, not replayed."""
    prepare, times = between_nodes.prepare, {}
    for name, around in (
        ("the kernel alone", sending_nothing), ("the kernel", contextlib.nullcontext),
    ):  # fmt: skip
        events: list[tuple[Any, Any]] = []

        def between_events(*arguments: Any, events: Any = events) -> list[Any]:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            events.append((before, after))
            return [before.record, *prepare(*arguments), after.record]

        enqueued = mock.patch("interlace.comm.groups.slices.has_single_queue", return_value=True)
        with enqueued, around(), replaced(prepare=between_events):
            for _ in range(_CALLS + _SAMPLES):
                workload.call()
            torch.cuda.synchronize()
        # The first calls make what is made once.
        us = [1e3 * before.elapsed_time(after) for before, after in events[_CALLS:]]
        times[name] = slowest(statistics.median(us))
    say(f"the kernel takes {times['the kernel'] / times['the kernel alone']:.3f} of its time alone")
    return times


def sending_nothing() -> contextlib.AbstractContextManager[None]:
    """Return a context in which calls in slices pool, and exchange nothing."""
    collects_nothing = mock.Mock(return_value=None)
    return replaced(SliceQueue=mock.MagicMock(), prepare_collect=collects_nothing)


@contextlib.contextmanager
def replaced(**members: object) -> Iterator[None]:
    """Replace members of ``between_nodes`` within the context, for graphs of calls as well."""
    replays = interlace.group_of().replays
    replays.clear()
    with mock.patch.multiple(between_nodes, **members):
        yield
    replays.clear()


def launch_per_slice(launch: Any) -> list[Any]:
    """Cut a launch that pools into one per slice, and one for the samples of this node."""
    arguments = launch.arguments
    bags, remote = launch.constants["POOLING"].bags, launch.constants["RANKS"].remote
    blocks = ceil_div(arguments["chunk"], bags)
    first, further = arguments["first_blocks"], arguments["slice_blocks"]
    ends = [0, first]
    while ends[-1] < blocks:
        ends.append(ends[-1] + further)
    bounds = [*(end * arguments["T"] * remote for end in ends), arguments["last_task"]]
    return [
        dataclasses.replace(
            launch,
            grid=(max(1, ceil_div(last - first, arguments["program_tasks"])),),
            arguments={**arguments, "first_task": first, "last_task": last},
        )
        for first, last in itertools.pairwise(bounds)
    ]


def config_of(workload: Workload, slices: int) -> interlace.EmbeddingAllToAllConfig | None:
    """Return the tuned configuration with so many slices; None if it cannot have them."""
    from interlace.operators.embedding_all_to_all.config import choose, in_short_blocks

    tables, batch = workload.tables, _batch(workload.tables)
    config = in_short_blocks(
        choose(
            tables=len(tables),
            width=WIDTH,
            batch=batch,
            pooling_factor=next_power_of_2(workload.indices.numel() // (len(tables) * batch)),
            dtype=tables[0].dtype,
            world_size=dist.get_world_size(),
            device=tables[0].device,
        ).config
    )
    blocks = ceil_div(ceil_div(batch, dist.get_world_size()), config.block_bags)
    members = ceil_div(blocks, slices)
    return dataclasses.replace(config, slice_blocks=members) if members <= 1024 else None


def captured(call: Callable[[], Any]) -> tuple[Callable[[], None], torch.Tensor]:
    """Return the replay of a graph of one call, and the call's result."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph.replay, result


def try_late_rank(workload: Workload) -> dict[str, Any]:
    """Let rank 1 miss a call; return what rank 0 raised, after how long, and that both recover."""
    before = interlace.group_of().deadline_s
    expected = workload.pair()
    workload.call()
    interlace.set_deadline(DEADLINE_S)
    outcome: dict[str, Any] = {}
    if dist.get_rank() == 0:
        start = time.monotonic()
        try:
            y = workload.call()
            interlace.synchronize()
            outcome["error"] = "none"
        except interlace.PeerTimeoutError as error:
            y = None
            outcome |= {"error": str(error), "peer": error.peer, "node": error.node}
        outcome["after_s"] = round(time.monotonic() - start, 2)
        if y is not None:
            outcome["result is NaN"] = bool(y.isnan().any())
        say(f"a late rank: {outcome}")
    else:
        time.sleep(3 * DEADLINE_S)
    interlace.set_deadline(before)
    interlace.recover()
    require_equal(workload.call(), expected, "after the recovery")
    say("recovered")
    return outcome


def timed(call: Callable[[], object], samples: int = _SAMPLES) -> float:
    """Return the median time of a call in microseconds, of the slowest rank."""
    for _ in range(samples):  # calls that come again become graphs
        call()
    return statistics.median(_sample(call) for _ in range(samples))


def timed_in_turn(
    calls: dict[str, Callable[[], object]],
    around: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Measure calls in turn, one sample of each after another, each turn in another order: a call
    may find sockets, caches and memory as the one before it has left them.

    Args:
        calls: The calls by name.
        around: Returns the context in which a call of a name is made.

    Returns:
        The median time of each in microseconds, of the slowest rank, and the lowest and highest.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    orders, names = random.Random(0), list(calls)  # the same on all ranks
    for turn in range(1 + _SAMPLES):
        for name in orders.sample(names, len(names)):
            with around(name):
                us = _sample(calls[name])
            if turn:  # the first one is the warm-up
                samples[name].append(us)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return medians, {name: [min(times), max(times)] for name, times in samples.items()}


def _sample(call: Callable[[], object]) -> float:
    """Return the mean time of several calls in microseconds, of the slowest rank.

    They follow one that is not timed, so that the host runs ahead of the GPUs and no rank begins
    late, as in a training step.
    """
    synchronize()
    call()
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        return slowest((time.perf_counter() - start) / _CALLS * 1e6)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(_CALLS):
        call()
    after.record()
    torch.cuda.synchronize()
    return slowest(1e3 * before.elapsed_time(after) / _CALLS)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))


def slowest(value: float) -> float:
    """Return the largest of all ranks' values."""
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def require_equal(result: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """End unless a result has the expected bits."""
    wrong = slowest(float((result != expected).sum()))
    if wrong:
        raise AssertionError(f"{name}: {wrong:.0f} elements differ from the pair's")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
