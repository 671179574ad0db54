"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

TableFile = Annotated[
    Path, typer.Option("--table", metavar="FILE", help="The tuned table: made, or extended.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything to FILE as JSON.")
]
Ranks = Annotated[
    int | None,
    typer.Option("--world-size", "-n", min=1, help="Ranks; default: all GPUs, at most 8."),
]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
HalfDtype = Annotated[str, typer.Option(help="bfloat16 or float16.")]


def shape_option(names: str, description: str) -> Any:
    """Return the option ``--shape``, which may be given several times.

    Args:
        names: the sizes' names in order, such as ``"MxNxK"``.
        description: the option's help.
    """
    # A default rather than an annotation: commands that are made in a loop have names of their own.
    return typer.Option(None, "--shape", metavar=names, help=description)
