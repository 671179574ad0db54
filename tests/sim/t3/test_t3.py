"""T3's model against closed forms, physics and its own identities; what overflows, what is refused,
what is written.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from interlace.cli.app import app
from interlace.errors import ConfigError
from interlace_sim.engine import Engine
from interlace_sim.t3 import (
    CONFIGURATIONS,
    AddressMap,
    DmaMap,
    Product,
    SubLayer,
    Target,
    all_to_all,
    direct_reduce_scatter,
    estimate,
    load_t3_machine,
    load_t3_model,
    ring_reduce_scatter,
    simulate,
)
from interlace_sim.t3.measured import compare
from interlace_sim.t3.memory import Kind, Memory
from interlace_sim.t3.reproduce import Case, figures, study
from interlace_sim.t3.tracker import Tracker

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SMALL = Product("small", rows=2048, columns=2048, depth=512)
ODD = Product("odd", rows=1000, columns=1030, depth=200)
IDEAL: dict[str, Any] = {  # a memory without overheads, a cache for everything
    "memory.row_open_ns": 0,
    "memory.row_cycle_ns": 0,
    "memory.row_gap_ns": 0,
    "memory.write_recovery_ns": 0,
    "memory.group_column_ns": 0,
    "memory.update_column_ns": 0,
    "memory.read_to_write_ns": 0,
    "memory.write_to_read_ns": 0,
    "memory.latency_ns": 0,
    "memory.cache_bytes": 1 << 30,
    "memory.cache_bytes_per_s": 1e16,
    "gpu.efficiency": 1,
}


@pytest.fixture(scope="module")
def small() -> dict[str, SubLayer]:
    return {name: simulate(load_t3_machine(), SMALL, 8, name) for name in CONFIGURATIONS}


# Closed forms.


def test_compute_bound_product() -> None:
    """Stages x steps x 128 x 128 x 64 multiply-adds on a compute unit; memory so fast that only the
    clock is left.
    """
    machine = load_t3_machine("t3-paper", {**IDEAL, "memory.bytes_per_s": 1e16})
    part = simulate(machine, SMALL, 8, "sequential").parts[0]
    stages, steps = -(-16 * 16 // 80), 512 // 64
    step_ns = 128 * 128 * 64 * 2 / (1024 * 1.4)
    assert part.product_ns == pytest.approx(stages * steps * step_ns, rel=1e-2)


def _input_bytes(product: Product) -> int:
    """Both inputs, fp16."""
    return 2 * product.depth * (product.rows + product.columns)


def test_memory_bound_product() -> None:
    """Inputs once at the DRAM's bandwidth, or all that the 80 tiles load and store at the cache's;
    computing takes nothing.
    """
    product = Product("a stage", rows=1024, columns=1280, depth=4096)
    machine = load_t3_machine("t3-paper", {**IDEAL, "gpu.clock_hz": 1e14})
    assert simulate(machine, product, 8, "sequential").parts[0].time_ns == pytest.approx(
        _input_bytes(product) / 1000, rel=0.03
    )
    machine = load_t3_machine(
        "t3-paper", {**IDEAL, "gpu.clock_hz": 1e14, "memory.cache_bytes_per_s": 1e12}
    )
    loaded = 80 * 2 * 128 * 4096 * 2
    part = simulate(machine, product, 8, "sequential").parts[0]
    assert part.time_ns == pytest.approx((loaded + product.output_bytes) / 1000, rel=0.02)


def test_collectives_of_fast_memory() -> None:
    """A ring: n - 1 steps of a chunk and a latency each; on a mesh and a switch one step, over the
    same bandwidth.
    """
    machine = load_t3_machine("t3-paper", {**IDEAL, "memory.bytes_per_s": 1e16})
    for network, steps in (("ring", 7), ("full", 1), ("switch", 1)):
        result = simulate(machine, SMALL, 8, "sequential", network=network)  # type: ignore[arg-type]
        _, scatter, gather = result.parts
        expected = 7 * SMALL.output_bytes / 8 / 150 + steps * 500
        assert scatter.time_ns == pytest.approx(expected, rel=0.01)
        assert gather.time_ns == pytest.approx(expected, rel=0.01)


def test_inputs_are_read_once_where_they_fit_and_outputs_may_take_their_place() -> None:
    small_cache = load_t3_machine("t3-paper", {"memory.cache_bytes": 4 << 20})
    product = Product("wide", rows=2048, columns=4096, depth=256)
    assert _input_bytes(product) < 4 << 20 < product.output_bytes
    kept, lost = (
        simulate(small_cache, product, 8, name).moved("product", "read")
        for name in ("t3", "sequential")
    )
    assert kept == _input_bytes(product) < lost
    assert simulate(load_t3_machine(), product, 8, "sequential").moved(
        "product", "read"
    ) == _input_bytes(product)


# Configurations.


def test_sequential_is_the_sum_and_ideal_the_larger(small: dict[str, SubLayer]) -> None:
    product, scatter, gather = (part.time_ns for part in small["sequential"].parts)
    assert small["sequential"].total_ns == product + scatter + gather
    assert small["ideal"].total_ns == max(product, scatter) + gather
    assert small["split-8"].total_ns >= small["ideal"].parts[0].time_ns


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_traffic_of_the_ring(ranks: int) -> None:
    """In chunks: reduce-scatter reads 2N - 1 -> N - 2, writes of product and reduce-scatter 2N ->
    2N - 2; all-gather the same.
    """
    before, after = (
        simulate(load_t3_machine(), ODD, ranks, name, network="ring")
        for name in ("sequential", "t3-mca")
    )
    chunk = ODD.output_bytes / ranks
    assert before.moved("reduce_scatter", "read") / chunk == pytest.approx(2 * ranks - 1)
    assert after.moved("reduce_scatter", "read") / chunk == pytest.approx(ranks - 2)
    assert [_written(one) / chunk for one in (before, after)] == pytest.approx(
        [2 * ranks, 2 * ranks - 2]
    )
    # Near-memory updates cost more than writes, so it matters which of both the traffic is.
    for cause in ("product", "reduce_scatter"):
        assert before.moved(cause, "update") == after.moved(cause, "write") == 0
        assert after.moved(cause, "update") / chunk == pytest.approx(ranks - 1)
    for one in (before, after):
        assert (
            one.moved("all_gather", "read")
            == one.moved("all_gather", "write")
            == pytest.approx((ranks - 1) * chunk)
        )
        assert sum(one.result.sent_bytes.values()) == pytest.approx(2 * (ranks - 1) * chunk)


def _written(one: SubLayer) -> float:
    return sum(one.moved(cause, "write", "update") for cause in ("product", one.collective))


@pytest.mark.parametrize("network", ["full", "switch"])
def test_traffic_of_direct_collectives(network: Any) -> None:
    """In chunks, on 4 GPUs: stores to their owners leave the collective no reads, and N writes with
    the product's.
    """
    chunk = ODD.output_bytes / 4
    for collective, reads, writes in (
        ("reduce_scatter", 3 + 4, 4 + 3 + 1),
        ("all_to_all", 3, 4 + 3),
    ):
        before, after = (
            simulate(load_t3_machine(), ODD, 4, name, collective, network=network)  # type: ignore[arg-type]
            for name in ("sequential", "t3")
        )
        assert [
            before.moved(collective, "read") / chunk,
            _written(before) / chunk,
        ] == pytest.approx([reads, writes])
        assert [after.moved(collective, "read") / chunk, _written(after) / chunk] == pytest.approx(
            [0, 4]
        )
        assert after.result.traffic_bytes == pytest.approx(before.result.traffic_bytes)
        assert after.fused.tracker_entries == 0


@pytest.mark.parametrize("network", ["ring", "switch"])
def test_traffic_of_a_gathered_input(network: Any) -> None:
    """Each GPU's rows cross 3 links and are written by 3 GPUs; a ring reads before each, a
    library's switch reads once.
    """
    shard = ODD.gathered_bytes / 4
    before, after = (
        simulate(load_t3_machine(), ODD, 4, name, "all_gather", network=network)
        for name in ("sequential", "t3")
    )
    assert before.moved("all_gather", "read") / shard == pytest.approx(
        3 if network == "ring" else 1
    )
    assert after.moved("all_gather", "read") / shard == pytest.approx(3)
    for one in (before, after):
        assert one.moved("all_gather", "write") / shard == pytest.approx(3)
        assert one.result.traffic_bytes["all_gather"] / shard == pytest.approx(3)


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_to_all", "all_gather"])
def test_one_gpu_stands_for_all(collective: Any) -> None:
    """All four in detail take the same time and move the same; one that computes half as fast holds
    up all.
    """
    product = Product("square", rows=1024, columns=1024, depth=256)
    runs = [
        simulate(load_t3_machine(), product, 4, "t3-mca", collective, slowness=slowness)
        for slowness in (None, (1, 1, 1, 1), (2, 1, 1, 1))
    ]
    assert runs[1].total_ns == pytest.approx(runs[0].total_ns, rel=0.01)
    assert runs[1].memory_bytes == pytest.approx(runs[0].memory_bytes)
    assert runs[2].fused.product_ns > 1.4 * runs[1].fused.product_ns
    assert runs[2].total_ns > runs[1].total_ns


def test_nothing_is_faster_than_its_parts(small: dict[str, SubLayer]) -> None:
    machine = load_t3_machine()
    for one in small.values():
        link = 2 * 7 / 8 * SMALL.output_bytes / 150
        memory = sum(one.memory_bytes.values()) / 1000
        assert one.total_ns >= max(1e9 * SMALL.flops / machine.gpu.flops_per_s, link, memory)
        assert one.total_ns >= one.result.bound.time_ns
    for name in ("t3", "t3-mca"):
        assert small[name].parts[0].time_ns >= small["ideal-nmc"].parts[0].product_ns


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_what_a_cache_writes_back_at_the_end_bounds_nothing(collective: Any) -> None:
    """Nothing waits for it, and a slow memory would take longer for it than for all the rest."""
    machine = load_t3_machine("t3-h200", {"memory.bytes_per_s": 1e9})
    one = simulate(machine, Product("low", 128, 128, 1), 2, "sequential", collective)
    assert one.result.bound.time_ns <= one.total_ns < one.result.memory_bytes
    assert one.result.busy_ns["memory"] <= one.total_ns


def test_what_does_not_contend_for_memory_is_not_bounded_by_all_of_it() -> None:
    changes = {"memory.bytes_per_s": 1e9, "memory.row_open_ns": 1000, "memory.row_cycle_ns": 1000}
    machine = load_t3_machine("t3-paper", changes)
    for name in CONFIGURATIONS:
        one = simulate(machine, Product("low", 7, 128, 64), 2, name)
        assert one.result.bound.time_ns <= one.total_ns


@pytest.mark.parametrize("entries", [1, 2, 3])
def test_no_access_is_larger_than_the_queue(entries: int) -> None:
    """Whole runs and segments of 256 bytes are four columns."""
    machine = load_t3_machine("t3-paper", {"memory.queue_entries": entries})
    for name in CONFIGURATIONS:
        one = simulate(machine, Product("low", 128, 256, 512), 3, name)
        whole = simulate(load_t3_machine("t3-paper"), one.product, 3, name)
        assert one.memory_bytes == pytest.approx(whole.memory_bytes)
        assert one.fused.product_ns >= whole.fused.product_ns > 0


def test_runs_are_repeatable(small: dict[str, SubLayer]) -> None:
    assert simulate(load_t3_machine(), SMALL, 8, "t3-mca") == small["t3-mca"]


# Address maps.


def test_maps_say_what_arrives() -> None:
    """Ring of 4: chunk 0 leaves, 1 and 2 wait for two updates, 3 is the sum of all; direct: all but
    3 leave for it.
    """
    ring, direct, exchange = ring_reduce_scatter(4), direct_reduce_scatter(4), all_to_all(4)
    assert [ring.expected(chunk) for chunk in range(4)] == [0, 2, 2, 2]
    assert [ring.addends(3), direct.addends(3), exchange.addends(3)] == [4, 4, 1]
    assert direct.expected(3) == 4
    assert not direct.dma_map
    assert sorted(target.chunk for target in exchange.targets().values()) == [0, 1, 2]


def test_a_written_map_is_followed() -> None:
    """Two chunks on two GPUs, the other way round: chunk 1 leaves first and chunk 0 stays."""
    given = AddressMap(2, {1: Target(1, 0)}, {})
    one = simulate(load_t3_machine(), ODD, 2, "t3", address_map=given)
    assert one.memory_bytes == simulate(load_t3_machine(), ODD, 2, "t3").memory_bytes


# Memory controller.


def _ended(changes: dict[str, Any], first: int, threshold: float | None) -> int:
    """When a communication request is done that comes after ``first`` of the product."""
    engine = Engine()
    memory = Memory(engine, load_t3_machine("t3-paper", {**IDEAL, **changes}), None)
    memory.threshold = threshold
    done: list[int] = []
    for _ in range(first):
        memory.request("compute", "product", "read", 16384, lambda: None)
    memory.request(
        "communication", "reduce_scatter", "read", 16384, lambda: done.append(engine.now)
    )
    engine.run()
    return done[0]


def test_arbitration_serves_the_product_first_but_starves_nobody() -> None:
    """200 requests of the product are waiting when communication asks: in turn, first come; first,
    all of them, up to a limit.
    """
    burst = 16384 / 1000
    ended = {
        limit: _ended({"arbitration.starvation_ns": limit}, 200, 5) for limit in (0, 1000, 10**9)
    }
    assert ended[0] < ended[1000] < ended[10**9] == pytest.approx(201 * burst, rel=0.01)
    assert ended[1000] == pytest.approx(1000, rel=0.1)
    assert _ended({}, 200, None) < ended[1000]
    assert _ended({}, 0, 5) == pytest.approx(burst, abs=2)


def test_threshold_falls_with_intensity() -> None:
    rule = load_t3_machine().arbitration
    assert [rule.threshold(intensity) for intensity in (0.9, 0.5, 0.3, 0.07, 0.01)] == [
        5,
        5,
        10,
        30,
        float("inf"),
    ]


def _busy(kinds: tuple[Kind, ...], run: float, **changes: float) -> int:
    """Until all of some requests of 16 KB are done, of nothing but what is given in ``changes``."""
    engine = Engine()
    memory = Memory(
        engine,
        load_t3_machine("t3-paper", {**IDEAL, **{f"memory.{k}": v for k, v in changes.items()}}),
        None,
    )
    for kind in kinds:
        memory.request("compute", "x", kind, 16384, lambda: None, run)
    return engine.run()


def test_memory_times() -> None:
    """16 KB are 16 columns a channel, in two segments: 16.4 ns at 1 TB/s."""
    burst = 16384 / 1000
    assert _busy(("read",), 0) == pytest.approx(burst, abs=1)
    assert _busy(("read", "write"), 0, read_to_write_ns=14) == pytest.approx(2 * burst + 14, abs=2)
    assert _busy(("read",), 0, row_open_ns=28) == pytest.approx(
        28 + burst, abs=2
    )  # two banks, opened together
    # Two of the four bank groups at a time, and a queue too short to look ahead to the others.
    columns = {"group_column_ns": 2, "update_column_ns": 4, "queue_entries": 16}
    assert _busy(("read",) * 64, 0, **columns) == pytest.approx(64 * burst, rel=0.05)
    assert _busy(("update",) * 64, 0, **columns) == pytest.approx(2 * 64 * burst, rel=0.1)
    # 128 bytes of each row in 16 banks every 200 ns; those that run on find their rows open.
    scattered, running = (
        _busy(("read",) * 64, run, row_open_ns=28, row_cycle_ns=200) for run in (128, 0)
    )
    assert running < 1.2 * 64 * burst < 64 * 16384 / (32 * 16 * 128 / 200) < scattered


# Tracker.


def test_tracker_counts_and_overflows() -> None:
    """Blocks 0, 2 and 4 share a set of two counters: 4 is counted elsewhere, and completes all the
    same.
    """
    complete: list[int] = []
    spilled: list[int] = []

    def spill(counted: Callable[[], None]) -> None:
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
    assert without.fused.tracker_overflows == 6 * 32  # the blocks that wait for a DMA
    assert without.moved("tracker", "read") == without.moved("tracker", "write") == 2 * 6 * 32 * 64
    assert without.moved("reduce_scatter") == small["t3"].moved("reduce_scatter")
    assert small["t3"].moved("tracker") == 0


# Whole layers, and the reproduction.


def test_a_layer_adds_up() -> None:
    """Times are given: 100 ns of product in 200 of sub-layer; a quarter of all in what is not
    sliced.
    """
    model = load_t3_model("t-nlg")
    times = {"sequential": 200, "t3": 150, "t3-mca": 140, "ideal": 120, "product": 100}
    known = {model.product(name, 8).depth: times for name in ("op", "fc2", "ip")}
    layer = estimate(load_t3_machine(), model, 8, "prompt", rest_share=0.25, known=known)
    assert layer.products_ns == pytest.approx((4 + 3) / 4 * 100)  # FC-1 and IP, at FC-2's rate
    assert layer.rest_ns == pytest.approx((400 + 175) / 3)
    assert layer.speed_up("t3") == pytest.approx((575 * 4 / 3) / (575 * 4 / 3 - 100))


def test_generation_of_tokens_has_little_to_overlap() -> None:
    layer = estimate(load_t3_machine(), load_t3_model("mega-gpt-2"), 8, "generation", tokens=8)
    assert layer.tokens == 8
    assert layer.speed_up("ideal") >= layer.speed_up("t3-mca") > 0.9


def test_study_compares_every_figure_that_it_can() -> None:
    done = study(models=("gpt-3",), workers=1, tokens=256)
    assert done.figures == []  # the paper has none of GPT-3 alone
    assert [case.sublayer for case in done.cases] == ["op", "fc2", "fc1", "ip"]
    assert done.cases[1].total_ns == done.cases[2].total_ns
    assert all(source and confidence for _, _, confidence, source in done.assumptions)
    mean, maximum = figures([*_named(done.cases, "palm"), *_named(done.cases, "mt-nlg")])
    assert mean.ours == pytest.approx(
        100 * (statistics.geometric_mean([case.speed_up("t3-mca") for case in done.cases]) - 1)
    )
    assert mean.met == (abs(mean.ours - 29) <= 3)
    assert maximum.ours == max(100 * (case.speed_up("t3-mca") - 1) for case in done.cases)
    assert len(figures(_named(done.cases, "t-nlg"))) > 15


def test_figures_need_few_cases() -> None:
    every, few = (
        study(models=("palm", "gpt-3"), workers=1, tokens=128, every_case=every_case)
        for every_case in (True, False)
    )
    assert few.figures == every.figures
    assert [case.model for case in few.cases] == ["palm"] * 4
    assert few.cases[0].total_ns.keys() == {"sequential", "t3-mca"}


def _named(cases: list[Case], model: str) -> list[Case]:
    """The same outcomes under another model's name, on 8 GPUs."""
    return [dataclasses.replace(case, model=model, ranks=8) for case in cases]


