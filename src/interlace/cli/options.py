"""Options that several commands share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.cli.outputs import Outputs

Command = Callable[..., None]

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
HalfDtype = Annotated[str, typer.Option(help="bfloat16 or float16.")]


def shape_option(names: str, description: str) -> Any:
    """Return the option ``--shape``, which may be given several times.

    Args:
        names: The sizes' names in order, such as ``"MxNxK"``.
        description: The option's help.
    """
    # A default rather than an annotation: commands that are made in a loop have names of their own.
    return typer.Option(None, "--shape", metavar=names, help=description)


def declare(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """Return an option for the signature of a command, which gets it as a keyword."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


@dataclasses.dataclass(frozen=True)
class Run:
    """Hold the options that every ``interlace bench`` and ``interlace tune`` of an operator has.

    Attributes:
        world_size: Number of ranks; None for all GPUs, at most 8.
        dtype: dtype of shapes that name none.
        outputs: The files of the command.
    """

    world_size: int | None
    dtype: str
    outputs: Outputs


def takes_run(
    dtype: str = "bfloat16", *, dtypes: Any = Dtype, makes_table: bool = False
) -> Callable[[Command], Command]:
    """Give a command, whose first argument is a :class:`Run`, that run's options after its own.

    Args:
        dtype: Default of ``--dtype``.
        dtypes: ``Dtype`` or ``HalfDtype``.
        makes_table: Whether the command has ``--table``, which must then be given.
    """
    shared = [
        declare("world_size", Ranks),
        declare("dtype", dtypes, dtype),
        declare("json", JsonFile),
        *([declare("table", TableFile, inspect.Parameter.empty)] if makes_table else []),
    ]

    def decorate(command: Command) -> Command:
        _, *parameters = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(world_size: int | None, dtype: str, **values: Any) -> None:
            outputs = Outputs(**{name: values.pop(name, None) for name in ("json", "table")})
            command(Run(world_size, dtype, outputs), **values)

        # Typer reads a command's options from its signature.
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*(parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters), *shared]
        )
        return run

    return decorate
