"""Where the time of a sub-layer goes, against closed forms; and the commands that show it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from interlace.cli.app import app
from interlace_sim.t3 import CONFIGURATIONS, Product, load_t3_machine, simulate

# A memory and a cache that nobody waits for; what is left is computing and the link.
FAST: dict[str, Any] = {"memory.bytes_per_s": 1e16, "memory.cache_bytes_per_s": 1e16} | {
    f"memory.{name}_ns": 0
    for name in (
        "row_open",
        "row_cycle",
        "row_gap",
        "write_recovery",
        "group_column",
        "update_column",
        "read_to_write",
        "write_to_read",
        "latency",
    )
}
STEP_NS = 128 * 128 * 64 * 2 / (1024 * 1.4 * 0.947)


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_to_all", "all_gather"])
@pytest.mark.parametrize("lockstep", [0, 1])
def test_causes_add_up_to_the_time(collective: Any, lockstep: int) -> None:
    product = Product("odd", rows=1000, columns=1030, depth=200)
    machine = load_t3_machine("t3-paper", {"gpu.lockstep": lockstep, "network.posted": 0})
    for name in CONFIGURATIONS:
        one = simulate(machine, product, 4, name, collective)
        assert sum(one.spent_ns.values()) == pytest.approx(one.total_ns), name
        assert min(one.spent_ns.values()) >= 0, name
        assert sum(one.fused.unit_ns.values()) == pytest.approx(one.fused.product_ns), name


@pytest.mark.parametrize(("lockstep", "posted"), [(1, 0), (1, 1), (0, 0)])
def test_stores_to_the_next_gpu_wait_for_the_link(lockstep: int, posted: int) -> None:
    """Two GPUs, two chunks of a stage each: the first chunk, 80 tiles of 32 KB, leaves at 150 GB/s.

    In lockstep all units wait until the last tile has arrived and been acknowledged, half of that
    time in the mean for a tile of their own. Posted stores hold up nobody; without lockstep nobody
    waits for others.
    """
    machine = load_t3_machine(
        "t3-paper", {**FAST, "gpu.lockstep": lockstep, "network.posted": posted}
    )
    one = simulate(machine, Product("two stages", 1024, 2560, 512), 2, "t3")
    assert one.spent_ns["computing"] == pytest.approx(2 * 8 * STEP_NS, rel=0.01)
    tile_ns = 32768 / 150
    own, others = one.spent_ns["link"], one.spent_ns["stage"]
    if posted:
        assert (own, others) == (0, pytest.approx(0, abs=100))
    elif lockstep:
        assert own == pytest.approx(40.5 * tile_ns + 1000, rel=0.02)
        assert others == pytest.approx(39.5 * tile_ns, rel=0.02)
    else:
        assert 0 < own < 40.5 * tile_ns + 1000
        assert others == 0


def test_a_last_stage_of_one_tile_leaves_the_other_units_idle() -> None:
    one = simulate(load_t3_machine("t3-paper", FAST), Product("81", 128, 81 * 128, 512), 2, "t3")
    assert one.spent_ns["idle"] == pytest.approx(79 / 80 * 8 * STEP_NS, rel=0.02)


def test_the_queue_in_steps_has_the_queue_s_mean() -> None:
    part = simulate(load_t3_machine(), Product("x", 1024, 1280, 256), 4, "t3").fused
    assert sum(part.queue) * 4096 / part.time_ns == pytest.approx(part.mean_queue_entries)
    assert 0 < max(part.queue) <= 64


def _run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["sim", *map(str, arguments)], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_says_where_the_time_goes() -> None:
    shape = ("--shape", "1024x2560x512", "--tensor", 2)
    output = _run("run", "t3", *shape, "--set", "machine.network.posted=0")
    (row,) = [line for line in output.splitlines() if line.startswith("waiting for its stores to")]
    assert "0 ns" in row  # the sequential product stores nothing at the next GPU
    assert "us" in row


def test_sensitivity_changes_one_value_or_two(tmp_path: Path) -> None:
    """Pairs are of assumed values, and never twice of one; a value that is given is no change."""
    shape = ("--shape", "256x256x64", "--tensor", 2)
    _run("study", "t3-sensitivity", *shape, "--out", tmp_path / "one")
    first, *ones = json.loads((tmp_path / "one" / "t3-sensitivity.json").read_text())
    assert first["changes"] == {}
    assert first["speed_ups"].keys() == {"t3", "t3-mca", "ideal"}
    assert {"network.posted": 0} in [row["changes"] for row in ones]
    assert {"network.posted": 1} not in [row["changes"] for row in ones]
    _run("study", "t3-sensitivity", *shape, "--pairs", "--out", tmp_path / "two")
    _, *twos = json.loads((tmp_path / "two" / "t3-sensitivity.json").read_text())
    assumed = {key for row in twos for key in row["changes"]}
    assert {"gpu.k_step", "gpu.lockstep"} <= assumed
    assert not {"network.posted", "memory.queue_entries"} & assumed
    assumed_ones = [row["changes"] for row in ones if row["changes"].keys() <= assumed]
    assert [row["changes"] for row in twos] == [
        first | second
        for first, second in itertools.combinations(assumed_ones, 2)
        if first.keys() != second.keys()
    ]


def test_reproduce_refuses_an_unknown_value() -> None:
    done = CliRunner().invoke(app, ["sim", "study", "t3", "--set", "machine.network.poste=1"])
    assert done.exit_code != 0
    assert "known key" in done.output
