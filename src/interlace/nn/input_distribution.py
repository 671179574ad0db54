"""``InputDistribution``: it sends the indices of bags to the ranks that hold their tables.

Before, each rank has its samples' bags of all tables; after, all samples' bags of its own tables.

Dimensions: T tables, n samples of this rank, R ranks, B = n R samples of the global batch, S shards
of this rank (a shard is a table, or some columns of one; every shard of a table needs all its
indices).
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import Group, require_same_ranks
from interlace.comm.groups.registration import once_differentiable
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.errors import ArgumentError, PeerTimeoutError
from interlace.gemm.operands import (
    has_values,
    require_device,
    require_tensors,
    require_values,
)
from interlace.nn.group_member import GroupMember
from interlace.nn.sharding import ShardingPlan

_NAME = "ShardedEmbeddingBags"

_MOST_LAYOUTS = 16
"""Numbers of samples whose layouts a module keeps: training has one or two of them."""


@dataclasses.dataclass(frozen=True)
class Bags:
    """The global batch's bags for this rank's shards of one kind: arguments of the operator.

    Attributes:
        indices: 1-D, int32 or int64: shard by shard, and within a shard sample by sample of the
            global batch.
        offsets: int64 ``[S * B + 1]``: the first index of each bag.
        per_sample_weights: One weight per index, or None.
        batch: B.
        sizes: Number of indices of each shard.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None
    batch: int
    sizes: list[int]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The order and the bags of what arrives. Where all bags have fixed lengths, it depends on the
    plan and the batch size alone.

    Attributes:
        positions: The value of :func:`_positions`; None with one rank.
        offsets: int64 ``[S * B + 1]``.
        sizes: Number of indices of each of this rank's shards.
    """

    positions: torch.Tensor | None
    offsets: torch.Tensor
    sizes: list[int]


class InputDistribution(GroupMember):
    """Sends indices to the ranks that hold their tables.

    If every table has a ``bag_length``, all sizes are known: one all-to-all, no synchronisation
    with the host. Otherwise the lengths go first, and the host must read the sizes of the messages
    (on CUDA it waits for the GPU then) before the indices can follow.
    """

    _group_attributes = ("group", "process_group")

    def __init__(
        self, plan: ShardingPlan, group: Group, process_group: dist.ProcessGroup | None
    ) -> None:
        self.plan, self.group, self.process_group = plan, group, process_group
        order = {table.name: i for i, table in enumerate(plan.tables)}
        self._sent_tables = [
            [order[shard.table.name] for shard in plan.of_rank(rank)]
            for rank in range(plan.world_size)
        ]
        # A table with several shards is sent once per shard, so it may occur several times.
        self._order = list(itertools.chain(*self._sent_tables))
        self._local_shards = plan.of_rank(group.rank)
        lengths = [table.bag_length for table in plan.tables]
        self.fixed: list[int] | None = (
            None if None in lengths else [length or 0 for length in lengths]
        )
        self._layouts: OrderedDict[tuple[int, torch.device], _Layout] = OrderedDict()
        self._captured: dict[tuple[int, torch.device], _Layout] = {}

    def __call__(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor | None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> list[Bags]:
        """Return the bags of each of the plan's kinds. Collective.

        Args:
            indices: 1-D, int32 or int64, table-major: bags of table 0, then bags of table 1 ...
            offsets: ``[T * n + 1]``; None if every table has a ``bag_length``.
            per_sample_weights: One weight per index, or None. Their gradients come back the same
                way, in a backward pass that is collective.

        Raises:
            ArgumentError: shapes or dtypes do not fit.
            GroupError: the process group was destroyed or replaced.
            RankMismatchError: ranks differ in their number of samples, in dtypes, or in whether
                weights require a gradient.
            PeerTimeoutError: a rank did not join within the group's deadline (on the CPU backend).
        """
        require_same_ranks(_NAME, self.process_group, self.group.rank, self.group.world_size)
        require_tensors(
            _NAME,
            ("offsets", "per_sample_weights"),
            indices=indices,
            offsets=offsets,
            per_sample_weights=per_sample_weights,
        )
        samples = self._samples(indices, offsets)
        if per_sample_weights is not None and per_sample_weights.shape != indices.shape:
            raise ArgumentError(
                f"{_NAME}: per_sample_weights must have one weight an index; got "
                f"{list(per_sample_weights.shape)} for "
                f"{list(indices.shape)}."
            )
        # Sizes of messages are computed from this rank's own arguments, so ranks must agree on them
        # before the exchange.
        self.group.agree(
            _NAME,
            samples=samples,
            dtype_of_indices=str(indices.dtype),
            dtype_of_per_sample_weights=None
            if per_sample_weights is None
            else str(per_sample_weights.dtype),
            gradient_of_per_sample_weights=per_sample_weights is not None
            and torch.is_grad_enabled()
            and per_sample_weights.requires_grad,
        )
        if self.fixed is not None:
            return self._distribute_fixed(indices, per_sample_weights, samples, self.fixed)
        assert offsets is not None
        return self._distribute(indices, offsets, per_sample_weights, samples)

    def _samples(self, indices: torch.Tensor, offsets: torch.Tensor | None) -> int:
        """Return n, the number of this rank's samples, after checking indices and offsets.

        Raises:
            ArgumentError: shapes, dtypes or devices do not fit, or (on the CPU) offsets do not rise
                or do not agree with the tables' ``bag_length``.
        """
        tables = len(self.plan.tables)
        if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(
                f"{_NAME}: indices must be 1-D int32 or int64; got {list(indices.shape)} "
                f"{indices.dtype}."
            )
        if offsets is not None and offsets.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"{_NAME}: offsets must be int32 or int64; got {offsets.dtype}.")
        if self.fixed is not None:
            samples, remainder = divmod(indices.numel(), sum(self.fixed))
            if remainder:
                raise ArgumentError(
                    f"{_NAME}: indices must be {sum(self.fixed)} a sample, by the tables' "
                    f"bag_length; got {indices.numel()}."
                )
            if offsets is not None and (
                offsets.dim() != 1 or offsets.numel() != tables * samples + 1
            ):
                raise ArgumentError(
                    f"{_NAME}: offsets must be None, or [{tables} * {samples} + 1] by the tables' "
                    "bag_length; "
                    f"got {list(offsets.shape)}."
                )
            if offsets is not None and offsets.device.type == "cpu" and has_values(offsets):
                lengths = torch.tensor(self.fixed, device="cpu").repeat_interleave(samples)
                if not torch.equal(offsets.diff().long(), lengths):
                    raise ArgumentError(
                        f"{_NAME}: bags must have the tables' bag_length; offsets say otherwise. "
                        "Set it to None."
                    )
            return samples
        if offsets is None:
            raise ArgumentError(
                f"{_NAME}: offsets must be given unless every table has a bag_length; got None."
            )
        samples, remainder = divmod(offsets.numel() - 1, tables)
        if offsets.dim() != 1 or remainder or samples < 0:
            raise ArgumentError(
                f"{_NAME}: offsets must be [{tables} * samples + 1] for {tables} tables; got "
                f"{list(offsets.shape)}."
            )
        require_device(f"{_NAME}: offsets", offsets, "indices", indices.device)
        require_values(f"{_NAME}: offsets, of tables without a bag_length,", offsets)
        # On a GPU this check would synchronise the host with it.
        if offsets.device.type == "cpu":
            lengths = offsets.diff()
            if (
                int(offsets[0]) != 0
                or int(offsets[-1]) != indices.numel()
                or bool((lengths < 0).any())
            ):
                raise ArgumentError(
                    f"{_NAME}: offsets must rise from 0 to the number of indices, "
                    f"{indices.numel()}; "
                    f"got {int(offsets[0])} to {int(offsets[-1])}, least step "
                    f"{int(lengths.min()) if lengths.numel() else 0}."
                )
        return samples

    # Bags of fixed lengths

    def _distribute_fixed(
        self, indices: torch.Tensor, weights: torch.Tensor | None, samples: int, lengths: list[int]
    ) -> list[Bags]:
        """Exchange bags whose lengths are ``lengths``, by table; no lengths are sent."""
        sizes = [samples * length for length in lengths]
        local = self._sent_tables[self.group.rank]
        receive_sizes = [sum(sizes[table] for table in local)] * self.group.world_size
        layout = self._layout(samples, lengths, indices.device)
        return self._send(indices, weights, samples, sizes, receive_sizes, layout)

    def _layout(self, samples: int, lengths: list[int], device: torch.device) -> _Layout:
        """Return the layout for a number of samples; it is computed once while it is in use.

        A CUDA graph of the program refers to its memory, and keeps it for good.
        """
        key = samples, device
        if key in self._layouts:
            self._layouts.move_to_end(key)
        else:
            local = [lengths[table] for table in self._sent_tables[self.group.rank]]
            self._layouts[key] = _layout_of(local, samples, self.group.world_size, device)
            if len(self._layouts) > _MOST_LAYOUTS:
                self._layouts.popitem(last=False)
        layout = self._layouts[key]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured[key] = layout
        return layout

    # Bags of any length

    def _distribute(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        samples: int,
    ) -> list[Bags]:
        """Exchange bags of any lengths: their lengths first, and then the indices."""
        ranks, shards = self.group.world_size, len(self._local_shards)
        lengths = offsets.diff().long().view(len(self.plan.tables), samples)
        # In the order of sending: each shard's lengths, rank by rank.
        order = self.group.cache.tables.on_device([self._order])[0]
        received = self.all_to_all(
            lengths[order].flatten(),
            [samples * len(tables) for tables in self._sent_tables],
            [samples * shards] * ranks,
        ).view(ranks, shards, samples)
        sizes = received.sum(2)
        # The one synchronisation with the host, which must know the sizes of all messages: those
        # that leave, by table, and those that come, by source and shard.
        on_host = torch.cat([lengths.sum(1), sizes.flatten()]).tolist()
        leaving, coming = on_host[: len(lengths)], on_host[len(lengths) :]
        receive_sizes = [sum(coming[rank * shards : (rank + 1) * shards]) for rank in range(ranks)]
        layout = _Layout(
            positions=_positions(sizes, sum(coming)) if ranks > 1 else None,
            offsets=_offsets(received.transpose(0, 1).flatten()),
            sizes=[sum(coming[shard::shards]) for shard in range(shards)],
        )
        return self._send(indices, weights, samples, leaving, receive_sizes, layout)

    # Bags of fixed and of any lengths

    def _send(
        self,
        indices: torch.Tensor,
        weights: torch.Tensor | None,
        samples: int,
        sizes: list[int],
        receive_sizes: list[int],
        layout: _Layout,
    ) -> list[Bags]:
        """Exchange indices, and weights if there are any.

        Args:
            indices: 1-D, table-major.
            weights: One weight per index, or None.
            samples: Number of this rank's samples.
            sizes: Number of indices of each table that leave this rank.
            receive_sizes: Number of indices that come from each rank.
            layout: The order and the bags of what arrives.
        """
        begins = list(itertools.accumulate(sizes, initial=0))
        send_sizes = [sum(sizes[table] for table in tables) for tables in self._sent_tables]

        def exchange(values: torch.Tensor) -> torch.Tensor:
            arrived = self._exchange(self._by_rank(values, begins), send_sizes, receive_sizes)
            return arrived if layout.positions is None else arrived[layout.positions]

        return self._by_kind(
            samples * self.group.world_size,
            exchange(indices),
            layout.offsets,
            None if weights is None else exchange(weights),
            layout.sizes,
        )

    def _by_rank(self, values: torch.Tensor, begins: list[int]) -> torch.Tensor:
        """Put values in the order of sending: each shard's table, rank by rank.

        They are not copied if that is the order of the tables.
        """
        if self._order == list(range(len(begins) - 1)):
            return values
        return torch.cat([values[begins[table] : begins[table + 1]] for table in self._order])

    def _exchange(
        self, values: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]
    ) -> torch.Tensor:
        """Exchange values as :meth:`all_to_all` does, and their gradients the other way."""
        if not (torch.is_grad_enabled() and values.requires_grad):
            return self.all_to_all(values, send_sizes, receive_sizes)
        received: torch.Tensor = _ExchangedValues.apply(  # type: ignore[no-untyped-call]
            values, self, send_sizes, receive_sizes
        )
        return received

    def all_to_all(
        self, values: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]
    ) -> torch.Tensor:
        """Exchange values, 1-D: ``send_sizes`` and ``receive_sizes`` are elements per rank.

        Raises:
            PeerTimeoutError: on the CPU backend, a rank did not join before the deadline.
        """
        if self.group.world_size == 1:
            return values
        received = values.new_empty(sum(receive_sizes))
        on_host = values.device.type == "cpu"
        try:
            work: Any = dist.all_to_all_single(
                received,
                values.contiguous(),
                receive_sizes,
                send_sizes,
                group=self.process_group,
                async_op=True,
            )
            # With a time limit, NCCL's wait would block the host. On a GPU the kernels that follow
            # have deadlines of their own.
            if on_host:
                work.wait(datetime.timedelta(seconds=self.group.deadline_s))
            else:
                work.wait()
        except RuntimeError as error:
            if not on_host:
                raise
            raise PeerTimeoutError(
                operator=_NAME, rank=self.group.rank, peer=-1, deadline_s=self.group.deadline_s
            ) from error
        return received

    def _by_kind(
        self,
        batch: int,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        sizes: list[int],
    ) -> list[Bags]:
        """Cut the bags of all local shards into one :class:`Bags` per kind.

        Args:
            batch: B.
            indices: 1-D, shard by shard.
            offsets: ``[S * B + 1]``.
            weights: One weight per index, or None.
            sizes: Number of indices of each local shard.
        """
        if len(self.plan.kinds) == 1:
            return [Bags(indices, offsets, weights, batch, sizes)]
        by_kind = []
        shard = index = 0
        for kind in self.plan.kinds:
            count = sum(local.kind == kind for local in self._local_shards)
            sizes_of_kind = sizes[shard : shard + count]
            stop = index + sum(sizes_of_kind)
            within = offsets[shard * batch : (shard + count) * batch + 1]
            by_kind.append(
                Bags(
                    indices[index:stop],
                    within - within[0],
                    None if weights is None else weights[index:stop],
                    batch,
                    sizes_of_kind,
                )
            )
            shard, index = shard + count, stop
        return by_kind


class _ExchangedValues(torch.autograd.Function):
    """Send values to other ranks, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        distribution: InputDistribution,
        send_sizes: list[int],
        receive_sizes: list[int],
    ) -> torch.Tensor:
        ctx.distribution, ctx.sizes = distribution, (receive_sizes, send_sizes)
        return distribution.all_to_all(values.view_as(values), send_sizes, receive_sizes)

    @staticmethod
    @once_differentiable(_NAME)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.distribution.all_to_all(grad, *ctx.sizes), None, None, None


