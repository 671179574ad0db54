"""Show the progress of a simulation on stderr: a bar on a terminal, elsewhere a line at times."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from interlace.cli.console import is_first_rank

Item = TypeVar("Item")
INTERVAL_S = 5.0
"""Seconds before the first line, and between lines, where stderr is no terminal."""


class Runs:
    """A count of the runs that are done; calling it with (done, all) reports them."""

    def __init__(self) -> None:
        self.done, self.all = 0, 0

    def __call__(self, done: int, all_runs: int) -> None:
        self.done, self.all = done, all_runs

    def over(self, items: Sequence[Item]) -> Iterator[Item]:
        """Iterate over items, each of which is a run."""
        for number, item in enumerate(items):
            self(number, len(items))
            yield item
        self(len(items), len(items))


@contextlib.contextmanager
def show_progress(title: str) -> Iterator[Runs]:
    """Show while the body runs how many of its runs are done; nothing remains on a terminal."""
    runs, ended = Runs(), threading.Event()

    def lines() -> None:
        seconds = 0.0
        while not ended.wait(INTERVAL_S):
            seconds += INTERVAL_S
            print(f"{title}: {runs.done} of {runs.all} runs after {seconds:.0f} s", file=sys.stderr)

    def bar() -> None:
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(title, total=None)
            while not ended.wait(0.1):
                progress.update(task, completed=runs.done, total=runs.all or None)

    # Peers of the first rank run the same command, and say nothing.
    watcher = threading.Thread(target=bar if sys.stderr.isatty() else lines, daemon=True)
    if is_first_rank():
        watcher.start()
    try:
        yield runs
    finally:
        ended.set()
        if watcher.ident is not None:
            watcher.join()
