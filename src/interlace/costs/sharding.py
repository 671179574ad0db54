"""The cost of owning a table or some of its columns, which a sharding plan balances over ranks.

Dimensions: B samples of the global batch, P lookups per bag on average, D columns of the shard, R
ranks.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ShardCost:
    """Traffic of one step that follows the shard to its owner, and the storage that it takes there.

    Attributes:
        memory_bytes: Bytes read and written in the owner's memory.
        link_bytes: Bytes of pooled rows that leave the owner (forward); in training, plus the bytes
            of gradients that reach it (backward).
        storage_bytes: Bytes of the rows and of the optimizer's state.
    """

    memory_bytes: float
    link_bytes: float
    storage_bytes: int

    def __add__(self, addend: ShardCost) -> ShardCost:
        return ShardCost(
            self.memory_bytes + addend.memory_bytes,
            self.link_bytes + addend.link_bytes,
            self.storage_bytes + addend.storage_bytes,
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
    """Compute the cost of owning a shard ``[rows, width]``.

    Forward, the owner reads P indices and rows for each of B bags, and sends the pooled rows of the
    ``(R-1)/R`` of the bags that are other ranks'. The rows that it receives for its own samples are
    as many under any plan, and are not counted. Backward, it receives as many pooled gradients,
    reads each of them once per lookup, and reads and writes as many rows as it looked up: an upper
    bound, as rows that occur several times in a batch are updated once.

    Args:
        rows: Rows of the table.
        width: D, columns of the shard.
        itemsize: Bytes of an element of the table.
        pooling_factor: P, lookups per bag.
        batch: B, samples of all ranks.
        world_size: R, the number of ranks.
        output_itemsize: Bytes of a pooled element.
        index_itemsize: Bytes of an index.
        state_bytes_per_row: Bytes of the optimizer's state per row.
        copies: Copies of the shard that the owner holds: 2 with dense gradients.
        training: Whether to count the backward pass as well.
    """
    lookups = batch * pooling_factor
    # Pooled rows are the traffic that leaves the owner: lookups themselves stay local.
    pooled = batch * width * output_itemsize
    memory = lookups * (width * itemsize + index_itemsize) + pooled / world_size
    link = pooled * (world_size - 1) / world_size
    # Gradients arrive in the pooled rows' size; every lookup then reads its gradient, and reads and
    # writes its row and the optimizer's state.
    if training:
        memory += (
            pooled
            + lookups * width * (output_itemsize + 2 * itemsize)
            + lookups * (index_itemsize + 2 * state_bytes_per_row)
        )
        link *= 2
    return ShardCost(memory, link, rows * (copies * width * itemsize + state_bytes_per_row))
