"""Draw the pictures of docs/t3.md: ``python docs/pictures/draw_t3.py`` writes them beside this file.

One explains; the others are results of the simulator, drawn by its own commands. About three minutes.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from draw import COMPUTE, FOLDER, GREY, PALE, SEND, SUM, arrow, block, box, canvas, label
from matplotlib import pyplot as plt
from typer.testing import CliRunner

from interlace.cli.app import app

RESULTS = FOLDER.parents[1] / "benchmarks" / "results"
MEASURED = [str(RESULTS / f"2026-11-21-{name}-4xh200.json") for name in ("gemm_reduce_scatter", "gemm_all_to_all")]
COMMANDS = (
    ("sim", "t3", "--plot", "{folder}/t3-traffic.png"),
    ("sim", "t3-measured", *MEASURED, "--plot", "{folder}/t3-h200.png"),
    ("sim", "reproduce", "t3", "--out", "{scratch}"),
)


def mechanism() -> None:
    """A ring of four: what becomes of each chunk that a GPU produces, and what it meets at the next."""
    figure, axes = canvas(112, 62)
    label(axes, 2, 59, "Fused reduce-scatter on a ring of 4 GPUs: the product is unchanged, its addresses are not", size=11, bold=True)
    rows = (
        ("chunk 0", "remote_map", "stores go to the next GPU", SEND, "its chunk 1"),
        ("chunk 1", "dma_map", "own + 1 update, then DMA", COMPUTE, "its chunk 2"),
        ("chunk 2", "dma_map", "own + 1 update, then DMA", COMPUTE, "its chunk 3"),
        ("chunk 3", "in no map", "own + 1 update: the sum of 4", SUM, ""),
    )
    for number, (chunk, entry, meaning, fill, there) in enumerate(rows):
        y = 42 - 11 * number
        block(axes, 6, y, 15, 7, fill)
        axes.text(13.5, y + 3.5, chunk, ha="center", va="center", color="white", fontsize=10, weight="bold")
        label(axes, 24, y + 5, entry, size=9, mono=True)
        label(axes, 24, y + 2, meaning, size=9)
        if not there:
            continue
        box(axes, 86, y - 11, 18, 7, there, fill=PALE)
        if entry == "remote_map":
            arrow(axes, (43, y + 3.5), (86, y - 5.5), color=fill)
            label(axes, 68, y + 0.8, "stores", size=8.5, color=fill)
        else:
            box(axes, 51, y + 0.5, 9, 6, "tracker\n2 of 2", size=7.5)
            box(axes, 65, y + 0.5, 9, 6, "DMA", size=8.5)
            arrow(axes, (60, y + 3.5), (65, y + 3.5), color=fill)
            arrow(axes, (74, y + 3), (86, y - 7.5), color=fill)
    label(axes, 6, 53.5, "one GPU, in the order in which it produces", size=9, color=GREY)
    label(axes, 86, 53.5, "the next GPU", size=9, color=GREY)
    label(axes, 86, 41, "near-memory update:", size=8.5, color=GREY)
    arrow(axes, (3.5, 49), (3.5, 9), color=GREY)
    label(axes, 2, 4.5, "All GPUs do this at once, each starting one part of the output further on: chunk p here is chunk p + 1 there.", size=9, color=GREY)  # fmt: skip
    label(axes, 2, 1.5, "Each update is added where it lands, in DRAM; a chunk is read once, by the DMA that sends it.", size=9, color=GREY)
    for suffix in ("png", "svg"):
        figure.savefig(FOLDER / f"t3-mechanism.{suffix}", dpi=150)
    plt.close(figure)


def results() -> None:
    """Run the commands, and keep the pictures they draw."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["COLUMNS"] = "200"
        for command in COMMANDS:
            done = CliRunner().invoke(app, [part.format(folder=FOLDER, scratch=scratch) for part in command])
            if done.exit_code:
                raise SystemExit(done.output)
            print(done.output)
        (FOLDER / "t3-figures.png").write_bytes((Path(scratch) / "t3.png").read_bytes())


if __name__ == "__main__":
    mechanism()
    results()
