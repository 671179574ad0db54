"""Results of a run, and their forms as CSV and JSON.

:mod:`interlace_sim.plot` draws them, and :mod:`interlace_sim.trace` makes traces of them.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from interlace.errors import ConfigError
from interlace.units import NS_PER_S
from interlace_sim.bounds import Bound


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of time in which rank 0 worked in one of its rows."""

    row: str
    name: str
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class LinkUse:
    """A stretch of time in which one kind of traffic occupied one of rank 0's links."""

    link: str
    traffic: str
    start_ns: int
    end_ns: int
    size: float


class LinkUses(Sequence[LinkUse]):
    """The link uses of a run, in the order in which they were recorded.

    They are kept in columns: a run on thousands of nodes has millions, and as objects they take
    several times the memory, and most of the run's time for the search for garbage among them.
    """

    def __init__(self) -> None:
        # Numbers of (link, traffic), of which a run has few, by first use.
        self._kinds: dict[tuple[str, str], int] = {}
        self._kind, self._start, self._end = array("I"), array("q"), array("q")
        self._size = array("d")

    def add(self, link: str, traffic: str, start_ns: int, end_ns: int, size: float) -> None:
        """Record a use.

        Raises:
            ConfigError: it ends after more than 2^63 ns, which are 292 years.
        """
        try:
            self._end.append(end_ns)
        except OverflowError as error:
            raise ConfigError(
                f"a link must be free again within 292 years; {link} would be after "
                f"{end_ns / NS_PER_S:.3g} s. Send fewer bytes, or over faster links."
            ) from error
        self._start.append(start_ns)
        self._kind.append(self._kinds.setdefault((link, traffic), len(self._kinds)))
        self._size.append(size)

    def __len__(self) -> int:
        return len(self._end)

    @overload
    def __getitem__(self, index: int) -> LinkUse: ...
    @overload
    def __getitem__(self, index: slice) -> list[LinkUse]: ...
    def __getitem__(self, index: int | slice) -> LinkUse | list[LinkUse]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        names = list(self._kinds)[self._kind[index]]
        return LinkUse(*names, self._start[index], self._end[index], self._size[index])

    def __iter__(self) -> Iterator[LinkUse]:
        names = list(self._kinds)
        columns = zip(self._kind, self._start, self._end, self._size, strict=True)
        return (LinkUse(*names[kind], start, end, size) for kind, start, end, size in columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinkUses) and vars(self) == vars(other)


_LAYER = re.compile(r"\b(?:l\d+|(?:bottom|top) \d+|embedding|interaction)\b")
"""The part of a task's name that says which layer of its model it belongs to."""
REST = "the rest"
"""Tasks of no layer, such as the optimizer, and waiting for the last collectives."""


@dataclasses.dataclass(frozen=True)
class TaskTime:
    """Start and end of a task on the rank that ended last, and the task that it waited for last.

    Attributes:
        compute_ns: Nanoseconds in which the task computed; a fused one also waits.
    """

    name: str
    row: str
    start_ns: int
    end_ns: int
    after: str | None
    compute_ns: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of a simulated step.

    Attributes:
        total_ns: Nanoseconds from the start to the end of the last task on the last rank,
            ``added_ns`` included.
        exposed_ns: Part of ``total_ns`` in which that rank computed nothing: exposed communication
            and waiting.
        busy_ns: Nanoseconds that each resource of a rank worked: computation, and each kind of
            link.
        sent_bytes: Bytes that a rank's traffic put on each kind of link.
        traffic_bytes: Bytes that leave a rank, by collective.
        memory_bytes: Bytes that a rank's kernels read and write in its device memory, without those
            of the library's collectives.
        bound: The physical lower bound; ``total_ns`` is not below it.
        events: Number of events that the engine called.
        added_ns: Time that is not in the tasks: a pipeline's fill and drain.
    """

    name: str
    total_ns: int
    exposed_ns: int
    busy_ns: dict[str, int]
    sent_bytes: dict[str, float]
    traffic_bytes: dict[str, float]
    memory_bytes: float
    tasks: list[TaskTime]
    spans: list[Span]
    link_uses: Sequence[LinkUse]
    bound: Bound
    events: int
    ranks: int
    topology: str
    machine: str
    all_ranks: bool
    added_ns: int = 0

    def critical_path(self) -> list[TaskTime]:
        """List the chain of tasks that ends with the last task.

        Each of them is the last that its successor waited for.
        """
        # The last task to end, and from there back along the last dependency of each.
        tasks = {task.name: task for task in self.tasks}
        path: list[TaskTime] = []
        at: str | None = max(self.tasks, key=lambda task: task.end_ns).name if self.tasks else None
        while at is not None:
            path.append(tasks[at])
            at = tasks[at].after
        return path[::-1]

    def streams(self) -> list[str]:
        """List the rows in which rank 0 worked: computation first, the others by name."""
        return sorted({span.row for span in self.spans}, key=lambda row: (row != "compute", row))

    def layers(self) -> dict[str, tuple[int, int]]:
        """Return the nanoseconds of computation and of exposed communication of each layer.

        Waiting counts for the layer whose computation it holds up, and inside of a fused kernel for
        the kernel's own layer. The sums are the step's, without ``added_ns``.
        """
        times: dict[str, tuple[int, int]] = {}
        at = 0
        for task in sorted(self.tasks, key=lambda task: task.start_ns):
            if not task.compute_ns:
                continue
            match = _LAYER.search(task.name)
            name = match[0] if match else REST
            computed, exposed = times.get(name, (0, 0))
            waited = task.end_ns - at - task.compute_ns
            times[name] = computed + task.compute_ns, exposed + waited
            at = task.end_ns
        computed, exposed = times.pop(REST, (0, 0))
        times[REST] = computed, exposed + self.total_ns - self.added_ns - at
        return times

    def to_json(self) -> dict[str, Any]:
        """Return everything but the single spans and link uses, for JSON."""
        return {
            "name": self.name,
            "machine": self.machine,
            "topology": self.topology,
            "ranks": self.ranks,
            "every_rank_simulated": self.all_ranks,
            "total_ns": self.total_ns,
            "exposed_ns": self.exposed_ns,
            "added_ns": self.added_ns,
            "bound_ns": round(self.bound.time_ns),
            "bound_reason": self.bound.reason,
            "busy_ns": self.busy_ns,
            "sent_bytes": {name: round(value) for name, value in self.sent_bytes.items()},
            "memory_bytes": round(self.memory_bytes),
            "traffic_bytes": {name: round(value) for name, value in self.traffic_bytes.items()},
            "events": self.events,
            "critical_path": [dataclasses.asdict(task) for task in self.critical_path()],
            "tasks": [dataclasses.asdict(task) for task in self.tasks],
        }

    def to_csv(self) -> str:
        """Write one line per task: name, row, start and end in nanoseconds, and 1 on the critical
        path.
        """
        critical = {task.name for task in self.critical_path()}
        return csv_text(
            ["task", "row", "start_ns", "end_ns", "critical"],
            (
                [task.name, task.row, task.start_ns, task.end_ns, int(task.name in critical)]
                for task in sorted(self.tasks, key=lambda task: (task.start_ns, task.row))
            ),
        )


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as CSV with line ends as on Unix, so that files are alike on all systems."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()
