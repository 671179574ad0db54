"""``impl="auto"`` of the operators around a product: the implementation that takes the least time.

The machine's profile predicts the times (:mod:`interlace.costs.time`), those of the stock pairs
too, so an operator is not slower than what PyTorch has. Operators whose times no profile composes
go by the nearest entry of their tuned table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from interlace.costs.known_profiles import cached_by_profiles, profile_of
from interlace.costs.time import MachineProfile, SizedCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.gemm.terms import Terms, default_output_dtype
from interlace.registry import operator_named
from interlace.tuning.choice import Choice, by_table, on_cpu
from interlace.tuning.configuration import Configuration
from interlace.tuning.gpu import Gpu
from interlace.units import round_up

MAX_RANKS = 8

_ALONE = "a rank alone has nothing to exchange"

Config = TypeVar("Config", bound=GemmConfig)
ConfigOf = TypeVar("ConfigOf", bound=Configuration)

# (block_m, block_n, num_warps), the most efficient tiles first.
_TILES = ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4))

# Up to this K the links have little time per tile, so programs should begin one after another.
_SHORT_INNER = 4096

# Small enough for the interpreter, which runs programs one after another.
_CPU = {
    "block_m": 16,
    "block_n": 32,
    "block_k": 32,
    "max_programs": 2,
    "interleave": 2,
    "stagger": 0,
}


_MOST_ROWS_OF_THEIR_OWN, _CLASSES_PER_OCTAVE_LOG2 = 32, 4
"""Rows up to which each number is chosen for by itself; more of them come in sixteen classes for
each doubling.
"""


def rows_of_class(rows: int, world_size: int) -> int:
    """Return the number of rows by which many rows are chosen for: the most that their class has,
    and one more where ranks do not get equally many.

    A server's prompts have hundreds of lengths, and a choice takes the host as long as several
    launches. Of 216 calls of more than 256 rows that no fit has seen, six choose something else for
    it, and all take 0.01 % less in the geometric mean; with fewer rows none does (decision 0014).
    """
    if rows <= _MOST_ROWS_OF_THEIR_OWN:
        return rows
    octave = (rows - 1).bit_length() - 1
    return round_up(rows, 1 << (octave - _CLASSES_PER_OCTAVE_LOG2)) + (rows % world_size > 0)


def by_class(operator: str, call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call, as :func:`choose_product` takes it, with the rows of its class; as it is where
    its very sizes were measured.
    """
    device, world_size = call["device"], call["world_size"]
    rows = rows_of_class(call["rows"], world_size)
    if device.type == "cpu" or rows == call["rows"]:
        return call
    gpu = Gpu.of(device)
    corrections = profile_of(gpu.name, gpu.processors).corrections.get(operator)
    size = call["rows"], call["columns"], call["inner"], world_size
    is_measured = corrections is not None and corrections.knows(size)
    return call if is_measured else {**call, "rows": rows}


def kernel_or_product(kernel: str, *, device: torch.device, world_size: int, **_: Any) -> str:
    """Return the implementation to take where no time is known: the operator's ``kernel``, but the
    library's product for a rank alone on a GPU, which has nothing to exchange.
    """
    return kernel if world_size > 1 or device.type == "cpu" else "unfused"


@cached_by_profiles
def choose_product(
    operator: str,
    config_type: type[Config],
    *,
    device: torch.device | Gpu,
    default: str = "fused",
    **call: Any,
) -> Choice[Config]:
    """Return the implementation that takes the least time; on the CPU backend the kernel.

    Args:
        device: The device of the operands, or a GPU that need not be here.
        default: The implementation to take where no time is known.
        call: As :func:`choose_on` takes it.
    """
    if device.type == "cpu":
        return on_cpu(dataclasses.replace(config_type(), **_CPU), default)
    return choose_on(Gpu.of(device), operator, config_type, default=default, **call)


