"""T3's model against closed forms, physics and its own identities; what overflows, what is refused, what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from interlace.cli.app import app
from interlace.errors import ConfigError
from interlace.sim.engine import Engine
from interlace.sim.t3 import CONFIGURATIONS, AddressMap, Product, load_t3_machine, load_t3_model, ring_reduce_scatter, simulate
from interlace.sim.t3.addresses import DmaMap
from interlace.sim.t3.memory import Memory
from interlace.sim.t3.product import schedule
from interlace.sim.t3.reproduce import figures, study
from interlace.sim.t3.run import SubLayer
from interlace.sim.t3.tracker import Tracker

SMALL = Product("small", rows=2048, columns=2048, depth=512)
IDEAL: dict[str, Any] = {  # a memory without overheads, a cache for everything
    "memory.efficiency": 1,
    "memory.turnaround_ns": 0,
    "memory.latency_ns": 0,
    "memory.cache_bytes": 1 << 30,
    "gpu.efficiency": 1,
}


@pytest.fixture(scope="module")
def small() -> dict[str, SubLayer]:
    return {name: simulate(load_t3_machine(), SMALL, 8, name) for name in CONFIGURATIONS}


# Closed forms.


def test_compute_bound_product() -> None:
    """Stages x steps x 128 x 128 x 64 multiply-adds on a compute unit; memory so fast that only the clock is left."""
    machine = load_t3_machine("t3-paper", {**IDEAL, "memory.bytes_per_s": 1e16})
    part = simulate(machine, SMALL, 8, "sequential").parts[0]
    stages, steps = -(-16 * 16 // 80), 512 // 64
    step_ns = 128 * 128 * 64 * 2 / (1024 * 1.4)
    assert part.product_ns == pytest.approx(stages * steps * step_ns, rel=1e-3)


def test_memory_bound_product() -> None:
    """Inputs once and outputs once at the DRAM's bandwidth; computing takes nothing."""
    machine = load_t3_machine("t3-paper", {**IDEAL, "gpu.clock_hz": 1e14})
    part = simulate(machine, SMALL, 8, "sequential").parts[0]
    assert part.time_ns == pytest.approx((SMALL.input_bytes + SMALL.output_bytes) / 1000, rel=0.01)


def test_collectives_of_fast_memory() -> None:
    """n - 1 steps of a chunk and a latency each."""
    machine = load_t3_machine("t3-paper", {**IDEAL, "memory.bytes_per_s": 1e16})
    _, scatter, gather = simulate(machine, SMALL, 8, "sequential").parts
    expected = 7 * (SMALL.output_bytes / 8 / 150 + 500)
    assert scatter.time_ns == pytest.approx(expected, rel=5e-3)
    assert gather.time_ns == pytest.approx(expected, rel=5e-3)


def test_inputs_are_read_once_where_they_fit_and_outputs_may_take_their_place() -> None:
    machine = load_t3_machine()
    once = schedule(machine, SMALL, 80, True)
    assert sum(map(sum, once.read_bytes)) == SMALL.input_bytes
    large = load_t3_model("t-nlg").product("op", 8)
    kept, lost = (sum(map(sum, schedule(machine, large, 80, bypass).read_bytes)) for bypass in (True, False))
    assert kept == large.input_bytes < lost


# Configurations.


