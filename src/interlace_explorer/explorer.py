"""``explore``: many schedules of one program on several ranks, in one process.

See ``docs/explorer.md``.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.comm.host.nodes import numbered
from interlace.comm.runtime.interpreter import require
from interlace.errors import ArgumentError
from interlace_explorer.failures import Report
from interlace_explorer.memory import CellTable, FinerGrain
from interlace_explorer.ranks import Rank
from interlace_explorer.search import Search
from interlace_explorer.trees import Tree


def explore(
    program: Callable[[Rank], Any],
    *,
    ranks: int = 2,
    schedules: int = 1000,
    preemptions: int = 2,
    seed: int = 0,
    replay: str | None = None,
    node_of_rank: Sequence[int] = (),
) -> Report:
    """Run ``program`` on several ranks in this process, under many schedules, until one fails.

    Ranks run one at a time. A schedule chooses the rank that goes on at each signal, wait and
    exchange, and the time at which a store that nothing orders arrives. Half of the schedules are
    tried in order: by default a rank goes on until it must wait, and then the next one; then come
    schedules that differ from this in one step, in two, and so on. A rank that is interrupted then
    waits until no other rank can go on. The other half is random. Kernels really run only where a
    rank gets to see something new, and no deadline expires.

    Args:
        program: Called with a :class:`Rank` for each rank. It calls operators, or launches kernels
            within ``rank.group.running()``, with CPU tensors, on the default group, and checks
            their results (``torch.testing.assert_close``). It must do the same in every run: random
            numbers come from ``rank.generator()``. Call ``rank.ready()`` once every operator has
            been called once, so that schedules differ only in the calls after it, which need no
            agreement of the ranks any more.
        ranks: Number of ranks, at least 2.
        schedules: Most schedules to try.
        preemptions: How often at most a schedule that is tried in order interrupts a rank that
            could go on.
        seed: Seed of the random schedules.
        replay: Schedule of a failure; only this one is tried.
        node_of_rank: Number of each rank's node, from 0; by default all are on one. Stores to other
            nodes are refused, and slices travel as messages.

    Returns:
        The report. A failing schedule is no error here; see :meth:`Report.raise_if_failed`.

    Raises:
        ArgumentError: an argument is out of range, or the program does something that cannot be
            explored.
        BackendError: Triton was imported without its interpreter.

    Example:
        >>> def program(rank):
        ...     x = torch.full((1, 32), float(rank.rank + 1))
        ...     for last in (False, True):
        ...         y = interlace.gemv_all_reduce(x, torch.ones(16, 32))
        ...         torch.testing.assert_close(y, torch.full((1, 16), 96.0))
        ...         rank.ready() if not last else None
        >>> interlace_explorer.explore(program, ranks=2, schedules=200).raise_if_failed()
    """
    if ranks < 2 or schedules < 1 or preemptions < 0:
        raise ArgumentError(
            "explore: ranks must be at least 2, schedules at least 1, preemptions not negative; "
            f"got {ranks}, {schedules}, {preemptions}."
        )
    if node_of_rank and (len(node_of_rank) != ranks or numbered(node_of_rank) != (*node_of_rank,)):
        raise ArgumentError(
            f"explore: node_of_rank must number the nodes of {ranks} ranks, several of them, in "
            f"the order in which they come; got {list(node_of_rank)}."
        )
    require("cpu")
    # Imported here, because it imports Triton, which must not happen before the interpreter is on.
    from interlace_explorer import hooks

    # Memory is simulated in cells of four bytes. A program that touches smaller values starts again
    # with smaller cells, which make every operation slower.
    grain = 4
    with hooks.installed(), torch.random.fork_rng(devices=[]):
        while True:
            cells = CellTable(ranks, grain)
            try:
                # A tree has a thread that stands still and a mapping, and both must end with it.
                with contextlib.ExitStack() as stack:
                    trees = [
                        Tree(
                            rank,
                            ranks,
                            program,
                            cells,
                            hooks.surroundings,
                            hooks.standing_still,
                            tuple(node_of_rank),
                        )
                        for rank in range(ranks)
                    ]
                    for tree in trees:
                        stack.callback(tree.close)
                    search = Search(trees, cells, hooks.Judge(), random.Random(seed))
                    return search.replay(replay) if replay else search.run(schedules, preemptions)
            except FinerGrain as finer:
                grain = finer.grain
