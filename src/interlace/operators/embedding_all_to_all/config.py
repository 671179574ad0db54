"""The configuration of ``embedding_all_to_all``, tuned or set by the caller."""

from __future__ import annotations

import dataclasses
import functools

import torch

from interlace.comm import MAX_PROGRAMS
from interlace.comm.launching.kernels import processors
from interlace.tuning.choice import Choice, by_device
from interlace.tuning.configuration import Configuration, between, power_of_two
from interlace.units import next_power_of_2

OPERATOR = "embedding_all_to_all"
MAX_WIDTH = 2048
MOST_STAGES = 16

# Triton's interpreter runs one program after another, so few large ones are faster.
_ON_INTERPRETER = {
    "max_programs": 8,
    "block_bags": 8,
    "push_programs": 2,
    "push_rows": 16,
    "update_programs": 4,
    "block_runs": 8,
}


@dataclasses.dataclass(frozen=True)
class EmbeddingAllToAllConfig(Configuration):
    """One way to run the fused kernels. Every rank of a call must use the same one.

    Attributes:
        block_bags: Bags of one table and destination that a program pools at a time; a power of
            two.
        stages: Lookups of a bag that are under way at a time: the row of one is added while those
            of the others are loaded.
        num_warps: Warps per program.
        max_programs: Maximum number of programs, which draw blocks until all are pooled. Kernels
            that wait for no peer have up to 16 times as many, each with blocks of its own.
        slice_blocks: Blocks of one table in a message between nodes, where the number of slices is
            not chosen.
        push_programs: Programs of the backward pass that send gradients, beside ``update_programs``
            that apply them.
        push_rows: Samples of one table that such a program sends at a time; a power of two.
        push_blocks: Blocks of ``push_rows`` samples that it sends before it waits for their
            arrival.
        update_programs: Programs that apply gradients; may be more than are resident.
        block_runs: Runs of lookups of one row that a program adds at a time; a power of two.
        run_lookups: Maximum number of lookups in a run; the sum of a row with more lookups is cut
            into runs. The bits of sums depend on it.
        update_warps: Warps per program of the backward pass.
        update_registers: Maximum number of registers per thread of the backward pass, so that more
            programs are resident; 0 for the compiler's choice.
    """

    block_bags: int = power_of_two(2, 1, 64)
    stages: int = between(3, 1, MOST_STAGES)
    num_warps: int = power_of_two(1, 1, 32)
    max_programs: int = between(4096, 1, MAX_PROGRAMS)
    slice_blocks: int = between(8, 1, 1024)
    push_programs: int = between(528, 1, MAX_PROGRAMS - 1)
    push_rows: int = power_of_two(8, 1, 64)
    push_blocks: int = between(4, 1, 1024)
    update_programs: int = between(2112, 1, MAX_PROGRAMS)
    block_runs: int = power_of_two(4, 1, 64)
    run_lookups: int = between(128, 2, 1 << 20)
    update_warps: int = power_of_two(1, 1, 32)
    update_registers: int = between(0, 0, 255)


def in_short_blocks(config: EmbeddingAllToAllConfig) -> EmbeddingAllToAllConfig:
    """Return the configuration of a kernel whose results leave in slices while it runs.

    Blocks have half as many bags, so that fewer bags of later slices are pooled before a slice is
    complete, and NCCL's kernel finds an SM earlier (decision 0023).
    """
    if config.block_bags == 1:
        return config
    stages = min(MOST_STAGES, config.stages + 1)
    return dataclasses.replace(config, block_bags=config.block_bags // 2, stages=stages)


def default_config(*, width: int, itemsize: int, processors: int) -> EmbeddingAllToAllConfig:
    """Return a configuration for sizes that have not been measured.

    On H200s it is the fastest, or nearly so, for tables of 16 to 2048 columns and 1 to 320 lookups
    per bag (decision 0006).

    Args:
        width: Width of the widest table.
        itemsize: Bytes of a table's element.
        processors: Number of SMs of the GPU.
    """
    block = next_power_of_2(max(width, 32))
    warps = max(1, min(4, block // 512))
    fitting = 2048 * warps // (block * itemsize)  # rows in 2 KB a warp, which it loads at a time
    bags = max(1, min(16, fitting))
    # Registers decide how many programs fit: 16 to 24 on an SM if a warp has several bags, and rows
    # of so many bytes at a time, else up to 32. More find no block, but take microseconds to end.
    resident = 16 if warps == 1 and 1 < fitting <= 16 else 32
    # 512 bytes of rows per warp: with more, 72 registers a thread do not hold what is under way.
    runs = max(1, min(4, 512 * warps // (block * itemsize)))
    return EmbeddingAllToAllConfig(
        block_bags=bags,
        num_warps=warps,
        max_programs=max(1, min(MAX_PROGRAMS, resident * processors // warps)),
        # 28 warps of 72 registers a thread fit on an SM, and two of them send.
        push_programs=2 * processors,
        push_rows=max(4, min(16, 1024 * warps // block)),
        push_blocks=8,
        update_programs=max(1, min(MAX_PROGRAMS - 2 * processors, 26 * processors // warps)),
        # Of rows of more columns a thread has 16 at a time, for which 72 are too few.
        update_registers=72 if block <= 256 * warps else 96,
        block_runs=runs,
        update_warps=warps,
    )


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
        batch: Samples of all ranks.
        pooling_factor: Average number of lookups per bag, rounded to a power of two, so that jagged
            calls share a kernel.
        dtype: Element type of the tables.
        world_size: Number of ranks.
        device: Device of the tables.
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