def test_sequential_is_the_sum_and_ideal_the_larger(small: dict[str, SubLayer]) -> None:
    product, scatter, gather = (part.time_ns for part in small["sequential"].parts)
    assert small["sequential"].total_ns == product + scatter + gather
    assert small["ideal"].total_ns == max(product, scatter) + gather
    assert small["split-8"].total_ns >= small["ideal"].parts[0].time_ns


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_traffic_identities(ranks: int) -> None:
    """In chunks: reduce-scatter reads 2N - 1 -> N - 2, writes of product and reduce-scatter 2N -> 2N - 2; all-gather the same."""
    product = Product("odd", rows=1000, columns=1030, depth=256)
    before, after = (simulate(load_t3_machine(), product, ranks, name) for name in ("sequential", "t3-mca"))
    chunk = product.output_bytes / ranks
    assert before.moved("reduce-scatter", "read") / chunk == pytest.approx(2 * ranks - 1)
    assert after.moved("reduce-scatter", "read") / chunk == pytest.approx(ranks - 2)
    writes = [sum(one.moved(cause, "write", "update") for cause in ("product", "reduce-scatter")) for one in (before, after)]
    assert [size / chunk for size in writes] == pytest.approx([2 * ranks, 2 * ranks - 2])
    for one in (before, after):
        assert one.moved("all-gather", "read") == one.moved("all-gather", "write") == pytest.approx((ranks - 1) * chunk)
        assert sum(one.result.sent_bytes.values()) == pytest.approx(2 * (ranks - 1) * chunk)


def test_nothing_is_faster_than_its_parts(small: dict[str, SubLayer]) -> None:
    machine = load_t3_machine()
    for one in small.values():
        link = 2 * 7 / 8 * SMALL.output_bytes / 150
        memory = sum(one.memory_bytes.values()) / 1000
        assert one.total_ns >= max(1e9 * SMALL.flops / machine.gpu.flops_per_s, link, memory)
        assert one.total_ns >= one.result.bound.time_ns
    for name in ("t3", "t3-mca"):
        assert small[name].parts[0].time_ns >= small["ideal-nmc"].parts[0].product_ns


def test_runs_are_repeatable(small: dict[str, SubLayer]) -> None:
    again = simulate(load_t3_machine(), SMALL, 8, "t3-mca")
    assert again == small["t3-mca"]


# Memory controller.


def test_arbitration_serves_the_product_first_but_starves_nobody() -> None:
    """200 bursts of the product are waiting when communication asks: first come, all before it; starving, it goes at its limit."""
    ended = {}
    for limit in (0, 1000, 10**9):
        engine = Engine()
        machine = load_t3_machine("t3-paper", {"arbitration.starvation_ns": limit})
        memory = Memory(engine, machine, None)
        memory.threshold = 5
        for _ in range(200):
            memory.request("compute", "product", "read", 16384, lambda: None)
        done: list[int] = []
        memory.request("communication", "reduce-scatter", "read", 16384, lambda e=engine, d=done: d.append(e.now))  # type: ignore[misc]
        engine.run()
        (ended[limit],) = done
    assert ended[0] < ended[1000] < ended[10**9]
    assert ended[10**9] == pytest.approx(201 * 16384 / 900 + 500, rel=0.01)


def test_updates_and_turnarounds_take_time() -> None:
    times = []
    for kinds in (("read", "read"), ("write", "write"), ("update", "update"), ("read", "write")):
        engine = Engine()
        memory = Memory(engine, load_t3_machine("t3-paper", {"memory.latency_ns": 0}), None)
        for kind in kinds:
            memory.request("compute", "x", kind, 16384, lambda: None)  # type: ignore[arg-type]
        engine.run()
        times.append(memory.busy_ns)
    burst = 16384 / 900
    assert times == pytest.approx([2 * burst, 2 * burst + 10, 4 * burst + 10, 2 * burst + 10])


# Tracker.


def test_tracker_counts_and_overflows() -> None:
    """Blocks 0, 2 and 4 share a set of two counters: 4 is counted elsewhere, and completes all the same."""
    complete: list[int] = []
    spilled: list[int] = []

    def spill(counted: Any) -> None:
        spilled.append(1)
        counted()

    tracker = Tracker(2, 2, spill)
    for _ in range(2):
        for block in (0, 2, 4):
            tracker.update(block, 2, lambda block=block: complete.append(block))  # type: ignore[misc]
    assert complete == [0, 2, 4]
    assert (tracker.overflows, len(spilled), tracker.most_entries) == (1, 2, 2)
    tracker.update(6, 1, lambda: complete.append(6))  # counters are free again
    assert complete[-1] == 6
    assert tracker.overflows == 1


