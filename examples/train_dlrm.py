r"""Train a DLRM with tables sharded over ranks; one kernel pools and communicates.

Without arguments it trains a small model on made-up clicks for some seconds and checks itself: the
loss falls, and fused and unfused runs have the same losses. With Criteo's files, on GPUs:

    python examples/train_dlrm.py --data train.txt --world-size 4 --batch 8192 \
        --rows 1000000 --width 64 --checkpoint runs/a
    torchrun --nproc-per-node 4 examples/train_dlrm.py --data train.txt --batch 8192 ...
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from shared.commands import is_first_rank, make_console, run_with_options

import interlace
from interlace.documents import to_json
from interlace.nn import EmbeddingTable
from interlace_dlrm import (
    DLRM,
    BatchStream,
    CriteoFiles,
    SyntheticClicks,
    Trainer,
    latest_checkpoint,
    measure_step,
)

HELD_OUT_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run, the same on every rank."""

    data: Annotated[
        list[Path] | None, typer.Option(help="A file in Criteo's format; may be repeated.")
    ] = None
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"A file to evaluate on; default: every {HELD_OUT_EVERY}th batch of --data."
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            "--synthetic", min=1, help="Train on this number of made-up samples, not on --data."
        ),
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at a corrupt line instead of skipping it.")
    ] = False
    impl: Annotated[str, typer.Option(help="auto, fused or unfused.")] = "auto"
    batch: Annotated[int, typer.Option(min=1, help="Samples per global batch.")] = 64
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this number of steps.")] = (
        None
    )
    epochs: Annotated[int, typer.Option(min=1, help="Times to go through the data.")] = 1
    tables: Annotated[int, typer.Option(min=1, max=26, help="Categorical features to use.")] = 26
    rows: Annotated[
        int, typer.Option(min=2, help="Rows of each table, to which categories are hashed.")
    ] = 1000
    width: Annotated[int, typer.Option(min=1, help="Width of an embedding.")] = 16
    lookups: Annotated[int, typer.Option(min=1, help="Lookups per bag; Criteo has 1.")] = 1
    jagged: Annotated[
        bool, typer.Option("--jagged", help="Bags of 0 to 2 * lookups - 1 lookups.")
    ] = False
    mode: Annotated[str, typer.Option(help="Pooling of a bag: sum or mean.")] = "sum"
    bottom: Annotated[str, typer.Option(help="Hidden widths of the bottom MLP.")] = "64,32"
    top: Annotated[str, typer.Option(help="Hidden widths of the top MLP.")] = "64,32"
    update: Annotated[str, typer.Option(help="The tables' optimizer: rowwise_adagrad or sgd.")] = (
        "rowwise_adagrad"
    )
    learning_rate: Annotated[float, typer.Option(help="Learning rate of the tables.")] = 0.05
    dense_learning_rate: Annotated[float, typer.Option(help="Learning rate of the MLPs.")] = 0.05
    cardinality: Annotated[int, typer.Option(min=1, help="Categories of a made-up feature.")] = 200
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and made-up samples.")] = 0
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints; one is written at the end.")
    ] = None
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps between two checkpoints.")] = 0
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --checkpoint.")
    ] = False
    times: Annotated[
        bool, typer.Option("--times", help="Measure the times of a step, fused and unfused.")
    ] = False
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write losses, AUC and times to a file.")
    ] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False


