"""Measure the rates of a machine's products and links, and the network between nodes.

``interlace tune machine`` begins with it. A program on GPUs whose profile is a guess does it when a
group is made, if ``INTERLACE_MEASURE_MACHINE=1`` says so: all ranks of the program then agree on
one profile, which is also kept for the user's next programs. So does a program on several nodes
whose profile has no network.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
import statistics
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from interlace.comm.groups import copies
from interlace.comm.host.common_profile import (
    is_asked_for,
    known_profile,
    publish,
    published,
    settle_network,
    settle_profile,
    settled_text,
)
from interlace.comm.host.members import Exchange, Members
from interlace.comm.runtime.driver import is_out_of_memory
from interlace.costs.known_profiles import (
    adopt,
    keep_profile,
    own_profile,
    parse_profile,
    profile_of,
    text_of,
)
from interlace.costs.network import parse_network
from interlace.costs.product_fit import MeasuredRates, ProductTime, with_rates
from interlace.costs.time import MachineProfile
from interlace.errors import WorkspaceError
from interlace.units import ceil_div, round_up

if TYPE_CHECKING:
    from interlace.comm.groups.group import Group

_PRODUCTS = 40
_MOST_FLOPS = 2e12
_SAMPLES, _GRAPH_US = 5, 1000.0
_SLEEP_CYCLES = 500_000  # a quarter of a millisecond
_LINK_BYTES, _LINK_COPIES = 256 << 20, 4
_MOST_SETS = 16


# Of all ranks, one profile


def share_profile(members: Members, exchange: Exchange) -> None:
    """Choose by one profile of this GPU with all ranks of the program. Collective.

    Where measuring is asked for, the profile may stay open, if it is a guess and no rank of the
    group knows more. Does nothing on the CPU backend, and without process groups.
    """
    if _may_measure(members):
        gpu = torch.cuda.get_device_name(members.device)
        profile = own_profile(gpu)
        own_text = settled_text(members.device) if profile is None else text_of(profile)
        answers = exchange("joining a group", [gpu, own_text])
        known = next((text for name, text in answers if name == gpu and text), None)
        if known is not None:
            # Even if it is what this rank would guess: its peers measure nothing either.
            settle_profile(members.device, parse_profile(known))
            adopt(known_profile(members.device))
        elif not known_profile(members.device).is_guess:
            settle_profile(members.device)
    elif members.backend == "cuda" and members.name:
        settle_profile(members.device)


def measure_unknown(group: Group) -> None:
    """Measure the machine of a group whose profile is a guess, or take what another group of this
    program has measured. Collective.

    Does nothing where measuring is not asked for, or ranks share a GPU. If a rank has no memory to
    measure, all ranks go on with the guess, with a warning.

    Raises:
        BackendError: The driver of a rank refuses a copy; raised on every rank.
    """
    if not _may_measure(group.members):
        return
    gpu = torch.cuda.get_device_name(group.device)
    processors = torch.cuda.get_device_properties(group.device).multi_processor_count
    guess = profile_of(gpu, processors)
    if own_profile(gpu) is not None or not guess.is_guess:
        return

    def measure() -> list[Any]:
        rates = measure_rates(group)
        date = datetime.date.today()
        source = f"{guess.source}; products and links measured {date} by {rates.world_size} ranks"
        profile = with_rates(guess, gpu, processors, rates, source)
        return [text_of(profile), rates.is_complete]

    label = "a measured machine"
    try:
        text, is_complete = _measured_once(group, label, f"measured {gpu}", measure)
    except WorkspaceError as error:
        _warn(f"{gpu} was not measured, and predictions for it are guesses: {error}")
        with group.channel.reaching_store(label):
            settle_profile(group.device)
        return
    profile = parse_profile(text)
    # What the program has compiled by the guess it must go on with.
    with group.channel.reaching_store(label):
        settle_profile(group.device, profile)
    adopt(known_profile(group.device))
    # What is missing in it another program may have memory to measure.
    _keep(profile if is_complete else None, group)


def measure_unknown_network(group: Group) -> None:
    """Measure the network of a group of all ranks on several nodes, if no profile has it.
    Collective.

    Does nothing where measuring is not asked for, ranks share a GPU, or the group is a part of the
    program: others may send meanwhile. If a rank has no memory to measure, all ranks go on without,
    with a warning.

    Raises:
        BackendError: A rank cannot connect.
        PeerTimeoutError: A rank did not come, or a message was late.
    """
    if not (_may_measure(group.members) and group.spans_nodes):
        return
    if group.world_size != dist.get_world_size():
        return
    # Equal on all ranks, as joining the group has compared.
    profile = known_profile(group.device)
    if profile.network is not None:
        return

    def measure() -> dict[str, Any]:
        # Imported here, since that module's own imports lead back to this one.
        from interlace.comm.groups.network_rates import measure_network

        date = datetime.date.today()
        source = f"measured {date} on {group.world_size} ranks of {group.nodes} nodes"
        _, network = measure_network(group, source)
        name = f"the network between {group.nodes} nodes"
        return dataclasses.asdict(dataclasses.replace(network, network=name))

    label, gpu = "a measured network", torch.cuda.get_device_name(group.device)
    try:
        measured = _measured_once(group, label, f"measured network of {gpu}", measure)
    except WorkspaceError as error:
        _warn(f"the network between nodes was not measured, and operators do not go by it: {error}")
        return
    network = parse_network(measured)
    with group.channel.reaching_store(label):
        settle_network(group.device, network)
    _keep(dataclasses.replace(profile, network=network), group)


def _measured_once(group: Group, label: str, name: str, measure: Callable[[], Any]) -> Any:
    """Return what the program has measured under a name, as JSON holds it. Collective.

    Groups of other ranks of this program may measure at the same time; the first one to end counts
    for all of them, as ranks of both may form a group later.

    Args:
        label: Name of the result, for errors.
        measure: Measures what no group has published; rank 0's result counts for all.

    Raises:
        WorkspaceError: A rank has no memory to measure; raised on every rank.
    """
    text = _of_rank_0(group, label, lambda: published(name))
    if text is None:
        rates = json.dumps(measure())
        text = _of_rank_0(group, label, lambda: publish(name, rates))
    return json.loads(text)


def _of_rank_0(group: Group, label: str, ask: Callable[[], str | None]) -> Any:
    """Return what rank 0 of a group has learnt from the program's store. Collective."""
    with group.channel.reaching_store(label):
        return group.exchange(label, ask() if group.rank == 0 else None)[0]


