"""T3's address-space configuration: what becomes of stores to each chunk of a product's output. The product is not changed.

Chunks are numbered in the order in which this GPU produces them. The GPUs of a ring start at staggered chunks, so chunk p
of one GPU is chunk p + 1 of the next one, which adds what it receives to its own.
"""

from __future__ import annotations

import dataclasses

from interlace.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DmaMap:
    """A local chunk whose blocks are sent when they are complete.

    Attributes:
        updates: how many updates complete a block: its own, and those from other GPUs.
    """

    updates: int


@dataclasses.dataclass(frozen=True)
class AddressMap:
    """What a user writes before the product starts.

    Attributes:
        chunks: equal parts of the output.
        remote_map: chunks whose stores become updates of the next GPU's memory.
        dma_map: chunks that are updated here, and sent on as updates when complete.

    A chunk in neither is updated here and stays.

    Raises:
        ConfigError: a chunk in both maps or outside the output, or counts that no run of the ring can reach.
    """

    chunks: int
    remote_map: frozenset[int]
    dma_map: dict[int, DmaMap]

    def __post_init__(self) -> None:
        both = self.remote_map & self.dma_map.keys()
        if both:
            raise ConfigError(f"a chunk must be in one map only; got {sorted(both)} in both. Take it out of one.")
        outside = sorted(chunk for chunk in self.remote_map | self.dma_map.keys() if not 0 <= chunk < self.chunks)
        if outside:
            raise ConfigError(f"a mapped chunk must be one of 0 to {self.chunks - 1}; got {outside}.")
        if self.chunks - 1 in self.remote_map | self.dma_map.keys():
            raise ConfigError(f"the last chunk must stay here; got {self.chunks - 1} mapped. The sum needs an owner.")
        for chunk, entry in self.dma_map.items():
            if entry.updates != self.expected(chunk):
                raise ConfigError(
                    f"chunk {chunk}'s DMA must wait for the updates that arrive; got {entry.updates}, and "
                    f"{self.expected(chunk)} arrive. It would "
                    f"{'never start' if entry.updates > self.expected(chunk) else 'send a part'}."
                )

    def sends(self, chunk: int) -> bool:
        """Whether the chunk leaves for the next GPU."""
        return chunk in self.remote_map or chunk in self.dma_map

    def expected(self, chunk: int) -> int:
        """Updates that reach a chunk here: its own, unless it is remote, and the previous GPU's, if that one sends it."""
        return (chunk not in self.remote_map) + (chunk > 0 and self.sends(chunk - 1))


def ring_reduce_scatter(ranks: int) -> AddressMap:
    """The first chunk remote, the last one's own, all between sent on when both updates have come.

    Raises:
        ConfigError: fewer than 2 ranks.
    """
    if ranks < 2:
        raise ConfigError(f"a reduce-scatter must have at least 2 ranks; got {ranks}.")
    return AddressMap(ranks, frozenset({0}), {chunk: DmaMap(2) for chunk in range(1, ranks - 1)})
