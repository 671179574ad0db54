"""``ShardedEmbeddingBags``: embedding tables sharded over ranks, pooled and sent in one kernel."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from interlace import optim
from interlace.comm import group_of
from interlace.costs.machine import H200_NODE, Machine
from interlace.errors import ArgumentError
from interlace.gemm.operands import integer
from interlace.nn.embedding_shards import ShardParameters, save_all_shards, take_own_shards
from interlace.nn.gradients import learn_weights, scale_gradient
from interlace.nn.group_member import GroupMember
from interlace.nn.input_distribution import Bags, InputDistribution
from interlace.nn.sharded_parameters import Sharing
from interlace.nn.sharding import EmbeddingTable, Shard, ShardingPlan, make_plan
from interlace.operators.embedding_all_to_all import embedding_all_to_all

GRADIENTS = ("dense", "sparse", "sgd", "rowwise_adagrad")

_FREE_SHARE = 0.9  # of free memory that tables may take


@dataclasses.dataclass(frozen=True)
class PooledEmbeddings:
    """Pooled embeddings of this rank's n samples, in the order in which the operator stores them.

    Attributes:
        values: ``[n, sum of D]`` of the module's output dtype: shards side by side in the order of
            ``shards``, which is by kind and rank, not by table.
        shards: The shards that the columns of ``values`` belong to, from left to right.
        plan: The plan that the shards are of.
    """

    values: torch.Tensor
    shards: list[Shard]
    plan: ShardingPlan

    def tables(self) -> dict[str, torch.Tensor]:
        """Return every table's ``[n, D]`` by the table's name, in the order of the model.

        They are views of ``values``, except for a table whose columns are not side by side there.
        """
        by_table: dict[str, list[tuple[int, torch.Tensor]]] = {
            table.name: [] for table in self.plan.tables
        }
        # One split instead of one slice per table, because its backward pass is one concatenation,
        # where slices would each fill a gradient of full width with zeros.
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
        """Return ``[n, sum of D]`` in the order of the model's tables.

        It is ``values`` itself if the columns are in that order already, and a copy otherwise.
        """
        order = {table.name: i for i, table in enumerate(self.plan.tables)}
        keys = [(order[shard.table.name], shard.start) for shard in self.shards]
        # With one rank, or with whole tables dealt out in order, no copy is needed.
        if keys == sorted(keys):
            return self.values
        return torch.cat(list(self.tables().values()), 1)

    def stacked(self) -> torch.Tensor:
        """Return ``[n, T, D]`` of T tables of one width D, in the order of ``plan.stack_order()``.

        It is a view of ``values``, unless a table is split by columns: then it is a copy, in the
        order of the model.

        Raises:
            ArgumentError: tables have different widths.
        """
        widths = sorted({table.width for table in self.plan.tables})
        if len(widths) > 1:
            raise ArgumentError(
                f"PooledEmbeddings.stacked: tables must have one width; got {widths}. Use tables()."
            )
        values = self.values if self.plan.stackable else self.ordered()
        return values.view(len(values), len(self.plan.tables), widths[0])

    def _runs(self) -> Iterator[torch.Tensor | None]:
        """Yield, for every shard, the columns of the run of neighbouring shards that it begins.

        A run is of one table. A shard that continues a run yields None.
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
    """Several ``nn.EmbeddingBag`` modules in one, with tables sharded over the ranks of a group.

    Each rank has a part of the global batch and needs its samples' embeddings from all tables. The
    indices travel to the tables' owners; the pooled embeddings come back from inside the kernel
    that pools them (:func:`interlace.embedding_all_to_all`). Print ``plan`` to see which rank holds
    which table.

    Dimensions: T tables, D_t columns of table t, n samples of this rank, R ranks, B = n R.

    Forward, collective::

        y [n, sum of D_t]:  y[b, columns of t] = sum (or mean) over i in bag (t, b) of table_t[i],
        times weight_i if given

    Backward: every rank's gradient goes to the tables' owners, which add the contributions of all B
    samples. ``gradient`` chooses the use of the sum: ``"dense"`` and ``"sparse"`` leave it in
    ``weight.grad`` for one of torch's optimizers, and ``clip_grad_norm_`` (of dense ones) and
    ``GradScaler`` then count all ranks' tables, collectively; ``"sgd"`` and ``"rowwise_adagrad"``
    update the tables within the backward pass, and no gradient is stored.

    **Scale.** With ``average_gradients`` the gradient is divided by R. If each rank's loss is the
    mean over its own samples, tables then get the gradient of the mean over the whole batch, as
    ``DistributedDataParallel`` does it.

    **State dict.** ``state_dict()`` holds this rank's shards, under names that give the table and
    its columns: ``shards.<table>:<start>-<stop>.weight``. ``load_state_dict`` takes the shards of
    any plan for any number of ranks: merge the dictionaries of all ranks that saved (or, if all
    tables fit into one rank's memory, call :func:`unsharded_state_dict`), and every rank picks its
    shards. Row-wise Adagrad's state is saved and loaded, too. If the new plan cuts a
    table's columns elsewhere, a new shard's state is the mean of the old states over its columns.
    (A row of a table that is split by columns has one state per shard, the mean over that shard's
    columns; so splitting changes the update a little.)

    Args:
        tables: The model's tables, the same on every rank.
        group: Process group; default: the default process group, or this process alone if it is
            not one of several.
        device: Default: the current CUDA device, or the CPU if there is none; ``"meta"`` allocates
            no memory.
        gradient: ``"dense"``, ``"sparse"``, ``"sgd"`` or ``"rowwise_adagrad"``.
        learning_rate, epsilon: Parameters of the fused optimizers. The attribute
            ``learning_rate`` may be set at any time, on all ranks alike.
        average_gradients: Divide gradients by R.
        output_dtype: dtype of y; default: float32.
        plan: Sharding plan; default: one that balances the ranks (:func:`interlace.nn.make_plan`).
        batch: Approximate number of samples in the global batch; only for balancing.
        memory_bytes: Memory for tables on each rank, in bytes; default: 90 % of the free memory on
            the rank that has least.
        seed: Seed of the first weights, uniform within ``1 / sqrt(rows)``; they do not depend on
            the plan.
        machine: Machine whose memory and links the plan weighs against each other.

    Attributes:
        plan: The sharding plan.
        impl: ``"auto"`` (default), ``"fused"``, ``"pooled"`` or ``"unfused"``; may be set at any
            time, on all ranks alike.

    Raises:
        ArgumentError: tables that do not fit into memory, before anything is allocated; a plan for
            another number of ranks.
        RankMismatchError: ranks differ in tables or options.

    Example:
        >>> user = EmbeddingTable("user", 100_000, 64)
        >>> item = EmbeddingTable("item", 50_000, 64, mode="mean")
        >>> bags = ShardedEmbeddingBags([user, item], gradient="sgd", learning_rate=0.02)
        >>> y = bags(indices, offsets)      # [n, 128]: columns of "user", then columns of "item"
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
        self.average_gradients, self.output_dtype = average_gradients, output_dtype
        self.impl = "auto"
        # Row-wise Adagrad keeps one float32 per row; a dense gradient is as large as its table.
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
        # Ranks that were built from different tables or options would wait for each other until
        # the deadline, so they compare both now.
        descriptions = [
            [t.name, t.rows, t.width, t.mode, str(t.dtype), t.bag_length] for t in plan.tables
        ]
        placement = [f"{shard.name} on {shard.rank}" for shard in plan.shards]
        options = {
            "gradient": gradient,
            "average_gradients": average_gradients,
            "output_dtype": str(output_dtype),
        }
        self.group.agreement.compare(
            type(self).__name__, {"tables": descriptions, "sharding_plan": placement, **options}
        )
        # Ranks remember each other's widths under this name, so each plan needs a name of its own.
        digest = hashlib.sha256(str([descriptions, placement]).encode()).hexdigest()
        self._name = f"{type(self).__name__} {digest[:16]}"
        self._names_by_kind = {
            kind: [shard.name for shard in plan.of_rank(self.group.rank, kind)]
            for kind in plan.kinds
        }
        self._output_order = plan.in_output_order()
        self.distribution = InputDistribution(plan, self.group, group)
        self.shards = nn.ModuleDict()
        holders = {shard.rank for shard in plan.shards}
        absent = next((rank for rank in range(plan.world_size) if rank not in holders), None)
        for shard in plan.of_rank(self.group.rank):
            self.shards[shard.name] = ShardParameters(
                shard,
                "meta" if on_meta else self.group.device,
                bool(state_bytes),
                Sharing(group, absent),
            )
        if not on_meta:
            self.reset_parameters(seed)
        self.register_state_dict_post_hook(save_all_shards)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(take_own_shards)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Asked of every table's dtype, so that ranks decide alike, whichever tables they hold.
        for dtype in {table.dtype for table in self.plan.tables}:
            converted = fn(torch.empty(0, dtype=dtype, device=self.group.device)).dtype
            if converted != dtype:
                raise ArgumentError(
                    f"{type(self).__name__}: tables must keep their dtypes, which are part of the "
                    f"plan; got a conversion from {dtype} to {converted}. Give EmbeddingTable the "
                    "dtype, and convert the other modules one by one."
                )
        base: Any = super()
        return base._apply(fn, recurse)

    @property
    def tables(self) -> tuple[EmbeddingTable, ...]:
        """The model's tables, in its order."""
        return self.plan.tables

    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the weights anew, uniform within ``1 / sqrt(rows)``.

        On one kind of device, the same seed gives the same tables under any plan.
        """
        # Asked on every rank, also on one that has no table to draw.
        seed = integer(f"{type(self).__name__}: seed must be an integer", seed)
        order = {table.name: i for i, table in enumerate(self.plan.tables)}
        for shard in self.plan.of_rank(self.group.rank):
            self.held(shard).draw(seed, order[shard.table.name])

    def forward(
        self,
        features: Any,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``y [n, sum of D_t]``, columns in the order of ``tables``.

        Collective, on the current stream. The operator stores tables in the order of the plan. If
        that is not the order of the model, y is copied once; :meth:`pool` makes no copy, and gives
        each table's embeddings as a view. Unless every table has a ``bag_length``, the host waits
        once per call for the lengths from the other ranks.

        Args:
            features: The indices, 1-D, int32 or int64, table-major (all bags of table 0, then of
                table 1), or an object with the interface of torchrec's ``KeyedJaggedTensor`` whose
                keys include the tables' names.
            offsets: ``[T n + 1]``; None if every table has a ``bag_length``, or with a
                ``KeyedJaggedTensor``.
            per_sample_weights: One weight per index, for tables of mode ``"sum"``. They may require
                a gradient, on all ranks alike; ``average_gradients`` does not concern it.

        Raises:
            ArgumentError: shapes, dtypes or keys that do not fit.
            RankMismatchError: ranks have different numbers of samples, or only some ranks' weights
                require a gradient.
            PeerTimeoutError: a rank did not make this call before the group's deadline.
        """
        return self.pool(features, offsets, per_sample_weights).ordered()

    def pool(
        self,
        features: Any,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> PooledEmbeddings:
        """Compute the output of :meth:`forward` in the order of the plan, without copying it.

        Arguments and errors are those of :meth:`forward`.
        """
        indices, offsets, per_sample_weights = self._read(features, offsets, per_sample_weights)
        return self.look_up(self.distribution(indices, offsets, per_sample_weights))

    def look_up(self, bags: list[Bags]) -> PooledEmbeddings:
        """Pool and exchange bags that ``distribution`` has sent to this rank.

        It is the second half of :meth:`pool`. A program may call ``distribution`` early, for the
        next batch, and this method when it needs the embeddings. Collective.
        """
        outputs = self._call(bags, self.process_group)
        if self.average_gradients and self.group.world_size > 1:
            # The output's gradient is scaled, which is smaller than the tables' gradients.
            outputs = [scale_gradient(output, 1 / self.group.world_size) for output in outputs]
        # Weights of lookups belong to this rank's samples, so their gradients are not scaled.
        ranks = range(self.group.world_size)
        for number, (kind, bags_of_kind) in enumerate(zip(self.plan.kinds, bags, strict=True)):
            if bags_of_kind.per_sample_weights is not None:
                tables = self._of_shards(kind, "_parameters", "weight")
                columns = [
                    sum(shard.width for shard in self.plan.of_rank(rank, kind)) for rank in ranks
                ]
                outputs[number] = learn_weights(
                    outputs[number], bags_of_kind, tables, columns, self.distribution
                )
        # With one kind the operator's output is the result. Several kinds cost a copy.
        values = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return PooledEmbeddings(values, self._output_order, self.plan)

    def look_up_alone(
        self, bags: list[Bags], group: dist.ProcessGroup | None
    ) -> list[torch.Tensor]:
        """Pool this rank's tables for the whole batch and send nothing.

        It is :meth:`look_up` without its communication, to measure the cost of communication.

        Args:
            bags: The bags that :meth:`look_up` would take.
            group: A process group of this rank alone.

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
        """Call the operator once for every kind of shard."""
        outputs = []
        for kind, bags_of_kind in zip(self.plan.kinds, bags, strict=True):
            weights = bags_of_kind.per_sample_weights
            outputs.append(
                embedding_all_to_all(
                    self._of_shards(kind, "_parameters", "weight"),
                    bags_of_kind.indices,
                    bags_of_kind.offsets,
                    # Their gradient is computed apart.
                    per_sample_weights=None if weights is None else weights.detach(),
                    mode=kind[0],
                    output_dtype=self.output_dtype,
                    gradient=self._gradient(kind),
                    batch_size=bags_of_kind.batch,
                    name=f"{self._name} {kind[0]} of {kind[1]}",
                    group=group,
                    impl=self.impl,
                )
            )
        return outputs

    def _of_shards(self, kind: tuple[str, torch.dtype], holder: str, name: str) -> list[Any]:
        """Return the parameters or the buffers of one name of this rank's shards of a kind.

        They are taken from the modules' dictionaries: to ask each module for its attribute would
        take the host longer than the call itself.

        Args:
            kind: One of the plan's kinds.
            holder: ``"_parameters"`` or ``"_buffers"``.
            name: Of the parameter or the buffer.
        """
        modules = self.shards._modules
        return [getattr(modules[shard], holder)[name] for shard in self._names_by_kind[kind]]

    def _gradient(self, kind: tuple[str, torch.dtype]) -> Any:
        """Return the operator's argument ``gradient``: an update with its states, or a name."""
        if self.gradient == "sgd":
            return optim.SGD(self.learning_rate)
        if self.gradient == "rowwise_adagrad":
            states = self._of_shards(kind, "_buffers", "sum_of_squares")
            return optim.RowWiseAdagrad(self.learning_rate, self.epsilon, states=states)
        return self.gradient

    def held(self, shard: Shard) -> ShardParameters:
        """Return the parameters of one of this rank's shards."""
        parameters = self.shards[shard.name]
        assert isinstance(parameters, ShardParameters)
        return parameters

    def _read(
        self, features: Any, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return indices, offsets and weights of ``features``, tables in the order of the model.

        Raises:
            ArgumentError: ``features`` is neither a tensor nor a ``KeyedJaggedTensor`` with a key
                for every table, or offsets or weights come with such an object.
        """
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
        # Such an object may have keys of other models, in any order: take the tables', in theirs.
        names, keys = [table.name for table in self.plan.tables], list(features.keys())
        absent = [name for name in names if name not in keys]
        if absent:
            raise ArgumentError(
                f"{type(self).__name__}: a KeyedJaggedTensor must have a key for every table; got "
                f"none for {', '.join(absent)}."
            )
        if keys != names:
            features = permuted(features, [keys.index(name) for name in names])
        return features.values(), features.offsets(), features.weights_or_none()

    def _free_bytes(self) -> int:
        """Return the free bytes of the rank that has least, less a reserve. Collective."""
        # Every rank makes its own plan, so all must make it from the same numbers.
        free = free_bytes(self.group.device, self.group.world_size)
        return int(_FREE_SHARE * min(self.group.exchange("memory for tables", free)))


def permuted(features: Any, order: list[int]) -> Any:
    """Return a ``KeyedJaggedTensor`` with other keys, or the same in another order.

    Args:
        features: The ``KeyedJaggedTensor``.
        order: The index in ``features.keys()`` of each key of the result.

    Raises:
        ArgumentError: its own method loses the gradient of its weights.
    """
    result = features.permute(order)
    before, after = features.weights_or_none(), result.weights_or_none()
    is_learned = torch.is_grad_enabled() and before is not None and before.requires_grad
    if is_learned and not after.requires_grad:
        raise ArgumentError(
            "ShardedEmbeddingBags: weights of a KeyedJaggedTensor that require a gradient must "
            f"come in the order of the tables; got keys {list(features.keys())}, and its method "
            "permute gives weights no gradient. Make it with the tables' keys."
        )
    return result


def free_bytes(device: torch.device, ranks_on_machine: int) -> int:
    """Return the number of bytes that can still be allocated for one rank.

    On the CPU it is the rank's share of the machine's available memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024 // ranks_on_machine
    except (OSError, KeyError, ValueError):
        # The system does not say. The allocation itself will fail if there is too little.
        return 1 << 62