@cached_by_profiles
def choose_alike(
    operator: str,
    alike: str,
    config_type: type[Config],
    *,
    rows: int,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device | Gpu,
    world_size: int,
    w_along_k: bool = True,
) -> Choice[Config]:
    """Return the implementation of an operator whose times no profile composes: that of the nearest
    entry of its tuned table with as many ranks, or else the one that takes the least time of
    another operator of as large a product, whose ranks exchange as many bytes. On the CPU backend
    the kernel.

    That is a guess: of the kernel's time as a part of the pair's it says 0.79 to 1.20 times what
    was measured in 18 calls on two H200s. So the kernel runs only where it is predicted to be as
    much faster as must be predicted on a GPU of another architecture.

    Args:
        operator, config_type, device, world_size, w_along_k: As :func:`choose_on` takes them.
        alike: The other operator's name. It has the implementations ``"fused"`` and ``"unfused"``.
        rows: Rows of all ranks, of which this rank's product has its share.
        columns, inner: N and K of this rank's product.
        dtype: The dtype of x and w.
    """
    sizes = {"rows": rows, "columns": columns, "inner": inner}
    if device.type == "cpu":
        return on_cpu(dataclasses.replace(config_type(), **_CPU))
    gpu, rows_of_rank = Gpu.of(device), rows // world_size
    start = default_config(
        config_type, rows=rows_of_rank, inner=inner, dtype=dtype, shared_bytes=gpu.shared_bytes
    )
    tabulated = by_table(operator, gpu.name, sizes, dtype, world_size, start, "unfused")
    if tabulated.table_ranks == world_size:
        return tabulated
    if world_size == 1:
        return dataclasses.replace(tabulated, impl="unfused", reason=_ALONE)
    profile, config = profile_of(gpu.name, gpu.processors), tabulated.config
    call = SizedCall.of_dtype(
        str(dtype).removeprefix("torch."),
        **{**sizes, "rows": rows_of_rank},
        world_size=world_size,
        w_along_k=w_along_k,
    )
    terms = Terms.of_sizes(rows_of_rank, columns, dtype, "cuda", world_size)
    times_us = predicted_times(profile, alike, call, (config.block_m, config.block_n), terms)
    of_both = {name: times_us[name] for name in times_us if name in ("fused", "unfused")}
    guess = dataclasses.replace(
        profile, is_guess=True, is_alike=False, source=f"the times of {alike}"
    )
    return fastest(operator, guess, of_both, lambda _: config)


def choose_on(
    gpu: Gpu,
    operator: str,
    config_type: type[Config],
    *,
    rows: int,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    world_size: int,
    out_dtype: torch.dtype | None = None,
    w_along_k: bool = True,
    in_place: bool = False,
    has_block_scales: bool = False,
    default: str = "fused",
) -> Choice[Config]:
    """Return the implementation that takes the least time on a GPU, which need not be here.

    Args:
        rows, columns, inner: M, N and K of this rank's product, the same on every rank (so not the
            rows of one rank's split).
        out_dtype: The dtype of the result, if it is not the one that comes by default.
        w_along_k: Whether w is contiguous along K; else it is along N.
        in_place: Whether peers can read rows of x where they lie.
        has_block_scales: Whether float8 operands have a scale for each block.
        default: The implementation to take where no time is known, and by a rank alone.
    """
    sizes = {"rows": rows, "columns": columns, "inner": inner}
    start = default_config(
        config_type,
        rows=rows // world_size,
        inner=inner,
        dtype=dtype,
        shared_bytes=gpu.shared_bytes,
        has_block_scales=has_block_scales,
    )
    tabulated = by_table(operator, gpu.name, sizes, dtype, world_size, start, default)
    profile, config = profile_of(gpu.name, gpu.processors), tabulated.config
    call = SizedCall.of_dtype(
        str(dtype).removeprefix("torch."), **sizes, world_size=world_size, w_along_k=w_along_k
    )
    call = dataclasses.replace(call, has_block_scales=has_block_scales)
    result_dtype = default_output_dtype(dtype)
    converts = out_dtype not in (None, result_dtype)
    terms = Terms(
        rows, "cuda", dtype, rows * columns * result_dtype.itemsize, world_size,
        converts=converts, is_even=rows % world_size == 0, w_along_k=w_along_k,
    )  # fmt: skip
    if out_dtype is not None and converts:
        call = dataclasses.replace(call, output_itemsize=out_dtype.itemsize)
    tile = config.block_m, config.block_n
    times_us = predicted_times(profile, operator, call, tile, terms, in_place=in_place)
    if not times_us:
        return tabulated
    choice = fastest(operator, profile, times_us, lambda _: config)
    if world_size > 1:
        return choice
    # What was measured has peers. Calls that cannot run the default take the others in this order:
    # the product for which ``pushed`` has a kernel is then all that runs.
    order = sorted(choice.times_us, key=lambda name: name != "pushed")
    times_us = {name: choice.times_us[name] for name in order}
    return dataclasses.replace(choice, impl=default, reason=_ALONE, faster=(), times_us=times_us)


