"""What a rank does to shared state, and the tree of all that it has been seen to do.

Between two operations on shared state a rank is a deterministic function of what its operations
have returned. So the operations of
a rank form a tree: a node is the next operation, an edge is what it returns. A schedule walks the
trees of all ranks; only an edge that was never taken needs a rank that really runs.
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
    """Operations. Those from ``RELEASE`` on are points at which a schedule may go on with another
    rank.
    """

    PUT = 0
    LOAD = 1
    ATOMIC = 2
    FENCE = 3
    PROGRAM = 4  # the next program of a launch begins
    RETURN = 5  # a launch has ended
    POST = 6  # this rank's part of an exchange on the host
    RELEASE = 7
    RELAXED = 8
    WAIT = 9
    WORDS = 10
    COLLECT = 11  # the peers' parts of an exchange
    READY = 12
    END = 13


class Operation:
    """A node of a rank's tree.

    Attributes:
        cells: of simulated memory.
        values: that are stored there, or the epochs that are awaited.
        detail: depends on the kind: see ``Live``.
        site: where in the program's source it comes from, for messages.
        parent, response: the operation before, and what that one returned.
        following: by what this one returns, as bytes; or, for kinds that return nothing, by None.
        known: whether the condition of a wait holds, by the bytes of what it would see.
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
        self.kind, self.cells, self.values, self.detail, self.site = (
            kind,
            cells,
            values,
            detail,
            site,
        )
        self.parent: Operation | None = None
        self.response: Any = None
        self.following: dict[bytes | None, Operation] = {}
        self.known: dict[bytes, bool] = {}

    def path(self) -> list[Any]:
        """What the operations before this one have returned, in order."""
        responses: list[Any] = []
        node = self
        while node.parent is not None:
            responses.append(node.response)
            node = node.parent
        return responses[::-1]