def _may_measure(members: Members) -> bool:
    """Return whether a group may measure its machine; the same on every rank."""
    return (
        is_asked_for()
        and members.backend == "cuda"
        and members.world_size > 1
        and members.ranks_per_gpu == 1
    )


def _keep(profile: MachineProfile | None, group: Group) -> None:
    """Keep a measured profile for the user's next programs, on every node. Collective.

    Args:
        profile: The profile, the same on every rank; None: there is nothing to keep.
        group: The group that has measured it, or taken it from another one.
    """
    if profile is not None and group.rank == min(group.members.local_ranks):
        try:
            keep_profile(profile)
        except OSError as error:
            _warn(f"the measured profile of {profile.gpu} is not kept: {error}")
    # Another program of this node may begin when this rank has left.
    group.exchange("a measured profile is kept", None)


def _warn(text: str) -> None:
    warnings.warn(f"interlace: {text}", RuntimeWarning, stacklevel=3)


# Measuring


def measure_rates(group: Group) -> MeasuredRates:
    """Measure products on every rank's GPU, and the links within nodes. Collective.

    Raises:
        WorkspaceError: A rank has no memory for most of the products, or for the copies; raised on
            every rank.
        BackendError: The driver of a rank refuses a copy; raised on every rank.
    """
    group.require_own_gpus("a measurement")
    sizes = _sizes()
    with group.agreement.together("measuring products"):
        own_us = [_product_us(group, *size) for size in sizes]
    by_rank: list[list[float | None]] = group.exchange("times of products", own_us)
    # A GPU whose memory the program has filled leaves large products out.
    products = [
        ProductTime(*size, us=max(us for us in times if us is not None))
        for size, times in zip(sizes, zip(*by_rank, strict=True), strict=True)
        if None not in times
    ]
    if len(products) < _PRODUCTS // 2:
        raise WorkspaceError(
            f"GPUs must have memory for {_PRODUCTS // 2} products; had it for {len(products)}."
        )
    rates = group.exchange("rates of links", _link_bytes_per_s(group))
    links = [rate for rate in rates if rate is not None]
    slowest, is_complete = min(links, default=None), len(products) == len(sizes)
    return MeasuredRates(products, slowest, group.world_size, is_complete)


