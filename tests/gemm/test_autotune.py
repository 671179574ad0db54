"""``interlace.autotune``: what is measured, that ranks agree, and what is remembered. Times are
made up, as the CPU backend has none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.cache_folder import cache_folder
from interlace.costs.known_profiles import profile_of
from interlace.gemm import autotune, dispatch
from interlace.gemm.call import GemmCall, RowPlan
from interlace.gemm.choice import choose_product, fastest
from interlace.gemm.config import GemmConfig
from interlace.gemm.operands import Operands
from interlace.mapped import Fused
from interlace.operators.gemm_all_reduce import GemmAllReduce
from interlace.registry import operator_named
from interlace.tuning import measured
from interlace.tuning.choice import Choice
from interlace.tuning.measured import MeasuredTimes

PREDICTED = {"chunked": 10.0, "fused": 12.0, "unfused": 14.0, "remote_stores": 40.0}
KIND = {"operator": "gemm_all_reduce", "x": [8, 16], "ranks": 2}


class _Machine:
    """A group whose implementations take the times that it is told."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, times: dict[str, Any]) -> None:
        self.timed: list[str] = []
        self.memory = MeasuredTimes(folder)
        self.times = times
        choice = choose_product(
            "gemm_all_reduce", GemmAllReduce.config_type, rows=8, columns=8, inner=8,
            dtype=torch.float32, world_size=2, device=torch.device("cpu"),
        )  # fmt: skip
        predicted = Choice(
            "chunked", choice.config, "predicted", times_us=PREDICTED, worst_error=1.5
        )
        patch.setattr(GemmAllReduce, "choose", lambda *_, **__: predicted)
        # Ranks of the pool warn of what is not deterministic, and then nothing is measured.
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
        patch.setattr(autotune, "may_measure", lambda call: call.group.world_size > 1)
        patch.setattr(autotune, "_memory", lambda: self.memory)
        patch.setattr(autotune, "_layers", lambda call: [call])
        patch.setattr(autotune, "_record", self.record)
        patch.setattr(autotune, "_median_us", lambda us, call, samples: us)

    def record(self, implementation: Any, layers: Any, calls: int) -> float | None:
        """Return the time of so many calls, in the place of a graph of them. A list has the times
        of one measurement after another.
        """
        count = self.timed.count(implementation.name)
        self.timed.append(implementation.name)
        us: Any = self.times.get(implementation.name)
        if isinstance(us, list):
            us = us[count]
        return None if us is None else us * calls


def _call(rows: int = 6) -> None:
    x, w = torch.ones(rows, 4), torch.ones(5, 4)
    y = interlace.gemm_all_reduce(x, w)
    assert torch.equal(y, torch.full_like(y, 4.0 * dist.get_world_size()))


def _order(rows: int = 6) -> list[str]:
    measured = interlace.group_of().cache.measured
    found = [each for kind, each in measured.items() if autotune.class_of(rows) in kind]
    candidates = list(map(operator_named("gemm_all_reduce").implementation, PREDICTED))
    return [each.name for each in found[0].in_order(candidates, PREDICTED)] if found else []


def _measured(folder: str, times: list[dict[str, float]], remembered: list[bool]) -> Any:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        interlace.group_of().release()
        machine = _Machine(patch, Path(folder) / str(rank), times[rank])
        if remembered[rank]:
            _call()
            kind: dict[str, Any] = {}
            patch.setattr(autotune, "kind_of", lambda *_, **__: kind)
            machine.memory.write(kind, {"chunked": 0.9, "fused": 0.66, "unfused": 0.5})
        else:
            patch.setattr(autotune, "kind_of", lambda *_, **__: {})
            _call()
        assert _order() == [], "nothing is measured without being asked"
        with interlace.autotune():
            _call()
            first = list(machine.timed)
            _call()
            _call(7)
            with interlace.autotune(False):
                _call(9)
        assert machine.timed == first, "once for each kind, to which up to eight rows belong"
        assert _order(9) == []
        _call()
        order = _order()
        kept = machine.memory.read({})
        interlace.group_of().release()
        return first, order, kept


