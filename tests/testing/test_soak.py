"""The soak: it makes what the seed says, and reports what is wrong, late or interrupted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from interlace.cli.app import app
from interlace.testing.cases import Prepared, between_nodes
from interlace.testing.soak import ROUND_CALLS, SoakPlan, make_round, run_rank

QUICK = ("gemv_all_reduce", "put_signal kernel", "gemm_sum_reduce_scatter")
"""Operators whose calls take Triton's interpreter milliseconds."""


def _soak(*arguments):
    return CliRunner().invoke(app, ["soak", *map(str, arguments)])


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_rounds_depend_on_seed_and_number_alone(backend):
    rounds = [
        make_round(number, SoakPlan(seed), backend, (4, 4, 3))
        for seed, number in ((1, 5), (1, 5), (1, 6), (2, 5))
    ]
    assert rounds[0] == rounds[1]
    assert rounds[0] != rounds[2]
    assert rounds[0] != rounds[3]
    for calls in rounds:
        assert sum(len(step.slots) for step in calls.steps) == ROUND_CALLS[backend]
        assert len({slot.group for slot in calls.slots}) > 1
        # One stream's and one group's, and all may be captured
        for number, graph in enumerate(calls.graphs):
            assert graph.graph == number
            assert len({(calls.slots[i].group, calls.slots[i].stream) for i in graph.slots}) == 1
            assert all(calls.slots[i].case.capturable for i in graph.slots)


def test_between_nodes_all_calls_send_something_of_ours():
    able = between_nodes()
    assert {"embedding_all_to_all", "gemm_all_to_all"} <= able.keys()
    assert "unfused" in between_nodes(["gemm_all_to_all"])["gemm_all_to_all"]
    groups = (4, 4, 2, 2)
    calls = [
        make_round(number, SoakPlan(1), "cpu", groups, spanning=(0, 1)).slots
        for number in range(20)
    ]
    for slot in (slot for slots in calls for slot in slots):
        if slot.group in (0, 1):
            assert slot.case.impl in able[slot.case.operator]
    within = {slot.case.operator for slots in calls for slot in slots if slot.group > 1}
    assert within - able.keys(), "ranks of one node call everything"


@pytest.mark.usefixtures("quick_launches")
def test_slices_between_nodes(tmp_path):
    file = tmp_path / "soak.json"
    arguments = ("--backend", "cpu", "--nodes", 2, "--calls", 8, "--seed", 2, "--json", file)
    sliced = ("--operators", "embedding_all_to_all", "--operators", "gemm_all_to_all")
    done = _soak(*arguments, *sliced)
    assert done.exit_code == 0, done.output
    (result,) = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert (result["nodes"], result["world_size"], result["groups"]) == (2, 2, [[0, 1], [0, 1]])
    assert {"fused", "chunked"} & {
        impl for implementations in result["by_operator"].values() for impl in implementations
    }
    assert "2 ranks on the cpu backend, of 2 nodes" in " ".join(done.output.split())
    refused = _soak(*arguments, "--operators", "put_signal kernel")
    assert refused.exit_code == 1
    assert "on several nodes" in " ".join(refused.output.split())


def test_right_calls_are_reported(ranks, tmp_path):
    """Three ranks, so that there is a group of some ranks only; the same report on every rank."""
    plan = SoakPlan(3, calls=ROUND_CALLS["cpu"] + 6, operators=QUICK, deadline_s=120.0)
    reports = ranks(3).run(run_rank, str(tmp_path), plan)
    for report in reports:
        assert (report["wrong"], report["timeouts"], report["errors"], report["failures"]) == (
            0,
            0,
            0,
            [],
        )
        assert report["calls"] >= plan.calls
        assert (
            sum(
                count
                for implementations in report["by_operator"].values()
                for count in implementations.values()
            )
            == report["calls"]
        )
        assert report["by_operator"] == reports[0]["by_operator"]


def test_results_that_are_integers_are_overwritten_too(ranks, tmp_path):
    plan = SoakPlan(1, calls=8, operators=("linear_top_k",), deadline_s=120.0)
    for report in ranks(2).run(run_rank, str(tmp_path), plan):
        assert report["failures"] == []
        assert report["calls"] >= 8


def _with_a_wrong_element(folder, plan, at):
    """Rank 1 changes an element of the result of its call number ``at``."""
    run, made = Prepared.run, []

    def spoil(self):
        results = run(self)
        made.append(None)
        if dist.get_rank() == 1 and len(made) == at + 1:
            results[0].view(-1)[0] += 1
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prepared, "run", spoil)
        return run_rank(folder, plan)


def test_one_wrong_element_is_found_and_its_call_named(ranks, tmp_path):
    plan = SoakPlan(7, calls=1000, operators=("gemv_all_reduce",), deadline_s=120.0)
    for report in ranks(2).run(_with_a_wrong_element, str(tmp_path), plan, 13):
        assert (report["wrong"], report["timeouts"], report["calls"]) == (1, 0, ROUND_CALLS["cpu"])
        (failure,) = report["failures"]
        assert (failure["rank"], failure["call"], failure["kind"]) == (1, 13, "wrong")
        assert failure["what"].startswith("gemv_all_reduce ")
        assert failure["what"].endswith(", alone: 1 wrong elements")


