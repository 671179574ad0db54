"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from interlace.cli.outputs import Outputs

MOST_RANKS = 8
"""The largest group of an operator."""

TableFile = Annotated[
    Path, typer.Option("--table", metavar="FILE", help="The tuned table: made, or extended.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything to FILE as JSON.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw a picture: PNG, SVG or PDF.")
]
Ranks = Annotated[
    int | None,
    typer.Option("--world-size", "-n", min=1, help="Ranks; default: all GPUs, at most 8."),
]
Backend = Annotated[str, typer.Option(help="auto, cpu or cuda; auto is cuda where there are GPUs.")]
Nodes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Nodes that the ranks count as. \\[default: the nodes that they are on]"
    ),
]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]


def shape_option(names: str, description: str) -> Any:
    """Return the option ``--shape``, which may be given several times.

    Args:
        names: The sizes' names in order, such as ``"MxNxK"``.
        description: The option's help.
    """
    # A default rather than an annotation: commands that are made in a loop have names of their own.
    return typer.Option(None, "--shape", metavar=names, help=description)


class Run(NamedTuple):
    """The options that every ``interlace bench`` and ``interlace tune`` of an operator has.

    Attributes:
        world_size: Number of ranks; None for all GPUs, at most 8.
        dtype: dtype of shapes that name none.
        outputs: The files of the command.
    """

    world_size: int | None
    dtype: str
    outputs: Outputs