def test_ranks_measure_together_what_is_near(ranks: Any, tmp_path: Path) -> None:
    """The slowest rank's time counts, and what fails on one rank is none's; remote_stores takes
    four times the shortest and is not measured. What was not measured may be in the next program,
    so nothing is kept.
    """
    times = [
        {"chunked": 11.0, "fused": 9.0, "unfused": 8.0},
        {"chunked": 10.0, "fused": 12.0},
    ]
    results = ranks(2).run(_measured, str(tmp_path), times, [False, False])
    for rank, (timed, order, kept) in enumerate(results):
        assert timed == ["chunked", "fused", "unfused"]
        assert order[:2] == ["chunked", "fused"]
        assert set(order[2:]) == {"remote_stores", "unfused"}, "in the order of the predictions"
        assert kept is None, rank


def test_what_other_work_may_have_lengthened_is_measured_again(ranks: Any, tmp_path: Path) -> None:
    """On rank 1 something else ran while chunked was measured."""
    slow = {"chunked": [31.0, 8.0], "fused": 12.0, "unfused": 15.0}
    results = ranks(2).run(
        _measured, str(tmp_path), [slow | {"chunked": [8.0, 8.5]}, slow], [False, False]
    )
    for rank, (timed, order, kept) in enumerate(results):
        assert timed == ["chunked", "fused", "unfused", "chunked"]
        assert order[:3] == ["chunked", "fused", "unfused"]
        expected = {"chunked": 0.85, "fused": 1.0, "unfused": pytest.approx(15 / 14)}
        assert kept == (expected if rank == 0 else None)


def test_what_is_doubtful() -> None:
    predicted = {"chunked": 10.0, "fused": 12.0, "unfused": 14.0}
    assert autotune.doubtful({}, {}) == set()
    assert autotune.doubtful({"fused": 99.0}, predicted) == set(), "with nothing to compare it with"
    assert autotune.doubtful({"chunked": 20.0, "fused": 25.0}, predicted) == set(), "all are slow"
    times = {"chunked": 20.0, "fused": 12.0, "unfused": 13.0}
    assert autotune.doubtful(times, predicted) == {"chunked"}


def test_a_pair_wins_ties() -> None:
    """Two measurements of one call differ by as much as a percent."""
    operator = operator_named("gemm_all_reduce")
    times = {"chunked": 99.5, "symm_mem": 100.0, "unfused": 101.0, "fused": 98.0}
    assert autotune.in_measured_order(operator, times) == [
        "fused",
        "symm_mem",
        "chunked",
        "unfused",
    ]
    assert autotune.in_measured_order(operator, {**times, "fused": 99.2})[0] == "symm_mem"


def test_a_pair_that_waits_for_its_host_wins_no_short_call() -> None:
    operator = operator_named("all_gather_gemm")
    short = {"async_tp": 90.0, "chunked": 110.0, "unfused": 150.0}
    assert autotune.in_measured_order(operator, short) == ["chunked", "unfused", "async_tp"]
    long = {name: 10 * us for name, us in short.items()}
    assert autotune.in_measured_order(operator, long) == ["async_tp", "chunked", "unfused"]


def test_what_rank_0_remembers_counts(ranks: Any, tmp_path: Path) -> None:
    """Ranks whose memories differ agree: rank 1 has none, and nobody measures."""
    for timed, order, _ in ranks(2).run(_measured, str(tmp_path), [{}, {}], [True, False]):
        assert timed == []
        assert order[:3] == ["unfused", "fused", "chunked"]


def _without_memory(folder: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotune, "has_memory", lambda *_: dist.get_rank() != 1)
        return _measured(folder, [{}, {}], [False, False])


def test_nothing_is_measured_where_one_rank_has_no_memory(ranks: Any, tmp_path: Path) -> None:
    """Peers would wait for the calls of that rank."""
    for timed, order, kept in ranks(2).run(_without_memory, str(tmp_path)):
        assert timed == []
        assert order[:3] == ["chunked", "fused", "unfused"], "as predicted"
        assert kept is None


