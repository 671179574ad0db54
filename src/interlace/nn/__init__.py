"""Modules that compute and communicate at once, in place of torch's own."""

from interlace.nn.embedding_bags import PooledEmbeddings, ShardedEmbeddingBags
from interlace.nn.row_parallel import RowParallelLinear
from interlace.nn.sharding import EmbeddingTable, Shard, ShardingPlan, make_plan

__all__ = [
    "EmbeddingTable",
    "PooledEmbeddings",
    "RowParallelLinear",
    "Shard",
    "ShardedEmbeddingBags",
    "ShardingPlan",
    "make_plan",
]
