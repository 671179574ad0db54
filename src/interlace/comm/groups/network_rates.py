"""Measure the network between the nodes of a group, by the carrier that slices travel by.

``interlace doctor --network`` shows it; ``interlace tune machine`` puts it into the machine
profile, and so does a program's first group between nodes if it is asked to
(:mod:`interlace.comm.groups.machine_rates`). Every rank exchanges with the rank of the next node
that has the same place in its node, all at the same time, so ranks that share an adapter are
measured as they will use it.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from interlace.comm.groups.group import Group
from interlace.comm.groups.process_groups import gather, process_group_named, scatter
from interlace.comm.groups.slices import Message, SliceQueue, Step
from interlace.comm.runtime.driver import has_memory
from interlace.costs.network import NetworkRates, parse_network
from interlace.errors import GroupError, WorkspaceError

SIZES = tuple(1 << power for power in range(16, 27, 2))
"""Bytes of a message: 64 KiB to 64 MiB."""

TOGETHER = 4
"""Number of messages of an exchange with several."""

_NAME = "network measurement"
_SAMPLES = 5
_MOST_STEPS = 32
_SAMPLE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_GREETING_BYTES = 16
_MEMORY_BYTES = 1 << 30  # for all messages, with some room
_SUMMED = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class ExchangeTime:
    """The time of one exchange between nodes, of the slowest rank.

    Attributes:
        nbytes: Bytes of a message.
        messages: Number of messages that each rank sends, and receives, at once.
        us: Median time in microseconds.
    """

    nbytes: int
    messages: int
    us: float

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes per second, each way."""
        return self.nbytes * self.messages / self.us * 1e6