@pytest.mark.parametrize("kept", [{}, {"chunked": 0.9, "unfused": 0.5}])
def test_times_of_some_are_no_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: dict[str, float]
) -> None:
    """As an earlier program has left them, which lacked memory."""
    memory, operator = MeasuredTimes(tmp_path), operator_named("gemm_all_reduce")
    candidates = tuple(operator.implementation(name) for name in ("chunked", "fused", "unfused"))
    measure = mock.Mock(return_value={"chunked": 3.0, "fused": 2.0, "unfused": 4.0})
    monkeypatch.setattr(autotune, "_memory", lambda: memory)
    monkeypatch.setattr(autotune, "kind_of", lambda *_, **__: KIND)
    monkeypatch.setattr(autotune, "measure", measure)
    memory.write(KIND, kept)
    group = SimpleNamespace(rank=0, world_size=2, exchange=lambda _, value: [value] * 2)
    rows = SimpleNamespace(by_rank=(4, 4))
    call: Any = SimpleNamespace(
        operator=operator, operands=None, group=group, rows=rows, gather=False
    )
    for _ in range(2):
        found = autotune.measured(call, candidates, PREDICTED)
        order = found.in_order(candidates, PREDICTED)
        assert [each.name for each in order] == ["fused", "chunked", "unfused"]
    assert measure.call_count == 1


def test_a_measurement_counts_for_a_class_of_rows() -> None:
    """Each number of rows has its own predicted times, and what was measured of others corrects
    them.
    """
    classes = {rows: autotune.class_of(rows) for rows in (0, 1, 2, 3, 5, 64, 65, 1000)}
    assert classes == {0: 1, 1: 1, 2: 2, 3: 4, 5: 8, 64: 64, 65: 128, 1000: 1024}
    operator = operator_named("gemm_all_reduce")
    measured = autotune.Measured(operator, {"fused": 2.0, "chunked": 1.0, "symm_mem": 1.0})
    few = {"fused": 10.0, "chunked": 15.0, "unfused": 18.0}
    assert measured.times_us(few) == {"chunked": 15.0, "fused": 20.0}
    many = {"fused": 10.0, "chunked": 25.0, "unfused": 18.0}
    assert list(measured.times_us(many)) == ["fused", "chunked"]
    candidates = list(map(operator.implementation, ("unfused", "chunked", "fused")))
    order = [each.name for each in measured.in_order(candidates, many)]
    assert order == ["fused", "chunked", "unfused"], "what was not measured comes last"


def test_one_candidate_is_no_measurement_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows of the same class may have two that are near each other."""
    operator = operator_named("gemm_all_reduce")
    candidates = tuple(operator.implementation(name) for name in ("chunked", "unfused"))
    monkeypatch.setattr(autotune, "may_measure", lambda _: True)
    measure = mock.Mock(return_value=autotune.Measured(operator, {"chunked": 3.0, "unfused": 1.0}))
    group = SimpleNamespace(cache=SimpleNamespace(measured={}), replays=mock.Mock())
    call: Any = SimpleNamespace(group=group, operator=operator)
    clear = {"chunked": 1.0, "unfused": 9.0}
    # The last one is as the first: what was measured meanwhile does not change it.
    for times, first in ((clear, "chunked"), (PREDICTED, "unfused"), (clear, "chunked")):
        decision: Any = SimpleNamespace(
            kind=("a class of rows",), implementations=candidates, predicted_us=times,
            choice=SimpleNamespace(worst_error=1.5), is_measured=False, has_run=False,
        )  # fmt: skip
        with mock.patch.object(autotune, "measured", measure):
            dispatch._measure(call, decision)
        assert decision.is_measured
        assert decision.implementations[0].name == first
    assert measure.call_count == 1


def test_ranks_break_ties_alike() -> None:
    """In the order of the measurements, never in that of a set, which differs by process."""
    measured = autotune.Measured(operator_named("gemm_all_reduce"), dict.fromkeys(PREDICTED, 1.0))
    same = dict.fromkeys(reversed(PREDICTED), 5.0)
    assert list(measured.times_us(same)) == ["unfused", "chunked", "fused", "remote_stores"]


def test_what_is_recorded_counts_no_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails to record some calls would go on in another buffer than its peers."""
    output = mock.Mock(place=(1, 0))
    kept = {"output": mock.Mock(spec=Fused, output=output), "absent": None}
    group = SimpleNamespace(kept=kept, replays=mock.Mock(), perform=lambda outcome: outcome)
    group.replays.record.side_effect = torch.OutOfMemoryError
    implementation: Any = SimpleNamespace(name="chunked", run=lambda _: torch.ones(1))
    layers: Any = [SimpleNamespace(group=group)]
    assert autotune._record(implementation, layers, 3) is None
    output.go_back.assert_called_once_with((1, 0))


