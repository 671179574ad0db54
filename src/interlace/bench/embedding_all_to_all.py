"""Benchmark, study and tuner of ``embedding_all_to_all`` on CUDA, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench.benchmark import Step, Way, Work, best_of, changes_along, constant
from interlace.bench.embedding_calls import EPSILON, LEARNING_RATE, SETS, Calls, Shape
from interlace.comm.group import MAX_PROGRAMS
from interlace.comm.kernels import Launch, processors
from interlace.costs import embedding_all_to_all as costs
from interlace.operators.embedding_all_to_all import backward, launch
from interlace.operators.embedding_all_to_all.config import (
    OPERATOR,
    ORDERS,
    EmbeddingAllToAllConfig,
)
from interlace.units import round_up

__all__ = ["OPERATOR", "Case", "Shape", "bench", "study", "tune"]

# Limits of an SM of compute capability 9.0, which decide how many programs it holds.
_PROGRAMS_PER_SM = 32
_WARPS_PER_SM = 64
_REGISTERS_PER_SM = 65_536


def tolerance(shape: Shape) -> float:
    """Return the relative error of float32 sums in two orders, and of rounding each result."""
    largest_bag = max(1, shape.range[1])
    return (
        8 * math.sqrt(largest_bag) * torch.finfo(torch.float32).eps
        + 2 * torch.finfo(shape.dtype).eps
    )


class Case(Calls):
    """A shape in one direction: its check, its ways and its times.

    Attributes:
        is_backward: Whether the backward pass is benchmarked; the tuner changes it half-way.
    """

    operand_sets = SETS

    def __init__(
        self, shape: Shape, group: dist.ProcessGroup | None = None, is_backward: bool = False
    ) -> None:
        super().__init__(shape, group)
        self.is_backward = is_backward

    @property
    def direction(self) -> str:
        """The direction, as results name it."""
        return "backward" if self.is_backward else "forward"

    @property
    def tolerance(self) -> float:
        """The relative error that roundings explain."""
        return tolerance(self.shape)

    def check(self, config: EmbeddingAllToAllConfig) -> float:
        """Return the largest relative error of the direction on any rank."""
        errors = self._backward_errors if self.is_backward else self._forward_errors
        return self.accept(errors(config), self.direction, config)

    def _forward_errors(self, config: EmbeddingAllToAllConfig) -> list[float]:
        """Return the relative differences of three calls from the unfused pair."""
        errors = []
        for i in range(3):
            expected = self.unfused(i)
            errors.append(_relative(self.fused(i, config), expected))
        return errors

    def _backward_errors(self, config: EmbeddingAllToAllConfig) -> list[float]:
        """Return the errors of the first table and its state after an update, against float64."""
        shape = self.shape
        # float64 copies, since the update is in place.
        before, state = self.tables[0].double(), self.states[0].double()
        self.fused_update(0, config)
        received = self.exchange(self.pack()).view(shape.batch, self.own_columns)
        grad = received[:, : shape.width].double()
        # The first table's lookups come first, bag by bag.
        lookups = self.lookups(0)
        bounds = lookups.offsets[: shape.batch + 1]
        rows = lookups.indices[: int(bounds[-1])]
        exact = torch.zeros_like(before)
        exact.index_add_(0, rows, grad.repeat_interleave(bounds.diff(), 0))
        state += (exact**2).mean(1)
        exact = before - LEARNING_RATE / (state.sqrt() + EPSILON)[:, None] * exact
        return [_relative(self.tables[0], exact), _relative(self.states[0], state)]

    def ways(self, config: EmbeddingAllToAllConfig) -> list[Way]:
        """Return every way to compute the direction, and its parts alone."""
        return self._backward_ways(config) if self.is_backward else self._forward_ways(config)

    def _forward_ways(self, config: EmbeddingAllToAllConfig) -> list[Way]:
        pooled = self.our_bags(0, config)
        bags: Callable[[int], torch.Tensor] = functools.partial(self.our_bags, config=config)
        exchange, unpack, torch_bags = self.exchange, self.unpack, self.torch_bags
        return [
            Way("fused", "ours", self.tuned_call(config), "fused"),
            Way("F.embedding_bag + NCCL + unpack", "pair", self.unfused, "unfused"),
            Way("F.embedding_bag + NCCL", "pair", lambda i: exchange(torch_bags(i))),
            Way("our bags + NCCL + unpack", "pair", lambda i: unpack(exchange(bags(i)))),
            Way("our bags + NCCL", "pair", lambda i: exchange(bags(i))),
            Way("our bags alone", "compute", bags),
            Way("F.embedding_bag alone", "compute", torch_bags),
            Way("NCCL alone", "communication", lambda i: exchange(pooled)),
        ]

    def _backward_ways(self, config: EmbeddingAllToAllConfig) -> list[Way]:
        packed = self.pack()

        def pair(i: int, send: Callable[[], torch.Tensor]) -> None:
            self.exchange(send())
            self.our_update(i, config)

        return [
            Way("fused", "ours", self.tuned_call(config), "fused"),
            Way("pack + NCCL + our update", "pair", lambda i: pair(i, self.pack)),
            Way("NCCL + our update", "pair", lambda i: pair(i, lambda: packed)),
            Way("our update alone", "compute", lambda i: self.our_update(i, config)),
            Way("NCCL alone", "communication", lambda i: self.exchange(packed)),
        ]

    def tuned_call(self, config: EmbeddingAllToAllConfig) -> Step:
        """Return the fused call of the direction."""
        fused = self.fused_update if self.is_backward else self.fused
        return functools.partial(fused, config=config)

    def is_candidate(self, config: EmbeddingAllToAllConfig) -> bool:
        """Return whether the programs of the backward pass fit."""
        return config.update_programs + config.push_programs <= MAX_PROGRAMS

    def compile(self, config: EmbeddingAllToAllConfig) -> None:
        """Compile the kernels of the direction."""
        _compile(self, config, self.is_backward)


def _relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    norm = expected.double().norm()
    return float((result.double() - expected.double()).norm() / norm.clamp(min=1e-30))


# The benchmark


def bench(
    shape: Shape,
    config: EmbeddingAllToAllConfig | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    backwards: bool = False,
) -> dict[str, Any]:
    """Check, then time one shape in every way, in one direction.

    Collective; the same result on every rank.

    Raises:
        InterlaceError: The fused result is wrong; nothing is timed then.
    """
    case = Case(shape, group, backwards)
    chosen = config or case.config
    error = case.check(chosen)
    times = case.time(case.ways(chosen))
    case.owner.synchronize()
    result = {
        "operator": OPERATOR,
        "direction": case.direction,
        "shape": str(shape) + (", backward" if backwards else ""),
        "tables": shape.tables,
        "rows": shape.rows,
        "width": shape.width,
        "batch": shape.batch,
        "lookups": shape.lookups,
        "pooling_factor": shape.pooling_factor,
        **case.header(chosen, "fused", error),
        **_work(case).entries(),
        "times": times,
    }
    if backwards:
        sort = case.measure(functools.partial(case.sort_lookups, config=chosen))
        result["before"] = {"sort of the lookups": dataclasses.asdict(sort)}
    return result


def _work(case: Case) -> Work:
    """Return the least work of the direction: means over the sets of lookups."""
    shape, widths, rank, size = case.shape, case.layout.widths, case.rank, case.shape.dtype.itemsize
    memory = []
    for indices, offsets, sample_indices, _ in case.sets:
        lookups = offsets[:: shape.batch].diff().tolist()
        if case.is_backward:
            distinct = torch.bincount(
                sample_indices.unique() // shape.rows, minlength=shape.tables
            ).tolist()
            memory.append(
                costs.backward_floor_memory_bytes(
                    widths=widths, batch=shape.batch, rank=rank, distinct_rows=distinct,
                    lookups=lookups, itemsize=size, gradient_itemsize=size, row_accesses=2,
                    state_bytes=8,
                )
            )  # fmt: skip
        else:
            memory.append(
                costs.floor_memory_bytes(
                    widths=widths, batch=shape.batch, rank=rank, lookups=lookups, itemsize=size,
                    output_itemsize=size, index_itemsize=indices.element_size(),
                )
            )  # fmt: skip
    link = costs.backward_floor_link_bytes if case.is_backward else costs.floor_link_bytes
    memory_bytes, link_bytes = case.maxima(
        [
            sum(memory) // len(memory),
            link(widths=widths, batch=shape.batch, rank=rank, itemsize=size),
        ]
    )
    return Work(memory_bytes, link_bytes)


# The study of occupancy and order


def resident_programs(case: Case, config: EmbeddingAllToAllConfig) -> int:
    """Return how many programs of the forward kernel this GPU holds, by registers and warps."""
    compiled = _prepare_forward(case, config).compile()
    compiled._init_handles()
    # Registers are handed out to a warp in units of eight per thread.
    registers = 32 * config.num_warps * round_up(compiled.n_regs, 8)
    by_registers = _REGISTERS_PER_SM // registers
    return processors(case.owner.device) * int(
        min(_PROGRAMS_PER_SM, _WARPS_PER_SM // config.num_warps, by_registers)
    )


def study(
    shape: Shape,
    config: EmbeddingAllToAllConfig | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Time the forward pass against occupancy, in each order of destinations. Collective.

    Occupancies are 25 to 100 % of the programs that fit.
    """
    case = Case(shape, group)
    chosen = config or case.config
    case.check(chosen)
    # A launch has at most as many programs as there are epoch cells.
    resident = min(MAX_PROGRAMS, resident_programs(case, chosen))
    points = []
    for percent in (25, 50, 75, 100):
        for order in ORDERS:
            programs = max(1, resident * percent // 100)
            changed = dataclasses.replace(chosen, order=order, max_programs=programs)
            timing = case.measure(functools.partial(case.fused, config=changed))
            points.append(
                {
                    "occupancy_percent": percent,
                    "order": order,
                    "programs": programs,
                    **dataclasses.asdict(timing),
                }
            )
    case.owner.synchronize()
    return {
        "operator": OPERATOR,
        "shape": str(shape),
        "dtype": str(shape.dtype).removeprefix("torch."),
        "world_size": case.owner.world_size,
        "config": str(chosen),
        "resident_programs": resident,
        "points": points,
    }


# The tuner

FORWARD_AXES: dict[str, Sequence[Any]] = {
    "protocol": ("direct", "tiles"),
    "block_bags": (1, 2, 4, 8, 16),
    "unroll": (1, 2, 4, 8),
    "num_warps": (1, 2, 4),
    "max_programs": (528, 1056, 1584, 2112, 3168, 4096),
    "max_registers": (0, 64, 96, 128),
}
BACKWARD_AXES: dict[str, Sequence[Any]] = {
    "push": ("direct", "tiles"),
    "push_programs": (66, 132, 264, 528, 1056),
    "push_blocks": (1, 2, 4, 8, 16),
    "push_rows": (2, 4, 8, 16, 32),
    "block_runs": (1, 2, 4, 8),
    "run_unroll": (1, 2, 4),
    "update_warps": (1, 2, 4),
    "update_registers": (0, 96, 128, 168),
    "update_programs": (1056, 2112, 3168, 3840),
}
_ROUNDS = 2


def tune(shape: Shape, group: dist.ProcessGroup | None = None) -> list[tuple[float, str]]:
    """Return the best configuration that was found, and its time. Collective.

    The forward pass's settings are tuned, then the backward pass's with the best of these: one
    setting at a time, twice round.
    """
    case = Case(shape, group)
    forward = case.tune([constant(case.config), *_ROUNDS * changes_along(FORWARD_AXES)])
    best_forward = best_of(forward)
    # The two directions have no setting in common, so one is tuned after the other.
    case.is_backward = True
    times = case.tune([constant(best_forward), *_ROUNDS * changes_along(BACKWARD_AXES)])
    best = best_of(times)
    return [(forward[best_forward] + times[best], str(best))]


def _prepare_forward(case: Case, config: EmbeddingAllToAllConfig) -> Launch:
    """Return the forward kernel's launch, for compilation only."""
    nbytes = case.samples * case.layout.columns * case.shape.dtype.itemsize
    destination = case.owner.outputs.take(nbytes).destination
    return launch.prepare(case.owner, case.call(0, config), config, 0, destination)


def _compile(case: Case, config: EmbeddingAllToAllConfig, is_backward: bool) -> None:
    """Compile the kernels of a direction on this rank."""
    if not is_backward:
        _prepare_forward(case, config).compile()
        return
    lookups = case.sorted_lookups(0, config)
    call = case.call(0, config)
    backward.prepare(case.owner, call, case.grad, case.target(), config, lookups, 0).compile()
