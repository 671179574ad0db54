"""``ShardedEmbeddingBags``: embedding tables shared out over ranks, pooled and sent in one kernel."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from interlace import optim
from interlace.comm import group_of
from interlace.costs.machine import H200_NODE, Machine
from interlace.errors import ArgumentError
from interlace.nn.group_member import GroupMember
from interlace.nn.input_distribution import Bags, InputDistribution
from interlace.nn.sharding import EmbeddingTable, Shard, ShardingPlan, free_bytes, make_plan
from interlace.operators.embedding_all_to_all.api import embedding_all_to_all

GRADIENTS = ("dense", "sparse", "sgd", "rowwise_adagrad")

_FREE_SHARE = 0.9  # of free memory that tables may take
_INIT_ELEMENTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class PooledEmbeddings:
    """This rank's samples' pooled embeddings, as the operator stored them.

    Attributes:
        values: ``[n, sum of D]``, shards side by side in ``shards``' order: by kind and rank, not
            by table.
        shards: what the columns of ``values`` are.
        plan: whose tables these are.
    """

    values: torch.Tensor
    shards: list[Shard]
    plan: ShardingPlan

    def tables(self) -> dict[str, torch.Tensor]:
        """Each table's ``[n, D]`` by name, in the order of the model: views, except for a table
        whose columns lie apart.
        """
        by_table: dict[str, list[tuple[int, torch.Tensor]]] = {
            table.name: [] for table in self.plan.tables
        }
        # One split, not a slice a table: its backward pass is one concatenation.
        for shard, part in zip(self.shards, self._runs(), strict=True):
            if part is not None:
                by_table[shard.table.name].append((shard.start, part))
        return {
            name: parts[0][1]
            if len(parts) == 1
            else torch.cat([part for _, part in sorted(parts, key=lambda p: p[0])], 1)
            for name, parts in by_table.items()
        }

    def ordered(self) -> torch.Tensor:
        """``[n, sum of D]`` in the order of the model's tables; ``values`` itself if they lie so
        already.
        """
        wanted = [
            (table.name, start) for table in self.plan.tables for start in self._starts(table)
        ]
        if [(shard.table.name, shard.start) for shard in self.shards] == wanted:
            return self.values
        return torch.cat(list(self.tables().values()), 1)

    def stacked(self) -> torch.Tensor:
        """``[n, T, D]`` of tables that are all equally wide, in the order of
        ``plan.stack_order()``.

        A view of ``values`` unless a table is split by columns, which puts them in the order of the
        model.
        """
        values = self.values if self.plan.stackable else self.ordered()
        return values.view(len(values), len(self.plan.tables), self.plan.tables[0].width)

    def _starts(self, table: EmbeddingTable) -> list[int]:
        return sorted(shard.start for shard in self.shards if shard.table.name == table.name)

    def _runs(self) -> Iterator[torch.Tensor | None]:
        """For each shard, the columns from it to the end of its run of neighbours; None for the
        others of a run.
        """
        lengths: list[int] = []
        first: list[bool] = []
        for before, shard in zip([None, *self.shards], self.shards, strict=False):
            joined = (
                before is not None
                and before.table.name == shard.table.name
                and before.stop == shard.start
            )
            first.append(not joined)
            if joined:
                lengths[-1] += shard.width
            else:
                lengths.append(shard.width)
        parts = iter(torch.split(self.values, lengths, dim=1))
        return (next(parts) if begins else None for begins in first)


class ShardedEmbeddingBags(GroupMember, nn.Module):
    """Several ``nn.EmbeddingBag`` s whose tables are shared out over the ranks of a group.

    Each rank has a part of the global batch and needs its samples' embeddings from all tables. The
    indices travel to the tables' owners; the pooled embeddings come back from inside the kernel
    that pools them (:func:`interlace.embedding_all_to_all`). Which rank holds what is ``plan``:
    print it.

    Dimensions: T tables, D_t columns of table t, n samples of this rank, R ranks, B = n R.

    Forward, collective::

        y [n, sum of D_t]:  y[b, columns of t] = sum (or mean) over i in bag (t, b) of table_t[i],
        times weight_i if given

    Backward: every rank's gradient goes to the tables' owners, which add the contributions of all B
    samples. What happens with the sum is ``gradient``'s choice: ``"dense"`` and ``"sparse"`` leave
    it in ``weight.grad`` for an optimizer of torch's; ``"sgd"`` and ``"rowwise_adagrad"`` update
    the tables within the backward pass, and no gradient is stored.

    **Scale.** With ``average_gradients`` the gradient is divided by R: then tables learn what they
    would learn from the whole batch, if each rank's loss is the mean over its own samples. That is
    ``DistributedDataParallel``'s convention.

    **State dict.** ``state_dict()`` holds this rank's shards, under names that say which columns of
    which table they are: ``shards.<table>:<start>-<stop>.weight``. ``load_state_dict`` takes the
    shards of any plan for any number of ranks: merge the dictionaries of all ranks that saved, and
    every rank picks what it needs. Row-wise Adagrad's state goes along; where the new plan cuts a
    table's columns elsewhere, a new shard's state is the mean over its columns of the old ones. (A
    row of a table that is split by columns has one state a shard, the mean over that shard's
    columns; so splitting changes the update a little.)

    Args:
        tables: of the model, the same on every rank.
        group: default: the default process group, or this process on its own.
        device: default: the current CUDA device, or the CPU if there is none; ``"meta"`` allocates
            nothing.
        gradient: ``"dense"``, ``"sparse"``, ``"sgd"`` or ``"rowwise_adagrad"``.
        learning_rate, epsilon: of the fused optimizers. The attribute ``learning_rate`` may be set
            at any time, on all ranks alike.
        average_gradients: divide gradients by R.
        output_dtype: of y; default: float32.
        plan: default: one that balances the ranks (:func:`interlace.nn.make_plan`).
        batch: samples of the global batch, roughly; only for balancing.
        memory_bytes: for tables on each rank; default: 90 % of what is free on the rank that has
            least.
        seed: of the first weights, uniform within ``1 / sqrt(rows)``; they do not depend on the
            plan.
        machine: whose memory and links the plan weighs against each other.

    Attributes:
        plan: the sharding plan.
        impl: ``"auto"`` (default), ``"fused"`` or ``"unfused"``; may be set at any time, on all
            ranks alike.

    Raises:
        ArgumentError: tables that do not fit into memory, before anything is allocated; a plan for
            another number of ranks.
        RankMismatchError: ranks differ in tables or options.

    Example:
        >>> tables = [EmbeddingTable("user", 100_000, 64), EmbeddingTable("item", 50_000, 64, mode="mean")]
        >>> bags = ShardedEmbeddingBags(tables, gradient="rowwise_adagrad", learning_rate=0.02)
        >>> y = bags(indices, offsets)      # [n, 128]: bags of "user" for n samples, then bags of "item"
        >>> y = bags(kjt)                   # or a torchrec KeyedJaggedTensor with these two keys
    """

    _group_attributes = ("process_group", "group")

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        gradient: str = "dense",
        learning_rate: float = 0.01,
        epsilon: float = 1e-8,
        average_gradients: bool = True,
        output_dtype: torch.dtype = torch.float32,
        plan: ShardingPlan | None = None,
        batch: int = 8192,
        memory_bytes: int | None = None,
        seed: int = 0,
        machine: Machine = H200_NODE,
    ) -> None:
        super().__init__()
        if gradient not in GRADIENTS:
            raise ArgumentError(
                f"{type(self).__name__}: gradient must be one of {', '.join(GRADIENTS)}; got "
                f"{gradient!r}."
            )
        on_meta = device is not None and torch.device(device).type == "meta"
        self.process_group = group
        self.group = group_of(group, None if on_meta else device)
        self.gradient, self.learning_rate, self.epsilon = gradient, learning_rate, epsilon
        self.average_gradients, self.output_dtype, self.impl = (
            average_gradients,
            output_dtype,
            "auto",
        )
        state_bytes = 4 if gradient == "rowwise_adagrad" else 0
        copies = 2 if gradient == "dense" else 1
        if plan is None:
            capacity = memory_bytes if memory_bytes is not None or on_meta else self._free_bytes()
            plan = make_plan(
                tables,
                self.group.world_size,
                batch=batch,
                capacity_bytes=capacity,
                state_bytes_per_row=state_bytes,
                copies=copies,
                machine=machine,
            )
        elif plan.world_size != self.group.world_size or list(plan.tables) != list(tables):
            raise ArgumentError(
                f"{type(self).__name__}: plan must be of these tables and of "
                f"{self.group.world_size} ranks; "
                f"got {len(plan.tables)} tables and {plan.world_size} ranks."
            )
        self.plan = plan
        described = [
            [t.name, t.rows, t.width, t.mode, str(t.dtype), t.bag_length] for t in plan.tables
        ]
        placed = [f"{shard.name} on {shard.rank}" for shard in plan.shards]
        options = {
            "gradient": gradient,
            "average_gradients": average_gradients,
            "output_dtype": str(output_dtype),
        }
        self.group.compare(
            type(self).__name__, {"tables": described, "sharding_plan": placed, **options}
        )
        # Ranks remember each other's widths by this name: another plan must have another one.
        self._name = f"{type(self).__name__} {hashlib.sha256(str([described, placed]).encode()).hexdigest()[:16]}"
        self._held_by_kind = {kind: plan.of_rank(self.group.rank, kind) for kind in plan.kinds}
        self._output_order = plan.in_output_order()
        self.distribution = InputDistribution(plan, self.group, group)
        self.shards = nn.ModuleDict()
        for shard in plan.of_rank(self.group.rank):
            self.shards[shard.name] = _ShardParameters(
                shard, "meta" if on_meta else self.group.device, bool(state_bytes)
            )
        if not on_meta:
            self.reset_parameters(seed)
        self.register_load_state_dict_pre_hook(_take_own_shards)  # type: ignore[no-untyped-call]

    @property
    def tables(self) -> tuple[EmbeddingTable, ...]:
        return self.plan.tables

    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the weights anew, uniform within ``1 / sqrt(rows)``: the same table under any plan
        on one kind of device.
        """
        order = {table.name: i for i, table in enumerate(self.plan.tables)}
        for shard in self.plan.of_rank(self.group.rank):
            self._held(shard).draw(seed, order[shard.table.name])

    def forward(
        self,
        features: Any,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``y [n, sum of D_t]`` in the order of ``tables``. Collective, on the current stream.

        The operator stores tables in the order of the plan. Putting them in the order of the model
        copies y once where the two differ; :meth:`pool` does not, and gives each table's embeddings
        as a view.

        Args:
            features: the indices, 1-D, int32 or int64, table-major (all bags of table 0, then of
                table 1), or an object with the interface of torchrec's ``KeyedJaggedTensor`` whose
                keys include the tables' names.
            offsets: ``[T n + 1]``; None where every table has a ``bag_length``, or with a
                ``KeyedJaggedTensor``.
            per_sample_weights: a weight an index, for tables of mode ``"sum"``.

        Raises:
            ArgumentError: shapes, dtypes or keys that do not fit.
            RankMismatchError: ranks have different numbers of samples.
            PeerTimeoutError: a rank did not make this call before the group's deadline.

        Without a ``bag_length`` for every table the host waits, once a call, for the lengths from
        the other ranks.
        """
        return self.pool(features, offsets, per_sample_weights).ordered()

    def pool(
        self,
        features: Any,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> PooledEmbeddings:
        """As :meth:`forward`, in the order in which the operator stores; nothing is copied to
        reorder it.
        """
        indices, offsets, per_sample_weights = self._read(features, offsets, per_sample_weights)
        return self.look_up(self.distribution(indices, offsets, per_sample_weights))

    def look_up(self, bags: list[Bags]) -> PooledEmbeddings:
        """The second half of :meth:`pool`, of bags that ``distribution`` has brought here: earlier,
        say, for the next batch.
        """
        outputs = self._call(bags, self.process_group)
        values = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        if self.average_gradients and self.group.world_size > 1:
            values = scale_gradient(values, 1 / self.group.world_size)
        return PooledEmbeddings(values, self._output_order, self.plan)

    def look_up_alone(
        self, bags: list[Bags], group: dist.ProcessGroup | None
    ) -> list[torch.Tensor]:
        """Pool this rank's tables for the whole batch and send nothing: :meth:`look_up` without its
        communication.

        For measuring what communication costs.

        Args:
            bags: as for :meth:`look_up`.
            group: of this rank alone.

        Returns:
            ``[B, columns of this rank]`` for each of the plan's kinds.
        """
        return self._call(bags, group)

    def extra_repr(self) -> str:
        return (
            f"{len(self.plan.tables)} tables, rank={self.group.rank} of {self.group.world_size}, "
            f"gradient={self.gradient}, "
            f"impl={self.impl}"
        )

    def _call(self, bags: list[Bags], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        """One call of the operator for each kind."""
        outputs = []
        for kind, each in zip(self.plan.kinds, bags, strict=True):
            held = [self._held(shard) for shard in self._held_by_kind[kind]]
            outputs.append(
                embedding_all_to_all(
                    [parameters.weight for parameters in held],
                    each.indices,
                    each.offsets,
                    per_sample_weights=each.per_sample_weights,
                    mode=kind[0],
                    output_dtype=self.output_dtype,
                    gradient=self._gradient(held),
                    batch_size=each.batch,
                    name=f"{self._name} {kind[0]} of {kind[1]}",
                    group=group,
                    impl=self.impl,
                )
            )
        return outputs

    def _gradient(self, parameters: list[_ShardParameters]) -> Any:
        if self.gradient == "sgd":
            return optim.SGD(self.learning_rate)
        if self.gradient == "rowwise_adagrad":
            return optim.RowWiseAdagrad(
                self.learning_rate, self.epsilon, states=[each.state for each in parameters]
            )
        return self.gradient

    def _held(self, shard: Shard) -> _ShardParameters:
        found = self.shards[shard.name]
        assert isinstance(found, _ShardParameters)
        return found

    def _read(
        self, features: Any, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if isinstance(features, torch.Tensor):
            return features, offsets, weights
        if not all(
            hasattr(features, name)
            for name in ("keys", "values", "offsets", "weights_or_none", "permute")
        ):
            raise ArgumentError(
                f"{type(self).__name__}: features must be indices or a KeyedJaggedTensor; got "
                f"{type(features).__name__}."
            )
        if offsets is not None or weights is not None:
            raise ArgumentError(
                f"{type(self).__name__}: offsets and weights must not be given beside a "
                "KeyedJaggedTensor; got both."
            )
        names, keys = [table.name for table in self.plan.tables], list(features.keys())
        missing = [name for name in names if name not in keys]
        if missing:
            raise ArgumentError(
                f"{type(self).__name__}: a KeyedJaggedTensor must have a key for every table; got "
                f"none for {', '.join(missing)}."
            )
        if keys != names:
            features = features.permute([keys.index(name) for name in names])
        return features.values(), features.offsets(), features.weights_or_none()

    def _free_bytes(self) -> int:
        """The least of all ranks: plans must be made from the same numbers."""
        free = free_bytes(self.group.device, self.group.world_size)
        return int(_FREE_SHARE * min(self.group.exchange("memory for tables", free)))


class _ShardParameters(nn.Module):
    """A shard's rows, and the state of its optimizer."""

    sum_of_squares: torch.Tensor | None

    def __init__(self, shard: Shard, device: torch.device | str, with_state: bool) -> None:
        super().__init__()
        self.shard = shard
        self.weight = nn.Parameter(
            torch.empty(shard.table.rows, shard.width, dtype=shard.table.dtype, device=device)
        )
        state = (
            torch.zeros(shard.table.rows, dtype=torch.float32, device=device)
            if with_state
            else None
        )
        self.register_buffer("sum_of_squares", state)

    @property
    def state(self) -> torch.Tensor:
        assert self.sum_of_squares is not None
        return self.sum_of_squares

    @torch.no_grad()
    def draw(self, seed: int, table: int) -> None:
        """Rows come in blocks, each from its own seed and at full width, so that no plan changes a
        weight.
        """
        config, weight = self.shard.table, self.weight
        block = max(1, _INIT_ELEMENTS // config.width)
        generator = torch.Generator(weight.device)
        bound = 1 / math.sqrt(config.rows)
        for number, start in enumerate(range(0, config.rows, block)):
            generator.manual_seed(((seed * 1_000_003 + table) * 1_000_003 + number) % (1 << 63))
            rows = min(block, config.rows - start)
            full = torch.empty(rows, config.width, device=weight.device).uniform_(
                -bound, bound, generator=generator
            )
            weight[start : start + rows] = full[:, self.shard.start : self.shard.stop].to(
                weight.dtype
            )
        if self.sum_of_squares is not None:
            self.sum_of_squares.zero_()


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x``, whose gradient arrives times ``factor``."""
    scaled: torch.Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled


def _take_own_shards(
    module: ShardedEmbeddingBags, state_dict: dict[str, Any], prefix: str, *rest: object
) -> None:
    """Before loading: of any plan's shards in ``state_dict``, make the ones that ``module`` has,
    and drop the others.
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
    made: dict[str, torch.Tensor] = {}
    for shard in module.plan.of_rank(module.group.rank):
        parts = sorted(
            part
            for part in saved.get(shard.table.name, [])
            if part[0] < shard.stop and part[1] > shard.start
        )
        if _covers(parts, shard):
            made |= {
                f"{root}{shard.name}.{name}": value
                for name, value in _assemble(state_dict, root, parts, shard).items()
            }
    for parts in saved.values():
        for _, _, name in parts:
            for field in ("weight", "sum_of_squares"):
                state_dict.pop(f"{root}{name}.{field}", None)
    for key, value in made.items():
        if module.gradient == "rowwise_adagrad" or not key.endswith("sum_of_squares"):
            state_dict[key] = value


def _covers(parts: list[tuple[int, int, str]], shard: Shard) -> bool:
    edges = [shard.start, *(stop for _, stop, _ in parts)]
    return (
        bool(parts)
        and edges[-1] >= shard.stop
        and all(start <= edge for (start, _, _), edge in zip(parts, edges, strict=False))
    )


def _assemble(
    state_dict: dict[str, Any], root: str, parts: list[tuple[int, int, str]], shard: Shard
) -> dict[str, torch.Tensor]:
    """A shard's weight, and its state if one was saved, from parts that cover it, sorted."""
    fields: dict[str, torch.Tensor] = {}
    if [(start, stop) for start, stop, _ in parts] == [(shard.start, shard.stop)]:
        names = (f"{parts[0][2]}.{field}" for field in ("weight", "sum_of_squares"))
        return {
            name.rpartition(".")[2]: state_dict[root + name]
            for name in names
            if root + name in state_dict
        }
    columns = []
    state = None
    edge = shard.start
    for start, stop, name in parts:
        until = min(stop, shard.stop)
        columns.append(state_dict[f"{root}{name}.weight"][:, edge - start : until - start])
        squares = state_dict.get(f"{root}{name}.sum_of_squares")
        if squares is not None:
            share = squares * ((until - edge) / shard.width)
            state = share if state is None else state + share
        edge = until
    fields["weight"] = torch.cat(columns, 1)
    if state is not None:
        fields["sum_of_squares"] = state
    return fields


__all__ = ["GRADIENTS", "PooledEmbeddings", "ShardedEmbeddingBags", "scale_gradient"]
