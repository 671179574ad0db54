"""``impl="auto"`` of ``mixture_of_experts`` between nodes: slices where they take less time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from interlace.costs.expert_time import ExpertsCall
from interlace.costs.known_profiles import cached_by_profiles
from interlace.costs.mixture_of_experts import NUMBER_BYTES, exchanges_between_nodes
from interlace.costs.network import (
    NetworkRates,
    Prediction,
    best_number_of_slices,
    collective_bytes,
    even_nodes,
    there_and_back,
)
from interlace.costs.time import MachineProfile
from interlace.gemm.between_nodes import profile_on
from interlace.operators.mixture_of_experts.config import OPERATOR
from interlace.registry import operator_named
from interlace.tuning.choice import NetworkTimes

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.choice import ExpertTerms


@cached_by_profiles
def times_between_nodes(terms: ExpertTerms, device: torch.device) -> NetworkTimes | None:
    """Return the predicted times of the implementations that take a call.

    The nodes are taken to have equally many consecutive ranks, so that all ranks predict alike.
    ``unfused`` is predicted where stock PyTorch has no other pair, which is in training, and then
    without the times in which its host waits for the device.

    Returns:
        The times; None if there is one node, or no network was measured.
    """
    profile = profile_on(device) if terms.nodes > 1 else None
    return None if profile is None else predicted_times(profile, terms)


def predicted_times(profile: MachineProfile, terms: ExpertTerms) -> NetworkTimes | None:
    """Return the times of :func:`times_between_nodes` by a profile; None if it has no network."""
    network, sizes = profile.network, terms.sizes
    if network is None:
        return None
    predictions: dict[str, Prediction] = {}
    call = ExpertsCall(
        sizes.tokens, sizes.hidden, sizes.ffn, sizes.experts, sizes.chosen, sizes.world_size,
        terms.dtype.itemsize, sizes.gates,
    )  # fmt: skip
    declaration, whole_us = operator_named(OPERATOR), call.computation_us(profile)
    if sizes.tokens and whole_us is not None:
        if declaration.refusal("nccl", terms) is None:
            predictions["nccl"] = _whole(network, whole_us, call, terms.nodes)
        else:
            predictions["unfused"] = _by_routing(network, whole_us, call, terms.nodes)
        if declaration.refusal("chunked", terms) is None:
            predictions["chunked"] = _in_slices(profile, network, call, terms.nodes)
    return NetworkTimes(network.network, predictions, network.margin(profile.margin))


def slices_of(terms: ExpertTerms, device: torch.device) -> int | None:
    """Return the number of slices in which ``impl="chunked"`` takes the least time.

    It is the same on every rank. None means that no network was measured.
    """
    times = times_between_nodes(terms, device)
    return None if times is None else times.slices_of("chunked")


def _whole(
    network: NetworkRates, computation_us: float, call: ExpertsCall, nodes: int
) -> Prediction:
    """Return the time of an all-gather of tokens, the computation, and a reduce-scatter of sums."""
    rank, node_of_rank = call.world_size - 1, even_nodes(call.world_size, nodes)
    sums = call.world_size * call.tokens * call.hidden * call.itemsize
    routing = call.world_size * call.tokens * 2 * call.top_k * NUMBER_BYTES
    exchanges_us = sum(
        network.collective_time_us(
            collective, collective_bytes(collective, size, rank, node_of_rank)
        )
        for collective, size in (
            ("all_gather", sums), ("all_gather", routing), ("reduce_scatter", sums),
        )
    )  # fmt: skip
    return Prediction(computation_us + exchanges_us)


def _by_routing(
    network: NetworkRates, computation_us: float, call: ExpertsCall, nodes: int
) -> Prediction:
    """Return the time of the computation between two exchanges of one row for each slot, where all
    experts get as many.
    """
    far = call.world_size - call.world_size // nodes
    rows = call.tokens * call.top_k * far / call.world_size
    exchange_us = network.all_to_all_us(rows * call.hidden * call.itemsize)
    return Prediction(computation_us + 2 * exchange_us)


def _in_slices(
    profile: MachineProfile, network: NetworkRates, call: ExpertsCall, nodes: int
) -> Prediction:
    """Return the time of ``impl="chunked"``, with the best number of slices."""
    ranks = call.world_size

    def computation_us(share: float) -> float:
        us = call.computation_us(profile, share)
        assert us is not None  # as the whole computation's is known
        return us

    def predict(slices: int) -> Prediction:
        there, back = exchanges_between_nodes(
            rank=ranks - 1,
            tokens=call.tokens,
            hidden=call.hidden,
            top_k=call.top_k,
            itemsize=call.itemsize,
            node_of_rank=even_nodes(ranks, nodes),
            slices=slices,
        )
        return there_and_back(
            network,
            computation_us(1 / ranks),
            computation_us((ranks - 1) / ranks / slices),
            there,
            back,
            profile.product.memory_bytes_per_s,
        )

    return best_number_of_slices(predict, call.tokens)
