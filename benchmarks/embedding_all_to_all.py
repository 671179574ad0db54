"""Benchmark and tuner of ``embedding_all_to_all`` on CUDA, forward and backward: operands, calls on
them, and the ways that are timed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.bench.benchmark import (
    Benchmark,
    LeastWork,
    Step,
    Way,
    changes_along,
    constant,
    relative_error,
)
from interlace.comm import MAX_PROGRAMS, default_name
from interlace.costs import embedding_all_to_all as costs
from interlace.errors import ArgumentError
from interlace.operators.embedding_all_to_all import (
    backward,
    embedding_all_to_all,
    fused,
    pooling,
)
from interlace.operators.embedding_all_to_all.call import (
    EmbeddingCall,
    SharedArguments,
    agreed_call,
)
from interlace.operators.embedding_all_to_all.config import (
    OPERATOR,
    EmbeddingAllToAllConfig,
    choose,
)
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.operators.embedding_all_to_all.lookups import Sorted, sort_lookups
from interlace.registry import operator_named
from interlace.units import next_power_of_2

__all__ = ["OPERATOR", "Backward", "Forward", "TablesShape", "bench", "tune"]

SETS = 2
"""Sets of lookups that calls take in turn: rows in the L2 are then another call's."""

LEARNING_RATE, EPSILON = 0.1, 1e-6


@dataclasses.dataclass(frozen=True)
class TablesShape:
    """One benchmarked call: ``tables`` of ``[rows, width]`` per rank, ``batch`` samples in all.

    Attributes:
        lookups: Lookups of a bag: ``"20"``, or ``"0-60"`` for a number drawn uniformly.
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
        """The least and the most lookups of a bag."""
        first, _, last = self.lookups.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return 1, 0
        return int(first), int(last or first)

    @property
    def tolerance(self) -> float:
        """The relative error of float32 sums in two orders, and of rounding each result."""
        largest_bag = max(1, self.range[1])
        return (
            8 * math.sqrt(largest_bag) * torch.finfo(torch.float32).eps
            + 2 * torch.finfo(self.dtype).eps
        )

    @property
    def pooling_factor(self) -> int:
        """The lookups of a bag on average, as ``choose`` counts them."""
        return next_power_of_2(math.ceil(sum(self.range) / 2))

    def __str__(self) -> str:
        return f"{self.tables} x {self.rows} x {self.width}, B = {self.batch}, L = {self.lookups}"


class DrawnLookups(NamedTuple):
    """The lookups of one call.

    Attributes:
        indices, offsets: Table by table, as the operator takes them.
        sample_indices, sample_offsets: Sample by sample, over all tables as one, as
            ``F.embedding_bag`` takes them.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    sample_indices: torch.Tensor
    sample_offsets: torch.Tensor


