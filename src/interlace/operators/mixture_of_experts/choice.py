"""``impl="auto"`` of ``mixture_of_experts``: what takes the least time by the machine's profile,
within a node and between nodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from interlace.costs.known_profiles import cached_by_profiles, profile_of
from interlace.costs.mixture_of_experts import (
    NUMBER_BYTES,
    STOCK_TILE,
    ExpertsCall,
    exchanges_between_nodes,
)
from interlace.costs.network import (
    NetworkRates,
    Prediction,
    best_number_of_slices,
    collective_bytes,
    even_nodes,
    there_and_back,
)
from interlace.costs.time import MachineProfile
from interlace.errors import ArgumentError
from interlace.gemm import invariance
from interlace.gemm.between_nodes import profile_on
from interlace.gemm.choice import fastest
from interlace.gemm.operands import FLOAT8
from interlace.operators.mixture_of_experts.config import (
    OPERATOR,
    MixtureOfExpertsConfig,
    untuned_config,
)
from interlace.operators.mixture_of_experts.layout import ExpertSizes
from interlace.registry import operator_named
from interlace.tuning.choice import Choice, NetworkTimes, by_device
from interlace.tuning.gpu import Gpu

# Triton's interpreter runs one program after another, so few programs are enough.
_ON_INTERPRETER: dict[str, Any] = {
    "block_m": 32,
    "programs": 2,
    "push_programs": 2,
    "sum_programs": 2,
    "stagger": 0,
}


class ExpertTerms(NamedTuple):
    """The properties of a call by which implementations may refuse it.

    Attributes:
        sizes: The call's sizes.
        dtype: The dtype of x, and of the weights unless they are float8.
        device_type: ``"cuda"`` or ``"cpu"``.
        keeps: Whether a backward pass will follow.
        nodes: Number of nodes that the ranks are on.
        is_float8: Whether weights are float8, with scales of blocks.
    """

    sizes: ExpertSizes
    dtype: torch.dtype
    device_type: str
    keeps: bool
    nodes: int = 1
    is_float8: bool = False

    @property
    def call(self) -> ExpertsCall:
        """Return the sizes by which the time of the call is predicted."""
        sizes = self.sizes
        return ExpertsCall(
            sizes.tokens, sizes.hidden, sizes.ffn, sizes.experts, sizes.chosen, sizes.world_size,
            self.dtype.itemsize, sizes.gates, self.is_float8,
        )  # fmt: skip

    @property
    def capacity_rule(self) -> tuple[bool, str]:
        """Return what implementations without a capacity need, and whether it is so."""
        is_enough = self.sizes.capacity >= self.sizes.tokens
        return is_enough, "no capacity that could drop tokens"

    @property
    def inference_rules(self) -> tuple[tuple[bool, str], ...]:
        """Return what implementations for inference need, and whether it is so."""
        return (not self.keeps, "no tensor that requires a gradient"), self.capacity_rule


def unmet(rules: Iterable[tuple[bool, str]]) -> str | None:
    """Return the rules that do not hold in words, or None."""
    return " and ".join(rule for holds, rule in rules if not holds) or None


@cached_by_profiles
def choose(terms: ExpertTerms, device: torch.device) -> Choice[MixtureOfExpertsConfig]:
    """Return the implementation that takes the least time, with its configuration.

    Where no time is predicted it is that of the tuned table, and without one the fused one, as on
    the CPU backend.
    """
    tabulated = _tabulated(terms, device)
    if device.type == "cpu" or not terms.sizes.tokens:
        return tabulated
    gpu = Gpu.of(device)
    profile = profile_of(gpu.name, gpu.processors)
    times_us = predicted_times(profile, terms)
    if times_us:
        config_of = functools.partial(_config_of, terms=terms, tabulated=tabulated)
        return fastest(OPERATOR, profile, times_us, config_of)
    if operator_named(OPERATOR).refusal(tabulated.impl, terms) is None:
        return tabulated
    config = _config_of("fused", terms, tabulated)
    return dataclasses.replace(tabulated, impl="fused", config=config)


def decide(terms: ExpertTerms, device: torch.device, impl: str) -> Choice[MixtureOfExpertsConfig]:
    """Return the implementation that runs a call, its configuration, and the reason.

    Args:
        terms: The properties of the call.
        device: The device of the operands.
        impl: The value of ``impl`` that counts; see :func:`invariance.effective_impl`.

    Raises:
        ArgumentError: The implementation was asked for and cannot run such a call; or the call must
            be batch-invariant and cannot be.
    """
    declaration, nodes = operator_named(OPERATOR), terms.nodes
    is_invariant, named = invariance.is_invariant(impl), invariance.name_in(impl)
    asked_for = named or declaration.choosers[0]
    declaration.require_nodes(asked_for, nodes, terms, is_invariant=is_invariant)
    times = times_between_nodes(terms, device)
    choice = choose(terms, device).between(declaration, nodes, times)
    if is_invariant:
        choice = _invariant(terms, device, choice, named)
        declaration.require_nodes(choice.impl, nodes, terms, is_invariant=True)
    else:
        name = choice.impl if impl == "auto" else impl
        config = _config_of(name, terms, _tabulated(terms, device))
        choice = dataclasses.replace(choice, impl=name, config=config)
    refusal = declaration.refusal(choice.impl, terms)
    if refusal is not None:
        raise ArgumentError(
            f"{OPERATOR}: impl={choice.impl!r} must have {refusal}. "
            f"{declaration.advice(terms, nodes)}"
        )
    return choice


def _invariant(
    terms: ExpertTerms,
    device: torch.device,
    choice: Choice[MixtureOfExpertsConfig],
    named: str,
) -> Choice[MixtureOfExpertsConfig]:
    """Return what runs a call whose rows must have the same bits in every batch.

    All kernels go along the inner dimensions in order, round where the others round, and add a
    token's rows in the order of its slots.

    Args:
        terms: The properties of the call.
        device: The device of the operands.
        choice: What a free call would run.
        named: The implementation that the caller has named; empty if none.

    Raises:
        ArgumentError: Tokens may be dropped, which goes by the others in the batch; or this GPU is
            not known to give the same bits by the implementation that was named.
    """
    sizes = terms.sizes
    if sizes.capacity < sizes.tokens:
        raise ArgumentError(
            f"{OPERATOR}: a call within interlace.batch_invariant() must have no capacity that "
            f"could drop tokens; got {sizes.capacity} for {sizes.tokens} tokens. Which rows are "
            "dropped goes by the batch."
        )
    name = invariance.invariant_implementation(
        operator_named(OPERATOR), device, terms.dtype, choice, terms, named
    ).name
    if not invariance.has_one_arithmetic(device, terms.dtype):
        # Tiles must not follow the number of tokens where they may change bits.
        terms = terms._replace(sizes=dataclasses.replace(sizes, tokens=invariance.REFERENCE_ROWS))
    config = _config_of(name, terms, _tabulated(terms, device))
    reason = f"calls must be batch-invariant; {choice.reason}"
    return dataclasses.replace(choice, impl=name, config=config, reason=reason)


@functools.lru_cache(maxsize=4096)
def _tabulated(terms: ExpertTerms, device: torch.device) -> Choice[MixtureOfExpertsConfig]:
    """Return what the tuned table says of these sizes, whether the call may run it or not."""
    sizes = terms.sizes
    names = ("tokens", "hidden", "ffn", "experts", "top_k")
    return by_device(
        OPERATOR,
        {name: getattr(sizes, name) for name in names},
        untuned_config("fused", terms.call),
        _ON_INTERPRETER,
        dtype=FLOAT8 if terms.is_float8 else terms.dtype,
        world_size=sizes.world_size,
        device=device,
    )


def _config_of(
    impl: str, terms: ExpertTerms, tabulated: Choice[MixtureOfExpertsConfig]
) -> MixtureOfExpertsConfig:
    """Return the configuration of an implementation: the table's, if it is of that one."""
    if (impl == "decode") == (tabulated.impl == "decode"):
        return tabulated.config
    config = untuned_config(impl, terms.call)
    if terms.device_type == "cpu":
        return dataclasses.replace(config, **_ON_INTERPRETER)
    return config


