"""Benchmark, study and tuner of ``embedding_all_to_all`` on CUDA, forward and backward: every
figure that a claim needs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.bench.timing import Timing, measure
from interlace.comm import group_of
from interlace.comm.group import MAX_PROGRAMS, solo_group
from interlace.comm.kernels import processors
from interlace.costs import embedding_all_to_all as costs
from interlace.costs.machine import H200_NODE
from interlace.errors import ArgumentError, InterlaceError
from interlace.operators.embedding_all_to_all import backward, launch
from interlace.operators.embedding_all_to_all.api import embedding_all_to_all
from interlace.operators.embedding_all_to_all.config import (
    OPERATOR,
    ORDERS,
    EmbeddingAllToAllConfig,
)
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.units import next_power_of_2, round_up

__all__ = ["OPERATOR", "Case", "Shape", "bench", "study", "tune"]

_SETS = 2  # of lookups that calls take in turn: rows in the L2 are then another call's
_LEARNING_RATE, _EPSILON = 0.1, 1e-6
_PROGRAMS_PER_SM = 32
_WARPS_PER_SM = 64
_REGISTERS_PER_SM = 65_536

Step = Callable[[int], object]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One benchmarked call: ``tables`` of ``[rows, width]`` on each rank, ``batch`` samples of all
    ranks.

    Attributes:
        lookups: of a bag: ``"20"``, or ``"0-60"`` for a number drawn uniformly from 0 to 60.
    """

    tables: int = 64
    rows: int = 200_000
    width: int = 256
    batch: int = 4096
    lookups: str = "20"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        first, last = self.range
        if not 0 <= first <= last:
            raise ArgumentError(
                f"lookups must be a number or a range such as 0-60; got {self.lookups!r}."
            )

    @property
    def range(self) -> tuple[int, int]:
        """Least and most lookups of a bag."""
        first, _, last = self.lookups.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return 1, 0
        return int(first), int(last or first)

    @property
    def pooling_factor(self) -> int:
        """Lookups of a bag on average, as ``choose`` counts them."""
        return next_power_of_2(math.ceil(sum(self.range) / 2))

    def __str__(self) -> str:
        return f"{self.tables} x {self.rows} x {self.width}, B = {self.batch}, L = {self.lookups}"


