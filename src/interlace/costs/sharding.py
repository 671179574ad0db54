"""What it costs a rank to own a table, or some columns of it: what a sharding plan balances.

Dimensions: B samples of the global batch, P lookups a bag on average, D columns of the shard, R
ranks.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ShardCost:
    """Traffic of one step that follows the shard to its owner, and what the owner must hold.

    Attributes:
        memory_bytes: read and written in the owner's memory.
        link_bytes: the larger of what leaves the owner (forward) and what reaches it (backward),
            the two together in training.
        storage_bytes: the rows, and the state of the optimizer.
    """

    memory_bytes: float
    link_bytes: float
    storage_bytes: int

    def __add__(self, other: ShardCost) -> ShardCost:
        return ShardCost(
            self.memory_bytes + other.memory_bytes,
            self.link_bytes + other.link_bytes,
            self.storage_bytes + other.storage_bytes,
        )


NOTHING = ShardCost(0, 0, 0)


def shard_cost(
    *,
    rows: int,
    width: int,
    itemsize: int,
    pooling_factor: float,
    batch: int,
    world_size: int,
    output_itemsize: int = 4,
    index_itemsize: int = 8,
    state_bytes_per_row: int = 0,
    copies: int = 1,
    training: bool = True,
) -> ShardCost:
    """Cost of owning a shard ``[rows, width]``.

    Forward, the owner reads P indices and rows for each of B bags, and sends the pooled rows of the
    ``(R-1)/R`` of the bags that are other ranks'. What it receives for its own samples is the same
    under any plan and not counted. Backward, it receives as many pooled gradients, reads each of
    them once a lookup, and reads and writes as many rows as it looked up: an upper bound, as rows
    that come several times in a batch are updated once.

    Args:
        rows: of the table.
        width: D, columns of the shard.
        itemsize: bytes of an element of the table.
        pooling_factor: P.
        batch: B.
        world_size: R.
        output_itemsize, index_itemsize: bytes of a pooled element and of an index.
        state_bytes_per_row: of the optimizer.
        copies: of the shard that the owner holds: 2 where there are dense gradients.
        training: count the backward pass as well.
    """
    lookups = batch * pooling_factor
    pooled = batch * width * output_itemsize
    memory = lookups * (width * itemsize + index_itemsize) + pooled / world_size
    link = pooled * (world_size - 1) / world_size
    if training:
        memory += (
            pooled
            + lookups * width * (output_itemsize + 2 * itemsize)
            + lookups * (index_itemsize + 2 * state_bytes_per_row)
        )
        link *= 2
    return ShardCost(memory, link, rows * (copies * width * itemsize + state_bytes_per_row))
