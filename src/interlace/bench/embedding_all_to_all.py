"""Benchmark and tuner of ``embedding_all_to_all`` on CUDA, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench.benchmark import LeastWork, Step, Way, changes_along, constant, relative_error
from interlace.bench.embedding_calls import (
    EPSILON,
    LEARNING_RATE,
    DrawnLookups,
    EmbeddingCalls,
    TablesShape,
)
from interlace.comm.groups.group import MAX_PROGRAMS
from interlace.comm.launching.kernels import Launch
from interlace.costs import embedding_all_to_all as costs
from interlace.operators.embedding_all_to_all import backward, fused
from interlace.operators.embedding_all_to_all.config import (
    OPERATOR,
    EmbeddingAllToAllConfig,
)

__all__ = ["OPERATOR", "Backward", "Forward", "TablesShape", "bench", "tune"]


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
        self.prepared(config).compile()

    def prepared(self, config: EmbeddingAllToAllConfig) -> Launch:
        """Return the kernel's launch, for compilation only."""
        nbytes = self.samples * self.layout.columns * self.shape.dtype.itemsize
        destination = self.owner.outputs.take(nbytes).destination
        return fused.prepare(self.call(0, config), destination)

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
    "protocol": ("direct", "tiles"),
    "block_bags": (1, 2, 4, 8, 16),
    "stages": (2, 3, 4, 6),
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
