"""Show the progress of a simulation on stderr: a bar on a terminal, elsewhere a line at times."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from interlace.cli.console import is_first_rank

Item = TypeVar("Item")
INTERVAL_S = 5.0
"""Seconds before the first line, and between lines, where stderr is no terminal."""


class Runs:
    """A count of the runs that are done; calling it with (done, all) reports them.

    A run that can say how far it is gets :meth:`watch`.
    """

    def __init__(self) -> None:
        self.done, self.all = 0, 0
        self._share: Callable[[], float] = lambda: 0.0
        self._started_s = 0.0

    def __call__(self, done: int, all_runs: int) -> None:
        self.done, self.all = done, all_runs
        # The next run may be one that cannot say it.
        self._share = lambda: 0.0

    def watch(self, share: Callable[[], float]) -> None:
        """Take the function that returns which share of the current run is done, from 0 to 1."""
        self._share, self._started_s = share, time.monotonic()

    def left(self) -> str:
        """Say how long the current run will still take, such as ``"about 40 s left of this one"``;
        empty if that is not known.
        """
        share, seconds = self._share(), time.monotonic() - self._started_s
        # What is left behind the last message, such as the physical bound, has no estimate.
        if not 0 < share < 1:
            return ""
        return f"about {_rounded(seconds * (1 - share) / share)} left of this one"

    def over(self, items: Sequence[Item]) -> Iterator[Item]:
        """Iterate over items, each of which is a run."""
        for number, item in enumerate(items):
            self(number, len(items))
            yield item
        self(len(items), len(items))


def _rounded(seconds: float) -> str:
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


@contextlib.contextmanager
def show_progress(title: str) -> Iterator[Runs]:
    """Show while the body runs how many of its runs are done; nothing remains on a terminal."""
    runs, ended = Runs(), threading.Event()

    def lines() -> None:
        seconds = 0.0
        while not ended.wait(INTERVAL_S):
            seconds += INTERVAL_S
            text = f"{title}: {runs.done} of {runs.all} runs after {seconds:.0f} s"
            print(", ".join(filter(None, (text, runs.left()))), file=sys.stderr)

    def bar() -> None:
        columns = (
            *(TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=None)
            while not ended.wait(0.1):
                progress.update(
                    task, completed=runs.done, total=runs.all or None, description=runs.left()
                )

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
