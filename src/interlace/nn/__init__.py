"""Modules that compute and communicate at once, to be used instead of torch's modules."""

from interlace.nn.embedding_bags import PooledEmbeddings, ShardedEmbeddingBags
from interlace.nn.linear_cross_entropy_loss import LinearCrossEntropyLoss
from interlace.nn.moe import MoE, Routing
from interlace.nn.parallel_linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    unsharded_state_dict,
)
from interlace.nn.replicated_gradients import sum_replicated_gradients
from interlace.nn.sharding import EmbeddingTable, Shard, ShardingPlan, make_plan
from interlace.nn.ulysses_attention import UlyssesAttention

__all__ = [
    "ColumnParallelLinear",
    "EmbeddingTable",
    "LinearCrossEntropyLoss",
    "MoE",
    "PooledEmbeddings",
    "Routing",
    "RowParallelLinear",
    "Shard",
    "ShardedEmbeddingBags",
    "ShardingPlan",
    "UlyssesAttention",
    "make_plan",
    "sum_replicated_gradients",
    "unsharded_state_dict",
]