# Against measured software.


def test_the_h200_model_is_near_what_was_measured(tmp_path: Path) -> None:
    """Its sequential time lies within 6 % of cuBLAS + NCCL; few rows are left out."""
    machine = load_t3_machine("t3-h200")
    file = _some_shapes(tmp_path / "bench.json", ("4096 x 8192 x 2048", "256 x 8192 x 7168"))
    reports: list[tuple[int, int]] = []
    found, left_out = compare(machine, [file], progress=lambda *done: reports.append(done))
    assert reports == [(0, 2), (1, 2), (2, 2)]
    (one,) = found
    assert left_out == ["gemm_reduce_scatter 256 x 8192 x 7168"]
    assert abs(one.error) < 0.06
    assert (
        one.measured_ns["product"]
        < one.corrected_ns("t3-mca")
        < one.measured_ns["fused"]
        < one.measured_ns["unfused"]
    )
    assert one.gain == pytest.approx(one.software_ns / one.corrected_ns("t3-mca"))
    (tmp_path / "empty.json").write_text('{"results": []}')
    with pytest.raises(
        ConfigError, match="must have times of gemm_reduce_scatter or gemm_all_to_all"
    ):
        compare(machine, [tmp_path / "empty.json"])
    with pytest.raises(ConfigError, match="must be a document of interlace bench"):
        compare(
            machine, [file, tmp_path / "none.json"], progress=lambda *_: pytest.fail("too late")
        )


