"""Modules that compute and communicate at once, to be used instead of torch's modules."""

from interlace.nn.embedding_bags import ShardedEmbeddingBags
from interlace.nn.moe import MoE, Routing
from interlace.nn.parallel_linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    unsharded_state_dict,
)
from interlace.nn.planning import make_plan
from interlace.nn.pooled_embeddings import PooledEmbeddings
from interlace.nn.sharding import EmbeddingTable, Shard, ShardingPlan

__all__ = [
    "ColumnParallelLinear",
    "EmbeddingTable",
    "MoE",
    "PooledEmbeddings",
    "Routing",
    "RowParallelLinear",
    "Shard",
    "ShardedEmbeddingBags",
    "ShardingPlan",
    "make_plan",
    "unsharded_state_dict",
]