class EmbeddingCalls(Benchmark[EmbeddingAllToAllConfig]):
    """A shape's tables and lookups on this rank, and the calls on them.

    Attributes:
        weight: All tables of this rank, one after the other.
        tables: Views of it.
        sets: Lookups.
        grad: The gradient of this rank's output.
        states: A state of row-wise Adagrad per table.
        received: The memory in which NCCL receives.
        config: The configuration that ``impl="auto"`` takes.
    """

    shape: TablesShape

    operand_sets = SETS

    def __init__(self, shape: TablesShape, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(operator_named(OPERATOR), shape, group)
        self.rank, ranks, device = self.owner.rank, self.owner.world_size, self.device
        if shape.batch % ranks:
            raise ArgumentError(
                f"the unfused pairs need a batch that {ranks} ranks divide; got {shape.batch}."
            )
        generator = torch.Generator(device).manual_seed(1 + self.rank)
        self.weight = torch.empty(
            shape.tables * shape.rows, shape.width, dtype=shape.dtype, device=device
        )
        self.weight.normal_(generator=generator)
        self.tables = list(self.weight.split(shape.rows))
        self.layout = Layout(((shape.width,) * shape.tables,) * ranks, shape.batch)
        self.samples, self.own_columns = shape.batch // ranks, shape.tables * shape.width
        self.sets = [self._lookups(generator) for _ in range(SETS)]
        self.grad = torch.randn(
            self.samples, self.layout.columns, generator=generator, device=device
        ).to(shape.dtype)
        self.states = [torch.zeros(shape.rows, device=device) for _ in self.tables]
        self.received = torch.empty(
            shape.batch * self.own_columns, dtype=shape.dtype, device=device
        )
        self.config = choose(
            tables=shape.tables,
            width=shape.width,
            batch=shape.batch,
            pooling_factor=shape.pooling_factor,
            dtype=shape.dtype,
            world_size=ranks,
            device=device,
        ).config
        self._sorted: dict[int, list[Sorted]] = {}

    def _lookups(self, generator: torch.Generator) -> DrawnLookups:
        """Draw the lookups of one call."""
        shape, device = self.shape, self.device
        # The same number of lookups in every bag, or a random one.
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
        # F.embedding_bag pools bags in order, so lookups are sorted by sample, then by table.
        order = torch.argsort(sample * shape.tables + table, stable=True)
        sample_indices = (indices + table * shape.rows)[order]
        sample_offsets = F.pad(lengths.T.flatten().cumsum(0), (1, 0))
        return DrawnLookups(indices, offsets, sample_indices, sample_offsets)

    def lookups(self, i: int) -> DrawnLookups:
        """Return the lookups of the i-th call."""
        return self.sets[i % SETS]

    def lookups_by_table(self, lookups: DrawnLookups) -> list[int]:
        """Return the number of lookups of each of this rank's tables."""
        counts: list[int] = lookups.offsets[:: self.shape.batch].diff().tolist()
        return counts

    def call(
        self, i: int, config: EmbeddingAllToAllConfig, *, alone: bool = False
    ) -> EmbeddingCall:
        """Return the i-th call; ``alone`` as a group of one makes it."""
        lookups = self.lookups(i)
        call = EmbeddingCall(
            self.tables,
            lookups.indices,
            lookups.offsets,
            None,
            self.layout,
            self.rank,
            "sum",
            self.shape.dtype,
            self.owner,
            default_name(self.group),
            "fused",
            config,
        )
        return call.without_peers() if alone else call

    # Forward

    def fused(self, i: int, config: EmbeddingAllToAllConfig) -> torch.Tensor:
        """Run the operator."""
        lookups = self.lookups(i)
        with torch.no_grad():
            return embedding_all_to_all(
                self.tables,
                lookups.indices,
                lookups.offsets,
                name=f"benchmark of {self.shape}",
                group=self.group,
                impl="fused",
                config=config,
            )

    def torch_bags(self, i: int) -> torch.Tensor:
        """Pool this rank's tables by ``F.embedding_bag``."""
        _, _, indices, offsets = self.lookups(i)
        return F.embedding_bag(indices, self.weight, offsets, mode="sum", include_last_offset=True)

    def our_bags(self, i: int, config: EmbeddingAllToAllConfig) -> torch.Tensor:
        """Run the kernel in a group of one: no puts and no waits, all of the pooling."""
        return pooling.pool(self.call(i, config, alone=True))

    def exchange(self, pooled: torch.Tensor) -> torch.Tensor:
        """Exchange pooled rows, or their gradients, by NCCL."""
        dist.all_to_all_single(self.received, pooled.view(-1), group=self.group)
        return self.received

    def unpack(self, received: torch.Tensor) -> torch.Tensor:
        """Put the ranks' columns side by side."""
        pieces = received.view(self.owner.world_size, self.samples, self.own_columns)
        return pieces.transpose(0, 1).reshape(self.samples, -1)

    def unfused(self, i: int) -> torch.Tensor:
        """Run the operator as a program without Interlace would."""
        return self.unpack(self.exchange(self.torch_bags(i)))

    # Backward

    def pack(self) -> torch.Tensor:
        """Put the gradients of each rank's columns one after the other."""
        return (
            self.grad.view(self.samples, self.owner.world_size, self.own_columns)
            .transpose(0, 1)
            .contiguous()
        )

    def target(self) -> backward.Target:
        """Return the tables as the backward pass updates them."""
        call, trainable = self.call(0, self.config), [True] * self.shape.tables
        return backward.update_target(
            call, self.states, trainable, "RowWiseAdagrad", LEARNING_RATE, EPSILON
        )

    def sort_lookups(self, i: int, config: EmbeddingAllToAllConfig) -> Sorted:
        """Sort the lookups of a call by row."""
        rows = [self.shape.rows] * self.shape.tables
        return sort_lookups(self.call(i, config), rows)

    def sorted_lookups(self, i: int, config: EmbeddingAllToAllConfig) -> Sorted:
        """Return lookups sorted beforehand: that depends on no gradient, and is timed by itself."""
        # Configurations with runs of the same length share the sorted lookups.
        if config.run_lookups not in self._sorted:
            self._sorted[config.run_lookups] = [self.sort_lookups(k, config) for k in range(SETS)]
        return self._sorted[config.run_lookups][i % SETS]

    def fused_update(self, i: int, config: EmbeddingAllToAllConfig) -> None:
        """Send gradients and update the tables in one kernel."""
        drawn, widths = self.lookups(i), self.layout.widths
        shared = SharedArguments(
            self.shape.batch, list(map(len, widths)), list(itertools.chain(*widths)), self.rank,
            "sum", self.shape.dtype,
        )  # fmt: skip
        call = agreed_call(
            backward.BACKWARD, self.tables, (drawn.indices, drawn.offsets, None), shared,
            (default_name(self.group), "fused", str(config)),
        )  # fmt: skip
        backward.launch(call, self.grad, self.target(), self.sorted_lookups(i, config))

    def our_update(self, i: int, config: EmbeddingAllToAllConfig) -> None:
        """Run the kernel in a group of one, on gradients that have been exchanged."""
        grad = self.received.view(self.shape.batch, self.own_columns)
        call, lookups = self.call(i, config, alone=True), self.sorted_lookups(i, config)
        backward.prepare(call, grad, self.target(), lookups)()


class Forward(EmbeddingCalls):
    """The forward pass: its ways, and its floor."""

    floor_link_bytes = staticmethod(costs.floor_link_bytes)

    def expected(self, i: int) -> torch.Tensor:
        """Return the result of the unfused pair."""
        return self.unfused(i)

    def tuned_call(self, config: EmbeddingAllToAllConfig) -> Step:
        """Return the fused kernel."""
        return functools.partial(self.fused, config=config)

    def ways(self, config: EmbeddingAllToAllConfig) -> list[Way]:
        """Return every way to compute the forward pass, and its parts alone."""
        pooled = self.our_bags(0, config)
        bags: Callable[[int], torch.Tensor] = functools.partial(self.our_bags, config=config)
        return [
            Way("fused", "ours", self.tuned_call(config), "fused"),
            Way("F.embedding_bag + NCCL + unpack", "pair", self.unfused, "unfused"),
            Way("F.embedding_bag + NCCL", "pair", lambda i: self.exchange(self.torch_bags(i))),
            Way("our bags + NCCL + unpack", "pair", lambda i: self.unpack(self.exchange(bags(i)))),
            Way("our bags + NCCL", "pair", lambda i: self.exchange(bags(i))),
            Way("our bags alone", "compute", bags),
            Way("F.embedding_bag alone", "compute", self.torch_bags),
            Way("NCCL alone", "communication", lambda i: self.exchange(pooled)),
        ]

    def compile(self, config: EmbeddingAllToAllConfig) -> None:
        """Compile the kernel on this rank."""
        nbytes = self.samples * self.layout.columns * self.shape.dtype.itemsize
        destination = self.owner.outputs.take(nbytes).destination
        fused.prepare(self.call(0, config), destination).compile()

    def floor_memory_bytes(self, lookups: DrawnLookups) -> int:
        """Return the least bytes that this rank moves in its own memory for one call."""
        size = self.shape.dtype.itemsize
        return costs.floor_memory_bytes(
            widths=self.layout.widths, batch=self.shape.batch, rank=self.rank,
            lookups=self.lookups_by_table(lookups), itemsize=size, output_itemsize=size,
            index_itemsize=lookups.indices.element_size(),
        )  # fmt: skip


class Backward(EmbeddingCalls):
    """The backward pass with row-wise Adagrad: its check, its ways and its floor."""

    floor_link_bytes = staticmethod(costs.backward_floor_link_bytes)

    def check(self, config: EmbeddingAllToAllConfig) -> float:
        """Check the first table and its state after an update, against float64."""
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
        pairs = (self.tables[0], exact), (self.states[0], state)
        errors = [relative_error(result, expected) for result, expected in pairs]
        return self.accept(errors, "backward", config)

    def tuned_call(self, config: EmbeddingAllToAllConfig) -> Step:
        """Return the fused kernel."""
        return functools.partial(self.fused_update, config=config)

    def ways(self, config: EmbeddingAllToAllConfig) -> list[Way]:
        """Return every way to compute the backward pass, and its parts alone."""
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

    def is_candidate(self, config: EmbeddingAllToAllConfig) -> bool:
        """Return whether the programs fit."""
        return config.update_programs + config.push_programs <= MAX_PROGRAMS

    def compile(self, config: EmbeddingAllToAllConfig) -> None:
        """Compile the kernel on this rank."""
        call, lookups = self.call(0, config), self.sorted_lookups(0, config)
        backward.prepare(call, self.grad, self.target(), lookups).compile()

    def floor_memory_bytes(self, lookups: DrawnLookups) -> int:
        """Return the least bytes that this rank moves in its own memory for one call."""
        shape, size = self.shape, self.shape.dtype.itemsize
        tables = lookups.sample_indices.unique() // shape.rows
        return costs.backward_floor_memory_bytes(
            widths=self.layout.widths, batch=shape.batch, rank=self.rank,
            distinct_rows=torch.bincount(tables, minlength=shape.tables).tolist(),
            lookups=self.lookups_by_table(lookups), itemsize=size, gradient_itemsize=size,
            row_accesses=2, state_bytes=8,
        )  # fmt: skip


# The benchmark


def bench(
    shape: TablesShape,
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
    case = Backward(shape, group) if backwards else Forward(shape, group)
    chosen = config or case.config
    error = case.check(chosen)
    times = case.time(case.ways(chosen))
    case.owner.synchronize()
    result = {
        "direction": "backward" if backwards else "forward",
        "shape": str(shape) + (", backward" if backwards else ""),
        "pooling_factor": shape.pooling_factor,
        **case.header(chosen, "fused", error),
        **_work(case).entries(),
        "times": times,
    }
    # That depends on no gradient, so it can run before the backward pass.
    if backwards:
        sort = case.measure(functools.partial(case.sort_lookups, config=chosen))
        result["before"] = {"sort of the lookups": dataclasses.asdict(sort)}
    return result


def _work(case: Forward | Backward) -> LeastWork:
    """Return the least work of the direction: means over the sets of lookups."""
    memory_bytes = sum(map(case.floor_memory_bytes, case.sets)) // len(case.sets)
    link_bytes = case.floor_link_bytes(
        widths=case.layout.widths, batch=case.shape.batch, rank=case.rank,
        itemsize=case.shape.dtype.itemsize,
    )  # fmt: skip
    return LeastWork(*case.maxima([memory_bytes, link_bytes]))


# The tuner

FORWARD_AXES: dict[str, Sequence[Any]] = {
    "block_bags": (1, 2, 4, 8, 16),
    "stages": (2, 3, 4, 6),
    "num_warps": (1, 2, 4),
    "max_programs": (528, 1056, 1584, 2112, 3168, 4096),
}
BACKWARD_AXES: dict[str, Sequence[Any]] = {
    "push_programs": (66, 132, 264, 528, 1056),
    "push_blocks": (1, 2, 4, 8, 16),
    "push_rows": (2, 4, 8, 16, 32),
    "block_runs": (1, 2, 4, 8),
    "update_warps": (1, 2, 4),
    "update_registers": (0, 96, 128, 168),
    "update_programs": (1056, 2112, 3168, 3840),
}
_ROUNDS = 2


def tune(shape: TablesShape, group: dist.ProcessGroup | None = None) -> EmbeddingAllToAllConfig:
    """Return the best configuration that was found. Collective.

    The forward pass's settings are tuned, then the backward pass's with the best of these: one
    setting at a time, twice round.

    Raises:
        BackendError: No configuration runs and is right.
    """
    best = _tuned(Forward(shape, group), None, FORWARD_AXES)
    # The two directions have no setting in common, so one is tuned after the other.
    return _tuned(Backward(shape, group), best, BACKWARD_AXES)


def _tuned(
    case: Forward | Backward,
    start: EmbeddingAllToAllConfig | None,
    axes: Mapping[str, Sequence[Any]],
) -> EmbeddingAllToAllConfig:
    changes = [constant(start or case.config), *_ROUNDS * changes_along(axes)]
    return case.fastest(case.tune(changes))


def measure(sizes: dict[str, Any], *, dtype: str, kind: str) -> list[dict[str, Any]]:
    """Benchmark pooled embeddings.

    Args:
        sizes: Sizes by name; they may name a dtype of their own.
        dtype: Dtype of shapes that name none.
        kind: ``"forward"``, ``"backward"``, or ``"tune"`` (then both directions are tuned, and the
            forward pass is timed).
    """
    shape = TablesShape(**{**sizes, "dtype": getattr(torch, sizes.get("dtype", dtype))})
    config = tune(shape) if kind == "tune" else None
    return [bench(shape, config, backwards=kind == "backward")]