def streams(settings: Settings) -> tuple[BatchStream, BatchStream]:
    """Return this rank's batches for training, and its batches for the evaluation."""
    cut: dict[str, Any] = {
        "rows": [settings.rows] * settings.tables,
        "lookups": settings.lookups,
        "jagged": settings.jagged,
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
    }
    if not settings.data:
        count = settings.samples or 0
        training, evaluation = (
            SyntheticClicks(
                samples,
                seed=settings.seed + i,
                model_seed=settings.seed,
                cardinality=settings.cardinality,
            )
            for i, samples in enumerate((count, max(settings.batch, count // 8)))
        )
        return BatchStream(training, settings.batch, **cut), BatchStream(
            evaluation, settings.batch, last="pad", **cut
        )
    files = CriteoFiles(settings.data, strict=settings.strict)
    if settings.held_out:
        held_out = CriteoFiles(settings.held_out, strict=settings.strict)
        return BatchStream(files, settings.batch, **cut), BatchStream(
            held_out, settings.batch, last="pad", **cut
        )
    cut["held_out_every"] = HELD_OUT_EVERY
    return BatchStream(files, settings.batch, **cut), BatchStream(
        files, settings.batch, held_out=True, last="pad", **cut
    )


def build(settings: Settings) -> Trainer:
    """Build the model and its optimizer; ranks differ only in the tables that they hold."""
    tables = [
        EmbeddingTable(
            f"C{t + 1}",
            settings.rows,
            settings.width,
            mode=settings.mode,
            bag_length=None if settings.jagged else settings.lookups,
            pooling_factor=settings.lookups,
        )
        for t in range(settings.tables)
    ]
    model = DLRM(
        tables,
        bottom=numbers("bottom", settings.bottom),
        top=numbers("top", settings.top),
        gradient=settings.update,
        learning_rate=settings.learning_rate,
        batch=settings.batch,
        seed=settings.seed,
    )
    model.embeddings.impl = settings.impl
    return Trainer(
        model, torch.optim.Adagrad(model.dense.parameters(), settings.dense_learning_rate)
    )


def train(settings: Settings) -> dict[str, Any]:
    """Train on this rank, and evaluate the model; the result is the same on every rank."""
    console = make_console(is_quiet=settings.quiet or dist.get_rank() != 0)
    trainer = build(settings)
    if settings.resume and settings.checkpoint:
        checkpoint = latest_checkpoint(settings.checkpoint)
        if checkpoint is None:
            console.print(f"No checkpoint in {settings.checkpoint} yet: from the beginning")
        else:
            trainer.load(checkpoint)
            console.print(f"Resumed after {trainer.steps} steps, from {checkpoint}")
    console.print(trainer.model.embeddings.plan)
    training, evaluation = streams(settings)
    # A file that is not clicks is refused now, not after hours of training.
    next(iter(evaluation), None)
    batches = itertools.chain.from_iterable(itertools.repeat(training, settings.epochs))
    losses: list[torch.Tensor] = []
    with progress(console) as bar:
        task = bar.add_task(
            "training", total=settings.steps, completed=trainer.steps, loss=math.nan
        )
        # A resumed run reads the batches that it has learnt from already, and skips them.
        for batch in itertools.islice(batches, trainer.steps, settings.steps):
            losses.append(trainer.step(batch.to(trainer.device)))
            # Reading a loss makes the host wait for the GPU, so the bar does it rarely.
            if trainer.steps % 10 == 0:
                bar.update(task, completed=trainer.steps, loss=float(losses[-1]))
            if (
                settings.checkpoint
                and settings.checkpoint_every
                and trainer.steps % settings.checkpoint_every == 0
            ):
                trainer.save(settings.checkpoint)
        bar.update(task, completed=trainer.steps)
    if not losses:
        console.print(f"Nothing left to do: the model has been trained for {trainer.steps} steps.")
    elif settings.checkpoint:
        console.print(f"Saved {trainer.save(settings.checkpoint)}")
    quality = trainer.evaluate(evaluation)
    result: dict[str, Any] = {
        "losses": trainer.mean_over_ranks(losses),
        **dataclasses.asdict(quality),
        "steps": trainer.steps,
    }
    if result["losses"]:
        count = max(1, min(5, len(losses) // 2))
        first, last = mean(result["losses"][:count]), mean(result["losses"][-count:])
        console.print(
            f"{trainer.steps} steps, loss {first:.4f} -> {last:.4f} (means of the first and the "
            f"last {count})"
        )
    if quality.samples:
        auc = "none for one class" if math.isnan(quality.auc) else f"{quality.auc:.4f}"
        console.print(f"Held out: {quality.samples} samples, loss {quality.loss:.4f}, AUC {auc}")
    else:
        console.print(f"Held out: nothing, of fewer than {HELD_OUT_EVERY} batches")
    if settings.times:
        result["times"] = report_times(console, trainer, next(iter(training)))
    return result


def report_times(console: Console, trainer: Trainer, batch: Any) -> dict[str, Any]:
    """Measure a step and its communication, with the fused kernels and with the unfused pair."""
    times = {}
    moved = batch.to(trainer.device)
    for impl in ("fused", "unfused"):
        trainer.model.embeddings.impl = impl
        measured = measure_step(trainer, moved)
        times[impl] = dataclasses.asdict(measured)
        console.print(
            f"{impl}: step {measured.step_ms:.2f} ms, compute alone {measured.compute_ms:.2f} ms, "
            f"exposed communication {measured.exposed_ms:.2f} ms"
        )
    if trainer.device.type == "cpu":
        console.print(
            "These times are of Triton's interpreter on the CPU and say nothing about speed.",
            style="yellow",
        )
    return times


def progress(console: Console) -> Progress:
    """Make a progress bar with the loss."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )
    return Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=console.quiet
    )


def mean(values: list[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def train_twice(settings: Settings, fused_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train with the unfused operator, and the first steps again with the fused kernels."""
    unfused = train(dataclasses.replace(settings, impl="unfused"))
    return unfused, train(
        dataclasses.replace(
            settings, impl="fused", steps=fused_steps, samples=fused_steps * settings.batch
        )
    )


def check_itself(world_size: int, backend: str) -> None:
    """Train a small model, and check that it learns, and learns the same with the fused kernels.

    On the CPU the fused kernels run in an interpreter, so only a few steps use them.
    """
    small = Settings(
        samples=960,
        batch=32,
        tables=4,
        cardinality=4,
        rows=16,
        width=4,
        bottom="8",
        top="16",
        learning_rate=0.1,
        dense_learning_rate=0.1,
        quiet=True,
    )
    unfused, fused = interlace.launch(train_twice, world_size, small, 4, backend=backend)[0]
    first, last = mean(unfused["losses"][:5]), mean(unfused["losses"][-5:])
    difference = max(abs(a - b) for a, b in zip(fused["losses"], unfused["losses"], strict=False))
    if is_first_rank():
        print(
            f"{unfused['steps']} steps on {world_size} ranks: loss {first:.4f} -> {last:.4f}; ",
            end="",
        )
        print(f"held out: loss {unfused['loss']:.4f}, AUC {unfused['auc']:.4f}")
        print(
            f"{fused['steps']} of them with the fused kernels: losses differ by at most "
            f"{difference:.1e}"
        )
    assert last < 0.8 * first
    assert unfused["auc"] > 0.55
    assert len(fused["losses"]) == 4
    assert difference < 1e-5


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Read positive integers that are separated by commas.

    Raises:
        typer.BadParameter: they are something else.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(
            f"--{option} must be positive numbers, separated by commas; got {text!r}. Say 64,32."
        )
    return tuple(map(int, parts))


def require_used(settings: Settings) -> None:
    """Refuse options that would be ignored beside, or without, others, or be of no use at the end.

    Raises:
        typer.BadParameter: one is given.
    """
    for option in ("bottom", "top"):
        numbers(option, getattr(settings, option))
    if settings.json_file and not settings.json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"--json must be in a folder; got {settings.json_file}.")
    if settings.data and settings.samples is not None:
        raise typer.BadParameter("--data and --synthetic must not come together. Leave one out.")
    for option, value, needed, has in (
        ("--held-out", settings.held_out, "--data", settings.data),
        ("--strict", settings.strict, "--data", settings.data),
        ("--resume", settings.resume, "--checkpoint", settings.checkpoint),
        ("--checkpoint-every", settings.checkpoint_every, "--checkpoint", settings.checkpoint),
    ):
        if value and not has:
            raise typer.BadParameter(f"{option} must come with {needed}. Add it.")
    if not settings.data and settings.samples is None and settings != Settings():
        raise typer.BadParameter("options must come with --data or --synthetic. Add one of them.")


def main(settings: Settings, ranks: int, backend: str) -> None:
    """Train a DLRM on Criteo's click logs or on made-up clicks.

    Without --data and --synthetic, train a small model and check it.
    """
    require_used(settings)
    if not settings.data and settings.samples is None:
        check_itself(ranks, backend)
        return
    result = interlace.launch(train, ranks, settings, backend=backend)[0]
    if settings.json_file is not None and is_first_rank():
        described = {"settings": dataclasses.asdict(settings), **result}
        settings.json_file.write_text(to_json(described, default=str))


if __name__ == "__main__":
    run_with_options(main, Settings)
