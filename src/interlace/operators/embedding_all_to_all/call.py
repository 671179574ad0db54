"""Calls of ``embedding_all_to_all``, as implementations get them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from interlace.comm import Group, group_named, process_group_named
from interlace.comm.groups.group import solo_group
from interlace.comm.host.agreement import Family
from interlace.comm.replay.replays import places
from interlace.costs.embedding_all_to_all import floor_link_bytes
from interlace.errors import ArgumentError
from interlace.operators.embedding_all_to_all import network_choice
from interlace.operators.embedding_all_to_all.config import (
    OPERATOR,
    EmbeddingAllToAllConfig,
    choose,
)
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.operators.embedding_all_to_all.validate import SeenTensors, check_values
from interlace.units import ceil_div, next_power_of_2


class SharedArguments(NamedTuple):
    """The arguments that all three operators of ``torch.ops`` share.

    Attributes:
        batch: Samples of all ranks.
        counts: Number of tables of each rank.
        widths: Widths of all tables, in rank order.
        rank: This rank.
        pooling: ``"sum"`` or ``"mean"``; torch's functionalisation has an argument ``mode``.
        dtype: Element type of the output.
    """

    batch: int
    counts: Sequence[int]
    widths: Sequence[int]
    rank: int
    pooling: str
    dtype: torch.dtype

    @property
    def layout(self) -> Layout:
        """Return the columns of all tables and the samples of all ranks."""
        return Layout.of(self.counts, self.widths, self.batch)

    @property
    def own_widths(self) -> tuple[int, ...]:
        """Return the widths of this rank's tables."""
        return self.layout.widths[self.rank]


