"""T3's address-space configuration: the destination of stores to each chunk of a product's output.
The product is not changed.

Chunks are numbered in the order in which a GPU produces them, which is equal on all GPUs. The part
of the output that is chunk 0 differs: the GPUs start at *staggered* parts, so that chunk p of a GPU
is chunk p + 1 of the next GPU in a ring. A chunk that is sent therefore has a different number at
the GPU that receives it, which its :class:`Target` names.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from interlace.errors import ConfigError

Operation = Literal["update", "write"]
"""``"update"`` adds a chunk to memory by near-memory compute, ``"write"`` stores it."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The destination of a chunk.

    Attributes:
        to: Distance to the GPU that receives it, in GPUs.
        chunk: The chunk's number at that GPU; a written chunk replaces the chunk of that number.
        operation: Operation by which it enters that GPU's memory.
    """

    to: int
    chunk: int
    operation: Operation = "update"


@dataclasses.dataclass(frozen=True)
class DmaMap:
    """A local chunk whose blocks are sent when they are complete.

    Attributes:
        updates: Number of updates that complete a block: its own, and those from other GPUs.
        target: Destination of complete blocks.
    """

    updates: int
    target: Target


@dataclasses.dataclass(frozen=True)
class AddressMap:
    """The configuration that a user writes before the product starts.

    Attributes:
        chunks: Equal parts of the output.
        remote_map: Chunks whose stores go to another GPU's memory.
        dma_map: Chunks that are updated in this GPU's memory, and sent on when complete.

    A chunk in neither map stays in this GPU's memory.

    Raises:
        ConfigError: a chunk is in both maps or outside the output, a target is not another GPU's
            chunk, no run can reach a count of updates, or chunks go round for ever.
    """

    chunks: int
    remote_map: dict[int, Target]
    dma_map: dict[int, DmaMap]

    def __post_init__(self) -> None:
        both = self.remote_map.keys() & self.dma_map.keys()
        if both:
            raise ConfigError(
                f"a chunk must be in one map only; got {sorted(both)} in both. Take it out of one."
            )
        targets = self.targets()
        named = targets.keys() | {target.chunk for target in targets.values()}
        outside = sorted(chunk for chunk in named if not 0 <= chunk < self.chunks)
        if outside:
            raise ConfigError(
                f"a mapped chunk must be one of 0 to {self.chunks - 1}; got {outside}."
            )
        for chunk, target in targets.items():
            if target.to < 1:
                raise ConfigError(
                    f"chunk {chunk} must go to another GPU, 1 or more further on; got {target.to}."
                )
            self._ends(chunk)
        for chunk, entry in self.dma_map.items():
            if entry.updates != self.expected(chunk):
                raise ConfigError(
                    f"chunk {chunk}'s DMA must wait for the updates that arrive; got "
                    f"{entry.updates}, and {self.expected(chunk)} arrive. It would "
                    f"{'never start' if entry.updates > self.expected(chunk) else 'send a part'}."
                )

    def targets(self) -> dict[int, Target]:
        """Return the target of every chunk that leaves."""
        return {**self.remote_map, **{chunk: entry.target for chunk, entry in self.dma_map.items()}}

    def expected(self, chunk: int) -> int:
        """Count the updates that reach a chunk in this GPU's memory.

        They are its own, unless it is remote, and those of other GPUs' chunks.
        """
        # All GPUs have one map, so the chunks that leave this GPU are also those that arrive.
        arriving = (
            target
            for target in self.targets().values()
            if target.chunk == chunk and target.operation == "update"
        )
        return (chunk not in self.remote_map) + sum(1 for _ in arriving)

    def addends(self, chunk: int) -> int:
        """Count the GPUs whose product is in the final sum of a chunk."""
        arriving = (
            source
            for source, target in self.targets().items()
            if target.chunk == chunk and target.operation == "update"
        )
        return 1 + sum(self.addends(source) for source in arriving)

    def _ends(self, chunk: int) -> None:
        """Refuse a chunk whose sums are passed on in a circle."""
        targets, seen = self.targets(), {chunk}
        while (target := targets.get(chunk)) is not None and target.operation == "update":
            chunk = target.chunk
            if chunk in seen:
                raise ConfigError(
                    f"a sum must stay somewhere; got chunks {sorted(seen)} that go round for "
                    "ever. Leave one unmapped."
                )
            seen.add(chunk)


def ring_reduce_scatter(ranks: int) -> AddressMap:
    """Return the paper's map: the first chunk is remote and the last stays.

    The chunks between are sent on when both their updates have arrived (Pati et al., ASPLOS'24).

    Raises:
        ConfigError: fewer than 2 ranks.
    """
    _check(ranks)
    dma = {chunk: DmaMap(2, Target(1, chunk + 1)) for chunk in range(1, ranks - 1)}
    return AddressMap(ranks, {0: Target(1, 1)}, dma)


def direct_reduce_scatter(ranks: int) -> AddressMap:
    """Return a map for a mesh or a switch: chunks are stored straight into their owners' memory.

    It needs no DMA, no read and no tracker. Chunk p belongs to the GPU p + 1 further on, so the
    GPUs send to different GPUs at a time; a GPU's own chunk is the last.

    Raises:
        ConfigError: fewer than 2 ranks.
    """
    _check(ranks)
    return AddressMap(
        ranks, {chunk: Target(chunk + 1, ranks - 1) for chunk in range(ranks - 1)}, {}
    )


def all_to_all(ranks: int) -> AddressMap:
    """Return a map that stores every chunk but a GPU's own into another GPU's memory.

    Nothing is added.

    Raises:
        ConfigError: fewer than 2 ranks.
    """
    _check(ranks)
    return AddressMap(
        ranks,
        {chunk: Target(chunk + 1, ranks - 2 - chunk, "write") for chunk in range(ranks - 1)},
        {},
    )


def _check(ranks: int) -> None:
    if ranks < 2:
        raise ConfigError(f"a collective must have at least 2 ranks; got {ranks}.")
