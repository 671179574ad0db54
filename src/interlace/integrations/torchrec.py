"""Interlace in place of TorchRec's sharded ``EmbeddingBagCollection``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from interlace.counting import calls_of
from interlace.errors import ArgumentError
from interlace.nn.embedding_bags import ShardedEmbeddingBags, permuted
from interlace.nn.sharding import EmbeddingTable, Shard

calls = calls_of("torchrec")
"""Counts of the tables that were sharded in this process."""


def shard(ebc: Any, **options: Any) -> nn.Module:
    """Return a module with the interface of ``ebc`` whose tables are shared out over the ranks.

    It takes a ``KeyedJaggedTensor`` of this rank's samples and returns their ``KeyedTensor``.
    Lookups, pooling and the exchange of pooled embeddings are
    :class:`interlace.nn.ShardedEmbeddingBags`, which the module has as its attribute ``bags``.

    The state dict has TorchRec's names, ``embedding_bags.<table>.weight``, with a ``ShardedTensor``
    per table. ``load_state_dict`` takes that, for the same plan, or whole tables, such as those of
    an unsharded ``EmbeddingBagCollection``. ``fused_optimizer`` is a ``KeyedOptimizer`` with the
    state of the update that the backward pass applies; its ``step()`` passes the learning rate of
    ``param_groups`` on. Parameters that the backward pass updates are left out by TorchRec's
    ``in_backward_optimizer_filter``.

    Tables belong to no replica: do not wrap the module in ``DistributedDataParallel``; wrap the
    dense part, or name its parameters and its buffers, the states of row-wise Adagrad, in
    ``_set_params_and_buffers_to_ignore_for_model``.

    Args:
        ebc: A ``torchrec.EmbeddingBagCollection`` of the same tables on every rank, in which each
            table has one feature. Its weights are copied; on the device ``"meta"`` each shard is
            initialised by its table's ``init_fn``.
        options: ``gradient``, ``learning_rate``, ``epsilon``, ``average_gradients``, ``group``,
            ``device``, ``plan``, ``batch``, ``memory_bytes``, ``machine``: see
            :class:`interlace.nn.ShardedEmbeddingBags`.

    Raises:
        ArgumentError: A table has several features, or tables do not fit into memory.
        RankMismatchError: Ranks differ in tables or options.

    Example:
        >>> ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        >>> ebc = interlace.integrations.torchrec.shard(ebc, gradient="rowwise_adagrad")
        >>> model = DLRM(ebc, dense_in_features=13, ...)
    """
    module: nn.Module = _collection_type()(ebc, options)
    return module


def _table(config: Any, weight: torch.Tensor) -> EmbeddingTable:
    from torchrec.modules.embedding_configs import pooling_type_to_str

    if len(config.feature_names) != 1:
        raise ArgumentError(
            f"table {config.name!r} must have one feature; got {config.feature_names}. Give each "
            "feature a table of its own, or shard it by TorchRec."
        )
    mode = pooling_type_to_str(config.pooling)
    rows, width = config.num_embeddings, config.embedding_dim
    return EmbeddingTable(config.name, rows, width, mode=mode, dtype=weight.dtype)


@functools.cache
def _collection_type() -> type[nn.Module]:
    """Return the module's class, which derives from one of TorchRec's."""
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollectionInterface,
        get_embedding_names_by_table,
    )
    from torchrec.optim.keyed import KeyedOptimizer
    from torchrec.sparse.jagged_tensor import KeyedTensor

    class FusedOptimizer(KeyedOptimizer):  # type: ignore[misc]
        """The update that the backward pass applies, as an optimizer that has nothing to do."""

        def __init__(self, bags: ShardedEmbeddingBags) -> None:
            held = {_key(shard): bags.held(shard) for shard in _own(bags)}
            params = {key: table.weight for key, table in held.items()}
            state = {
                table.weight: {f"{table.shard.table.name}.momentum1": table.sum_of_squares}
                for table in held.values()
                if table.sum_of_squares is not None
            }
            groups = [{"params": list(params.values()), "lr": bags.learning_rate}]
            super().__init__(params, state, groups)
            self._bags = bags

        def zero_grad(self, set_to_none: bool = True) -> None:
            """Do nothing: no gradient is stored."""

        def step(self, closure: Any = None) -> None:
            """Use the learning rate of ``param_groups`` from the next forward pass on."""
            self._bags.learning_rate = self.param_groups[0]["lr"]

    class InterlaceEmbeddingBagCollection(EmbeddingBagCollectionInterface):  # type: ignore[misc]
        """An ``EmbeddingBagCollection`` whose tables are shared out over the ranks."""

        def __init__(self, ebc: Any, options: dict[str, Any]) -> None:
            super().__init__()
            self._configs, self._is_weighted = ebc.embedding_bag_configs(), ebc.is_weighted()
            weights = {
                config.name: ebc.embedding_bags[config.name].weight for config in self._configs
            }
            tables = [_table(config, weights[config.name]) for config in self._configs]
            self._features = [config.feature_names[0] for config in self._configs]
            names = get_embedding_names_by_table(self._configs)
            self._names = [name for of_table in names for name in of_table]
            self._widths = [table.width for table in tables]
            self.bags = ShardedEmbeddingBags(tables, **options)
            for _ in tables:
                calls.take("embedding_all_to_all")
            self._fill(weights)
            updates = self.bags.gradient not in ("dense", "sparse")
            self._fused_optimizer = FusedOptimizer(self.bags)
            for parameter in self.bags.parameters() if updates else ():
                # TorchRec's mark of a parameter that the backward pass updates.
                parameter._in_backward_optimizers = [self._fused_optimizer]  # type: ignore[attr-defined]
            self.register_state_dict_post_hook(_name_by_table)
            self.register_load_state_dict_pre_hook(_take_tables)

        @torch.no_grad()
        def _fill(self, weights: dict[str, torch.Tensor]) -> None:
            by_name = {config.name: config for config in self._configs}
            for shard in _own(self.bags):
                parameter, table = self.bags.held(shard).weight, weights[shard.table.name]
                if parameter.is_meta:
                    continue
                if table.is_meta:
                    by_name[shard.table.name].init_fn(parameter)
                else:
                    parameter.copy_(table[:, shard.start : shard.stop])

        def forward(self, features: Any) -> Any:
            """Return the pooled embeddings of this rank's samples. Collective."""
            if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
                raise ArgumentError(
                    "a KeyedJaggedTensor must have as many samples for every key, and no inverse "
                    "indices; got one with a batch size per key."
                )
            keys = features.keys()
            if keys != self._features:
                absent = sorted(set(self._features) - set(keys))
                if absent:
                    raise ArgumentError(
                        "a KeyedJaggedTensor must have a key for every table's feature; got none "
                        f"for {', '.join(absent)}."
                    )
                features = permuted(features, [keys.index(name) for name in self._features])
            weights = features.weights() if self._is_weighted else None
            values = self.bags(features.values(), features.offsets(), weights)
            return KeyedTensor(keys=self._names, length_per_key=self._widths, values=values)

        def embedding_bag_configs(self) -> list[Any]:
            """Return the tables' configurations, as the unsharded collection does."""
            configs: list[Any] = self._configs
            return configs

        def is_weighted(self) -> bool:
            """Return whether samples' indices have weights."""
            return bool(self._is_weighted)

        @property
        def device(self) -> torch.device:
            """The device of this rank's tables."""
            return self.bags.group.device

        @property
        def fused_optimizer(self) -> Any:
            """The update that the backward pass applies, as one of TorchRec's optimizers."""
            return self._fused_optimizer

    return InterlaceEmbeddingBagCollection