class KnownCall(NamedTuple):
    """What tells a call of valid arguments from every other one of its group, for ``Group.recall``:
    it comes again where all of this does.

    Attributes:
        seen: The tables and the states of an update.
        lookups: The places of indices, offsets and factors.
        options: The other arguments.
    """

    seen: SeenTensors
    lookups: tuple[Hashable, ...]
    options: tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class EmbeddingCall:
    """One pass of a call, forward or backward, validated and agreed on by all ranks.

    Attributes:
        weights: This rank's tables; none in a backward pass that returns gradients.
        indices: Row numbers of this rank's lookups, contiguous.
        offsets: The first lookup of each bag, contiguous.
        scale: Factors of the rows, contiguous; None for 1.
        layout: The columns of all tables and the samples of all ranks.
        rank: This rank.
        mode: ``"sum"`` or ``"mean"``.
        dtype: Element type of the output, and so of the gradients that travel.
        group: The ranks, and what they share; a group of one where this rank computes alone.
        group_name: The name of the process group.
        impl: The implementation that the caller has asked for, or ``"auto"``.
        config: The kernels' configuration.
        is_config_given: Whether the caller has given the configuration; else it is the tuned one.
        mark: The number that the signals of this pass carry; from the ranks' agreement.
        known: By what ``Group.recall`` finds the pass when it comes again; None for nothing.
        family: What ranks have agreed on for all batches; None between nodes.
    """

    weights: Sequence[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor
    scale: torch.Tensor | None
    layout: Layout
    rank: int
    mode: str
    dtype: torch.dtype
    group: Group
    group_name: str
    impl: str
    config: EmbeddingAllToAllConfig
    is_config_given: bool = True
    mark: int = 0
    known: Hashable = None
    family: Family | None = None

    @functools.cached_property
    def plan(self) -> network_choice.NetworkPlan:
        """Return what all ranks run between nodes. Collective in the first call of a kind."""
        return network_choice.plan_of(self)

    @property
    def is_empty(self) -> bool:
        """Return whether no rank has anything to compute; all ranks know that."""
        return self.layout.batch == 0 or self.layout.columns == 0

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Return the process group; None where this process is on its own."""
        return process_group_named(self.group_name)

    @property
    def table_dtype(self) -> torch.dtype:
        """Return the element type of the tables; without tables, that of the output."""
        return self.weights[0].dtype if self.weights else self.dtype

    def new_output(self) -> torch.Tensor:
        """Return an uninitialised ``[samples of this rank, columns]``."""
        shape = [self.layout.samples(self.rank), self.layout.columns]
        return self.indices.new_empty(shape, dtype=self.dtype)

    def link_bytes(self) -> int:
        """Return the least bytes that leave this rank."""
        return floor_link_bytes(
            widths=self.layout.widths,
            batch=self.layout.batch,
            rank=self.rank,
            itemsize=self.dtype.itemsize,
        )

    def memory(self) -> tuple[Hashable, ...]:
        """Return where the arguments lie and what they are, for the key of a replay.

        Kernels read as many lookups as the offsets say, so the number of indices is no part of it.
        """
        tables = tuple((weight.data_ptr(), weight.stride(0)) for weight in self.weights)
        scale = None if self.scale is None else (self.scale.data_ptr(), self.scale.dtype)
        indices = self.indices.data_ptr(), self.indices.dtype
        return tables, self.table_dtype, indices, scale, *places(self.offsets)

    def without_peers(self) -> EmbeddingCall:
        """Return the call by which this rank's kernels run alone, on its tables and the batch.

        The configuration stays, as bits of gradients depend on it.
        """
        layout = Layout((self.layout.widths[self.rank],), self.layout.batch)
        return dataclasses.replace(self, layout=layout, rank=0, group=solo_group(self.group.device))


def agreed_call(
    name: str,
    weights: Sequence[torch.Tensor],
    lookups: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    shared: SharedArguments,
    options: Sequence[str],
    check: bool | None = None,
    known: Hashable = None,
) -> EmbeddingCall:
    """Agree on one pass of a call with all ranks, and choose its configuration.

    Args:
        name: The name of the pass, by which ranks tell calls apart.
        weights: This rank's tables; none in a backward pass that returns gradients.
        lookups: Indices, offsets and factors.
        shared: What the operators share.
        options: The name of the process group, the implementation and the text of the
            configuration, empty for the tuned one.
        check: Whether all ranks look at indices and offsets, which waits for the device; None in
            the backward pass, which never does.
        known: By what the pass is found when it comes again; None for nothing.

    Raises:
        ArgumentError: Indices or offsets of some rank are wrong; raised on every rank.
        RankMismatchError: Ranks differ in what must be the same.
    """
    (indices, offsets, scale), (group_name, impl, config) = lookups, options
    group, layout = group_named(group_name, indices.device), shared.layout
    group.check()
    in_common = {
        "widths": layout.widths,
        "dtype": str(shared.dtype),
        "mode": shared.pooling,
        "impl": impl,
        "config": config,
        **({} if check is None else {"check_indices": check}),
    }
    # The last batch of a run may have another size.
    first = {"the_global_batch": layout.batch}
    mark, family = group.agreement.agree_on_sizes(name, in_common, first, layout.batch)
    call = EmbeddingCall(
        weights,
        indices.contiguous(),
        offsets.contiguous(),
        None if scale is None else scale.contiguous(),
        layout,
        shared.rank,
        shared.pooling,
        shared.dtype,
        group,
        group_name,
        impl,
        EmbeddingAllToAllConfig.parse(config)
        if config
        else tuned_config(weights, indices, layout, shared.dtype),
        bool(config),
        mark,
        known,
        family,
    )
    # Indices are checked on the device, which the host must wait for; so it is an option.
    if check:
        wrong = check_values(weights, call.indices, call.offsets, layout.batch)
        for rank, error in enumerate(group.exchange(f"{OPERATOR} (check of indices)", wrong)):
            if error is not None:
                raise ArgumentError(f"{OPERATOR}: on rank {rank}, {error} Nothing was computed.")
    return call


def tuned_config(
    weights: Sequence[torch.Tensor], indices: torch.Tensor, layout: Layout, dtype: torch.dtype
) -> EmbeddingAllToAllConfig:
    """Return the tuned configuration for some tables, lookups, layout and dtype of the output."""
    bags = max(1, len(weights) * layout.batch)
    return choose(
        tables=layout.most_tables,
        width=max(max(widths, default=1) for widths in layout.widths),
        batch=layout.batch,
        pooling_factor=next_power_of_2(ceil_div(indices.shape[0], bags)),
        dtype=weights[0].dtype if weights else dtype,
        world_size=layout.world_size,
        device=indices.device,
    ).config
