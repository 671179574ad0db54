"""The options and the terminal of examples that are programs for several ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

import interlace
from shared.errors import DTYPES

WorldSize = Annotated[
    int | None, typer.Option("--world-size", "-n", help="Ranks; default: torchrun's, or 2.")
]
Backend = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]


def is_first_rank() -> bool:
    """Tell if this process is the first of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def make_console() -> Console:
    """Return a console that prints on the first rank only: the others run the same program."""
    return Console(highlight=False, soft_wrap=True, quiet=not is_first_rank())


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