def test_what_rank_0_does_not_remember_is_measured(ranks: Any, tmp_path: Path) -> None:
    times = [{"chunked": 3.0, "fused": 2.0, "unfused": 4.0}] * 2
    for timed, order, _ in ranks(2).run(_measured, str(tmp_path), times, [False, True]):
        assert len(timed) == 3
        assert order[:3] == ["fused", "chunked", "unfused"]


def _on_the_cpu() -> int:
    interlace.group_of().release()
    with interlace.autotune():
        _call()
    return len(interlace.group_of().cache.measured)


def test_nothing_is_measured_on_the_cpu(ranks: Any) -> None:
    assert ranks(2).run(_on_the_cpu) == [0, 0]


def test_as_many_are_measured_as_fit_in_the_budget() -> None:
    candidates: Any = [SimpleNamespace(name=name) for name in "abcd"]
    few = autotune.near_the_best(candidates, {"a": 10.0, "b": 14.9, "c": 15.1, "d": 11.0}, 1.5)
    assert [each.name for each in few] == ["a", "b", "d"]
    slow = autotune.near_the_best(candidates, dict.fromkeys("abcd", 20e3), 1.5)
    assert [each.name for each in slow] == ["a", "b"]


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, by_default, by_word in (("1", True, True), ("0", False, False), ("", False, True)):
        monkeypatch.setenv("INTERLACE_AUTOTUNE", value)
        assert autotune.is_enabled() is by_default
        assert autotune.is_enabled("measured") is by_word
        with interlace.autotune(False):
            assert not autotune.is_enabled("measured")
        with interlace.autotune():
            assert autotune.is_enabled()
            with monkeypatch.context() as patch:
                # Another run might choose differently.
                patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
                assert not autotune.is_enabled("measured")


