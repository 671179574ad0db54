"""``impl="auto"`` between nodes: slices where a measured network says that they take less time."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from interlace.comm import Group
from interlace.costs.embedding_all_to_all import (
    floor_memory_bytes,
    fused_between_nodes,
    stock_between_nodes,
    stock_pooling_factor,
)
from interlace.costs.network import best_in_slices, even_nodes, one_after_the_other
from interlace.gemm.between_nodes import profile_on
from interlace.operators.embedding_all_to_all import record
from interlace.operators.embedding_all_to_all.config import OPERATOR
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.tuning.choice import NetworkTimes
from interlace.units import ceil_div

if TYPE_CHECKING:
    from interlace.operators.embedding_all_to_all.launch import Call


@functools.lru_cache(maxsize=256)
def times_between_nodes(
    layout: Layout,
    pooling_factor: int,
    itemsize: int,
    output_itemsize: int,
    nodes: int,
    device: torch.device,
) -> NetworkTimes | None:
    """Return the predicted times between nodes of the rank that has most columns.

    The nodes are taken to have equally many consecutive ranks, so that all ranks predict alike.

    Args:
        layout: Columns and samples of all ranks.
        pooling_factor: Number of lookups per bag, the same on every rank.
        itemsize: Bytes of an element of the tables.
        output_itemsize: Bytes of an element of the output.

    Returns:
        The times; None if no network was measured.
    """
    profile = profile_on(device)
    if profile is None or profile.network is None:
        return None
    network, rate = profile.network, profile.product.memory_bytes_per_s
    rank = layout.rank_columns.index(max(layout.rank_columns))
    widths, node_of_rank = layout.widths, even_nodes(layout.world_size, nodes)
    memory_bytes = floor_memory_bytes(
        widths=widths,
        batch=layout.batch,
        rank=rank,
        lookups=[pooling_factor * layout.batch] * len(widths[rank]),
        itemsize=itemsize,
        output_itemsize=output_itemsize,
        index_itemsize=4,
    )
    pooling_us = profile.product.launch_us + 1e6 * memory_bytes / rate
    traffic = functools.partial(
        fused_between_nodes,
        rank=rank,
        widths=widths,
        batch=layout.batch,
        output_itemsize=output_itemsize,
        node_of_rank=node_of_rank,
    )
    predictions = {
        "unfused": one_after_the_other(
            network,
            pooling_us * stock_pooling_factor(itemsize),
            stock_between_nodes(
                rank=rank,
                widths=widths,
                batch=layout.batch,
                output_itemsize=output_itemsize,
                node_of_rank=node_of_rank,
            ),
            rate,
        )
    }
    if layout.world_size <= record.MAX_RANKS:
        predictions["fused"] = best_in_slices(
            network, lambda _: pooling_us, lambda slices: traffic(slices=slices), rate
        )
    return NetworkTimes(network.network, predictions, profile.margin)


def times_of(call: Call, group: Group) -> NetworkTimes | None:
    """Return the predicted times of a call, the same on every rank.

    Collective in the first call of a kind if a network was measured: ranks tell each other how many
    rows they look up, and the largest number counts for all calls of that kind.
    """
    profile = profile_on(call.indices.device)
    if profile is None or profile.network is None:
        return None
    layout = call.layout
    bags = max(1, len(call.weights) * layout.batch)
    lookups = ceil_div(call.indices.shape[0], bags)
    # A rank without tables does not know their dtype.
    itemsize = call.weights[0].dtype.itemsize if call.weights else 0
    key = (OPERATOR, "lookups", layout, call.dtype)
    most = group.agreement.largest(OPERATOR, key, (lookups, itemsize))
    return times_between_nodes(layout, *most, call.dtype.itemsize, group.nodes, call.indices.device)
