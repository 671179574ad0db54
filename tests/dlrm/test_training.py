"""A stopped run resumes exactly, checkpoints fit any number of ranks, a dead rank ends all."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import Faults, LaunchError
from interlace.nn import EmbeddingTable
from interlace_dlrm import (
    DLRM,
    Batch,
    BatchStream,
    CriteoFiles,
    SyntheticClicks,
    Trainer,
    latest_checkpoint,
    measure_step,
)
from tests.errors import error_of
from tests.nn.features import weights_of

ROWS, BATCH = [20] * 3, 12


def _trainer(seed: int = 0, **options: Any) -> Trainer:
    tables = [EmbeddingTable(f"C{i}", rows, 4, bag_length=1) for i, rows in enumerate(ROWS)]
    model = DLRM(
        tables,
        bottom=(8,),
        top=(8,),
        gradient="rowwise_adagrad",
        learning_rate=0.1,
        seed=seed,
        **options,
    )
    model.embeddings.impl = "unfused"
    return Trainer(model, torch.optim.Adagrad(model.dense.parameters(), 0.1))


def _batches(count: int) -> list[Batch]:
    source = SyntheticClicks(count * BATCH, cardinality=15)
    return list(
        BatchStream(
            source, BATCH, rows=ROWS, rank=dist.get_rank(), world_size=dist.get_world_size()
        )
    )


def _run(folder: str | None) -> list[float]:
    """Do eight steps, with a checkpoint after four of them."""
    trainer = _trainer()
    losses = []
    for batch in _batches(8):
        losses.append(trainer.step(batch))
        if folder and trainer.steps == 4:
            trainer.save(Path(folder), note="half way")
    return trainer.mean_over_ranks(losses)


def _resume(folder: str) -> dict[str, Any]:
    trainer = _trainer(seed=1)
    result = latest_checkpoint(Path(folder))
    assert result is not None
    extra = trainer.load(result)
    states = [float(state.sum()) for state in trainer.model.embeddings.buffers()]
    losses = [trainer.step(batch) for batch in _batches(8)[trainer.steps :]]
    return {
        "extra": extra,
        "losses": trainer.mean_over_ranks(losses),
        "steps": trainer.steps,
        "states": min(states, default=1.0),
    }


def test_a_resumed_run_goes_on_exactly(ranks: Any, tmp_path: Path) -> None:
    losses = ranks(2).run(_run, str(tmp_path))[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    for result in ranks(2).run(_resume, str(tmp_path)):
        assert result == {
            "extra": {"note": "half way"},
            "losses": losses[4:],
            "steps": 8,
            "states": result["states"],
        }
        assert result["states"] > 0
    # Four ranks hold other tables and add in another order: the same up to rounding.
    for result in ranks(4).run(_resume, str(tmp_path)):
        assert result["losses"] == pytest.approx(losses[4:], rel=1e-5)


def _spoilt(folder: str) -> list[Any]:
    trainer = _trainer()
    path = Path(folder) / "step-00000004"
    before = weights_of(trainer.model.embeddings)
    errors = [error_of(trainer.load, path), error_of(trainer.load, Path(folder) / "nothing")]
    after = weights_of(trainer.model.embeddings)
    return [*errors, all(torch.equal(before[name], after[name]) for name in before)]


class _Evil:
    """An object that makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_a_checkpoint_that_cannot_be_read(ranks: Any, tmp_path: Path) -> None:
    """A pickle in place of tensors is refused, on every rank, and not executed."""
    ranks(2).run(_run, str(tmp_path))
    torch.save(
        {"shards.C0:0-4.weight": _Evil(tmp_path / "executed")},
        tmp_path / "step-00000004" / "embeddings-1.pt",
    )
    for spoilt, nothing, unchanged in ranks(2).run(_spoilt, str(tmp_path)):
        assert spoilt[0] == nothing[0] == "DataError"
        assert spoilt[1].startswith(
            "load_checkpoint must succeed on every rank; got on rank 0: UnpicklingError: Weights "
            "only load failed."
        )
        assert "FileNotFoundError" in nothing[1]
        assert unchanged
    assert not (tmp_path / "executed").exists()


def _unwritable(folder: str) -> Any:
    return error_of(_trainer().save, Path(folder) / "file" / "below")