def test_copies_of_a_weight_as_far_as_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 1 MiB, and an L2 of 4: eight copies; or as many as there is memory for."""
    properties = SimpleNamespace(L2_cache_size=4 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    w = torch.ones(256, 1024)
    operands = Operands(torch.ones(4, 1024), w, None, None, None, torch.float32)
    group: Any = SimpleNamespace(device=torch.device("cpu"))
    call = GemmCall(
        operator=operator_named("gemm_all_reduce"),  # type: ignore[arg-type]
        operands=operands,
        rows=RowPlan((2, 2), (), 4, 4, 4),
        gather=False,
        group=group,
        group_name="",
        config=GemmAllReduce.config_type(),
        configs={},
        mark=0,
        impl="auto",
    )
    weights = [layer.operands.w for layer in autotune._layers(call)]
    assert len({weight.data_ptr() for weight in weights}) == len(weights) == 8
    assert weights[0] is w
    assert all(torch.equal(weight, w) for weight in weights)

    class Scarce(torch.Tensor):
        left = 2

        def clone(self, *_: Any, **__: Any) -> torch.Tensor:
            Scarce.left -= 1
            if Scarce.left < 0:
                raise torch.OutOfMemoryError
            return torch.ones(256, 1024)

    scarce = dataclasses.replace(operands, w=w.as_subclass(Scarce))
    assert len(autotune._layers(dataclasses.replace(call, operands=scarce))) == 3


# Files


def test_times_are_remembered(tmp_path: Path) -> None:
    folder = tmp_path / "interlace"
    assert MeasuredTimes(folder).read(KIND) is None
    MeasuredTimes(folder).write(KIND, {"fused": 1.5, "unfused": 2.0})
    assert MeasuredTimes(folder).read(KIND) == {"fused": 1.5, "unfused": 2.0}
    assert MeasuredTimes(folder).read({**KIND, "ranks": 4}) is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [file.suffix for file in folder.iterdir()] == [".json"], "no part of a file is left"


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"kind": {}, "times_us": {"fused": 1.0}}', '{"kind": 1}',
        '{"kind": KIND, "times_us": {"fused": "fast"}}',
        '{"kind": KIND, "times_us": {"fused": -1}}',
        '{"kind": KIND, "times_us": [1]}', "\x00\x01", "[" * 100_000,
        '{"kind": KIND, "multiples": {"fused": 1%s}}' % ("0" * 400),
    ],
)  # fmt: skip
def test_files_that_are_none_are_ignored(tmp_path: Path, text: str) -> None:
    memory = MeasuredTimes(tmp_path)
    memory.write(KIND, {"fused": 1.5})
    (file,) = tmp_path.iterdir()
    file.write_text(text.replace("KIND", json.dumps(KIND)))
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert memory.read(KIND) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert memory.read(KIND) is None, "one warning is enough"


def test_a_folder_that_others_may_write_is_ignored(tmp_path: Path) -> None:
    MeasuredTimes(tmp_path).write(KIND, {"fused": 1.5})
    tmp_path.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others than this user may write to it"):
        assert MeasuredTimes(tmp_path).read(KIND) is None
    tmp_path.chmod(0o700)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = MeasuredTimes(tmp_path / "file" / "folder")
    with pytest.warns(RuntimeWarning, match="measured times are not kept in"):
        memory.write(KIND, {"fused": 1.5})
    assert memory.read(KIND) is None


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        MeasuredTimes(tmp_path).write(KIND, {"fused": 1.5})
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MOST_FILES", 3)
    memory = MeasuredTimes(tmp_path)
    for ranks in range(5):
        memory.write({**KIND, "ranks": ranks}, {"fused": 1.0 + ranks})
        by_age = sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime)
        for age, file in enumerate(by_age):
            os.utime(file, (time.time() - 100 + age,) * 2)
    found = [memory.read({**KIND, "ranks": ranks}) for ranks in range(5)]
    assert found == [None, None, {"fused": 3.0}, {"fused": 4.0}, {"fused": 5.0}]


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv("INTERLACE_CACHE_DIR", raising=False)
    assert cache_folder("measured") == Path("/somewhere/interlace/measured")
    monkeypatch.setenv("INTERLACE_CACHE_DIR", "/elsewhere")
    assert cache_folder("measured") == Path("/elsewhere/measured")


def test_a_pair_that_keeps_the_host_busy_is_not_preferred() -> None:
    """A stock pair comes before what is hardly faster, but not one whose host an eager program
    waits for.
    """
    times = {"chunked": 600.0, "async_tp": 605.0, "unfused": 700.0}
    operator = operator_named("gemm_reduce_scatter")
    assert operator.pairs_among(times) == {"async_tp", "unfused"}
    assert operator.preferred_among(times) == {"unfused"}
    profile = profile_of("NVIDIA H200")

    def taken(times_us: dict[str, float]) -> str:
        return fastest(operator.name, profile, times_us, lambda _: GemmConfig()).impl

    assert taken(times) == "chunked"
    assert taken(times | {"async_tp": 590.0}) == "async_tp"
    assert taken(times | {"unfused": 610.0}) == "unfused"