def test_no_tracker_costs_traffic_and_loses_nothing(small: dict[str, SubLayer]) -> None:
    without = simulate(load_t3_machine("t3-paper", {"tracker.sets": 0}), SMALL, 8, "t3")
    assert without.parts[0].tracker_overflows == 7 * 32  # every block but those of the remote chunk
    assert without.moved("tracker", "read") == without.moved("tracker", "write") == 2 * 7 * 32 * 64
    assert without.moved("reduce-scatter") == small["t3"].moved("reduce-scatter")
    assert small["t3"].moved("tracker") == 0


# Reproduction.


def test_study_compares_every_figure_that_it_can() -> None:
    done = study(models=("mt-nlg",))
    (figure,) = done.figures
    assert figure.name.startswith("T3-MCA, PALM and MT-NLG")
    assert figure.met == (abs(figure.ours - 29) <= 3)
    assert [case.sublayer for case in done.cases] == ["op", "fc2", "fc1", "ip"]
    assert done.cases[1].total_ns == done.cases[2].total_ns
    assert all(source and confidence for _, _, confidence, source in done.assumptions)
    assert figures([]) == []


# Bad input.


def test_rejected_inputs() -> None:
    machine = load_t3_machine()
    for call, message in (
        (lambda: simulate(machine, SMALL, 8, "t4"), "a configuration must be one of"),
        (lambda: simulate(machine, SMALL, 1, "t3"), "at least 2 ranks; got 1"),
        (lambda: Product("none", 0, 1, 1), "sizes of a product must be at least 1; got 0 x 1 x 1"),
        (lambda: load_t3_model("t-nlg").product("fc3", 8), "a sub-layer must be one of op, fc2, fc1, ip; got 'fc3'"),
        (lambda: load_t3_model("t-nlg").product("op", 5), "must be at least 2 and divide"),
        (lambda: load_t3_model("gpt-5"), "must be a YAML file or one of"),
        (lambda: load_t3_machine("t3-paper", {"tracker.bytes": 1}), "must be a known key"),
        (lambda: load_t3_machine("t3-paper", {"memory.bytes_per_s": 0}), "bytes_per_s must be above 0"),
        (lambda: load_t3_machine("t3-paper", {"memory.update_cost": 0.5}), "update_cost must be at least 1"),
        (lambda: AddressMap(4, frozenset({0, 1}), {1: DmaMap(2)}), "one map only"),
        (lambda: AddressMap(4, frozenset({4}), {}), "one of 0 to 3"),
        (lambda: AddressMap(4, frozenset({3}), {}), "the last chunk must stay"),
        (lambda: AddressMap(4, frozenset({0}), {1: DmaMap(3)}), "It would never start"),
        (lambda: AddressMap(4, frozenset({0}), {1: DmaMap(1)}), "It would send a part"),
        (lambda: simulate(machine, SMALL, 8, "t3", ring_reduce_scatter(4)), "over 8 chunks"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()  # type: ignore[no-untyped-call]


# Command.


def test_command_prints_and_writes(tmp_path: Path) -> None:
    files = {name: tmp_path / f"t3.{name}" for name in ("json", "png", "trace")}
    arguments = ["sim", "t3", "--shape", "1024x1024x256", "--tp", "4", "--set", "tracker.sets=64", "--json", files["json"]]
    done = CliRunner().invoke(app, [str(a) for a in (*arguments, "--plot", files["png"], "--trace", files["trace"])])
    assert done.exit_code == 0, done.output
    assert "t3-mca" in done.output
    document = json.loads(files["json"].read_text())
    assert document.keys() == set(CONFIGURATIONS)
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(files["trace"].read_text())["traceEvents"]
    flows = [e for e in events if e["ph"] in "stf" and e["pid"] == 1]
    assert {e["ph"] for e in flows} == {"s", "t", "f"}
    assert len(flows) == 3 * 2 * 16  # two chunks are sent by DMA, 16 blocks each
    bad = CliRunner().invoke(app, ["sim", "t3", "--shape", "12x"])
    assert bad.exit_code != 0
