"""``impl="auto"`` between nodes: slices where a measured network says that they take less time.

Times follow from the machine profile's network and from the traffic that an implementation declares
(:func:`interlace.costs.network_cost_of`), so a new one needs no formula here.
"""

from __future__ import annotations

import torch

from interlace.costs.known_profiles import cached_by_profiles, profile_of
from interlace.costs.network import (
    Prediction,
    best_in_slices,
    collective_bytes,
    even_nodes,
    one_after_the_other,
)
from interlace.costs.registry import OPERATOR_COSTS, NetworkCost
from interlace.costs.time import MachineProfile, SizedCall
from interlace.registry import Implementation, operator_named
from interlace.tuning.choice import NetworkTimes
from interlace.tuning.gpu import Gpu
from interlace.units import ceil_div

_PIECEWISE = ("by_rank", "by_peer")
"""Schedules that multiply one rank's rows after another's, and so one slice after another."""


def profile_on(device: torch.device) -> MachineProfile | None:
    """Return the profile of a device; None on the CPU backend, of which no time means anything."""
    if device.type == "cpu":
        return None
    gpu = Gpu.of(device)
    return profile_of(gpu.name, gpu.processors)


def known_network(device: torch.device) -> NetworkTimes | None:
    """Return the network's name without any times, for operators of which none are predicted.

    None means that no network was measured.
    """
    profile = profile_on(device)
    if profile is None or profile.network is None:
        return None
    return NetworkTimes(profile.network.network, {}, profile.network.margin(profile.margin))


@cached_by_profiles
def times_between_nodes(
    operator: str,
    nodes: int,
    *,
    rows: int,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
) -> NetworkTimes | None:
    """Return the predicted time of each implementation of an operator around one product.

    The nodes are taken to have equally many consecutive ranks, so that all ranks predict alike.

    Args:
        operator: The operator's name.
        nodes: Number of nodes.
        rows, columns, inner: M, N and K of this rank's product, the same on every rank.

    Returns:
        The times; None if there is one node, or no network was measured.
    """
    profile = profile_on(device) if nodes > 1 else None
    if profile is None:
        return None
    dtype_name = str(dtype).removeprefix("torch.")
    call = SizedCall.of_dtype(dtype_name, rows, columns, inner, world_size)
    return predicted_times(profile, operator, nodes, call)


def predicted_times(
    profile: MachineProfile, operator: str, nodes: int, call: SizedCall
) -> NetworkTimes | None:
    """Return the times of :func:`times_between_nodes` by a profile; None if it has no network."""
    declared = OPERATOR_COSTS.get(operator)
    if profile.network is None:
        return None
    predictions: dict[str, Prediction] = {}
    # Costs of other computations have other sizes.
    is_product = declared is not None and declared.computation == "GEMM"
    for implementation in operator_named(operator).implementations if is_product else ():
        prediction = _predicted(
            profile, operator, implementation, call, even_nodes(call.world_size, nodes)
        )
        if prediction is not None:
            predictions[implementation.name] = prediction
    margin = profile.network.margin(profile.margin)
    return NetworkTimes(profile.network.network, predictions, margin)


def _predicted(
    profile: MachineProfile,
    operator: str,
    implementation: Implementation,
    call: SizedCall,
    node_of_rank: tuple[int, ...],
) -> Prediction | None:
    """Return an implementation's time between nodes; None if it declares no traffic there."""
    network, rate = profile.network, profile.product.memory_bytes_per_s
    assert network is not None
    # Nodes that have fewer ranks than others come last, and send the most to other nodes.
    rank, declared = call.world_size - 1, OPERATOR_COSTS[operator]
    sizes = {
        "rows": call.rows,
        "columns": call.columns,
        "inner": call.inner,
        "itemsize": call.itemsize,
        "output_itemsize": call.output_itemsize,
        "world_size": call.world_size,
    }
    traffic = declared.between_nodes.get(implementation.name)
    if traffic is not None:
        return best_in_slices(
            network,
            lambda slices: _product_us(profile, implementation, call, slices),
            lambda slices: traffic(**sizes, rank=rank, node_of_rank=node_of_rank, slices=slices),
            rate,
        )
    if not (implementation.is_stock or implementation.name == "unfused"):
        return None
    if not implementation.spans_nodes:
        return None
    size = declared.formula(**sizes).size
    sent = collective_bytes(declared.collective, size, rank, node_of_rank)
    product_us = profile.library_product_us(call)
    return one_after_the_other(network, product_us, NetworkCost(sent, 1), rate, declared.collective)


def _product_us(
    profile: MachineProfile, implementation: Implementation, call: SizedCall, slices: int
) -> float:
    """Return the time of a call's product, in pieces if the implementation makes them."""
    if implementation.schedule not in _PIECEWISE:
        return profile.library_product_us(call)
    # This rank's own rows are multiplied in as many pieces as those of each peer.
    rows = ceil_div(call.rows, call.world_size * slices)
    return call.world_size * slices * profile.library_product_us(call, rows)
