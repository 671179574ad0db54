"""Calls of ``embedding_all_to_all`` that ranks can make, and what must come out, in float64."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

import interlace
from interlace import EmbeddingAllToAllConfig
from interlace.operators.embedding_all_to_all import reference

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SMALL = EmbeddingAllToAllConfig(
    block_bags=4, stages=2, max_programs=3, slice_blocks=2,
    push_programs=2, push_rows=4, update_programs=3, block_runs=4, run_lookups=8,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: tables of ``widths[rank]``, of ``rows`` rows and a few more each, bags of up to
    ``most`` lookups.

    Attributes:
        hot: Every lookup hits row 0: one row that all bags use.
    """

    widths: tuple[tuple[int, ...], ...]
    batch: int
    rows: int = 11
    most: int = 5
    dtype: str = "float32"
    output_dtype: str | None = None
    index_dtype: torch.dtype = torch.int64
    mode: str = "sum"
    weighted: bool = False
    impl: str = "fused"
    config: EmbeddingAllToAllConfig | None = SMALL
    seed: int = 0
    hot: bool = False
    name: str = ""

    @property
    def out(self) -> torch.dtype:
        return DTYPES[self.output_dtype or self.dtype]

    def tables(self, rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        shapes = [(self.rows + table, width) for table, width in enumerate(self.widths[rank])]
        return [torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for shape in shapes]

    def lookups(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """indices, offsets and per-sample weights of a rank."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank + 500)
        bags = len(self.widths[rank]) * self.batch
        lengths = torch.randint(0, self.most + 1, (bags,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        count = int(offsets[-1])
        limits = torch.tensor(
            [
                self.rows + table
                for table in range(len(self.widths[rank]))
                for _ in range(self.batch)
            ]
        )
        limits = limits.repeat_interleave(lengths) if bags else torch.zeros(0)
        indices = (torch.rand(count, generator=generator) * limits).long() * (not self.hot)
        scale = torch.rand(count, generator=generator) if self.weighted else None
        return indices.to(self.index_dtype), offsets.to(self.index_dtype), scale

    def samples(self, rank: int) -> slice:
        chunk = -(-self.batch // len(self.widths))
        return slice(min(rank * chunk, self.batch), min((rank + 1) * chunk, self.batch))

    def pooled(self, rank: int, tables: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each table of ``rank`` for the whole batch, from float64 ``tables``."""
        return reference.pool(tables, *self.lookups(rank), self.mode, self.batch)

    def expected(self) -> torch.Tensor:
        """``[batch, columns]`` in float64."""
        return self._all(lambda table: table.double())

    def bound(self) -> torch.Tensor:
        """The largest error that float32 sums in some order and one rounding of the result allow,
        element by element.

        ``most`` products, rounded, added, and perhaps divided: at most ``(most + 2) u`` times the
            sum of absolute values. The
        CPU backend truncates to bfloat16: a whole unit in the last place instead of half of one.
        """
        u = torch.finfo(torch.float32).eps / 2
        steps = self.most + 2
        accumulated = steps * u / (1 - steps * u) * self._all(lambda table: table.double().abs())
        out = torch.finfo(self.out)
        rounding = out.eps if self.out == torch.bfloat16 else out.eps / 2
        return (
            accumulated
            + rounding * (self.expected().abs() + accumulated)
            + out.smallest_normal * out.eps
        )

    def _all(self, change) -> torch.Tensor:
        ranks = range(len(self.widths))
        parts = [
            part
            for rank in ranks
            for part in self.pooled(rank, [change(table) for table in self.tables(rank)])
        ]
        return torch.cat(parts, 1) if parts else torch.zeros(self.batch, 0, dtype=torch.float64)

    def check(self, results: list[torch.Tensor]) -> None:
        """Every rank has its samples, as right as the arithmetic allows."""
        expected, bound = self.expected(), self.bound()
        for rank, y in enumerate(results):
            mine = self.samples(rank)
            assert y.dtype == self.out
            assert y.shape == expected[mine].shape, self
            error = (y.double() - expected[mine]).abs()
            assert (error <= bound[mine]).all(), (
                f"{self}: rank {rank} is wrong by {(error / bound[mine]).max():.3g} times the bound"
            )


def run_one(call: Call, group: dist.ProcessGroup | None = None, **more) -> torch.Tensor:
    rank = dist.get_rank(group)
    indices, offsets, scale = call.lookups(rank)
    return interlace.embedding_all_to_all(
        call.tables(rank),
        indices,
        offsets,
        per_sample_weights=scale,
        mode=call.mode,
        output_dtype=None if call.output_dtype is None else DTYPES[call.output_dtype],
        batch_size=call.batch,
        name=call.name or f"{call.widths} {call.dtype}",
        group=group,
        impl=call.impl,
        config=call.config,
        **more,
    )


def run(calls: list[Call]) -> list[torch.Tensor]:
    """On a rank: make the calls one after another. Results are kept: later calls must not write
    into them.
    """
    return [run_one(call) for call in calls]


def check_all(calls: list[Call], results: list[list[torch.Tensor]]) -> None:
    """``results[rank][i]`` against ``calls[i]``."""
    for i, call in enumerate(calls):
        call.check([result[i] for result in results])
