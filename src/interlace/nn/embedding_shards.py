"""Parameters of embedding shards, and state dicts of one plan that load under another one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from interlace.comm import rank_and_size
from interlace.nn.shard_holder import ShardHolder, is_gathering
from interlace.nn.sharded_parameters import Sharing
from interlace.nn.sharding import Shard

if TYPE_CHECKING:
    from interlace.nn.embedding_bags import ShardedEmbeddingBags

# Elements that are drawn at a time. They are drawn at full width and then cut, so more of them
# would take much memory.
_INIT_ELEMENTS = 1 << 20


class ShardParameters(ShardHolder):
    """The weight of one shard and the state of its optimizer.

    Attributes:
        weight: ``[rows, columns of the shard]``, of the table's dtype.
        sum_of_squares: float32 ``[rows]``: the state of row-wise Adagrad; None without one.
    """

    _group_attributes = ("process_group",)

    sum_of_squares: torch.Tensor | None

    def __init__(
        self, shard: Shard, device: torch.device | str, with_state: bool, sharing: Sharing
    ) -> None:
        super().__init__()
        self.shard = shard
        self.process_group, self.absent = sharing
        self.world_size = rank_and_size(self.process_group)[1]
        self.weight = nn.Parameter(
            torch.empty(shard.table.rows, shard.width, dtype=shard.table.dtype, device=device)
        )
        state = (
            torch.zeros(shard.table.rows, dtype=torch.float32, device=device)
            if with_state
            else None
        )
        self.register_buffer("sum_of_squares", state)

    def _sharded(self) -> list[str]:
        return ["weight"]

    def _sharing(self) -> Sharing:
        return Sharing(self.process_group, self.absent)

    @torch.no_grad()
    def draw(self, seed: int, table: int) -> None:
        """Draw the weight, uniform within ``1 / sqrt(rows)``, and set the state to 0.

        Args:
            seed: Of the module.
            table: The table's index in the model.
        """
        # Blocks of rows are drawn at the table's full width, each from a seed of its own, and this
        # shard keeps its columns: so the weights do not depend on the plan.
        config, weight = self.shard.table, self.weight
        block = max(1, _INIT_ELEMENTS // config.width)
        generator = torch.Generator(weight.device)
        bound = 1 / math.sqrt(config.rows)
        for number, start in enumerate(range(0, config.rows, block)):
            # The seed of a block depends on table and block alone: two large factors keep the seeds
            # of different tables and blocks apart.
            generator.manual_seed(((seed * 1_000_003 + table) * 1_000_003 + number) % (1 << 63))
            rows = min(block, config.rows - start)
            # In float32, so that weights do not depend on the default dtype.
            full = torch.empty(rows, config.width, dtype=torch.float32, device=weight.device)
            full.uniform_(-bound, bound, generator=generator)
            weight[start : start + rows] = full[:, self.shard.start : self.shard.stop].to(
                weight.dtype
            )
        if self.sum_of_squares is not None:
            self.sum_of_squares.zero_()


def save_all_shards(
    module: ShardedEmbeddingBags, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Add the other ranks' shards to ``state_dict`` while all ranks' shards are gathered.

    A hook that runs after a state dict is made.
    """
    if not is_gathering() or module.group.world_size == 1:
        return
    fields = ["weight"] + ["sum_of_squares"] * (module.gradient == "rowwise_adagrad")
    device = module.group.device
    for shard in module.plan.shards:
        for field in fields:
            key = f"{prefix}shards.{shard.name}.{field}"
            if shard.rank != module.group.rank:
                shape = [shard.table.rows] + [shard.width] * (field == "weight")
                dtype = shard.table.dtype if field == "weight" else torch.float32
                state_dict[key] = torch.empty(shape, dtype=dtype, device=device)
            value = state_dict[key].detach()
            dist.broadcast(value, group_src=shard.rank, group=module.process_group)


def take_own_shards(
    module: ShardedEmbeddingBags, state_dict: dict[str, Any], prefix: str, *arguments: object
) -> None:
    """Replace the shards in ``state_dict``, of any plan, by those that ``module`` has.

    A hook that runs before a state dict is loaded. Shards of other ranks are dropped.
    """
    root = f"{prefix}shards."
    saved: dict[str, list[tuple[int, int, str]]] = {}
    for key in list(state_dict):
        if key.startswith(root) and key.endswith(".weight"):
            name = key[len(root) : -len(".weight")]
            table, _, columns = name.rpartition(":")
            start, _, stop = columns.partition("-")
            if start.isdigit() and stop.isdigit():
                saved.setdefault(table, []).append((int(start), int(stop), name))
    own_state: dict[str, torch.Tensor] = {}
    for shard in module.plan.of_rank(module.group.rank):
        parts = sorted(
            part
            for part in saved.get(shard.table.name, [])
            if part[0] < shard.stop and part[1] > shard.start
        )
        if _covers(parts, shard):
            own_state |= {
                f"{root}{shard.name}.{name}": value
                for name, value in _assemble(state_dict, root, parts, shard).items()
            }
    # Keys that the module does not have would be reported as unexpected.
    for parts in saved.values():
        for _, _, name in parts:
            for field in ("weight", "sum_of_squares"):
                state_dict.pop(f"{root}{name}.{field}", None)
    for key, value in own_state.items():
        if module.gradient == "rowwise_adagrad" or not key.endswith("sum_of_squares"):
            state_dict[key] = value


def _covers(parts: list[tuple[int, int, str]], shard: Shard) -> bool:
    """Tell if sorted parts hold all columns of a shard, without a gap."""
    edges = [shard.start, *(stop for _, stop, _ in parts)]
    return (
        bool(parts)
        and edges[-1] >= shard.stop
        and all(start <= edge for (start, _, _), edge in zip(parts, edges, strict=False))
    )


def _assemble(
    state_dict: dict[str, Any], root: str, parts: list[tuple[int, int, str]], shard: Shard
) -> dict[str, torch.Tensor]:
    """Return a shard's weight, and its state if one was saved, from sorted parts that cover it."""
    if [(start, stop) for start, stop, _ in parts] == [(shard.start, shard.stop)]:
        saved = f"{root}{parts[0][2]}"
        fields = [f for f in ("weight", "sum_of_squares") if f"{saved}.{f}" in state_dict]
        return {field: state_dict[f"{saved}.{field}"] for field in fields}
    columns = []
    state = None
    edge = shard.start
    # A part of other rows than the shard's is left to torch, which names it.
    weights = [state_dict[f"{root}{name}.weight"] for *_, name in parts]
    for weight in weights:
        if len(weight) != shard.table.rows:
            return {"weight": weight}
    has_state = all(f"{root}{name}.sum_of_squares" in state_dict for *_, name in parts)
    for (start, stop, name), weight in zip(parts, weights, strict=True):
        until = min(stop, shard.stop)
        columns.append(weight[:, edge - start : until - start])
        # A row has one state, the mean over the shard's columns. So a new shard's state is the mean
        # of the old ones, weighted by the number of columns that come from each.
        if has_state:
            squares = state_dict[f"{root}{name}.sum_of_squares"]
            share = squares * ((until - edge) / shard.width)
            state = share if state is None else state + share
        edge = until
    weight = torch.cat(columns, 1)
    return {"weight": weight} if state is None else {"weight": weight, "sum_of_squares": state}
