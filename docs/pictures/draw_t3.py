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
    ("sim", "run", "t3", "--sublayer", "op", "--plot", "{folder}/t3-traffic.png"),
    ("sim", "compare", *MEASURED, "--plot", "{folder}/t3-h200.png"),
    ("sim", "study", "t3", "--out", "{scratch}"),
)


def mechanism() -> None:
    """A ring of four: what becomes of each chunk that a GPU produces, and what it meets at the next."""
    figure, axes = canvas(112, 62)
    label(axes, 2, 59, "T3: an address map sends each chunk on while the product computes the next one", size=11, bold=True)
    label(axes, 2, 56, "A fused reduce-scatter on a ring of 4 GPUs. The kernel stays as it is; its addresses are new.", size=9, color=GREY)
    rows = (
        ("chunk 0", "remote_map", "leaves at once, by its stores", SEND, "its chunk 1"),
        ("chunk 1", "dma_map", "own + 1 update, then leaves", COMPUTE, "its chunk 2"),
        ("chunk 2", "dma_map", "own + 1 update, then leaves", COMPUTE, "its chunk 3"),
        ("chunk 3", "in no map", "stays: the sum of all 4", SUM, ""),
    )
    for number, (chunk, entry, meaning, fill, there) in enumerate(rows):
        y = 41 - 11 * number
        block(axes, 20, y, 14, 7, fill)
        axes.text(27, y + 3.5, chunk, ha="center", va="center", color="white", fontsize=10, weight="bold")
        label(axes, 36, y + 5, entry, size=9, mono=True)
        label(axes, 36, y + 2, meaning, size=9)
        if number:
            arrow(axes, (8, y + 3.5), (20, y + 3.5), color=SEND if number == 1 else COMPUTE)
            label(axes, 8.5, y + 5, "+ update", size=8, color=GREY)
        if not there:
            continue
        box(axes, 90, y - 11, 16, 7, there, fill=PALE)
        if entry == "remote_map":
            arrow(axes, (57, y + 3.5), (90, y - 5.5), color=fill)
            label(axes, 70, y + 1.6, "stores", size=8.5, color=fill)
        else:
            box(axes, 59, y + 0.5, 9, 6, "tracker:\nboth there", size=7)
            box(axes, 72, y + 0.5, 9, 6, "DMA", size=8.5)
            arrow(axes, (68, y + 3.5), (72, y + 3.5), color=fill)
            arrow(axes, (81, y + 3), (90, y - 7.5), color=fill)
    label(axes, 8, 52, "GPU before", size=9, color=GREY)
    label(axes, 20, 52, "this GPU, in the order in which it computes", size=9, color=GREY)
    label(axes, 90, 52, "next GPU", size=9, color=GREY)
    label(axes, 90, 39.5, "adds in its DRAM:", size=8.5, color=GREY)
    arrow(axes, (3.5, 48), (3.5, 8), color=GREY)
    axes.text(1.6, 28, "time", ha="center", va="center", rotation=90, color=GREY, fontsize=8.5)
    label(axes, 2, 4.5, "All GPUs do this at once, each starting one part of the output further on, so chunk p here is chunk p + 1 on the next.", size=9, color=GREY)  # fmt: skip
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
