"""``interlace bench`` and ``interlace tune`` of batches of products before and after an all-to-all."""

from __future__ import annotations

from pathlib import Path

from interlace.cli import bench, tuned
from interlace.cli.bench_products import parse_work
from interlace.cli.bench_ranks import run_batch_rank

# A rank's experts of two layers, forward and backward: Mixtral's 8 of 4096 x 14336 on 4 ranks, and
# 64 of 2048 x 1408.
SHAPES = {
    "bmm_all_to_all": ("2x5120x4096x14336", "2x5120x4096x28672", "16x1920x2048x1408"),
    "all_to_all_bmm": ("2x5120x28672x4096", "2x5120x14336x4096", "16x1920x2816x2048"),
}
_SIZES = "BxMxNxK", "products"


def run(
    operator: str,
    shapes: list[str] | None,
    world_size: int | None,
    dtype: str,
    json_file: Path | None,
) -> None:
    """Measure every shape; tables on the terminal, everything in ``json_file``."""
    work = parse_work(operator, shapes or SHAPES[operator], dtype, *_SIZES)
    document = bench.measure_on_gpus(
        "bench", f"Measuring {operator}", work, run_batch_rank, (dtype,), world_size, json_file
    )
    bench.show(document, operator, json_file)


def run_tune(
    operator: str,
    shapes: list[str] | None,
    world_size: int | None,
    dtype: str,
    table: Path,
    json_file: Path | None,
) -> None:
    """The same, and put the fastest way of each shape in the tuned table."""
    old = tuned.read(table, operator)  # before minutes are spent
    work = parse_work(operator, shapes or SHAPES[operator], dtype, *_SIZES)
    document = bench.measure_on_gpus(
        "tune", f"Measuring {operator}", work, run_batch_rank, (dtype,), world_size, json_file
    )
    bench.write_table(document, old, operator, table)
