"""``impl="auto"`` between nodes: slices where they are predicted to take less time."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from interlace.comm.groups.copies import has_single_queue, supports_triggers
from interlace.costs.embedding_all_to_all import (
    SLICES_OF_VECTORS,
    backward,
    floor_memory_bytes,
    fused_between_nodes,
    pooling_us,
    stock_between_nodes,
    stock_pooling_us,
)
from interlace.costs.known_profiles import cached_by_profiles
from interlace.costs.network import (
    NetworkRates,
    Prediction,
    even_nodes,
    first_of_the_best,
    guessed_network,
    in_slices,
    one_after_the_other,
)
from interlace.costs.registry import NetworkCost
from interlace.costs.time import MachineProfile
from interlace.gemm.between_nodes import profile_on
from interlace.operators.embedding_all_to_all.config import OPERATOR
from interlace.operators.embedding_all_to_all.layout import MAX_RANKS, Layout
from interlace.tuning.choice import NetworkTimes
from interlace.units import ceil_div

if TYPE_CHECKING:
    from interlace.operators.embedding_all_to_all.call import EmbeddingCall


_GRADIENT_SLICES = 2
"""Slices of gradients, where there are several. With two, half of the update is hidden, and both
exchanges are enqueued before the first update fills the processors; with four, the last ones wait
for it.
"""

_GUESS_MARGIN = 0.1
"""The fraction by which slices must be below the whole exchange over a network that is guessed."""


class NetworkPlan(NamedTuple):
    """Say what all ranks run of one kind of call between nodes.

    Attributes:
        impl: What ``"auto"`` runs, ``"fused"`` or ``"pooled"``.
        shares: Relative sizes of the slices of ``"fused"``, also where its name was given: one of
            ``SLICES_OF_VECTORS``.
        gradient_slices: Number of slices of its backward pass.
    """

    impl: str
    shares: tuple[int, ...]
    gradient_slices: int = 1


class LookupSizes(NamedTuple):
    """Hold the sizes of a call by which all ranks predict alike.

    The nodes are taken to have equally many consecutive ranks, and times are those of the rank that
    has most columns.

    Attributes:
        layout: Columns and samples of all ranks.
        pooling_factor: Number of lookups per bag, the same on every rank.
        itemsize: Bytes of an element of the tables.
        output_itemsize: Bytes of an element of the output.
        nodes: Number of nodes.
    """

    layout: Layout
    pooling_factor: int
    itemsize: int
    output_itemsize: int
    nodes: int

    @property
    def rank(self) -> int:
        """Return the rank that has most columns."""
        columns = self.layout.rank_columns
        return columns.index(max(columns))

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """Return the number of each rank's node."""
        return even_nodes(self.layout.world_size, self.nodes)


@cached_by_profiles
def times_between_nodes(sizes: LookupSizes, device: torch.device) -> NetworkTimes | None:
    """Return the predicted times between nodes.

    Where no network was measured, one is guessed, and times must differ by more.

    Returns:
        The times; None on the CPU backend.
    """
    profile = profile_on(device)
    if profile is None:
        return None
    network, margin = _network_of(profile)
    rate = profile.product.memory_bytes_per_s
    layout, pooling_factor, itemsize, output_itemsize, _ = sizes
    rank, widths, node_of_rank = sizes.rank, layout.widths, sizes.node_of_rank
    memory_bytes = floor_memory_bytes(
        widths=widths,
        batch=layout.batch,
        rank=rank,
        lookups=[pooling_factor * layout.batch] * len(widths[rank]),
        itemsize=itemsize,
        output_itemsize=output_itemsize,
        index_itemsize=4,
    )
    launch_us = profile.product.launch_us
    our_us = pooling_us(memory_bytes, launch_us, rate)
    traffic = functools.partial(
        fused_between_nodes,
        rank=rank,
        widths=widths,
        batch=layout.batch,
        output_itemsize=output_itemsize,
        node_of_rank=node_of_rank,
    )
    unsliced = stock_between_nodes(
        rank=rank,
        widths=widths,
        batch=layout.batch,
        output_itemsize=output_itemsize,
        node_of_rank=node_of_rank,
    )
    stock_us = stock_pooling_us(memory_bytes, launch_us, rate, itemsize)
    predictions = {
        "pooled": one_after_the_other(network, our_us, unsliced, rate),
        "unfused": one_after_the_other(network, stock_us, unsliced, rate),
    }
    if layout.world_size <= MAX_RANKS:
        predictions["fused"] = first_of_the_best(
            [
                in_slices(network, our_us, traffic(shares=shares), rate)
                for shares in SLICES_OF_VECTORS
            ]
        )
    return NetworkTimes(network.network, predictions, network.margin(margin))


