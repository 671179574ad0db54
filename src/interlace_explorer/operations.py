"""Operations of a rank on shared state, and the tree of all that it has been seen to do.

Between two operations on shared state a rank is a deterministic function of the results of its
operations. So the operations of a rank form a tree: a node is the next operation, an edge is its
result. A schedule walks the trees of all ranks; only an edge that was never taken needs a rank that
really runs.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

Cells = npt.NDArray[np.intp]
Words = npt.NDArray[Any]

NO_CELLS: Cells = np.zeros(0, np.intp)


class Kind(enum.IntEnum):
    """Kinds of operations.

    At those from ``RELEASE`` on, a schedule may go on with another rank. The others cannot be told
    apart from outside, so nothing would be found by interrupting a rank there.
    """

    PUT = 0
    LOAD = 1
    ATOMIC = 2  # on the rank's own memory
    FENCE = 3
    PROGRAM = 4  # the next program of a launch begins
    RETURN = 5  # a launch has ended
    POST = 6  # this rank's part of an exchange on the host
    RELEASE = 7
    RELAXED = 8
    PEER_ATOMIC = 9  # on memory of a peer
    WAIT = 10
    WORDS = 11
    COLLECT = 12  # the peers' parts of an exchange
    READY = 13
    END = 14


class Operation:
    """A node of a rank's tree.

    Attributes:
        kind: Kind of the operation.
        cells: Cells of simulated memory that it touches.
        values: Values that are stored there, or epochs that are awaited.
        detail: More about it, depending on the kind: see :class:`interlace_explorer.ranks.RankRun`.
        site: Line of the program's source that it comes from, for messages.
        parent, response: The operation before, and the result of that one.
        following: The next operations, by this one's result as bytes; by None if the kind has no
            result.
        known: For a wait, True or False by the bytes that it would see: True if it is over.
    """

    __slots__ = (
        "cells",
        "detail",
        "following",
        "kind",
        "known",
        "parent",
        "response",
        "site",
        "values",
    )

    def __init__(
        self, kind: Kind, cells: Cells, values: Words | None, detail: Any, site: str
    ) -> None:
        self.kind, self.cells, self.values = kind, cells, values
        self.detail, self.site = detail, site
        self.parent: Operation | None = None
        self.response: Any = None
        self.following: dict[bytes | None, Operation] = {}
        self.known: dict[bytes, bool] = {}

    def path(self) -> list[Any]:
        """Return the results of the operations before this one, in order."""
        responses: list[Any] = []
        node = self
        while node.parent is not None:
            responses.append(node.response)
            node = node.parent
        return responses[::-1]
