"""Options that commands of ``interlace sim`` share, as annotated types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Nodes = Annotated[
    int,
    typer.Option(
        min=0, help="Nodes of the machine's GPUs. \\[default: the workload's]", show_default=False
    ),
]
Machine = Annotated[
    str,
    typer.Option(
        help="A machine preset or YAML file; see `interlace sim presets`.", show_default=False
    ),
]
Model = Annotated[
    str,
    typer.Option(
        help="A model preset or YAML file; see `interlace sim presets`.", show_default=False
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        "--topology",
        help="ring, torus2d, torus3d, torus:AxB, switch, full, fattree[:LEAVESxDOWN/UP]. "
        "\\[default: the machine's]",
    ),
]
Fused = Annotated[str, typer.Option(help="Passes with fused operators: none, forward or both.")]
AllToAll = Annotated[
    str, typer.Option(help="The unfused All-to-All: one_shot, direct, per_dimension or ring.")
]
AllReduce = Annotated[
    str, typer.Option(help="The AllReduce: ring, direct, halving_doubling or double_binary_tree.")
]
Slices = Annotated[
    int,
    typer.Option(
        min=0,
        help="Slices in which a fused kernel's output for a rank leaves. "
        "\\[default: the workload's]",
        show_default=False,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value, say model.tables=1024 or machine.network.latency_ns=500; several "
        "times.",
    ),
]
AllRanks = Annotated[
    bool, typer.Option("--all-ranks", help="Simulate every rank and link, not one of each kind.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything to FILE as JSON.")
]
CsvFile = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Write the tasks to FILE as CSV.")
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", help="Draw the timelines, and bars beside them (FILE-bars)."
    ),
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace for ui.perfetto.dev.")
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes. \\[default: all processors]", show_default=False),
]
CacheFolder = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        help="Where outcomes are remembered. \\[default: the user's cache]",
        show_default=False,
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Run everything again, and remember nothing.")
]
OutFolder = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="Where JSON, CSV and pictures go.")
]

T3Model = Annotated[
    str, typer.Option("--model", help="Mega-GPT-2, T-NLG, GPT-3, PALM, MT-NLG, or a YAML file.")
]
T3Degree = Annotated[int, typer.Option("--tp", min=2, help="GPUs of the tensor-parallel group.")]
T3SubLayer = Annotated[
    str, typer.Option("--sublayer", help="op, fc2 (forward), fc1 or ip (backward).")
]
T3Shape = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="ROWSxCOLUMNSxDEPTH",
        help="Any matrix product on each GPU, instead of a model's.",
    ),
]
T3Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a value of the machine, say tracker.sets=64."
    ),
]

# Commands whose files hold something else than a workload's say so in their own help.
T3PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw DRAM and link traffic over time, by cause."),
]
BarsFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw a bar for each shape.")
]
PointsFile = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Write the points to FILE as CSV.")
]
HeatMapFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw a heat map over the first two parameters."),
]
