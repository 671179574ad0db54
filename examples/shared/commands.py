"""The options and the terminal of examples that are programs for several ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

import interlace
from interlace.cli.console import is_first_rank, make_console  # noqa: F401  # for examples
from shared.errors import DTYPES

WorldSize = Annotated[
    int | None, typer.Option("--world-size", "-n", help="Ranks; default: torchrun's, or 2.")
]
Backend = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Steps = Annotated[int, typer.Option(help="Steps to time.")]
Times = Annotated[
    bool, typer.Option("--times", help="Compile with Inductor too and, on GPUs, time steps.")
]


def ranks_of(world_size: int | None) -> int:
    """Return the number of ranks: as asked for, or torchrun's, or two."""
    return world_size or int(os.environ.get("WORLD_SIZE", "2"))


def require_dtype(dtype: str) -> None:
    """Refuse a dtype that is not in ``DTYPES``.

    Raises:
        typer.BadParameter: it is not.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype}.")


def require_even(ranks: int, **sizes: int) -> None:
    """Refuse sizes that the ranks do not divide; names are those of the options.

    Raises:
        typer.BadParameter: a size does not divide evenly.
    """
    for name, size in sizes.items():
        if size % ranks:
            option = name.replace("_", "-")
            raise typer.BadParameter(
                f"--{option} must divide evenly over {ranks} ranks; got {size}."
            )


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the program with one red line, not with a traceback, after an error of Interlace."""
    try:
        yield
    except interlace.InterlaceError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"Error: {error.line}", style="bold red", markup=False
        )
        raise typer.Exit(1) from None


def run_with_options(main: Callable[[Any, int, str], None], settings: type) -> None:
    """Run ``main`` as a program whose options are the fields of a dataclass, and the ranks'.

    ``main`` gets the settings, the number of ranks and the backend; its docstring is the help.

    Args:
        settings: The dataclass. Each field has a default and a type annotated by ``typer.Option``.
    """

    def command(**values: Any) -> None:
        ranks, backend = ranks_of(values.pop("world_size")), values.pop("backend")
        with errors_in_one_line():
            main(settings(**values), ranks, backend)

    def option(name: str, annotation: Any, default: object) -> inspect.Parameter:
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=default, annotation=annotation)

    annotations = typing.get_type_hints(settings, include_extras=True)
    fields = dataclasses.fields(settings)
    options = [option(field.name, annotations[field.name], field.default) for field in fields]
    ranks_options = [option("world_size", WorldSize, None), option("backend", Backend, "auto")]
    # Typer reads a command's options from its signature.
    command.__signature__ = inspect.Signature([*ranks_options, *options])
    command.__doc__ = main.__doc__
    typer.run(command)
