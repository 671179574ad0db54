"""Launches of the forward pass: implementation, configuration, memory and grid of a call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from interlace.comm import Group, group_named, process_group_named
from interlace.comm.groups.group import solo_group
from interlace.comm.groups.outputs import BUFFERS, Destination
from interlace.comm.launching.constants import on_device
from interlace.comm.launching.kernels import Launch, describe_ranks, processors, triton_dtype
from interlace.comm.replay.replays import places
from interlace.comm.runtime import ranges
from interlace.comm.runtime.interpreter import require
from interlace.costs.embedding_all_to_all import floor_link_bytes
from interlace.errors import ArgumentError
from interlace.operators.embedding_all_to_all import network_choice, record, reference
from interlace.operators.embedding_all_to_all.config import (
    OPERATOR,
    EmbeddingAllToAllConfig,
    default_config,
)
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.operators.embedding_all_to_all.tables import alignment, entry
from interlace.operators.embedding_all_to_all.validate import check_values
from interlace.tuning.choice import Choice, by_device
from interlace.units import ceil_div, next_power_of_2

MOST_TILE_BYTES = 1 << 16
"""A tile passes through shared memory; any GPU that has tensor descriptors has room for two
programs of this.
"""

_WAVES = 16  # programs of a launch, at most, for each that fits at once
_BYTES_OF_TASKS = 4096  # of rows, at least: some us of a program among as many as fit at once

# Triton's interpreter runs one program after another, so few large ones are faster.
_ON_INTERPRETER = {
    "max_programs": 8,
    "block_bags": 8,
    "push_programs": 2,
    "push_rows": 16,
    "update_programs": 4,
    "block_runs": 8,
}


@functools.lru_cache(maxsize=4096)
def choose(
    *,
    tables: int,
    width: int,
    batch: int,
    pooling_factor: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
) -> Choice[EmbeddingAllToAllConfig]:
    """Return the fastest configuration by the tuned table of this GPU.

    On the CPU backend it has few programs.

    Args:
        tables: Number of tables of the rank that has most.
        width: Width of the widest table.
        pooling_factor: Average number of lookups per bag, rounded to a power of two, so that jagged
            calls share a kernel.
    """
    count = processors(device) if device.type == "cuda" else 1
    return by_device(
        OPERATOR,
        {"tables": tables, "width": width, "batch": batch, "pooling_factor": pooling_factor},
        default_config(width=width, itemsize=dtype.itemsize, processors=count),
        _ON_INTERPRETER,
        dtype=dtype,
        world_size=world_size,
        device=device,
    )


@dataclasses.dataclass(frozen=True)
class EmbeddingCall:
    """One call whose arguments ``api`` has validated, on one rank; see ``op`` for the fields.

    Indices, offsets and scale are contiguous.

    Attributes:
        dtype: Element type of the output, and so of the gradients that travel.
        alone: Whether this rank computes without its peers, whatever the group.
    """

    weights: Sequence[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor
    scale: torch.Tensor | None
    layout: Layout
    rank: int
    mode: str
    dtype: torch.dtype
    group_name: str
    impl: str
    config: str
    alone: bool = False

    @functools.cached_property
    def group(self) -> Group:
        if self.alone:
            return solo_group(group_named(self.group_name, self.indices.device).device)
        return group_named(self.group_name, self.indices.device)

    @functools.cached_property
    def plan(self) -> network_choice.NetworkPlan:
        """Return what all ranks run between nodes. Collective in the first call of a kind."""
        return network_choice.plan_of(self, self.group)

    @property
    def table_dtype(self) -> torch.dtype:
        return self.weights[0].dtype if self.weights else self.dtype

    def memory(self) -> tuple[Hashable, ...]:
        """Return where the arguments lie and what they are, for the key of a replay.

        Kernels read as many lookups as the offsets say, so the number of indices is no part of it.
        """
        tables = tuple((weight.data_ptr(), weight.stride(0)) for weight in self.weights)
        scale = None if self.scale is None else (self.scale.data_ptr(), self.scale.dtype)
        indices = self.indices.data_ptr(), self.indices.dtype
        return tables, self.table_dtype, indices, scale, *places(self.offsets)

    def agree(self, check: bool) -> int:
        """Agree on this call with all ranks; return its mark (``Group.agree``)."""
        return self.group.agree(
            OPERATOR,
            the_global_batch=self.layout.batch,
            widths=self.layout.widths,
            dtype=str(self.dtype),
            mode=self.mode,
            impl=self.impl,
            config=self.config,
            check_indices=check,
        )

    def without_peers(self) -> EmbeddingCall:
        """Return the call by which this rank's kernels run alone, on its tables and the batch."""
        layout = Layout((self.layout.widths[self.rank],), self.layout.batch)
        return dataclasses.replace(self, layout=layout, rank=0, impl="fused", alone=True)

    def implementation(self) -> str:
        """Return the implementation that runs: the one that was asked for, or that of ``"auto"``.

        Collective in the first call of a kind by ``"auto"`` between nodes.

        Raises:
            ArgumentError: The kernels were asked for between nodes, and take fewer ranks.
        """
        if self.impl == "auto":
            return self.plan.impl if self.group.spans_nodes else "fused"
        is_too_large = self.layout.world_size > record.MAX_RANKS
        if self.impl == "fused" and self.group.spans_nodes and is_too_large:
            raise ArgumentError(
                f"{OPERATOR}: impl={self.impl!r} must have at most {record.MAX_RANKS} ranks; got "
                f"{self.layout.world_size}. Take impl='auto', 'pooled' or 'unfused'."
            )
        return self.impl

    def range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return the range of this call for profilers, by the name of the operator or its half."""
        return ranges.around(
            name,
            # What "auto" runs between nodes is known once the ranks have agreed.
            "fused" if self.impl == "auto" and not self.group.spans_nodes else self.impl,
            (*self.weights, self.indices),
            lambda: floor_link_bytes(
                widths=self.layout.widths,
                batch=self.layout.batch,
                rank=self.rank,
                itemsize=self.dtype.itemsize,
            ),
        )

    def chosen(self) -> EmbeddingAllToAllConfig:
        """Return the caller's configuration, or the tuned one."""
        if self.config:
            return EmbeddingAllToAllConfig.parse(self.config)
        bags = max(1, len(self.weights) * self.layout.batch)
        return choose(
            tables=self.layout.most_tables,
            width=max(max(widths, default=1) for widths in self.layout.widths),
            batch=self.layout.batch,
            pooling_factor=next_power_of_2(ceil_div(self.indices.shape[0], bags)),
            dtype=self.table_dtype,
            world_size=self.layout.world_size,
            device=self.indices.device,
        ).config