def _own(bags: ShardedEmbeddingBags) -> list[Shard]:
    return bags.plan.of_rank(bags.group.rank)


def _key(shard: Shard) -> str:
    """Return TorchRec's name of a table; with the columns, if the shard has not all of them."""
    is_whole = shard.width == shard.table.width
    return f"embedding_bags.{shard.table.name if is_whole else shard.name}.weight"


def _name_by_table(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace the shards in ``state_dict`` by a ``ShardedTensor`` per table."""
    bags: ShardedEmbeddingBags = module.bags
    for shard in _own(bags):
        for field in ("weight", "sum_of_squares"):
            state_dict.pop(f"{prefix}bags.shards.{shard.name}.{field}", None)
    for table in bags.tables:
        state_dict[f"{prefix}embedding_bags.{table.name}.weight"] = _sharded(bags, table)


def _sharded(bags: ShardedEmbeddingBags, table: EmbeddingTable) -> Any:
    """Return all ranks' shards of a table as a ``ShardedTensor``. Nothing is sent."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import (
        ShardedTensor,
        ShardedTensorMetadata,
        TensorProperties,
    )

    group = bags.process_group or dist.group.WORLD
    shards = [shard for shard in bags.plan.shards if shard.table.name == table.name]
    described, local = [], []
    for shard in sorted(shards, key=lambda shard: shard.start):
        rank = dist.get_global_rank(group, shard.rank) if group is not None else shard.rank
        placement = f"rank:{rank}/{bags.group.device}"
        size = [table.rows, shard.width]
        described.append(ShardMetadata([0, shard.start], size, placement))
        if shard.rank == bags.group.rank:
            local.append(LocalShard(bags.held(shard).weight.detach(), described[-1]))
    properties = TensorProperties(dtype=table.dtype)
    metadata = ShardedTensorMetadata(described, torch.Size([table.rows, table.width]), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, metadata, process_group=group
    )


def _take_tables(module: Any, state_dict: dict[str, Any], prefix: str, *arguments: object) -> None:
    """Replace the tables in ``state_dict``, sharded or whole, by the shards that the module has.

    The state of the fused optimizer is not in the state dict, and stays as it is.
    """
    bags: ShardedEmbeddingBags = module.bags
    tables = {
        table.name: state_dict.pop(f"{prefix}embedding_bags.{table.name}.weight", None)
        for table in bags.tables
    }
    for shard in _own(bags):
        name = f"{prefix}bags.shards.{shard.name}"
        weight = _columns(tables[shard.table.name], shard)
        if weight is not None:
            state_dict[f"{name}.weight"] = weight
        state = bags.held(shard).sum_of_squares
        if state is not None:
            state_dict[f"{name}.sum_of_squares"] = state


def _columns(table: Any, shard: Shard) -> torch.Tensor | None:
    """Return a shard's columns of a table that is whole or a ``ShardedTensor``.

    Raises:
        ArgumentError: The table is sharded by another plan.
    """
    if table is None or not hasattr(table, "local_shards"):
        return None if table is None else table[:, shard.start : shard.stop]
    for local in table.local_shards():
        if local.metadata.shard_offsets[1] == shard.start and local.metadata.shard_sizes == [
            shard.table.rows,
            shard.width,
        ]:
            weight: torch.Tensor = local.tensor
            return weight
    raise ArgumentError(
        f"table {shard.table.name!r} must be sharded as the module's plan says, or whole; got a "
        f"ShardedTensor without columns {shard.start} to {shard.stop} of this rank. Load it by "
        "torch.distributed.checkpoint, or gather it first."
    )