def partners(node_of_rank: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Return the rank that a rank sends to and the one that it receives from; -1 for none.

    Both have its place in their nodes, which are the next one and the previous one.
    """

    def at(step: int) -> int:
        node = node_of_rank[rank]
        index = sum(earlier == node for earlier in node_of_rank[:rank])
        target = (node + step) % (1 + max(node_of_rank))
        members = [member for member, its in enumerate(node_of_rank) if its == target]
        return members[index] if index < len(members) else -1

    return at(1), at(-1)


def measure_network(
    group: Group,
    source: str,
    sizes: tuple[int, ...] = SIZES,
    advance: Callable[[], None] = lambda: None,
) -> tuple[list[ExchangeTime], NetworkRates]:
    """Measure the network between the nodes of a group. Collective.

    Args:
        source: Where and when it is measured; rank 0's counts, as clocks may not agree on the date.
        sizes: Bytes of the messages.
        advance: Is called after each measurement of exchanges.

    Returns:
        The times of exchanges, and the rates, without the network's name, the same on every rank.

    Raises:
        WorkspaceError: A rank has no memory for the messages; raised on every rank.
    """
    with group.agreement.together(_NAME):
        # Peers would wait for messages of a rank that has no memory for them.
        if not has_memory(_MEMORY_BYTES, group.device):
            raise WorkspaceError(
                f"{_NAME}: a GPU must have {_MEMORY_BYTES >> 20} MiB of free memory; it has less."
            )
    compared = compare_with_all_to_all(group, sizes, advance)
    several = measure_exchanges(group, sizes, advance, (TOGETHER,))
    network = NetworkRates(
        "",
        source,
        group.world_size,
        group.nodes,
        slice_us=[(exchange.nbytes, _digits(exchange.us)) for exchange in compared.exchanges],
        collective_us=[
            (collective.nbytes, _digits(collective.us)) for collective in compared.collectives
        ],
        spread=_digits(compared.spread),
        collective_factors=[(name, _digits(factor)) for name, factor in compared.factors],
    )
    further = [
        (exchange.us - network.exchange_us(exchange.nbytes * exchange.messages))
        / (exchange.messages - 1)
        for exchange in several
    ]
    network = dataclasses.replace(
        network, further_message_us=_digits(max(0.0, statistics.median(further or [0.0])))
    )
    exchanges = compared.exchanges + several
    return exchanges, parse_network(group.exchange("network", dataclasses.asdict(network))[0])


def measure_exchanges(
    group: Group,
    sizes: tuple[int, ...] = SIZES,
    advance: Callable[[], None] = lambda: None,
    together: tuple[int, ...] = (1, TOGETHER),
) -> list[ExchangeTime]:
    """Measure exchanges of one message, and of several at once. Collective.

    Args:
        group: A group of several nodes.
        sizes: Bytes of a message.
        advance: Is called after each measurement.
        together: Numbers of messages of an exchange.

    Raises:
        GroupError: All ranks share memory.
        PeerTimeoutError: A rank did not come, or a message was late.
    """
    _require_nodes(group)
    times = []
    for messages in together:
        # Several large messages say nothing that one does not.
        for nbytes in sizes if messages == 1 else sizes[:-2] or sizes:
            steps = _steps_of_a_sample(group, nbytes * messages)
            exchange = functools.partial(_exchange_us, group, nbytes, messages, steps)
            (samples_us,) = _in_turn(group, (exchange,))
            times.append(ExchangeTime(nbytes, messages, statistics.median(samples_us)))
            advance()
    return times


def _require_nodes(group: Group) -> None:
    if not group.spans_nodes:
        raise GroupError(
            f"{_NAME}: ranks must be on several nodes; they are on one. Run on two machines, or "
            "declare nodes by INTERLACE_NODES."
        )


def queue_of(
    group: Group, nbytes: int, messages: int, steps: int, lanes: int | None = None
) -> SliceQueue:
    """Return a queue of equal exchanges that wait for nothing; see :class:`SliceQueue`.

    Collective.
    """
    mark = group.agree(_NAME, bytes_of_a_message=nbytes, messages=messages, exchanges=steps)
    target, source = partners(group.members.node_of_rank, group.rank)

    def data(peer: int) -> tuple[Message, ...]:
        if peer < 0:
            return ()
        # Messages of an exchange have memory of their own, as slices have.
        memory = torch.zeros(messages, nbytes, dtype=torch.uint8, device=group.device)
        return tuple(Message(peer, part) for part in memory)

    return SliceQueue(group, _NAME, [Step((), data(target), data(source))] * steps, mark, lanes)


def _exchange_us(group: Group, nbytes: int, messages: int, steps: int) -> float:
    """Return the time of one of several exchanges, one behind the other."""
    queue = queue_of(group, nbytes, messages, steps, lanes=1)
    with group.running():
        _begin_together(group)
        start = time.perf_counter()
        _run(queue)
        group.streams.synchronize()
        return (time.perf_counter() - start) / steps * 1e6


def _run(queue: SliceQueue) -> None:
    queue.arm()
    queue.release()
    queue.join()


class Comparison(NamedTuple):
    """Hold the times of slices and of torch's all-to-all with as many bytes, measured in turn.

    Attributes:
        exchanges: Exchanges of one message by the carrier of slices.
        collectives: All-to-alls, by the bytes for ranks of other nodes.
        spread: By how much the ratio of the two varies: half of the range of its middle samples,
            as a fraction of the median.
        factors: Names of torch's other collectives, and by which factor they take longer than an
            all-to-all of as many bytes for other nodes.
    """

    exchanges: list[ExchangeTime]
    collectives: list[ExchangeTime]
    spread: float
    factors: list[tuple[str, float]]


def compare_with_all_to_all(
    group: Group,
    sizes: tuple[int, ...] = SIZES,
    advance: Callable[[], None] = lambda: None,
) -> Comparison:
    """Measure slices and torch's all-to-all of the same bytes, a sample of each in turn.

    Which of them is faster is what predictions ask for, and other work on the hosts makes a network
    slower for seconds, which would count for one of them only. Collective; the same result on every
    rank. The all-to-all runs on a process group of its own, which is made like the program's.

    Args:
        group: A group of several nodes.
        sizes: Bytes that each rank sends to other nodes.
        advance: Is called after each size.

    Raises:
        GroupError: All ranks share memory.
        PeerTimeoutError: A rank did not come, or a message was late.
    """
    _require_nodes(group)
    ranks = dist.get_process_group_ranks(process_group_named(group.name))
    timeout = datetime.timedelta(seconds=group.deadline_s)
    process_group = dist.new_group(ranks, timeout=timeout)
    remote = len(group.members.remote_ranks)
    exchanges, collectives, spreads = [], [], []
    for nbytes in sizes:
        part = nbytes // remote
        steps = _steps_of_a_sample(group, nbytes)
        sent = torch.zeros(part * group.world_size, dtype=torch.uint8, device=group.device)
        received = torch.empty_like(sent)

        all_to_all = functools.partial(dist.all_to_all_single, received, sent, group=process_group)
        slices_us, all_to_all_us = _in_turn(
            group,
            (
                functools.partial(_exchange_us, group, nbytes, 1, steps),
                functools.partial(_calls_us, group, all_to_all, steps),
            ),
        )
        exchanges.append(ExchangeTime(nbytes, 1, statistics.median(slices_us)))
        collectives.append(ExchangeTime(part * remote, 1, statistics.median(all_to_all_us)))
        ratios = [us / all_to_all_us[number] for number, us in enumerate(slices_us)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        spreads.append((high - low) / 2 / middle)
        advance()
    # Of a size at which the bytes take most of the time.
    factors = _compare_collectives(group, process_group, sizes[-2:][0])
    dist.destroy_process_group(process_group)
    return Comparison(exchanges, collectives, statistics.median(spreads), factors)


def _compare_collectives(
    group: Group, process_group: dist.ProcessGroup, nbytes: int
) -> list[tuple[str, float]]:
    """Return the times of torch's collectives that send ``nbytes`` to other nodes, as multiples of
    an all-to-all's, a sample of each in turn.
    """
    ranks = group.world_size
    # A rank's part of all rows, of which a gather sends each once to every other node.
    share = max(1, nbytes // (group.nodes - 1) // _SUMMED.itemsize)
    rows = torch.zeros(share, dtype=_SUMMED, device=group.device)
    gathered = torch.zeros(ranks * share, dtype=_SUMMED, device=group.device)
    exchanged = torch.zeros(
        nbytes // len(group.members.remote_ranks) // _SUMMED.itemsize * ranks,
        dtype=_SUMMED,
        device=group.device,
    )
    received, half = torch.empty_like(exchanged), gathered[: max(1, len(gathered) // 2)]
    calls: dict[str, Callable[[], object]] = {
        "all_to_all": lambda: dist.all_to_all_single(received, exchanged, group=process_group),
        "all_gather": lambda: gather(gathered, rows, process_group),
        "reduce_scatter": lambda: scatter(rows, gathered, process_group),
        "all_reduce": lambda: dist.all_reduce(half, group=process_group),
    }
    steps = _steps_of_a_sample(group, nbytes)
    measures = [functools.partial(_calls_us, group, call, steps) for call in calls.values()]
    all_to_all_us, *others_us = map(statistics.median, _in_turn(group, measures))
    return [(name, us / all_to_all_us) for name, us in zip(list(calls)[1:], others_us, strict=True)]


def _in_turn(group: Group, measures: Sequence[Callable[[], float]]) -> list[list[float]]:
    """Return samples of each measure, one of each after another, of the slowest rank. Collective.

    The first samples, which make whatever is made once, are left out.
    """
    samples = [[measure() for measure in measures] for _ in range(_SAMPLES + 1)]
    of_ranks = group.exchange(_NAME, samples[1:])
    return [
        [max(float(samples[number][way]) for samples in of_ranks) for number in range(_SAMPLES)]
        for way in range(len(measures))
    ]


def _calls_us(group: Group, call: Callable[[], object], count: int) -> float:
    """Return the time of one of several calls of a collective, one behind the other."""
    _meet(group)
    call()  # brings the ranks together
    group.streams.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    group.streams.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def _steps_of_a_sample(group: Group, nbytes: int) -> int:
    """Return how many exchanges of so many bytes make up one sample."""
    return max(1, min(_MOST_STEPS, _SAMPLE_BYTES[group.backend] // nbytes))


def _begin_together(group: Group) -> None:
    """Wait for all ranks, and then for a message of the rank whose messages are measured.

    The host looks only now and then whether others have come, so ranks go on up to some
    milliseconds apart, which would count as time of the network.
    """
    queue = queue_of(group, _GREETING_BYTES, 1, 1)
    _meet(group)
    _run(queue)
    group.streams.synchronize()


def _meet(group: Group) -> None:
    """Wait for all ranks."""
    group.streams.synchronize()
    group.exchange(_NAME, None)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