def _without_a_call(folder, plan, at):
    """Rank 1 leaves out its call number ``at``."""
    run, made = Prepared.run, []

    def leave_out(self):
        made.append(None)
        left_out = dist.get_rank() == 1 and len(made) == at + 1
        return [result.clone() for result in self._expected[0]] if left_out else run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prepared, "run", leave_out)
        return run_rank(folder, plan)


def test_a_timeout_ends_all_ranks_with_a_report(ranks, tmp_path):
    pool = ranks(2)
    plan = SoakPlan(7, calls=1000, operators=("put_signal kernel",), deadline_s=5.0)
    reports = pool.run(_without_a_call, str(tmp_path), plan, 13)
    pool.close()  # its groups are broken
    for report in reports:
        assert report["timeouts"] >= 1
        assert report["failures"][0]["kind"] == "timeout"
        assert report["failures"][0]["call"] >= 13
        assert "PeerTimeoutError" in report["failures"][0]["what"]


def _interrupted(folder, plan, at):
    """Rank 1 is interrupted within its call number ``at``."""
    run, made = Prepared.run, []

    def interrupt(self):
        made.append(None)
        if dist.get_rank() == 1 and len(made) == at + 1:
            os.kill(os.getpid(), signal.SIGINT)
        return run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prepared, "run", interrupt)
        return run_rank(folder, plan)


def test_an_interrupt_ends_all_ranks_with_a_report(ranks, tmp_path):
    plan = SoakPlan(1, operators=QUICK)
    for report in ranks(2).run(_interrupted, str(tmp_path), plan, 7):
        assert report["interrupted"]
        assert report["failures"] == []


@pytest.mark.usefixtures("quick_launches")
def test_command(tmp_path):
    file = tmp_path / "soak.json"
    done = _soak(
        "--backend",
        "cpu",
        "--calls",
        8,
        "--seed",
        2,
        "--operators",
        "gemv_all_reduce",
        "--json",
        file,
    )
    assert done.exit_code == 0, done.output
    document = json.loads(file.read_text(encoding="utf-8"))
    (result,) = document["results"]
    assert document["machine"]["torch"]
    assert (result["backend"], result["world_size"], result["seed"], result["wrong"]) == (
        "cpu",
        2,
        2,
        0,
    )
    assert set(result["by_operator"]) == {"gemv_all_reduce"}
    assert " 0 wrong, 0 timeouts, 0 errors" in done.output


def _document(file: Path, **changes: object) -> Path:
    result = {
        "backend": "cuda",
        "world_size": 2,
        "groups": [[0, 1], [0, 1]],
        "seed": 1,
        "start": 0,
        "round_calls": 5000,
        "operators": [],
        "calls": 5000,
        "wrong": 0,
        "timeouts": 0,
        "errors": 0,
        "rounds": 1,
        "replayed_in_graphs": 100,
        "with_backward": 1000,
        "seconds": 2.0,
        "deadline_s": 20.0,
        "interrupted": False,
        "failures": [],
        "by_operator": {"gemv_all_reduce": {"unfused": 5000}},
        **changes,
    }
    document = {"machine": {"gpus": ["H200"]}, "command": "", "date": "2026", "results": [result]}
    file.write_text(json.dumps(document), encoding="utf-8")
    return file


def test_soaks_are_added_up(tmp_path):
    first, second = _document(tmp_path / "a.json"), _document(tmp_path / "b.json", start=5000)
    total = tmp_path / "total.json"
    done = _soak("--add", first, "--add", second, "--json", total)
    assert done.exit_code == 0, done.output
    assert "10,000 calls, 0 wrong" in done.output
    assert len(json.loads(total.read_text(encoding="utf-8"))["results"]) == 2
    refused = _soak("--add", first, "--add", total)
    assert refused.exit_code == 1
    assert "must make different calls; got seed 1 from call 0 twice" in " ".join(
        refused.stderr.split()
    )


def test_what_lacks_something_is_not_added_up(tmp_path):
    file = _document(tmp_path / "a.json")
    document = json.loads(file.read_text(encoding="utf-8"))
    for changed in (
        {name: value for name, value in document.items() if name != "date"},
        document | {"results": [1]},
        document | {"results": [document["results"][0] | {"calls": "7"}]},
        document | {"machine": 1},
    ):
        file.write_text(json.dumps(changed), encoding="utf-8")
        done = _soak("--add", file)
        assert done.exit_code == 1
        assert f"{file} must be JSON files that interlace soak wrote; " in done.stderr


def test_a_failure_says_how_to_repeat_it(tmp_path):
    failure = {"rank": 1, "call": 7003, "kind": "wrong", "what": "some call: 2 wrong elements"}
    file = _document(
        tmp_path / "a.json", start=5000, wrong=1, failures=[failure], operators=["gemv_all_reduce"]
    )
    done = _soak("--add", file)
    assert done.exit_code == 1
    assert "First failure: call 7003 on rank 1, wrong: some call: 2 wrong elements" in done.output
    command = (
        "interlace soak --backend cuda --world-size 2 --seed 1 --start 5000 "
        "--calls 2004 --operators gemv_all_reduce"
    )
    assert command in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--operators", "gemv"), "--operators must be among gemv_all_reduce, "),
        (("--start", 25), "--start must be a multiple of 24; got 25. Say --start 24."),
        (("--backend", "tpu"), "--backend must be auto, cpu or cuda; got 'tpu'."),
    ],
)
def test_refusals(arguments, message):
    done = _soak("--backend", "cpu", *arguments)
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())
