"""Parts of the terminal that commands share: output of the first rank only, tables, errors, and
progress.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.protocol import rich_cast
from rich.table import Table

from interlace.errors import InterlaceError

_UNBOUNDED_COLUMNS = 100_000


def is_first_rank() -> bool:
    """Return whether this rank is the first one of torchrun or Slurm.

    The others run the same command and must not print it too.
    """
    return os.environ.get("RANK", "0") == "0"


class _Unbounded(Console):
    """A console of a file or a pipe, which have no width: lines are as long as what they say."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print the objects; a table's title and caption, which Rich folds at the table's width, in
        lines of their own.
        """
        table = rich_cast(objects[0]) if len(objects) == 1 else None
        if not isinstance(table, Table):
            super().print(*objects, **options)
            return
        bare = copy.copy(table)
        bare.title = bare.caption = None
        for part in (table.title, bare, table.caption):
            if part is not None:
                super().print(part, **options)


def make_console(*, is_quiet: bool = False) -> Console:
    """Return a console that prints on the first rank only, or, if ``is_quiet``, nothing.

    Nothing is folded in a file or a pipe, unless COLUMNS says how wide it is. Brackets and colons
    are printed as they are: texts have names of files, machines and models in them.
    """
    options: dict[str, Any] = {"quiet": is_quiet or not is_first_rank()}
    options |= {"highlight": False, "markup": False, "emoji": False}
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return Console(**options)
    return _Unbounded(width=_UNBOUNDED_COLUMNS, **options)


def make_table(
    *columns: str, left: Collection[str] | None = None, title: str | None = None, **options: Any
) -> Table:
    """Make a plain table: no borders, columns two spaces apart.

    Args:
        columns: Headings in order.
        left: Headings of the columns that are aligned to the left; the first column by default.
            The other columns, which hold numbers, are aligned to the right.
        title: Heading above the table.
        options: Further arguments of every ``rich.table.Table.add_column``. A name or number that
            is too long for a narrow terminal goes on in the next line, and loses nothing.
    """
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name in columns:
        at_left = name in (columns[:1] if left is None else left)
        table.add_column(
            name, justify="left" if at_left else "right", **{"overflow": "fold", **options}
        )
    return table


def print_error(error: InterlaceError) -> None:
    """Print one red line; for a failed rank's traceback, the line that says what failed."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"Error: {error.line or type(error).__name__}", style="bold red", markup=False)
    if "\n" in str(error).strip():
        console.print("Run with `interlace --debug ...` for the traceback.", style="dim")


def now() -> str:
    """Return the time in UTC, as documents record it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def command_line() -> str:
    """Return the command that runs, as documents record it."""
    return shlex.join(["interlace", *sys.argv[1:]])


def run_ranks(
    console: Console,
    title: str,
    steps: int,
    worker: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str,
    nodes: int | None = None,
    join_timeout_s: float | None = None,
) -> list[Any]:
    """Run ``interlace.launch(worker, world_size, folder, *args)`` under a progress bar.

    The ranks count as ``nodes`` nodes; None stands for the nodes that they are on.

    Ranks say how far they are by :func:`interlace.cli.ranks.advance` ``(folder)``, ``steps`` times
    each.
    """
    from interlace.comm import launch

    with (
        tempfile.TemporaryDirectory(prefix="interlace-") as folder,
        _progress(console, title, Path(folder), steps * world_size),
    ):
        return launch(
            worker,
            world_size,
            folder,
            *args,
            backend=backend,
            nodes=nodes,
            join_timeout_s=join_timeout_s,
        )


@contextlib.contextmanager
def _progress(console: Console, title: str, folder: Path, total: int) -> Iterator[None]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    # Ranks are processes: they append a byte to a file per step, and a thread counts the bytes.
    done = threading.Event()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{title}: starting", total=total)

        def watch() -> None:
            while not done.wait(0.2):
                count = sum(file.stat().st_size for file in folder.glob("rank-*"))
                progress.update(
                    task, completed=count, description=title if count else f"{title}: starting"
                )

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
