"""``impl="auto"`` of the operators around a product: the tuned table's answer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Generic, TypeVar

import torch

from interlace import tuning
from interlace.comm import Group, group_named
from interlace.errors import ArgumentError, GroupError
from interlace.gemm.config import ProductConfig
from interlace.gemm.operands import Operands

MAX_RANKS = 8

Config = TypeVar("Config", bound=ProductConfig)

_TILES = ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4))

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
    """What ``impl="auto"`` chose, and why.

    Attributes:
        otherwise: what is run where ``impl`` cannot: the faster one of those that take any
            operands.
        measured: the tuned table says so, rather than a default.
        faster: all implementations that were measured to be faster than the unfused pair.
    """

    impl: str
    config: Config
    reason: str
    otherwise: str = "unfused"
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
) -> Choice[Config]:
    """The fastest implementation by the tuned table of this GPU; on the CPU backend the kernel.

    Args:
        rows, columns, inner: M, N and K of this rank's product, the same on every rank (so not the
            rows of one rank's split).
    """
    if device.type == "cpu":
        small = dataclasses.replace(config_type(), **_CPU)
        return Choice(
            "fused",
            small,
            "the cpu backend exists to run the kernels; no time measured on it means anything",
        )
    sizes = {"rows": rows, "columns": columns, "inner": inner}
    point = tuning.Point(
        world_size=world_size, dtype=str(dtype).removeprefix("torch."), sizes=sizes
    )
    found = tuning.nearest(operator, torch.cuda.get_device_name(device), point)
    if found is None:
        config = default_config(
            config_type,
            rows=rows // world_size,
            inner=inner,
            dtype=dtype,
            shared_bytes=_shared_bytes(device),
        )
        return Choice(
            "fused",
            config,
            "nothing was measured on this GPU near these sizes; the default configuration",
        )
    # Of an operator without a kernel of its own
    config = config_type.parse(found.config) if found.config else config_type()
    return Choice(
        found.impl, config, found.reason, found.otherwise, measured=True, faster=found.faster
    )


def default_config(
    config_type: type[Config], *, rows: int, inner: int, dtype: torch.dtype, shared_bytes: int
) -> Config:
    """A sound choice where nothing has been measured: the largest tiles that fit.

    Args:
        rows: of the product, that belong to one rank.
        inner: K. Tiles of a long one leave time enough for the links; programs then need not begin
            in turn.
        shared_bytes: that a program may have.
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


IMPLS = ("auto", "fused", *tuning.CARRIED, "unfused")
"""Implementations of the operators whose product travels."""

ANY_ROWS = {
    ("all_gather_gemm", "pushed"),
    ("all_gather_gemm", "chunked"),
    ("gemm_reduce_scatter", "chunked"),
}
"""Those of :data:`interlace.tuning.CARRIED` that do not need rows to be split evenly."""


def resolve(
    operator: str, impl: str, choice: Choice[Config], operands: Operands, even: bool
) -> str:
    """Which implementation runs a call: ``impl``, or what was chosen where it can run.

    Args:
        even: whether every rank gets as many rows from every rank.

    Raises:
        ArgumentError: ``impl`` was asked for and cannot run these operands.
    """
    wanted = choice.impl if impl == "auto" else impl
    missing = unmet(operator, wanted, operands, even)
    if not missing:
        return wanted
    if impl == "auto":
        return choice.otherwise
    raise ArgumentError(
        f"{operator}: impl={impl!r} must have {' and '.join(missing)}. Take impl='auto', 'fused' "
        "or 'unfused'."
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Decision(Generic[Config]):
    """How calls alike run, agreed on by all ranks; see ``Group.once``.

    Attributes:
        mark: of ``Group.agree``.
        how: an implementation.
        otherwise: what is run where ``how`` turns out to be impossible.
        rows: of each rank.
    """

    mark: int
    how: str
    otherwise: str
    config: Config
    rows: tuple[int, ...] = ()


def unmet(operator: str, impl: str, operands: Operands, even: bool) -> list[str]:
    """What an implementation needs and these operands are not; empty where it can run them."""
    if impl not in tuning.CARRIED:
        return []
    missing = [] if even or (operator, impl) in ANY_ROWS else ["rows that are split evenly"]
    if impl != "triggered" and operands.out_dtype != operands.x.dtype:
        missing.append("a result of the dtype of x")
    if operands.bias is not None and not takes_bias(operator, impl):
        missing.append("no bias")
    return missing


def takes_bias(operator: str, impl: str) -> bool:
    """Whether an implementation adds biases: all but a product that cuBLAS writes into the peers'
    memory.
    """
    return impl != "remote_stores"


def group_for(operator: str, group_name: str, device: torch.device) -> Group:
    """The group of a call.

    Raises:
        GroupError: it is too large.
    """
    group = group_named(group_name, device)
    if group.world_size > MAX_RANKS:
        raise GroupError(
            f"{operator}: a group must have at most {MAX_RANKS} ranks; got {group.world_size}."
        )
    return group
