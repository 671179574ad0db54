"""The benchmark's steps, on small shapes and the CPU backend: they run, they are right, and their
bytes are the costs'.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist

from interlace.bench import report
from tests.operators.embedding_all_to_all.calls import SMALL
from tests.untimed import untimed


def _bench(lookups, backwards):
    from benchmarks import embedding_all_to_all as operator

    with untimed():
        shape = operator.TablesShape(tables=2, rows=30, width=8, batch=6, lookups=lookups)
        group = dist.new_group()
        return operator.bench(shape, dataclasses.replace(SMALL), group, backwards=backwards)


@pytest.mark.parametrize(("lookups", "backwards"), [("3", False), ("0-4", False), ("0-4", True)])
def test_every_way_runs_and_the_floor_is_the_costs(ranks, lookups, backwards):
    results = ranks(2).run(_bench, lookups, backwards)
    assert results[0] == results[1]
    result = results[0]
    summary = report.summarise(result)
    assert (summary.fused_us, summary.unfused[1], summary.communication[0]) == (
        10.0,
        10.0,
        "NCCL alone",
    )
    assert result["relative_error"] < 1e-6
    assert result["link_bytes"] == 3 * 2 * 8 * 4
    if lookups == "3":
        assert result["memory_bytes"] == 2 * 6 * 3 * (8 * 4 + 8) + 8 * (2 * 6 + 1) + 3 * 32 * 4
    assert ("sort of the lookups" in result.get("before", {})) == backwards
    title = (
        "embedding_all_to_all: 2 x 30 x 8, B = 6, L = "
        + lookups
        + (", backward" if backwards else "")
        + ", float32, 2 ranks"
    )
    assert report.title("embedding_all_to_all", result) == title


def _tune():
    from benchmarks import embedding_all_to_all as operator

    with untimed() as patch:
        for case in (operator.Forward, operator.Backward):
            patch.setattr(case, "compile", lambda case, config: None)
        patch.setattr(operator, "FORWARD_AXES", {"num_warps": (1, 2), "stages": (1,)})
        patch.setattr(
            operator, "BACKWARD_AXES", {"push_programs": (1, 2), "update_programs": (2, 4096)}
        )
        shape = operator.TablesShape(tables=1, rows=9, width=4, batch=4, lookups="2")
        return operator.tune(shape, dist.new_group())


def test_the_tuner_tries_what_it_says(ranks):
    for found in ranks(2).run(_tune):
        assert found.num_warps == 1
        taken = found.push_programs, found.push_rows, found.update_programs
        assert taken == (2, 16, 4), "ties keep what was there; 4096 programs leave none for pushing"


@pytest.mark.parametrize("lookups", ["", "x", "9-3", "-1", "1-2-3"])
def test_lookups_that_are_none(lookups):
    from benchmarks.embedding_all_to_all import TablesShape
    from interlace.errors import ArgumentError

    with pytest.raises(
        ArgumentError, match="lookups must be a number or a range such as 0-60; got "
    ):
        TablesShape(lookups=lookups)
