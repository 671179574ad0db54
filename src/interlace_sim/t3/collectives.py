"""A library's collectives without a product: compute units read data, send it, and write arrivals.

Rings go step by step, and the pieces of each step are pipelined through memory and link. Direct
collectives send to all GPUs at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

from interlace.units import ceil_div
from interlace_sim.collectives import TITLES
from interlace_sim.engine import Join
from interlace_sim.results import Span
from interlace_sim.t3.gpu import Gpu, Group, Part
from interlace_sim.t3.machine import T3Machine
from interlace_sim.t3.memory import Kind

Collective = Literal["reduce_scatter", "all_gather", "all_to_all"]
PIECE_BYTES = 32768
"""Bytes of a piece of a transfer, which is the output of a tile of 128 x 128 in fp16."""


@functools.lru_cache(maxsize=16)
def alone(
    machine: T3Machine,
    kind: Collective,
    size: float,
    ranks: int,
    network: str,
    share: float = 1.0,
    near_memory: bool = False,
) -> Part:
    """Simulate a library's collective of ``size`` bytes per GPU on an idle machine.

    Args:
        machine: The GPUs and their links.
        kind: Name of the collective.
        size: Bytes per GPU.
        ranks: Number of GPUs.
        network: Topology of the group.
        share: Share of the library's bandwidth that the sending compute units reach.
        near_memory: Whether arrivals are added by the memory, so that no operand is read.
    """
    group = Group(machine, ranks, network)
    # A library does not reach the links' bandwidth, even with all compute units.
    share *= machine.network.library_efficiency.value
    run = _Run(group.gpus[0], kind, size / ranks, share, near_memory=near_memory)
    start = run.ring if network == "ring" and kind != "all_to_all" else run.direct
    group.engine.at(round(machine.network.library_launch_ns.value), start)
    return group.run(kind)


class _Run:
    """A collective of chunks of ``chunk`` bytes, as one GPU runs it."""

    def __init__(
        self, gpu: Gpu, kind: Collective, chunk: float, share: float, *, near_memory: bool
    ) -> None:
        self._gpu, self._kind, self._chunk, self._share = gpu, kind, chunk, share
        # Near-memory compute adds arrivals as they are written, so compute units read nothing.
        self._adds = kind == "reduce_scatter" and not near_memory
        self._arriving: Kind = "update" if near_memory else "write"
        self._pieces = max(1, ceil_div(int(chunk), PIECE_BYTES))
        self._started = 0

    def ring(self, step: int = 0) -> None:
        """Run one step of a ring, and then the next one.

        From the second step of a reduce-scatter on, a GPU reads its own chunk and the chunk that
        arrived; in the end the owner adds up.
        """
        if step:
            self._span(f"step {step - 1}")
        self._started = self._gpu.engine.now
        if step == self._gpu.group.ranks - 1:
            self._sum(2)
            return
        # A step ends when all its pieces have arrived, as a library's ring does.
        everything = Join(self._pieces, lambda: self.ring(step + 1))
        for _ in range(self._pieces):
            self._move(1, 2 if self._adds and step else 1, everything.done)

    def direct(self) -> None:
        """Send a chunk to each peer; an all-gather sends one chunk to all, and reads it once."""
        ranks = self._gpu.group.ranks
        self._started = self._gpu.engine.now
        everything = Join(self._pieces * (ranks - 1), self._exchanged)
        for _ in range(self._pieces):
            for to in range(1, ranks):
                self._move(to, 0 if self._kind == "all_gather" and to > 1 else 1, everything.done)

    def _exchanged(self) -> None:
        self._span("exchange")
        self._started = self._gpu.engine.now
        self._sum(self._gpu.group.ranks)

    def _move(self, to: int, reads: int, done: Callable[[], None]) -> None:
        piece = self._chunk / self._pieces

        def arrived(receiver: Gpu) -> None:
            receiver.memory.request("communication", self._kind, self._arriving, piece, done)

        self._gpu.memory.request(
            "communication", self._kind, "read", reads * piece,
            lambda: self._gpu.send(to, piece, self._kind, arrived, self._share),
        )  # fmt: skip

    def _sum(self, addends: int) -> None:
        """Add up a reduce-scatter: the owner reads the operands and writes the sum."""
        if not self._adds:
            return

        def write() -> None:
            self._gpu.memory.request(
                "communication", self._kind, "write", self._chunk, lambda: self._span("last sum")
            )

        self._gpu.memory.request("communication", self._kind, "read", addends * self._chunk, write)

    def _span(self, stage: str) -> None:
        self._gpu.spans.append(
            Span(self._kind, f"{TITLES[self._kind]}, {stage}", self._started, self._gpu.engine.now)
        )