def sets_past_cache(nbytes: int, device: torch.device) -> int:
    """Return how many sets of operands calls must take in turn to find none of them in the L2 of a
    GPU; at most 16.

    In a program, the weights of other layers are read between two calls of a layer.

    Args:
        nbytes: The bytes that one call reads and writes.
        device: The device of the operands.
    """
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MOST_SETS, ceil_div(2 * cache_bytes, max(1, nbytes)))


def _sizes() -> list[tuple[int, int, int]]:
    """Return rows, columns and inner sizes of the products, the same in every program."""
    chance = random.Random(0)
    sizes: list[tuple[int, int, int]] = []
    while len(sizes) < _PRODUCTS:
        rows, columns, inner = (
            round_up(round(2 ** chance.uniform(low, high)), 8)
            for low, high in ((3, 14), (9, 14), (8, 14))
        )
        if 2 * rows * columns * inner <= _MOST_FLOPS:
            sizes.append((rows, columns, inner))
    return sizes


def _product_us(group: Group, rows: int, columns: int, inner: int) -> float | None:
    """Return the time of one product on this rank's GPU; None without memory for it."""
    device = group.device
    # The program's own random numbers stay what they are.
    generator = torch.Generator(device).manual_seed(0)

    def operand(length: int) -> torch.Tensor:
        values = torch.randn(length, inner, device=device, generator=generator)
        return values.bfloat16()

    try:
        with group.on_device(), torch.no_grad():
            nbytes = 2 * ((rows + columns) * inner + rows * columns)
            count = max(2, sets_past_cache(nbytes, device))
            sets = [(operand(rows), operand(columns)) for _ in range(count)]
            return _graph_us(group, lambda i: torch.mm(sets[i % count][0], sets[i % count][1].T))
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise


def _graph_us(group: Group, call: Callable[[int], object]) -> float:
    """Return the median time of ``call(0)``, ``call(1)``, ... one after the other in a graph."""
    call(0)
    calls = max(1, round(_GRAPH_US / max(1.0, _elapsed_us(lambda: call(1)))))
    calls = round_up(calls, 2)

    def enqueue() -> None:
        for i in range(calls):
            call(i)

    graph = group.replays.record(enqueue)
    graph.replay()  # the first replay uploads the graph
    return statistics.median(_elapsed_us(graph.replay) for _ in range(_SAMPLES)) / calls


def _elapsed_us(enqueue: Callable[[], object]) -> float:
    # The GPU sleeps while the host enqueues, whose time would count as the GPU's otherwise: on a
    # machine that has just started, 80 x 992 x 560 took 11 us instead of 4.
    torch.cuda._sleep(_SLEEP_CYCLES)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    enqueue()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _link_bytes_per_s(group: Group) -> float | None:
    """Return the bytes per second that a copy engine fetches from the next rank of the node while
    all ranks fetch; None for a rank on its own. Collective.
    """
    local = group.members.local_ranks
    block = group.allocate(2 * _LINK_BYTES)
    peer = local[(local.index(group.rank) + 1) % len(local)]
    target = block.address_of(group.rank)
    source = block.address_of(peer) + _LINK_BYTES

    def fetch() -> None:
        for _ in range(_LINK_COPIES):
            copies.fetch(group, target, source, _LINK_BYTES, peer)

    times_us = []
    for _ in range(_SAMPLES + 1):
        # Ranks begin a sample when all have ended the previous one, or none does if one fails.
        with group.agreement.together("measuring links"), group.on_device():
            if len(local) > 1:
                times_us.append(_elapsed_us(fetch))
    if not times_us:
        return None
    # The first one is a warm-up.
    return _LINK_COPIES * _LINK_BYTES / statistics.median(times_us[1:]) * 1e6