class Case:
    """A shape's tables and lookups on this rank, and the calls on them."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None = None) -> None:
        self.shape, self.group = shape, group
        self.owner = group_of(group)
        if shape.batch % self.owner.world_size:
            raise ArgumentError(
                f"the unfused pairs need a batch that {self.owner.world_size} ranks divide; got "
                f"{shape.batch}."
            )
        self.rank, ranks, device = self.owner.rank, self.owner.world_size, self.owner.device
        generator = torch.Generator(device).manual_seed(1 + self.rank)
        self.whole = torch.empty(
            shape.tables * shape.rows, shape.width, dtype=shape.dtype, device=device
        )
        self.whole.normal_(generator=generator)
        self.tables = list(self.whole.split(shape.rows))
        self.layout = Layout(((shape.width,) * shape.tables,) * ranks, shape.batch)
        self.samples, self.own_columns = shape.batch // ranks, shape.tables * shape.width
        self.sets = [self._lookups(generator) for _ in range(_SETS)]
        self.grad = torch.randn(
            self.samples, self.layout.columns, generator=generator, device=device
        ).to(shape.dtype)
        self.states = [torch.zeros(shape.rows, device=device) for _ in self.tables]
        self.received = torch.empty(
            shape.batch * self.own_columns, dtype=shape.dtype, device=device
        )
        config = launch.choose(
            tables=shape.tables, width=shape.width, batch=shape.batch,
            pooling_factor=shape.pooling_factor, dtype=shape.dtype, world_size=ranks, device=device,
        ).config  # fmt: skip
        self.config = config

    def _lookups(
        self, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """indices and offsets, table-major; and the same by sample, over all tables as one, as
        ``F.embedding_bag`` wants them.
        """
        shape, device = self.shape, self.whole.device
        first, last = shape.range
        lengths = torch.randint(
            first, last + 1, (shape.tables, shape.batch), generator=generator, device=device
        )
        offsets = F.pad(lengths.flatten().cumsum(0), (1, 0))
        indices = torch.randint(
            0, shape.rows, (int(offsets[-1]),), generator=generator, device=device
        )
        table = (
            torch.arange(shape.tables, device=device)[:, None]
            .expand_as(lengths)
            .flatten()
            .repeat_interleave(lengths.flatten())
        )
        sample = (
            torch.arange(shape.batch, device=device)
            .repeat(shape.tables)
            .repeat_interleave(lengths.flatten())
        )
        order = torch.argsort(sample * shape.tables + table, stable=True)
        by_sample = (indices + table * shape.rows)[order]
        return indices, offsets, by_sample, F.pad(lengths.T.flatten().cumsum(0), (1, 0))

    def call(self, i: int, config: EmbeddingAllToAllConfig, *, alone: bool = False) -> launch.Call:
        indices, offsets, _, _ = self.sets[i % _SETS]
        layout = (
            Layout((self.layout.widths[self.rank],), self.shape.batch) if alone else self.layout
        )
        name = "" if self.group is None else self.group.group_name
        rank = 0 if alone else self.rank
        return launch.Call(
            self.tables,
            indices,
            offsets,
            None,
            layout,
            rank,
            "sum",
            self.shape.dtype,
            name,
            "fused",
            str(config),
            alone,
        )

    # Forward

    def fused(self, i: int, config: EmbeddingAllToAllConfig) -> torch.Tensor:
        indices, offsets, _, _ = self.sets[i % _SETS]
        with torch.no_grad():
            return embedding_all_to_all(
                self.tables,
                indices,
                offsets,
                name=f"benchmark of {self.shape}",
                group=self.group,
                impl="fused",
                config=config,
            )

    def torch_bags(self, i: int) -> torch.Tensor:
        _, _, indices, offsets = self.sets[i % _SETS]
        return F.embedding_bag(indices, self.whole, offsets, mode="sum", include_last_offset=True)

    def our_bags(self, i: int, config: EmbeddingAllToAllConfig) -> torch.Tensor:
        """The same kernel in a group of one: no puts and no waits, all of the pooling."""
        return launch.run(self.call(i, config, alone=True), check=False)

    def exchange(self, pooled: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(self.received, pooled.view(-1), group=self.group)
        return self.received

    def unpack(self, received: torch.Tensor) -> torch.Tensor:
        pieces = received.view(self.owner.world_size, self.samples, self.own_columns)
        return pieces.transpose(0, 1).reshape(self.samples, -1)

    # Backward

    def pack(self) -> torch.Tensor:
        return (
            self.grad.view(self.samples, self.owner.world_size, self.own_columns)
            .transpose(0, 1)
            .contiguous()
        )

    def target(self) -> backward.Target:
        return backward.Target(
            update="adagrad", by_segment=False, address=0,
            places=[table.data_ptr() for table in self.tables],
            strides=[self.shape.width] * self.shape.tables,
            states=[state.data_ptr() for state in self.states],
            rows=[self.shape.rows] * self.shape.tables, dtype=self.shape.dtype,
            learning_rate=_LEARNING_RATE, epsilon=_EPSILON,
        )  # fmt: skip

    @functools.cached_property
    def found(self) -> dict[int, list[backward.Sorted]]:
        return {}

    def sorted_lookups(self, i: int, config: EmbeddingAllToAllConfig) -> backward.Sorted:
        """Lookups sorted by row beforehand: that depends on no gradient, and is timed by itself."""
        if config.run_lookups not in self.found:
            rows = [self.shape.rows] * self.shape.tables
            self.found[config.run_lookups] = [
                backward.sort_lookups(self.call(each, config), rows, config.run_lookups)
                for each in range(_SETS)
            ]
        return self.found[config.run_lookups][i % _SETS]

    def fused_update(self, i: int, config: EmbeddingAllToAllConfig) -> None:
        call = self.call(i, config)
        mark = backward.agree(call)
        found = self.sorted_lookups(i, config)
        ready = backward.prepare(self.owner, call, self.grad, self.target(), config, found, mark)
        with self.owner.running():
            ready()

    def our_update(self, i: int, config: EmbeddingAllToAllConfig) -> None:
        """The same kernel in a group of one, on gradients that have been exchanged."""
        call, grad = (
            self.call(i, config, alone=True),
            self.received.view(self.shape.batch, self.own_columns),
        )
        found = self.sorted_lookups(i, config)
        backward.prepare(
            solo_group(self.owner.device), call, grad, self.target(), config, found, 0
        )()


# Right before fast


def tolerance(shape: Shape) -> float:
    """Float32 sums in two orders, and a rounding of each result."""
    most = max(1, shape.range[1])
    return 8 * math.sqrt(most) * torch.finfo(torch.float32).eps + 2 * torch.finfo(shape.dtype).eps


def check_forward(case: Case, config: EmbeddingAllToAllConfig) -> float:
    """Largest relative difference between fused and ``F.embedding_bag`` + NCCL + unpack over three
    calls, on any rank.

    Raises:
        InterlaceError: it is too large.
    """
    worst = 0.0
    for i in range(3):
        expected = case.unpack(case.exchange(case.torch_bags(i)))
        y = case.fused(i, config)
        worst = max(worst, _relative(y, expected))
    return _accept(case, worst, "forward", config)


def check_backward(case: Case, config: EmbeddingAllToAllConfig) -> float:
    """Largest relative error of the first table and its state after one update, against float64, on
    any rank.
    """
    shape = case.shape
    before, state = case.tables[0].double(), case.states[0].double()
    case.fused_update(0, config)
    own = case.exchange(case.pack()).view(shape.batch, case.own_columns)[:, : shape.width].double()
    indices, offsets, _, _ = case.sets[0]
    bounds = offsets[: shape.batch + 1]
    rows = indices[: int(bounds[-1])]
    exact = torch.zeros_like(before).index_add_(0, rows, own.repeat_interleave(bounds.diff(), 0))
    state += (exact**2).mean(1)
    exact = before - _LEARNING_RATE / (state.sqrt() + _EPSILON)[:, None] * exact
    worst = max(_relative(case.tables[0], exact), _relative(case.states[0], state))
    return _accept(case, worst, "backward", config)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    norm = expected.double().norm()
    return float((found.double() - expected.double()).norm() / norm.clamp(min=1e-30))


def _accept(case: Case, mine: float, what: str, config: EmbeddingAllToAllConfig) -> float:
    case.owner.synchronize()
    worst = torch.tensor(mine, device=case.owner.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=case.group)
    if not worst.item() <= tolerance(case.shape):
        raise InterlaceError(
            f"{OPERATOR} {case.shape}, {what}, {config}: relative error {worst.item():.1e} is "
            f"above {tolerance(case.shape):.1e}; "
            f"not timed."
        )
    return float(worst.item())


# The benchmark


def bench(
    shape: Shape,
    config: EmbeddingAllToAllConfig | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    backwards: bool = False,
) -> dict[str, Any]:
    """Check, then time one shape in every way, in one direction. Collective; the same result on
    every rank.

    Raises:
        InterlaceError: the fused result is wrong; nothing is timed then.
    """
    case = Case(shape, group)
    chosen = config or case.config
    error = check_backward(case, chosen) if backwards else check_forward(case, chosen)
    times = {
        name: _timed(case, step)
        for name, step in (_backward_ways if backwards else _forward_ways)(case, chosen).items()
    }
    case.owner.synchronize()
    memory_bytes, link_bytes = _floor_bytes(case, backwards)
    result = {
        "operator": OPERATOR,
        "direction": "backward" if backwards else "forward",
        "shape": str(shape) + (", backward" if backwards else ""),
        "tables": shape.tables,
        "rows": shape.rows,
        "width": shape.width,
        "batch": shape.batch,
        "lookups": shape.lookups,
        "pooling_factor": shape.pooling_factor,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "world_size": case.owner.world_size,
        "config": str(chosen),
        "auto": "fused",
        "relative_error": error,
        "floor_us": round(H200_NODE.floor_ns(memory_bytes, link_bytes) / 1e3, 2),
        "memory_bytes": memory_bytes,
        "link_bytes": link_bytes,
        "times": {name: dataclasses.asdict(timing) for name, timing in times.items()},
    }
    if backwards:
        rows = [shape.rows] * shape.tables
        sort = _timed(
            case, lambda i: backward.sort_lookups(case.call(i, chosen), rows, chosen.run_lookups)
        )
        result["before"] = {"sort of the lookups": dataclasses.asdict(sort)}
    return result


def _timed(case: Case, step: Step, samples: int = 15) -> Timing:
    """Time ``step``; buffers that the graph has taken are given back afterwards, for the graph is
    gone.
    """
    timing = measure(step, period=_SETS, samples=samples, group=case.group)
    case.owner.release()
    return timing


def _forward_ways(case: Case, config: EmbeddingAllToAllConfig) -> Mapping[str, Step]:
    pooled = case.our_bags(0, config)
    return {
        "fused": lambda i: case.fused(i, config),
        "F.embedding_bag + NCCL + unpack": lambda i: case.unpack(case.exchange(case.torch_bags(i))),
        "F.embedding_bag + NCCL": lambda i: case.exchange(case.torch_bags(i)),
        "our bags + NCCL + unpack": lambda i: case.unpack(case.exchange(case.our_bags(i, config))),
        "our bags + NCCL": lambda i: case.exchange(case.our_bags(i, config)),
        "our bags alone": lambda i: case.our_bags(i, config),
        "F.embedding_bag alone": case.torch_bags,
        "NCCL alone": lambda i: case.exchange(pooled),
    }


def _backward_ways(case: Case, config: EmbeddingAllToAllConfig) -> Mapping[str, Step]:
    packed = case.pack()

    def pair(i: int, send: Callable[[], torch.Tensor]) -> None:
        case.exchange(send())
        case.our_update(i, config)

    return {
        "fused": lambda i: case.fused_update(i, config),
        "pack + NCCL + our update": lambda i: pair(i, case.pack),
        "NCCL + our update": lambda i: pair(i, lambda: packed),
        "our update alone": lambda i: case.our_update(i, config),
        "NCCL alone": lambda i: case.exchange(packed),
    }


def _floor_bytes(case: Case, backwards: bool) -> tuple[int, int]:
    """Memory and link bytes of the least that the direction can do, on the rank that has most;
    means over the sets of lookups.
    """
    shape, widths, rank, size = case.shape, case.layout.widths, case.rank, case.shape.dtype.itemsize
    memory = []
    for indices, offsets, by_sample, _ in case.sets:
        lookups = offsets[:: shape.batch].diff().tolist()
        if backwards:
            distinct = torch.bincount(
                by_sample.unique() // shape.rows, minlength=shape.tables
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
    link = costs.backward_floor_link_bytes if backwards else costs.floor_link_bytes
    mine = [
        sum(memory) // len(memory),
        link(widths=widths, batch=shape.batch, rank=rank, itemsize=size),
    ]
    most = torch.tensor(mine, dtype=torch.int64, device=case.owner.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=case.group)
    memory_bytes, link_bytes = most.tolist()
    return int(memory_bytes), int(link_bytes)


# The study of occupancy and order


def resident_programs(case: Case, config: EmbeddingAllToAllConfig) -> int:
    """Programs of the forward kernel that this GPU can hold at once, by their registers and warps."""
    call = case.call(0, config)
    space = case.owner.outputs.take(case.samples * case.layout.columns * case.shape.dtype.itemsize)
    ready = launch.prepare(
        case.owner, call, config, 0, space.address, space.buffer_bytes, space.index
    )
    compiled = ready.compile()
    compiled._init_handles()
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
    """Time against occupancy (25 to 100 % of the programs that fit), in each order of destinations.
    Collective.
    """
    case = Case(shape, group)
    chosen = config or case.config
    check_forward(case, chosen)
    resident = min(MAX_PROGRAMS, resident_programs(case, chosen))
    points = []
    for percent in (25, 50, 75, 100):
        for order in ORDERS:
            programs = max(1, resident * percent // 100)
            changed = dataclasses.replace(chosen, order=order, max_programs=programs)
            timing = _timed(case, functools.partial(case.fused, config=changed))
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
    """Times of the configurations that were tried and are right, fastest first: the forward pass's
    settings, then the backward pass's with the best of these. One setting at a time, twice round.
    Collective.
    """
    case = Case(shape, group)
    best, forward_us = _descend(case, case.config, FORWARD_AXES, backwards=False)
    best, backward_us = _descend(case, best, BACKWARD_AXES, backwards=True)
    return [(forward_us + backward_us, str(best))]


def _descend(
    case: Case,
    start: EmbeddingAllToAllConfig,
    axes: Mapping[str, Sequence[Any]],
    *,
    backwards: bool,
) -> tuple[EmbeddingAllToAllConfig, float]:
    best, best_us = start, _candidate_us(case, start, backwards)
    tried = {start}
    for _ in range(_ROUNDS):
        for name, values in axes.items():
            for value in values:
                candidate = dataclasses.replace(best, **{name: value})
                if (
                    candidate in tried
                    or candidate.update_programs + candidate.push_programs > MAX_PROGRAMS
                ):
                    continue
                tried.add(candidate)
                time_us = _candidate_us(case, candidate, backwards)
                if time_us < best_us:
                    best, best_us = candidate, time_us
    return best, best_us


def _candidate_us(case: Case, config: EmbeddingAllToAllConfig, backwards: bool) -> float:
    """Median time; infinite if it does not compile on some rank or is wrong. The same on every
    rank.
    """
    step = case.fused_update if backwards else case.fused
    works = torch.ones((), device=case.owner.device)
    try:
        _compile(case, config, backwards)
    except Exception as error:  # the compiler's errors have no common base: too many registers, say
        works.zero_()
        print(
            f"{OPERATOR} {case.shape}, {config}: left out: {str(error).splitlines()[0][:100]}",
            flush=True,
        )
    dist.all_reduce(works, op=dist.ReduceOp.MIN, group=case.group)
    if not works.item():
        return math.inf
    try:
        (check_backward if backwards else check_forward)(case, config)
    except InterlaceError as error:
        print(error, flush=True)
        return math.inf
    return _timed(case, lambda i: step(i, config), samples=7).median_us


def _compile(case: Case, config: EmbeddingAllToAllConfig, backwards: bool) -> None:
    call = case.call(0, config)
    if backwards:
        ready = backward.prepare(
            case.owner, call, case.grad, case.target(), config, case.sorted_lookups(0, config), 0
        )
    else:
        space = case.owner.outputs.take(
            case.samples * case.layout.columns * case.shape.dtype.itemsize
        )
        ready = launch.prepare(
            case.owner, call, config, 0, space.address, space.buffer_bytes, space.index
        )
    ready.compile()