def run(call: EmbeddingCall, check: bool) -> torch.Tensor:
    """Run the forward pass; return ``[samples of this rank, columns]``."""
    group, layout = call.group, call.layout
    group.check()
    mark = call.agree(check)
    # Indices are checked on the device, which the host must wait for; so it is an option.
    if check:
        refuse_bad_values(call)
    shape = [layout.samples(call.rank), layout.columns]
    if layout.batch == 0 or layout.columns == 0:
        return call.indices.new_empty(shape, dtype=call.dtype)
    implementation = call.implementation()
    if implementation != "fused":
        samples = [layout.samples(rank) for rank in range(layout.world_size)]
        pooled = (
            run(call.without_peers(), check=False)
            if implementation == "pooled"
            else reference.pool(
                call.weights,
                call.indices,
                call.offsets,
                call.scale,
                call.mode,
                layout.batch,
                call.dtype,
            )
        )
        process_group = process_group_named(call.group_name)
        return reference.exchange(
            pooled, samples, list(layout.rank_columns), call.rank, process_group
        )
    config = call.chosen()
    if group.spans_nodes:
        from interlace.operators.embedding_all_to_all import between_nodes

        return between_nodes.run(group, call, config, mark)
    if layout.world_size == 1:
        y = call.indices.new_empty(shape, dtype=call.dtype)
        launch = prepare(group, call, config, mark, Destination(y.data_ptr(), 0, 0))
        with group.running():
            launch()
        return y
    # Peers store to the output directly, so it is symmetric memory that this rank grants to them.
    output = group.outputs.take(layout.chunk * layout.columns * call.dtype.itemsize)
    y = output.tensor(shape, call.dtype, group.device)
    launch = prepare(group, call, config, mark, output.destination)
    with group.running():
        launch()
    # Memory that is not lent is the landing, which the next call writes again.
    return y if output.lent else y.clone()