def test_a_checkpoint_that_cannot_be_written(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for kind, message, _ in ranks(2).run(_unwritable, str(tmp_path)):
        assert kind == "DataError"
        assert message.startswith(
            "save_checkpoint must succeed on every rank; got on rank 0: NotADirectoryError"
        )


def _slow_disk(folder: str) -> bool:
    """Save while rank 1 writes for longer than the group's deadline; tell if the group is broken
    then.
    """
    group_deadline_s = 2.0
    trainer = _trainer()
    group = trainer.model.embeddings.group
    save = torch.save

    def slow(*args: Any) -> None:
        if dist.get_rank() == 1:
            time.sleep(1.5 * group_deadline_s)
        save(*args)

    before_s = group.deadline_s
    group.deadline_s = group_deadline_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", slow)
        trainer.save(Path(folder))
    group.deadline_s = before_s
    return group.broken


def test_a_slow_disk_on_one_rank_breaks_nothing(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(_slow_disk, str(tmp_path)) == [False, False]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def _too_slow_a_disk(folder: str) -> Any:
    process_group = dist.new_group()
    trainer = _trainer(group=process_group)
    save = torch.save

    def stuck(*args: Any) -> None:
        if dist.get_rank() == 1:
            time.sleep(3)
        save(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", stuck)
        error = error_of(lambda: trainer.save(Path(folder), deadline_s=1.0))
    return error, trainer.model.embeddings.group.broken


def test_the_deadline_of_a_checkpoint_can_be_set(ranks: Any, tmp_path: Path) -> None:
    """The rank that was ready first gives up and names the other one; no checkpoint appears."""
    (error, broken), _ = ranks(2).run(_too_slow_a_disk, str(tmp_path))
    assert error[0] == "PeerTimeoutError"
    assert error[1].startswith("save_checkpoint: rank 0 waited 1 s for rank 1")
    assert broken
    assert latest_checkpoint(tmp_path) is None


def _full_disk(folder: str, failing: str) -> Any:
    """Save a step again, while rank 1 cannot write or rank 0 cannot rename."""
    trainer = _trainer()
    trainer.save(Path(folder), note="first")
    save, rename = torch.save, Path.rename

    def full(value: object, file: Path) -> None:
        if failing == "write" and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        save(value, file)

    def refused(path: Path, target: Path) -> Any:
        if failing == "rename" and path.suffix == ".partial":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", full)
        patch.setattr(Path, "rename", refused)
        error = error_of(lambda: trainer.save(Path(folder), note="second"))
    result = latest_checkpoint(Path(folder))
    assert result is not None
    return error, trainer.load(result), trainer.model.embeddings.group.broken


@pytest.mark.parametrize(("failing", "rank"), [("write", 1), ("rename", 0)])
def test_a_checkpoint_that_fails_leaves_the_old_one_as_it_was(
    ranks: Any, tmp_path: Path, failing: str, rank: int
) -> None:
    for error, extra, broken in ranks(2).run(_full_disk, str(tmp_path), failing):
        assert error[0] == "DataError"
        assert error[1].startswith(
            f"save_checkpoint must succeed on every rank; got on rank {rank}: OSError"
        )
        assert extra == {"note": "first"}
        assert not broken
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


class _Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


def _kill_between_renames(folder: str) -> list[Any]:
    """Save a step again, and die when the old checkpoint has no name and the new one none yet."""
    trainer, path = _trainer(), Path(folder) / "step-00000000"
    trainer.save(Path(folder), note="first")
    rename = Path.rename

    def killed(source: Path, target: Path) -> Any:
        if source.suffix == ".partial":
            raise _Killed
        return rename(source, target)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(_Killed):
        patch.setattr(Path, "rename", killed)
        trainer.save(Path(folder), note="second")
    latest = latest_checkpoint(Path(folder))
    assert latest is not None
    seen: list[Any] = [path.exists(), trainer.load(latest), trainer.load(path)]
    trainer.save(Path(folder), note="third")
    latest = latest_checkpoint(Path(folder))
    assert latest is not None
    return [*seen, latest.name, trainer.load(latest)]


def test_a_kill_between_the_renames_leaves_the_old_checkpoint(ranks: Any, tmp_path: Path) -> None:
    (seen,) = ranks(1).run(_kill_between_renames, str(tmp_path))
    assert seen == [False, *[{"note": "first"}] * 2, "step-00000000", {"note": "third"}]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    """The latest has the most steps, not the last name."""
    assert latest_checkpoint(tmp_path) is None
    for name, is_complete in {
        "step-00000009": True,
        "step-99999999": True,
        "step-100000000": True,
        ".step-100000001.partial": True,
        "step-100000002": False,
        "step-last": True,
    }.items():
        (tmp_path / name).mkdir()
        if is_complete:
            (tmp_path / name / "checkpoint.json").write_text(json.dumps({}))
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100000000"


def _measure() -> dict[str, Any]:
    trainer = _trainer()
    trainer.model.embeddings.impl = "fused"
    batch = _batches(1)[0]
    before = [value.clone() for value in trainer.model.state_dict().values()]
    times = measure_step(trainer, batch, repeats=2)
    equal = all(
        torch.equal(a, b) for a, b in zip(before, trainer.model.state_dict().values(), strict=True)
    )
    return {
        "same": equal,
        "times": times,
        "steps": trainer.steps,
        "rate": trainer.model.embeddings.learning_rate,
    }


def test_measuring_leaves_the_model_alone(ranks: Any) -> None:
    outcomes = ranks(2).run(_measure)
    for result in outcomes:
        times = result["times"]
        assert result["same"]
        assert (result["steps"], result["rate"]) == (0, 0.1)
        assert not times.meaningful
        assert times.step_ms > 0
        assert times.compute_ms > 0
        assert times.exposed_ms == max(0, times.step_ms - times.compute_ms)
        assert times == outcomes[0]["times"], "the slowest rank's, on every rank"


def _evaluate() -> Any:
    """Evaluate ten samples in batches of four: the padding of the last batch must not count."""
    trainer = _trainer()
    options: dict[str, Any] = {
        "rows": ROWS,
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "last": "pad",
    }
    judged = trainer.evaluate(BatchStream(SyntheticClicks(10, seed=1), 4, **options))
    nothing = trainer.evaluate([])
    return judged, nothing.samples


def test_evaluation_does_not_depend_on_the_ranks(ranks: Any) -> None:
    alone, nothing = ranks(1).run(_evaluate)[0]
    assert (alone.samples, nothing) == (10, 0)
    for judged, _ in ranks(2).run(_evaluate):
        assert judged.samples == 10
        assert judged.auc == alone.auc
        assert judged.loss == pytest.approx(alone.loss, rel=1e-6)


# Real rows

SAMPLE = Path(__file__).parents[3] / "shared" / "data" / "criteo_sample.csv"


def _learn_real_rows(path: str) -> dict[str, Any]:
    """Do five epochs of five batches: the first with the fused kernels, and all again without."""
    rows = [50] * 3
    tables = [EmbeddingTable(f"C{i + 1}", count, 8, bag_length=1) for i, count in enumerate(rows)]
    stream = BatchStream(
        CriteoFiles([path], strict=True),
        40,
        rows=rows,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    first: dict[str, list[float]] = {}
    for impl in ("unfused", "fused"):
        model = DLRM(tables, bottom=(16,), top=(16,), gradient="rowwise_adagrad", learning_rate=0.1)
        trainer = Trainer(model, torch.optim.Adagrad(model.dense.parameters(), 0.1))
        model.embeddings.impl = impl
        first[impl] = trainer.mean_over_ranks([trainer.step(batch) for batch in stream])
    model.embeddings.impl = "unfused"
    for _ in range(4):
        last = trainer.mean_over_ranks([trainer.step(batch) for batch in stream])
    return {"first": first, "last": last, "judged": trainer.evaluate(stream)}


@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample of real rows is not here")
def test_the_loss_falls_on_real_rows(ranks: Any) -> None:
    for result in ranks(2).run(_learn_real_rows, str(SAMPLE)):
        fused, unfused = result["first"]["fused"], result["first"]["unfused"]
        assert len(fused) == 5
        assert fused == pytest.approx(unfused, rel=1e-5)
        assert sum(result["last"]) < 0.8 * sum(fused), result
        assert result["judged"].samples == 200
        assert result["judged"].auc > 0.75, result


# Faults


def _dies(pids: str) -> None:
    (Path(pids) / str(dist.get_rank())).write_text(str(os.getpid()))
    trainer = _trainer()
    trainer.model.embeddings.impl = "fused"
    batch = _batches(1)[0]
    trainer.step(batch)
    interlace.set_deadline(200.0)
    faults = Faults(die_after_puts=2) if dist.get_rank() == 1 else Faults()
    with interlace.inject(faults):
        trainer.step(batch)


@pytest.mark.usefixtures("quick_launches")
def test_a_rank_that_dies_in_mid_step_ends_all(tmp_path: Path) -> None:
    """The caller learns which rank died, without waiting out the deadline.

    No process is left.
    """
    with pytest.raises(LaunchError, match=r"rank 1 ended without a result: .*SIGKILL"):
        interlace.launch(_dies, 2, str(tmp_path), backend="cpu", timeout_s=120)
    for rank in range(2):
        assert not os.path.exists(f"/proc/{(tmp_path / str(rank)).read_text()}")


def _stalls() -> Any:
    """Rank 1 computes its forward pass and leaves out the backward pass."""
    group = dist.new_group()
    trainer = _trainer(group=group)
    trainer.model.embeddings.impl = "fused"
    batch = _batches(1)[0]
    trainer.step(batch)
    interlace.set_deadline(1.0, group)
    start = time.monotonic()
    if dist.get_rank() == 1:
        trainer.model(batch.dense, batch.indices)
        time.sleep(4)
        return None
    result = error_of(trainer.step, batch)
    return result, time.monotonic() - start


def test_a_rank_that_stalls_in_mid_step(ranks: Any) -> None:
    result, seconds = ranks(2).run(_stalls)[0]
    # Collectives that were given up have left their process groups in an unknown state
    ranks(2).close()
    assert result[0] == "PeerTimeoutError"
    assert seconds < 60
