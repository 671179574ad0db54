"""Draw the pictures of docs/simulator.md: ``python docs/pictures/draw_simulator.py`` writes them beside this file.

Two explain (algorithms, latency); the others are results of the simulator, drawn by its own commands. About a minute.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from draw import COMPUTE, FOLDER, GREY, PALE, SEND, SHADES, SUM, arrow, block, box, canvas, label
from matplotlib import pyplot as plt
from typer.testing import CliRunner

from interlace.cli.app import app

DRAWN = {
    "timeline": ("sim", "run", "dlrm", "--plot", "{folder}/simulator-timeline.png"),
    "layer": ("sim", "run", "transformer", "--model", "llama3-70b", "--nodes", "16", "--tensor", "8", "--pipeline", "4",
              "--plot", "{scratch}/step.png"),
    "call": ("trace", "gemm_reduce_scatter", "8192x8192x2048", "--gpu", "h200", "-n", "4", "--trace", "{scratch}/call.json",
             "--plot", "{folder}/simulator-call.png"),
    "validate": ("sim", "validate", "--out", "{scratch}"),
    "study": ("sim", "study", "sc24", "--out", "{scratch}"),
    "sweep": ("sim", "sweep", "dlrm", "--param", "machine.network.link_bytes_per_s=12.5e9,25e9,50e9,100e9",
              "--param", "model.tables=128,256,512,1024,2048", "--plot", "{folder}/simulator-sweep.png"),
}
KEPT = {"validate.png": "simulator-validate.png", "sc24-tornado.png": "simulator-tornado.png", "sc24-tornado-both.png": "simulator-tornado-both.png",
        "sc24-tornado-per_dimension.png": "simulator-tornado-per_dimension.png",
        "sc24-nodes.png": "simulator-nodes.png", "step-layer.png": "simulator-layer.png", "sc24-networks.png": "simulator-networks.png"}


def algorithms() -> None:
    """Four ranks, four blocks each: what leaves rank 0 in each step."""
    figure, axes = canvas(110, 74)
    panels = (
        ("one_shot: all blocks at once, straight to their owners", [[(1, "1"), (2, "2"), (3, "3")]]),
        ("direct: one block after the other, the nearest first", [[(1, "1")], [(2, "2")], [(3, "3")]]),
        ("ring: from neighbour to neighbour; what is not yours goes on", [[(1, "1 2 3")], [(1, "1 2")], [(1, "1")]]),
        ("per_dimension (2 x 2): all blocks for a column, then for a row", [[(1, "1 3")], [(2, "2 3")]]),
    )
    for number, (title, steps) in enumerate(panels):
        x, y = 2 + 55 * (number % 2), 40 - 36 * (number // 2)
        label(axes, x, y + 31, title, size=9.5, bold=True)
        for step, sends in enumerate(steps):
            left = x + 17.5 * step
            label(axes, left, y + 27.5, f"step {step + 1}", size=8, color=GREY)
            places = {rank: (left + (9 if rank % 2 else 0), y + (5 if rank > 1 else 17)) for rank in range(4)}
            for rank, (px, py) in places.items():
                box(axes, px, py, 5, 5, str(rank), fill=SHADES[rank])
            for peer, blocks in sends:
                (ax, ay), (bx, by) = places[0], places[peer]
                start = (ax + (5 if bx > ax else 2.5), ay + (2.5 if bx > ax and by == ay else 0))
                end = (bx + (0 if bx > ax else 2.5), by + (2.5 if by == ay else 5))
                arrow(axes, start, end, color=SEND)
                word = "block" if len(blocks) == 1 else "blocks"
                label(axes, bx + 2.5, by + 6.6 if by > 10 + y else by - 1.7, f"{word} {blocks}", size=7.5, ha="center", color=SEND)
    label(axes, 2, 0.8, "All-to-all between four ranks, as rank 0 sends it; every rank does the same, shifted.", size=8.5, color=GREY)
    _save(figure, "simulator-algorithms")


def latency() -> None:
    """Space over time: three links, one message, both ways of switching."""
    figure, axes = canvas(112, 47)
    for number, (title, delay) in enumerate((("cut_through: the head goes on, the links work at once", 4), ("store_and_forward: a link starts when the last byte is there", 16))):
        x, y = 8 + 49 * number, 10
        label(axes, x - 4, 43, title, size=9.5, bold=True)
        at = x
        for hop in range(3):
            row = y + 22 - 9 * hop
            label(axes, x - 1, row + 2.5, f"link {hop + 1}", ha="right", size=8, color=GREY) if number == 0 else None
            block(axes, at, row, 12, 5, COMPUTE)
            label(axes, at + 6, row + 2.5, "bytes / bandwidth", ha="center", size=7, color="white")
            if hop < 2:
                arrow(axes, (at + (0 if delay < 10 else 12), row), (at + delay, row - 4), color=SEND)
                label(axes, at + (4.6 if delay < 10 else 14.4) + 1.0, row - 2, "latency", size=7.5, color=SEND)
            at += delay
        end = at - delay + 12 + 4
        arrow(axes, (end - 4, y + 4), (end, y - 3.5), color=SEND)
        label(axes, end, y - 5.5, "last byte arrives", ha="center", size=8, color=SUM, bold=True)
    label(axes, 4, 1.2, "Latency is what each hop adds, from the first byte in to the first byte out; it is not bytes / bandwidth. Only under store_and_forward do the bytes count at every hop.", size=8.5, color=GREY)
    axes.axvline(50.5, 0.08, 0.95, color=PALE)
    _save(figure, "simulator-latency")


def _save(figure: plt.Figure, name: str) -> None:
    plt.rcParams["svg.hashsalt"] = name  # the same file from every run
    figure.savefig(FOLDER / f"{name}.svg", facecolor="white", metadata={"Date": None})
    figure.savefig(FOLDER / f"{name}.png", dpi=150, facecolor="white")
    plt.close(figure)


def results() -> None:
    """Run the commands that draw the results."""
    with tempfile.TemporaryDirectory() as scratch:
        for arguments in DRAWN.values():
            done = CliRunner().invoke(app, [part.format(folder=FOLDER, scratch=scratch) for part in arguments])
            if done.exit_code:
                raise SystemExit(done.output)
        for name, kept in KEPT.items():
            (FOLDER / kept).write_bytes((Path(scratch) / name).read_bytes())


if __name__ == "__main__":
    algorithms()
    latency()
    results()
