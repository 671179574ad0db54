"""``impl="auto"`` of the operators around a product: the tuned table's answer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Generic, TypeVar

import torch

from interlace import tuning
from interlace.gemm.config import GemmConfig

MAX_RANKS = 8

Config = TypeVar("Config", bound=GemmConfig)

# (block_m, block_n, num_warps), the most efficient tiles first.
_TILES = ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4))

# Up to this K the links have little time per tile, so programs should begin one after another.
_SHORT_INNER = 4096

# Small enough for the interpreter, which runs programs one after another.
_CPU = {
    "block_m": 16,
    "block_n": 32,
    "block_k": 32,
    "max_programs": 8,
    "interleave": 2,
    "stagger": 0,
}


@dataclasses.dataclass(frozen=True)
class Choice(Generic[Config]):
    """The implementation that ``impl="auto"`` chose, its configuration, and the reason.

    Attributes:
        impl: The implementation.
        config: The fused kernel's configuration.
        reason: Why, for :func:`interlace.explain`.
        fallback: What runs where ``impl`` cannot: the faster one of those that take any operands.
        measured: Whether the tuned table says so; else it is a default.
        faster: All implementations that were measured to be faster than the fastest stock pair.
    """

    impl: str
    config: Config
    reason: str
    fallback: str = "unfused"
    measured: bool = False
    faster: tuple[str, ...] = ()


@functools.cache
def choose_product(
    operator: str,
    config_type: type[Config],
    *,
    rows: int,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    default: str = "fused",
) -> Choice[Config]:
    """Return the fastest implementation by the tuned table of this GPU; on the CPU backend the
    kernel.

    Args:
        rows, columns, inner: M, N and K of this rank's product, the same on every rank (so not the
            rows of one rank's split).
        default: The implementation to take where nothing was measured.
    """
    if device.type == "cpu":
        small = dataclasses.replace(config_type(), **_CPU)
        return Choice(
            default,
            small,
            "the cpu backend exists to run the kernels; no time measured on it means anything",
        )
    sizes = {"rows": rows, "columns": columns, "inner": inner}
    point = tuning.Point(
        world_size=world_size, dtype=str(dtype).removeprefix("torch."), sizes=sizes
    )
    entry = tuning.nearest(operator, torch.cuda.get_device_name(device), point)
    if entry is None:
        config = default_config(
            config_type,
            rows=rows // world_size,
            inner=inner,
            dtype=dtype,
            shared_bytes=_shared_bytes(device),
        )
        return Choice(
            default,
            config,
            "nothing was measured on this GPU near these sizes; the default configuration",
        )
    # An operator without a kernel of its own has no configuration.
    config = config_type.parse(entry.config) if entry.config else config_type()
    if rows % (world_size * config.block_m):
        # Every shape of the tables fills its tiles. Where a rank's last rows do not, fused kernels
        # were measured to take up to seven times as long, the others hardly longer.
        entry = entry.without(
            "fused", f"a rank's rows are no multiple of its tiles' {config.block_m}"
        )
    return Choice(
        entry.impl, config, entry.reason, entry.fallback, measured=True, faster=entry.faster
    )


def default_config(
    config_type: type[Config], *, rows: int, inner: int, dtype: torch.dtype, shared_bytes: int
) -> Config:
    """Return a valid configuration if nothing has been measured: the largest tiles that fit.

    Args:
        rows: Rows of the product that belong to one rank.
        inner: K. Tiles of a long one leave time enough for the links; programs then need not begin
            in turn.
        shared_bytes: Shared memory that a program may have.
    """
    block_k = {1: 128, 2: 64}.get(dtype.itemsize, 32)
    for block_m, block_n, warps in _TILES:
        if block_m > 64 and block_m >= 2 * rows:
            continue
        # Three stages of operands, and a tile on its way to a peer.
        operand_bytes = 3 * (block_m + block_n) * block_k * dtype.itemsize
        if operand_bytes + block_m * block_n * max(dtype.itemsize, 2) <= shared_bytes:
            stagger = 100 if inner <= _SHORT_INNER else 0
            return config_type(
                block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, stagger=stagger
            )
    return config_type(block_m=32, block_n=64, block_k=32, num_warps=4, num_stages=2)


def _shared_bytes(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(
        getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    )
