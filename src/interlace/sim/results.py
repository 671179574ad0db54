"""What a run found out, and how it is written down: table, CSV, JSON; see also
:mod:`interlace.sim.plot` and ``trace``.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from typing import Any

from interlace.sim.bounds import Bound


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that rank 0 did in one of its rows."""

    row: str
    name: str
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class LinkUse:
    """Bytes of a kind of traffic on one of rank 0's links."""

    link: str
    traffic: str
    start_ns: int
    end_ns: int
    size: float


@dataclasses.dataclass(frozen=True)
class TaskTime:
    """When a task of the rank that ended last ran, and which task it waited for last."""

    name: str
    row: str
    start_ns: int
    end_ns: int
    after: str | None


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of a simulated step.

    Attributes:
        total_ns: from the start to the end of the last task on the last rank, ``added_ns``
            included.
        exposed_ns: the part of it in which that rank computed nothing: exposed communication and
            waiting.
        busy_ns: how long each resource of a rank worked: computation, and each kind of link.
        sent_bytes: that a rank's traffic put on each kind of link.
        traffic_bytes: that leave a rank, by collective.
        memory_bytes: that a rank's kernels read and write in its device memory; of a library's
            collectives not.
        bound: the physical lower bound; ``total_ns`` is not below it.
        events: that the engine called.
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
    link_uses: list[LinkUse]
    bound: Bound
    events: int
    ranks: int
    topology: str
    machine: str
    all_ranks: bool
    added_ns: int = 0

    def critical_path(self) -> list[TaskTime]:
        """The chain of tasks, each the last that the next one waited for, that ends with the last
        task.
        """
        tasks = {task.name: task for task in self.tasks}
        path: list[TaskTime] = []
        at: str | None = max(self.tasks, key=lambda task: task.end_ns).name if self.tasks else None
        while at is not None:
            path.append(tasks[at])
            at = tasks[at].after
        return path[::-1]

    def to_json(self) -> dict[str, Any]:
        """Everything but the single spans."""
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
        """One line per task: name, row, start and end in nanoseconds, whether it is on the critical
        path.
        """
        critical = {task.name for task in self.critical_path()}
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["task", "row", "start_ns", "end_ns", "critical"])
        for task in sorted(self.tasks, key=lambda task: (task.start_ns, task.row)):
            writer.writerow(
                [task.name, task.row, task.start_ns, task.end_ns, int(task.name in critical)]
            )
        return out.getvalue()