def _network_of(profile: MachineProfile) -> tuple[NetworkRates, float]:
    """Return the network that predictions go by, and the margin that they need over it."""
    if profile.network is None:
        return guessed_network(), max(profile.margin, _GUESS_MARGIN)
    return profile.network, profile.margin


def plan_by(times: NetworkTimes | None) -> NetworkPlan:
    """Return what takes the least time; None stands for the CPU backend, where none is predicted.

    Slices must be below the whole exchange by the margin of the predictions: with few lookups they
    hide nothing, and the whole exchange is what a program does by itself. The stock pair never
    takes less, as it pools more slowly than our kernel.
    """
    if times is None:
        return NetworkPlan("pooled", (1, 3), 2)
    slices = times.predictions.get("fused")
    if slices is None:
        return NetworkPlan("pooled", (1,))
    limit_us = times.predictions["pooled"].us * (1 - times.margin)
    return NetworkPlan("fused" if slices.us < limit_us else "pooled", slices.shares)


@cached_by_profiles
def gradient_slices(sizes: LookupSizes, device: torch.device) -> int:
    """Return the number of slices in which gradients travel, by predicted times.

    Where no network was measured, one is guessed, and times must differ by more. A slice's tables
    are updated while the next one travels: the same as a computation whose slices leave, the other
    way round. Most rows are taken to be looked up once.
    """
    profile = profile_on(device)
    if profile is None:
        return 1
    # Both ways are over the same network, so how much its times vary does not matter.
    network, margin = _network_of(profile)
    layout, pooling_factor, itemsize, output_itemsize, _ = sizes
    nothing = [0] * len(layout.widths[sizes.rank])
    vectors = pooling_factor * layout.batch * layout.rank_columns[sizes.rank]
    rate = profile.product.memory_bytes_per_s
    # A gradient is read for every lookup, and the row that it changes is read and written.
    update_us = profile.product.launch_us + 1e6 * vectors * (output_itemsize + 2 * itemsize) / rate

    def in_so_many(slices: int) -> Prediction:
        cost = backward(
            rank=sizes.rank,
            widths=layout.widths,
            batch=layout.batch,
            lookups=nothing,
            distinct_rows=nothing,
            itemsize=itemsize,
            gradient_itemsize=output_itemsize,
            push_rows=1,
            node_of_rank=sizes.node_of_rank,
            slices=slices,
        )
        traffic = NetworkCost(cost.network_bytes, cost.network_messages, slices)
        return in_slices(network, update_us, traffic, rate)

    limit_us = in_so_many(1).us * (1 - margin)
    return _GRADIENT_SLICES if in_so_many(_GRADIENT_SLICES).us < limit_us else 1


@functools.cache
def _can_send_slices(device: torch.device) -> bool:
    """Return whether streams can wait for counters here, also in CUDA graphs."""
    if device.type == "cpu":
        return True
    return supports_triggers(device) and not has_single_queue()


def plan_of(call: EmbeddingCall) -> NetworkPlan:
    """Return what runs of a call between nodes, the same on every rank.

    Collective in the first call of a kind on GPUs: ranks tell each other how many rows they look
    up, and the largest number counts for all calls of that kind; then, as their profiles and
    drivers may differ, what each of them would run, and the fewest slices count.
    """
    group, device, layout = call.group, call.indices.device, call.layout
    if profile_on(device) is None:
        return plan_by(None)
    # The backward pass of gradients has no tables, but knows their number.
    tables = len(layout.widths[call.rank])
    lookups = ceil_div(call.indices.shape[0], max(1, tables * layout.batch))
    # A rank without tables does not know their dtype.
    itemsize = call.table_dtype.itemsize if tables else 0
    kind = (OPERATOR, layout, call.dtype)
    lookups, itemsize = group.agreement.largest(OPERATOR, (*kind, "lookups"), (lookups, itemsize))
    sizes = LookupSizes(layout, lookups, itemsize, call.dtype.itemsize, group.nodes)
    plan = plan_by(times_between_nodes(sizes, device))
    stays_whole = int(plan.impl == "pooled" or not _can_send_slices(group.device))
    cut = SLICES_OF_VECTORS.index(plan.shares)
    answers = group.agreement.largest(
        OPERATOR, (*kind, "slices"), (stays_whole, -cut, -gradient_slices(sizes, device))
    )
    return NetworkPlan(
        "pooled" if answers[0] else "fused", SLICES_OF_VECTORS[-answers[1]], -answers[2]
    )
