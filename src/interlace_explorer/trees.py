"""Trees of ranks' operations, which grow when a rank runs further than it has before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from interlace_explorer.failures import Violation
from interlace_explorer.machine import ExploredGpus
from interlace_explorer.memory import CellTable, View
from interlace_explorer.operations import Operation
from interlace_explorer.ranks import Rank, RankRun


class Tree:
    """All operations that one rank has been seen to do, and its current run.

    Attributes:
        rank, world_size, program, cells: The rank, the number of ranks, the program, and the cells
            of simulated memory.
        surroundings: Context of a run, entered in its thread.
        standing_still: Context of the time in which a run waits for the explorer.
        node_of_rank: Number of each rank's node; empty for one node.
        view: The rank's view of memory.
        runs: Number of runs so far.
        response: Result of the last operation that was done in the rank's own thread.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        program: Callable[[Rank], Any],
        cells: CellTable,
        surroundings: Callable[[RankRun], contextlib.AbstractContextManager[None]],
        standing_still: Callable[[], contextlib.AbstractContextManager[None]],
        node_of_rank: tuple[int, ...] = (),
    ) -> None:
        self.rank, self.world_size, self.program, self.cells = rank, world_size, program, cells
        self.surroundings, self.standing_still = surroundings, standing_still
        self.node_of_rank = node_of_rank
        self.view = View(world_size)
        self.runs = 0
        self.response: Any = None
        self._machine: ExploredGpus | None = None
        self._last: tuple[Operation, bytes | None, Any]
        self._root: Operation | None = None
        self._run: RankRun | None = None
        self._at: Operation | None = None

    def start(self) -> Operation:
        """Return the program's first operation."""
        if self._root is None:
            self._begin([])
            self._root = self._at
        assert self._root is not None
        return self._root

    def extend(
        self, machine: ExploredGpus, node: Operation, key: bytes | None, response: Any
    ) -> Operation:
        """Let the rank go on from ``node`` with a result that it has never had there.

        Operations that no other rank can notice are done on the way.

        Args:
            machine: The state of the schedule.
            node: The rank's operation.
            key: Its result as bytes.
            response: Its result.

        Returns:
            The rank's next operation.
        """
        self._machine, self._last = machine, (node, key, response)
        try:
            # The current run can go on if it stands at this operation. Otherwise a new one must get
            # there first.
            if self._run is None or self._at is not node:
                self._begin([*node.path(), response])
            else:
                self._at = self._run.go_on(response)
        finally:
            self._machine = None
        assert self._at is not None
        self._append(self._at)
        return self._at

    def does_here(self, operation: Operation) -> bool:
        """Do an operation that no other rank can notice, in its own rank's thread.

        Returns:
            True if it was done; its result is in ``response``.
        """
        # Switching to the explorer's thread and back costs much on a machine whose processors other
        # programs use.
        if self._machine is None:
            return False
        self._machine.make_room()
        try:
            key, self.response = self._machine.effect(self.rank, operation)
        # The explorer's thread does the operation again, and gets the exception.
        except Violation:
            return False
        self._append(operation)
        self._last = operation, key, self.response
        return True

    def _append(self, operation: Operation) -> None:
        """Add an operation to the tree, after the last one."""
        node, key, response = self._last
        operation.parent, operation.response = node, response
        node.following[key] = operation

    def close(self) -> None:
        """End the current run and unmap the memory."""
        self._stop()
        self.view.close()

    def _begin(self, responses: Sequence[Any]) -> None:
        """Begin a new run, which gets these results first."""
        self._stop()
        self.view.reset()
        self.runs += 1
        self._run = RankRun(self, responses)
        self._at = self._run.start()

    def _stop(self) -> None:
        if self._run is not None:
            self._run.abandon()
            self._run = self._at = None