def predicted_times(profile: MachineProfile, terms: ExpertTerms) -> dict[str, float]:
    """Return the time of each implementation in microseconds.

    Implementations are missing whose times the profile does not compose for such a call, and those
    that refuse it.
    """
    call, times_us = terms.call, {}
    for implementation in operator_named(OPERATOR).implementations:
        time = profile.predict_us(
            OPERATOR,
            implementation.name,
            call,
            implementation.schedule,
            tile_of(implementation.name, call),
        )
        if (
            time is not None
            and implementation.refusal(terms) is None
            and implementation.is_predictable(terms)
        ):
            times_us[implementation.name] = time
    return times_us


def tile_of(implementation: str, call: ExpertsCall) -> tuple[int, int]:
    """Return the rows and columns of the tiles of an implementation's products."""
    if implementation not in ("fused", "decode"):
        return STOCK_TILE
    config = untuned_config(implementation, call)
    # An expert whose rows are at most these needs one tile.
    return config.block_m + config.tail, config.block_n


# Between nodes


@cached_by_profiles
def times_between_nodes(terms: ExpertTerms, device: torch.device) -> NetworkTimes | None:
    """Return the predicted times of the implementations that take a call.

    The nodes are taken to have equally many consecutive ranks, so that all ranks predict alike.
    Where ``unfused`` has no grouped products, which is in training, its time is predicted without
    the times in which its host waits for the device.

    Returns:
        The times; None if there is one node, or no network was measured.
    """
    profile = profile_on(device) if terms.nodes > 1 else None
    return None if profile is None else predicted_between_nodes(profile, terms)


def predicted_between_nodes(profile: MachineProfile, terms: ExpertTerms) -> NetworkTimes | None:
    """Return the times of :func:`times_between_nodes` by a profile; None if it has no network."""
    network, call = profile.network, terms.call
    if network is None:
        return None
    predictions: dict[str, Prediction] = {}
    declaration, whole_us = operator_named(OPERATOR), call.computation_us(profile)
    if call.tokens and whole_us is not None:
        # Its composition is of grouped products.
        is_grouped = declaration.implementation("unfused").is_predictable(terms)
        predict = _whole if is_grouped else _by_routing
        predictions["unfused"] = predict(network, whole_us, call, terms.nodes)
        if declaration.refusal("chunked", terms) is None:
            predictions["chunked"] = _in_slices(profile, network, call, terms.nodes)
    return NetworkTimes(network.network, predictions, network.margin(profile.margin))


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