def predicted_times(
    profile: MachineProfile, operator: str, call: SizedCall, tile: tuple[int, int], terms: Terms,
    *, in_place: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Return the time of each implementation in microseconds, the shortest first: the GPU's, or
    the host's in an eager call where that is declared and more.

    Implementations are missing whose times the profile does not compose, or that do not keep to
    them, and those that refuse every call of these sizes.

    Args:
        tile: Rows and columns of the fused kernel's tiles.
        terms: The properties of the simplest call of these sizes.
        in_place: Whether peers can read rows of x where they lie. What was measured staged them.
    """
    declaration = operator_named(operator)
    known = {}
    for implementation in declaration.implementations:
        if not implementation.is_predictable(terms):
            continue
        time = profile.predict_us(
            operator, implementation.name, call, implementation.schedule, tile
        )
        if time is not None and implementation.refusal(terms) is None:
            is_staged = not (in_place and implementation.reads_in_place)
            known[implementation.name] = time if is_staged else time - profile.staging_us(call)
    eager_us = declaration.eager_us(known)
    return dict(sorted(eager_us.items(), key=lambda known: known[::-1]))


def fastest(
    operator: str,
    profile: MachineProfile,
    times_us: Mapping[str, float],
    config_of: Callable[[str], ConfigOf],
) -> Choice[ConfigOf]:
    """Return the choice of the shortest of these times.

    Args:
        operator: The operator's name.
        profile: By which the times were predicted.
        times_us: Microseconds by implementation.
        config_of: Returns the configuration that an implementation runs with.
    """
    declaration = operator_named(operator)
    preferred = declaration.preferred_among(times_us)
    limit_us = min((times_us[name] for name in preferred), default=math.inf) * (1 - profile.margin)
    order = profile.in_order(times_us, preferred)
    times = ", ".join(f"{name} {times_us[name]:.0f} us" for name in order)
    source = f", by {profile.source}" if profile.is_guess else ""
    return Choice(
        order[0],
        config_of(order[0]),
        f"predicted for {profile.gpu}{source}: {times}",
        times_us={name: times_us[name] for name in order},
        worst_error=profile.worst_error,
        is_known=True,
        faster=tuple(
            name for name in order if not declaration.is_pair(name) and times_us[name] < limit_us
        ),
    )


def default_config(
    config_type: type[Config],
    *,
    rows: int,
    inner: int,
    dtype: torch.dtype,
    shared_bytes: int,
    has_block_scales: bool = False,
) -> Config:
    """Return a valid configuration if nothing has been measured: the largest tiles that fit.

    Args:
        rows: Rows of the product that belong to one rank.
        inner: K. Tiles of a long one leave time enough for the links; programs then need not begin
            in turn.
        shared_bytes: Shared memory that a program may have.
        has_block_scales: Whether float8 operands have a scale for each block. Steps along K are
            then within a block, and sums are in registers twice, for which the largest tiles have
            none.
    """
    block_k = {1: 128, 2: 64}.get(dtype.itemsize, 32)
    for block_m, block_n, warps in _TILES:
        # A tile of twice a rank's rows would be half empty.
        if block_m > 64 and block_m >= 2 * rows:
            continue
        if has_block_scales and block_n > SCALE_BLOCK:
            continue
        # Three stages of operands, and a tile on its way to a peer.
        operand_bytes = 3 * (block_m + block_n) * block_k * dtype.itemsize
        if operand_bytes + block_m * block_n * max(dtype.itemsize, 2) <= shared_bytes:
            stagger = 100 if inner <= _SHORT_INNER else 0
            return config_type(
                block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, stagger=stagger
            )
    return config_type(block_m=32, block_n=64, block_k=32, num_warps=4, num_stages=2)