@pytest.mark.parametrize("fastest", ["fused", "remote_stores", "chunked"])
def test_t3_is_compared_with_the_fastest_of_our_implementations(
    fastest: str, tmp_path: Path
) -> None:
    """Whatever ``auto`` took in that run, and whatever was measured beside them."""
    file = _some_shapes(tmp_path / "bench.json", ("4096 x 4096 x 14336",))
    document = json.loads(file.read_text())
    times = document["results"][0]["times"]
    assert {"fused", "remote_stores", "chunked"} < times.keys()
    times[fastest]["median_us"] = 180.0
    times["torch async-TP"]["median_us"] = 170.0
    file.write_text(json.dumps(document))
    (one,), _ = compare(load_t3_machine("t3-h200"), [file])
    assert (one.software, one.software_ns) == (fastest, 180_000)
    for name in {"remote_stores", "chunked"} - {fastest}:  # an implementation may be missing
        del times[name]
    file.write_text(json.dumps(document))
    assert compare(load_t3_machine("t3-h200"), [file])[0][0].software == fastest


def _some_shapes(file: Path, shapes: tuple[str, ...]) -> Path:
    document = json.loads((RESULTS / "2026-11-21-gemm_reduce_scatter-4xh200.json").read_text())
    document["results"] = [row for row in document["results"] if row["shape"] in shapes]
    file.write_text(json.dumps(document))
    return file


