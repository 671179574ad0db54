"""Times between nodes: predicted from a measured network, beside the committed measurement."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from pathlib import Path

import pytest

from interlace.costs.embedding_all_to_all import (
    floor_memory_bytes,
    fused_between_nodes,
    pooling_us,
    stock_between_nodes,
)
from interlace.costs.known_profiles import parse_profile, profile_of
from interlace.costs.network import (
    STEP_US,
    NetworkRates,
    best_in_slices,
    collective_bytes,
    even_nodes,
    guessed_network,
    in_slices,
    one_after_the_other,
    parse_network,
    read_network,
    there_and_back,
)
from interlace.costs.registry import NetworkCost
from interlace.errors import ConfigError

NETWORKS = Path(str(importlib.resources.files("interlace.costs") / "networks"))
SOCKETS = read_network(NETWORKS / "two_h200_over_sockets.json")
H200 = profile_of("NVIDIA H200")
MEMORY = H200.product.memory_bytes_per_s

# Round figures: 100 us, and 1000 bytes a us from 100 kB on; a collective twice as fast.
ROUND = NetworkRates(
    "a network", "made up", 2, 2, [(100_000, 100.0), (1_000_000, 1000.0)], [(100_000, 50.0)]
)


def test_times_between_measured_sizes() -> None:
    assert ROUND.exchange_us(1) == 100, "latency: no message is quicker than the smallest one"
    assert ROUND.exchange_us(550_000) == 550
    assert ROUND.exchange_us(4_000_000) == 4000, "beyond the largest one, at its rate"
    assert ROUND.all_to_all_us(550_000) == 275, "the collective keeps its ratio to slices"
    several = dataclasses.replace(ROUND, further_message_us=7)
    assert several.exchange_us(550_000, 4) == 550 + 3 * 7
    assert several.following_us(100_000, 3) == ROUND.following_us(100_000, 3) + 2 * 7


def test_a_disturbed_measurement() -> None:
    """Four messages of 1 MB took 1000 us each, so 4 MB at once cannot take 9000; and no message
    takes longer than the smallest one, and then its bytes at the rate of the largest one.
    """
    slices = [(100_000, 100.0), (1_000_000, 1000.0), (4_000_000, 9000.0), (8_000_000, 7000.0)]
    network = dataclasses.replace(
        ROUND, slice_us=slices, collective_us=[*slices[:2], (4_000_000, 9000.0)]
    )
    assert [network.exchange_us(nbytes) for nbytes in (2e6, 4e6, 8e6)] == [1850, 3600, 7000]
    assert network.all_to_all_us(4e6) == 4000
    network = dataclasses.replace(
        ROUND, slice_us=[(1000, 100.0), (1_000_000, 1000.0), (64_000_000, 6400.0)]
    )
    assert network.exchange_us(1e6) == 100 + 100


def test_slices_must_gain_more_than_times_vary_by() -> None:
    assert ROUND.margin(0.03) == 0.03
    assert dataclasses.replace(ROUND, spread=0.2).margin(0.03) == 0.2
    assert dataclasses.replace(ROUND, spread=7.0).margin(0.03) == 0.5, "slices stay possible"


def test_slices_leave_while_the_rest_is_computed() -> None:
    """Half of 1000 us is for the other node; 400 kB leave in two exchanges of 200 us each."""
    one = in_slices(ROUND, 800, NetworkCost(400_000, 1, 1, 0.5), 1e12)
    two = in_slices(ROUND, 800, NetworkCost(400_000, 2, 2, 0.5), 1e12)
    assert one.us == 400 + 400 + STEP_US
    # The first slice leaves at 200 us, the second at 400 us, and both are there before the end.
    assert two.us == 800
    pair = one_after_the_other(ROUND, 800, NetworkCost(400_000, 1, landing_bytes=1_000_000), 1e12)
    assert pair.us == 800 + 200 + 1
    # Where the network decides, all exchanges follow the first slice.
    late = in_slices(ROUND, 80, NetworkCost(400_000, 2, 2, 0.5), 1e12)
    assert late.us == 20 + 2 * (200 + STEP_US)
    # Nothing leaves: the computation, and nothing else.
    assert in_slices(ROUND, 80, NetworkCost(0, 0, 4, 0.0), 1e12).us == 80


def test_slices_of_several_sizes() -> None:
    """Half of 800 us is for the other node; 100 and 300 kB take 100 and 300 us."""
    cost = NetworkCost(400_000, 2, 2, 0.5, shares=(1, 3))
    prediction = in_slices(ROUND, 800, cost, 1e12)
    assert prediction.us == 800, "they leave after 100 and 400 us"
    assert prediction.cut == "1/4 + 3/4"
    assert in_slices(ROUND, 80, cost, 1e12).us == 10 + 100 + 300 + 2 * STEP_US
    even = in_slices(ROUND, 80, NetworkCost(400_000, 2, 2, 0.5, shares=(1, 1)), 1e12)
    assert even == dataclasses.replace(
        in_slices(ROUND, 80, NetworkCost(400_000, 2, 2, 0.5), 1e12), shares=(1, 1)
    )
    assert even.cut == "2"


def test_an_exchange_begins_while_the_one_before_it_ends() -> None:
    """Each exchange takes 200 us to begin and to end, and 400 us for a quarter of the bytes."""
    slow = dataclasses.replace(
        ROUND, slice_us=[(1000, 200.0), (400_000, 600.0), (400_000_000, 400_000.0)]
    )
    cost = NetworkCost(1_600_000, 4, 4, 0.5)
    # They begin beside 80 us of computation only if they are the first two.
    assert in_slices(slow, 80, cost, 1e12).us == 10 + 600 + 3 * 400 + 2 * STEP_US
    # Complete at 1000, 2000, 3000 and 4000 us: none is under way when another one begins.
    assert in_slices(slow, 8000, cost, 1e12).us == 8000
    assert in_slices(slow, 8000, dataclasses.replace(cost, remote_share=1.0), 1e12).us == 8000 + 600
    # The third one waits until the first one has ended, as two are under way at a time.
    few_bytes = NetworkCost(4000, 4, 4, 0.5)
    expected = 10 + 2 * 200 + 2 * STEP_US
    assert in_slices(slow, 80, few_bytes, 1e12).us == pytest.approx(expected, abs=2)


def test_results_go_back_while_the_next_slice_is_computed() -> None:
    """Two slices of 100 kB take 100 us each, there and back; a slice is computed in 150 us."""
    there, back = NetworkCost(200_000, 2, 2), NetworkCost(200_000, 2, 2, landing_bytes=1_000_000)

    def us(own_us: float, slice_us: float) -> float:
        prediction = there_and_back(ROUND, own_us, slice_us, there, back, 1e12)
        assert prediction.slices == 2
        return prediction.us - 1  # for what landed

    # All have arrived at 200, before this rank's own; then two slices, and the second one's way.
    assert us(300, 150) == 300 + 2 * 150 + 100
    # The first slice is computed from its arrival on, at 100.
    assert us(50, 150) == 100 + 2 * 150 + 100
    # Where the network decides, it is busy from the beginning to the end.
    assert us(50, 10) == 4 * 100


def test_other_collectives_than_an_all_to_all() -> None:
    network = dataclasses.replace(ROUND, collective_factors=[["all_gather", 1.5]])
    times = {
        name: network.collective_time_us(name, 550_000)
        for name in ("all_to_all", "all_gather", "reduce_scatter")
    }
    assert times == {"all_to_all": 275, "all_gather": 412.5, "reduce_scatter": 275}
    cost = NetworkCost(550_000, 1)
    assert one_after_the_other(network, 10, cost, 1e12, "all_gather").us == 10 + 412.5
    assert one_after_the_other(network, 10, cost, 1e12).us == 10 + 275


def test_the_number_of_slices() -> None:
    def cost_of(slices: int) -> NetworkCost:
        return NetworkCost(1_600_000, slices, slices, 0.5)

    # Each exchange takes 100 us beside its bytes.
    network = dataclasses.replace(ROUND, slice_us=[(100_000, 200.0), (1_000_000, 1100.0)])

    def slices(compute_us: float) -> int:
        return best_in_slices(network, lambda _: compute_us, cost_of, 1e12).slices

    # With 4000 us of computation one slice is hidden behind its second half already.
    assert [slices(us) for us in (1, 1600, 4000)] == [1, 4, 1]


@pytest.mark.parametrize(
    ("collective", "expected"),
    [("all_to_all", 50), ("reduce_scatter", 25), ("all_gather", 25), ("all_reduce", 50)],
)
def test_bytes_of_a_librarys_collective(collective: str, expected: int) -> None:
    assert collective_bytes(collective, 100, 3, even_nodes(4, 2)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slice_us": []}, "a network's slice_us must be pairs"),
        ({"slice_us": [[2, 1.0], [1, 1.0]]}, "a network's slice_us must be pairs"),
        ({"collective_us": [[1, 0.0]]}, "a network's collective_us must be pairs"),
        ({"further_message_us": -1}, "a network's further_message_us must be at least 0"),
        ({"spread": -0.1}, "a network's spread must be at least 0"),
        ({"collective_factors": [["all_gather", 0]]}, "a network's collective_factors must be"),
        ({"speed": 1}, "a network must have the fields network, source, "),
    ],
)
def test_a_profile_whose_network_is_none(change: dict[str, object], message: str) -> None:
    profile = dataclasses.replace(H200, network=ROUND)
    values = dataclasses.asdict(profile)
    text = json.dumps(values)
    assert parse_profile(text) == profile, "a profile with a network is read as it was written"
    with pytest.raises(ConfigError, match=message):
        parse_profile(json.dumps(values | {"network": values["network"] | change}))


def test_shipped_profiles_have_no_network() -> None:
    assert H200.network is None


# The committed measurement

RESULTS = Path(__file__).parents[1] / "benchmarks/results/exploration"


def _percent(predicted: float, measured: float) -> int:
    return round(100 * (predicted / measured - 1))


def test_a_network_is_guessed_to_be_the_one_that_was_measured() -> None:
    assert guessed_network() == SOCKETS


@pytest.mark.parametrize(
    ("file", "pair", "errors"),
    [
        ("between-nodes-lanes-2xh100", 9, {2: 15, 4: 12, 8: 10}),
        ("between-nodes-lanes-again-2xh100", 4, {2: 17, 4: 8, 8: 13}),
        ("between-nodes-lanes-first-2xh100", 6, {2: 13, 4: -2, 8: -24}),
    ],
)
def test_slices_against_the_measurement(file: str, pair: int, errors: dict[int, int]) -> None:
    """Two H100s over sockets, with so many lookups that pooling takes as long as the exchange; the
    network as it was measured in the same run. Errors are in percent, by the number of slices: of
    what auto takes in graphs, a seventh and three times two, else of equal slices.
    """
    chosen, h100 = (1, 2, 2, 2), profile_of("NVIDIA H100 80GB HBM3")
    rate = h100.product.memory_bytes_per_s
    measured = json.loads((RESULTS / f"2026-11-26-{file}.json").read_text(encoding="utf-8"))
    network = parse_network(measured["network"]["rates"])
    lookups = measured["results"]["balanced_lookups"]
    found = measured["results"]["lookups"][str(lookups)]
    assert found["slices"] == list(chosen)
    call = {"rank": 0, "widths": ((128,) * 8,) * 2, "batch": 16384, "output_itemsize": 2}
    memory_bytes = floor_memory_bytes(
        **call, lookups=[lookups * 16384] * 8, itemsize=2, index_itemsize=4
    )
    computation_us = pooling_us(memory_bytes, h100.product.launch_us, rate)

    def error(shares: tuple[int, ...], name: str) -> int:
        cost = fused_between_nodes(**call, node_of_rank=(0, 1), shares=shares)
        predicted = in_slices(network, computation_us, cost, rate)
        return _percent(predicted.us, found["us"][name])

    wrong = {slices: error((1,) * slices, f"fused, {slices} slices") for slices in (2, 8)}
    assert wrong | {4: error(chosen, "fused, graph")} == errors
    whole = stock_between_nodes(**call, node_of_rank=(0, 1))
    predicted = one_after_the_other(network, computation_us, whole, rate)
    assert _percent(predicted.us, found["us"]["pair, graph"]) == pair