@makes_ordinary_tensors
def _layout_of(lengths: list[int], samples: int, ranks: int, device: torch.device) -> _Layout:
    """Return the layout of bags of these lengths, one per shard, of all ranks' samples."""
    local = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    sizes = (samples * local).expand(ranks, -1)
    return _Layout(
        positions=_positions(sizes.to(device), int(sizes.sum())) if ranks > 1 else None,
        offsets=_offsets(local.repeat_interleave(samples * ranks)).to(device),
        sizes=sizes.sum(0).tolist(),
    )


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Return the offsets of bags of these lengths: ``[number of bags + 1]``, from 0."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _positions(sizes: torch.Tensor, total: int) -> torch.Tensor:
    """Return the indices that put received elements in the order of shards.

    Elements arrive source by source, and within a source shard by shard.

    Args:
        sizes: ``[R, S]``: number of elements of each shard from each source.
        total: Sum of ``sizes``, known on the host.

    Returns:
        int64 ``[total]``: ``received[positions]`` is shard by shard.

    Example:
        Two sources and two shards of sizes ``[[1, 2], [3, 1]]``: ``a | b b | c c c | d`` becomes
        ``a | c c c | b b | d``, so positions are ``[0, 3, 4, 5, 1, 2, 6]``.
    """
    flat = sizes.flatten()
    # The distance of each block's first element from its place in the result is that of all its
    # elements.
    received_starts = (flat.cumsum(0) - flat).view(sizes.shape).t().flatten()
    flat = sizes.t().flatten()
    shift = received_starts - (flat.cumsum(0) - flat)
    return torch.arange(total, device=sizes.device) + shift.repeat_interleave(
        flat, output_size=total
    )