# Bad input.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda machine: simulate(machine, SMALL, 8, "t4"), "a configuration must be one of"),
        (
            lambda machine: simulate(machine, SMALL, 8, "t3", "broadcast"),
            "a collective must be one of",
        ),
        (
            lambda machine: simulate(machine, SMALL, 8, "t3", network="torus"),
            "a network must be one of",
        ),
        (lambda machine: simulate(machine, SMALL, 1, "t3"), "at least 2 ranks; got 1"),
        (
            lambda machine: simulate(machine, SMALL, 1, "t3", "all_gather"),
            "at least 2 ranks, and rows that divide evenly",
        ),
        (
            lambda machine: simulate(machine, ODD, 3, "t3", "all_gather"),
            "got 1000 rows and 3 ranks",
        ),
        (
            lambda machine: simulate(machine, SMALL, 4, "t3", slowness=(1, 1)),
            "a factor from 1 to 1000 for each of 4 GPUs",
        ),
        (
            lambda machine: simulate(machine, SMALL, 2, "t3", slowness=(float("inf"), 1)),
            "a factor from 1 to 1000 for each of 2 GPUs",
        ),
        (
            lambda machine: simulate(machine, SMALL, 8, "t3", address_map=ring_reduce_scatter(4)),
            "for each of 8 GPUs; got 4",
        ),
        (
            lambda machine: simulate(machine, SMALL, 4, "t3", address_map=all_to_all(4)),
            "chunk 3 is that of 1",
        ),
        (
            lambda machine: simulate(
                machine, SMALL, 4, "t3", "all_gather", address_map=ring_reduce_scatter(4)
            ),
            "got one for an all-gather",
        ),
        (
            lambda _: simulate(
                load_t3_machine("t3-paper", {"gpu.compute_units": 8}), SMALL, 4, "split-8"
            ),
            "more than 8 compute units",
        ),
        (
            lambda _: Product("none", 0, 1, 1),
            "sizes of a product must be at least 1; got 0 x 1 x 1",
        ),
        (
            lambda _: load_t3_model("t-nlg").product("fc3", 8),
            "a sub-layer must be one of op, fc2, fc1, ip; got 'fc3'",
        ),
        (lambda _: load_t3_model("t-nlg").product("op", 5), "must be at least 2 and divide"),
        (lambda _: load_t3_model("gpt-5"), "^model must be a YAML file or one of"),
        (lambda _: load_t3_machine("t3-paper", {"tracker.bytes": 1}), "must be a known key"),
        (
            lambda _: load_t3_machine("t3-paper", {"memory.bytes_per_s": 0}),
            "bytes_per_s must be above 0",
        ),
        (
            lambda _: load_t3_machine("t3-paper", {"gpu.efficiency": 2}),
            "efficiency must not be above 1",
        ),
        (
            lambda _: load_t3_machine("t3-paper", {"memory.update_column_ns": 1}),
            "update_column_ns must be at least",
        ),
        (
            lambda _: load_t3_machine("t3-paper", {"arbitration.intensities": [0.1, 0.5, 0.9]}),
            "intensities must fall",
        ),
        (
            lambda machine: estimate(machine, load_t3_model("t-nlg"), 8, "sleep"),
            "a phase must be one of",
        ),
        (
            lambda machine: estimate(machine, load_t3_model("t-nlg"), 8, "generation"),
            "must have the number of sequences",
        ),
        (
            lambda machine: estimate(machine, load_t3_model("t-nlg"), 8, "prompt", rest_share=1),
            "from 0 to below 1",
        ),
        (lambda _: ring_reduce_scatter(1), "at least 2 ranks; got 1"),
        (
            lambda _: AddressMap(
                4, {0: Target(1, 1), 1: Target(1, 2)}, {1: DmaMap(2, Target(1, 2))}
            ),
            "one map only",
        ),
        (lambda _: AddressMap(4, {4: Target(1, 1)}, {}), "one of 0 to 3"),
        (lambda _: AddressMap(4, {0: Target(0, 1)}, {}), "must go to another GPU"),
        (lambda _: AddressMap(2, {0: Target(1, 1), 1: Target(1, 0)}, {}), "go round for ever"),
        (
            lambda _: AddressMap(4, {0: Target(1, 1)}, {1: DmaMap(3, Target(1, 2))}),
            "It would never start",
        ),
        (
            lambda _: AddressMap(4, {0: Target(1, 1)}, {1: DmaMap(1, Target(1, 2))}),
            "It would send a part",
        ),
    ],
)
def test_rejected_inputs(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(load_t3_machine())


# Commands.


def _run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["sim", *map(str, arguments)], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    return done.output


def test_command_prints_and_writes(tmp_path: Path) -> None:
    files = {name: tmp_path / f"t3.{name}" for name in ("json", "png", "trace")}
    shape = ("--shape", "1024x1024x256", "--tensor", 4, "--set", "machine.tracker.sets=64")
    output = _run(
        "run",
        "t3",
        *shape,
        "--json",
        files["json"],
        "--plot",
        files["png"],
        "--trace",
        files["trace"],
    )
    assert "t3-mca" in output
    document = json.loads(files["json"].read_text())
    assert document.keys() == set(CONFIGURATIONS)
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(files["trace"].read_text())["traceEvents"]
    flows = [e for e in events if e.get("cat") == "block" and e["pid"] == 1]
    first = [e for e in flows if e["id"] == flows[0]["id"]]
    assert [e["ph"] for e in first] == ["s", "t", "t", "f"]  # stored, in memory, triggered, sent
    assert [e["ts"] for e in first] == sorted(e["ts"] for e in first)
    assert len(flows) == 4 * 2 * 16  # two chunks are sent by DMA, 16 blocks each
    assert CliRunner().invoke(app, ["sim", "run", "t3", "--shape", "12x"]).exit_code != 0


@pytest.mark.parametrize(
    ("collective", "topology"),
    [("all_to_all", "switch"), ("all_gather", "full"), ("reduce_scatter", "full")],
)
def test_command_of_what_the_paper_only_discusses(
    collective: str, topology: str, tmp_path: Path
) -> None:
    arguments = (
        "--shape",
        "512x512x128",
        "--tensor",
        4,
        "--collective",
        collective,
        "--topology",
        topology,
        "--slowest",
        1.5,
    )
    output = _run(
        "run", "t3", *arguments, "--plot", tmp_path / "a.png", "--trace", tmp_path / "a.json"
    )
    assert f"{topology} of 4" in output
    assert collective.replace("reduce_scatter", "product update") in output


def test_other_commands(tmp_path: Path) -> None:
    bench = _some_shapes(tmp_path / "bench.json", ("4096 x 8192 x 2048",))
    output = _run("compare", bench, "--json", tmp_path / "m.json", "--plot", tmp_path / "m.png")
    assert "4096 x 8192 x 2048" in output
    (one,) = json.loads((tmp_path / "m.json").read_text())
    assert one["gain"] > 1
    assert one["software"] == "chunked"
    assert "chunked" in output
    assert (tmp_path / "m.png").stat().st_size > 0