def refuse_bad_values(call: EmbeddingCall) -> None:
    """Look at indices and offsets, and tell every rank about errors on any; waits for the device.

    Raises:
        ArgumentError: on every rank.
    """
    wrong = check_values(call.weights, call.indices, call.offsets, call.layout.batch)
    for rank, error in enumerate(call.group.exchange(f"{OPERATOR} (check of indices)", wrong)):
        if error is not None:
            raise ArgumentError(f"{OPERATOR}: on rank {rank}, {error} Nothing was computed.")


def prepare(
    group: Group,
    call: EmbeddingCall,
    config: EmbeddingAllToAllConfig,
    mark: int,
    destination: Destination,
) -> Launch:
    """Prepare the forward launch, into a buffer of the output. Collective when the workspace must
    grow.
    """
    layout, ranks = call.layout, call.layout.world_size
    if ranks == 1:
        return _prepare_alone(group, call, config, destination.address)
    require(group.backend)
    from interlace.operators.embedding_all_to_all.kernels.forward import (
        embedding_all_to_all_forward,
    )

    blocks = ceil_div(layout.chunk, config.block_bags)
    tasks = len(call.weights) * blocks * ranks
    programs = max(1, min(tasks, config.max_programs))
    workspace = group.workspace(OPERATOR, 4096, record.HEADER)
    arguments, constants, align = pooling(group, call, config)
    protocol, tiles = config.protocol, None
    if protocol == "tiles":
        # Where descriptors cannot describe the blocks, ordinary stores write the same bytes.
        width, full = lanes_of(layout.widths[call.rank])
        fits = full and align * call.dtype.itemsize == 16 and bool(call.weights)
        fits = fits and config.block_bags * width * call.dtype.itemsize <= MOST_TILE_BYTES
        protocol = "tiles" if fits and group.backend == "cuda" else "direct"
    if protocol == "tiles":
        sizes = [
            (BUFFERS + 1, destination.buffer_bytes // call.dtype.itemsize),
            (layout.chunk, layout.columns),
            (layout.columns, 1),
        ]
        tiles = describe_ranks(
            group, destination.address, call.dtype, sizes, [config.block_bags, width]
        )
    arguments |= {
        "tiles": tiles,
        "buffers": destination.address,
        "grants": workspace.data.address,
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(OPERATOR),
        "call": mark,
        "buffer_bytes": destination.buffer_bytes,
        "buffer_index": destination.own_index,
        "chunk": layout.chunk,
        "drawn_tasks": fewest_tasks(call, config, tasks),
    }
    constants |= {"WORLD_SIZE": ranks, "PROTOCOL": protocol}
    return Launch(embedding_all_to_all_forward, (programs,), arguments, constants)


def _prepare_alone(
    group: Group, call: EmbeddingCall, config: EmbeddingAllToAllConfig, address: int
) -> Launch:
    """Prepare the launch that pools without peers, into ``[batch, columns]`` at an address."""
    require(group.backend)
    from interlace.operators.embedding_all_to_all.kernels.forward import pool_embeddings

    tasks = len(call.weights) * ceil_div(call.layout.batch, config.block_bags)
    program_tasks = tasks_of_program(call, config, tasks)
    programs = max(1, ceil_div(tasks, program_tasks))
    arguments, constants, _ = pooling(group, call, config)
    arguments |= {"output": address, "program_tasks": program_tasks}
    return Launch(pool_embeddings, (programs,), arguments, constants)


def tasks_of_program(call: EmbeddingCall, config: EmbeddingAllToAllConfig, tasks: int) -> int:
    """Return the number of blocks that each program pools, where programs wait for nothing.

    There are more programs than fit at once, so that the GPU shares them out.
    """
    waves = 1 if call.group.backend == "cpu" else _WAVES
    fewest = fewest_tasks(call, config, tasks)
    return max(fewest, ceil_div(tasks, waves * config.max_programs))


def fewest_tasks(call: EmbeddingCall, config: EmbeddingAllToAllConfig, tasks: int) -> int:
    """Return the least number of blocks that are worth the start of a program, or a trip to memory
    to draw them.

    Args:
        tasks: Number of all blocks, of which each program should have some.
    """
    tables = max(1, len(call.weights))
    row_bytes = call.layout.rank_columns[call.rank] // tables * call.table_dtype.itemsize
    lookups = call.indices.shape[0] * config.block_bags // (tables * call.layout.batch)
    worth = ceil_div(_BYTES_OF_TASKS, max(1, lookups * row_bytes))
    return max(1, min(worth, tasks // config.max_programs))


def pooling(
    group: Group, call: EmbeddingCall, config: EmbeddingAllToAllConfig
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return what every kernel that pools is launched with.

    Returns:
        The tables and the lookups, by the names of their parameters; the constants of pooling and
        Triton's options; and the elements that all vectors' addresses are multiples of.
    """
    from interlace.operators.embedding_all_to_all.kernels.forward import Lookups, Pooling
    from interlace.operators.embedding_all_to_all.kernels.vectors import Vectors

    rows, align = forward_records(call)
    arguments = {
        "lookups": Lookups(on_device(group, rows), call.indices, call.offsets, call.scale),
        "B": call.layout.batch,
        "T": len(call.weights),
        "column_groups": call.layout.columns // align,
    }
    width, full = lanes_of(call.layout.widths[call.rank])
    constants: dict[str, Any] = {
        "POOLING": Pooling(config.block_bags, config.stages, mean=call.mode == "mean"),
        "VECTORS": Vectors(
            triton_dtype(call.table_dtype), triton_dtype(call.dtype), width, full, align
        ),
        "num_warps": config.num_warps,
    }
    if config.max_registers:
        constants["maxnreg"] = config.max_registers
    return arguments, constants, align


def forward_records(call: EmbeddingCall) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Return this rank's table records, and the alignment of its vectors in elements."""
    tables = tuple((weight.data_ptr(), weight.stride(0)) for weight in call.weights)
    return _forward_records(
        tables, call.layout, call.rank, call.table_dtype.itemsize, call.dtype.itemsize
    )


@functools.lru_cache(maxsize=256)
def _forward_records(
    tables: tuple[tuple[int, int], ...],
    layout: Layout,
    rank: int,
    itemsize: int,
    output_itemsize: int,
) -> tuple[tuple[tuple[int, ...], ...], int]:
    first, widths = layout.first_column(rank), layout.widths[rank]
    rows = tuple(
        entry(width=width, column=first + column, own_column=column, address=address, stride=stride)
        for (address, stride), width, column in zip(
            tables, widths, layout.table_columns(rank), strict=True
        )
    )
    # Vectors are loaded and stored as wide as the greatest common alignment of all their addresses.
    starts = [address // itemsize for address, _ in tables]
    numbers = [layout.columns, first, *widths, *(stride for _, stride in tables), *starts]
    return rows or (entry(width=1, column=0, own_column=0),), alignment(
        numbers, min(itemsize, output_itemsize)
    )


def lanes_of(widths: Sequence[int]) -> tuple[int, bool]:
    """Return the lanes of a vector, a power of two, and whether every table fills them."""
    width = next_power_of_2(max(widths, default=1))
    return width, all(table_width == width for table_width in widths)
