"""Calls of ``embedding_all_to_all``, with gradients and with updates of the tables."""

from __future__ import annotations

import dataclasses
import random

import torch
import torch.distributed as dist

import interlace
from interlace import EmbeddingAllToAllConfig
from interlace.comm import group_of
from interlace.operators.embedding_all_to_all import reference
from interlace.optim import SGD, Gradient, RowWiseAdagrad
from interlace.testing.cases.base import DTYPES, Case, Make, Tensors, generator, whole_numbers
from interlace.units import ceil_div

OPERATOR = "embedding_all_to_all"
IMPLEMENTATIONS = {OPERATOR: ("fused", "pooled", "unfused")}
UPDATES = ("dense", "sparse", "sgd", "adagrad")

_LENGTHS = torch.tensor([0, 1, 2, 4])  # of bags: means of whole numbers are then exact
_EPSILON = 1e-3
_CPU = EmbeddingAllToAllConfig(
    block_bags=4, stages=2, max_programs=3, slice_blocks=2, push_programs=2, push_rows=4,
    update_programs=3, block_runs=4, run_lookups=8,
)  # fmt: skip
_CUDA = EmbeddingAllToAllConfig(
    block_bags=2, stages=4, max_programs=256, slice_blocks=4, push_programs=32, push_rows=8,
    update_programs=128, run_lookups=16,
)  # fmt: skip

# Widths of the tables of ranks 0, 1, ... (taken in turn), dtype, output dtype.
_KINDS = (
    (((16,), (20,)), "float32", "float32"),
    (((4, 4), (), (8,)), "float32", "float32"),
    (((7, 3), (5,)), "float16", "float16"),
    (((32, 32),), "bfloat16", "float32"),
    (((64,), (64, 64)), "float16", "float32"),
)


@dataclasses.dataclass(frozen=True)
class EmbeddingCase(Case):
    """Tables of ``widths[rank % len(widths)]``, a global batch, and an update of the backward pass.

    Attributes:
        update: One of ``UPDATES``: what the backward pass does for the tables.
        weighted: Whether every lookup has a factor of its own.
    """

    widths: tuple[tuple[int, ...], ...] = ((8,), (4, 4))
    batch: int = 9
    rows: int = 23
    output: str = "float32"
    mode: str = "sum"
    weighted: bool = False
    update: str = "dense"

    @property
    def sizes(self) -> str:
        tables = f"widths {list(self.widths)}, {self.rows} rows, batch {self.batch}"
        pooling = f"{self.mode}{', weighted' if self.weighted else ''}"
        update = f", {self.update}" if self.backward else ""
        return f"{tables}, {pooling}, {self.output} out{update}"

    @property
    def result_dtype(self) -> torch.dtype:
        return DTYPES[self.output]

    def units(self, results: int) -> list[float]:
        return [0.25 if self.mode == "mean" else 0.5] * results

    @property
    def work(self) -> int:
        # A few bags take as long as a tile of a product does.
        return self.batch * max(map(len, self.widths)) << 14

    @property
    def exact(self) -> bool:
        return not (self.backward and self.update == "adagrad")

    @property
    def capturable(self) -> bool:
        return super().capturable and not (
            self.backward and self.update == "sparse"
        )  # whose size the host must know

    def _widths(self, rank: int) -> tuple[int, ...]:
        return self.widths[rank % len(self.widths)]

    def _samples(self, rank: int, ranks: int) -> slice:
        chunk = ceil_div(self.batch, ranks)
        return slice(min(rank * chunk, self.batch), min((rank + 1) * chunk, self.batch))

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        source, widths = generator(seed, rank), self._widths(rank)
        # The same lengths with every seed, so that all variants have as many indices.
        lengths = _LENGTHS[
            torch.randint(
                0, len(_LENGTHS), (len(widths) * self.batch,), generator=generator(0, rank)
            )
        ]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        count = int(offsets[-1])
        tensors = {
            f"table{i}": whole_numbers(source, (self.rows, width), 2).to(DTYPES[self.dtype])
            for i, width in enumerate(widths)
        }
        tensors |= {
            "indices": torch.randint(0, self.rows, (count,), generator=source),
            "offsets": offsets,
        }
        if self.weighted:
            tensors["scale"] = 2.0 ** torch.randint(-1, 2, (count,), generator=source)
        if self.backward:
            samples = self._samples(rank, ranks)
            columns = sum(sum(self._widths(peer)) for peer in range(ranks))
            tensors["grad"] = whole_numbers(
                source, (samples.stop - samples.start, columns), 1, 0.5
            ).to(self.result_dtype)
            if self.update == "adagrad":
                tensors |= {f"state{i}": torch.zeros(self.rows) for i in range(len(widths))}
        return tensors

    def results(self, inputs: list[Tensors]) -> list[list[torch.Tensor]]:
        ranks = len(inputs)
        tables = [
            [
                call[f"table{i}"].clone().requires_grad_(self.backward)
                for i in range(len(self._widths(rank)))
            ]
            for rank, call in enumerate(inputs)
        ]
        pooled = torch.cat(
            [part for rank, call in enumerate(inputs) for part in self._pooled(call, tables[rank])],
            1,
        )
        outputs = [pooled[self._samples(rank, ranks)] for rank in range(ranks)]
        if not self.backward:
            return [[output] for output in outputs]
        torch.autograd.backward(outputs, [call["grad"] for call in inputs])
        return [
            [output.detach(), *self._updated(parts)]
            for output, parts in zip(outputs, tables, strict=True)
        ]

    def _pooled(self, tensors: Tensors, tables: list[torch.Tensor]) -> list[torch.Tensor]:
        """Pool each of a rank's tables for the entire batch."""
        lookups = tensors["indices"], tensors["offsets"], tensors.get("scale")
        return reference.pool(tables, *lookups, self.mode, self.batch)

    def _updated(self, tables: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return gradients, or tables and states after the update."""
        grads = [torch.zeros_like(table) if table.grad is None else table.grad for table in tables]
        if self.update in ("dense", "sparse"):
            return grads
        if self.update == "sgd":
            return [table.detach() - grad for table, grad in zip(tables, grads, strict=True)]
        states = [(grad**2).mean(1) for grad in grads]
        steps = [
            grad / (state.sqrt() + _EPSILON)[:, None]
            for grad, state in zip(grads, states, strict=True)
        ]
        return [
            *(table.detach() - step for table, step in zip(tables, steps, strict=True)),
            *states,
        ]

    def dtypes(self, results: int) -> list[torch.dtype]:
        if not self.backward or self.update != "adagrad":
            return [self.result_dtype, *[DTYPES[self.dtype]] * (results - 1)]
        count = (results - 1) // 2
        return [self.result_dtype, *[DTYPES[self.dtype]] * count, *[torch.float32] * count]

    def open(self, group: dist.ProcessGroup | None) -> Make:
        config = None
        if self.impl == "fused":
            config = _CPU if group_of(group).backend == "cpu" else _CUDA

        def make(tensors: Tensors) -> list[torch.Tensor]:
            tables = [tensor.detach() for name, tensor in tensors.items() if "table" in name]
            states = [tensor for name, tensor in tensors.items() if "state" in name]
            for table in tables:
                table.requires_grad_(self.backward)
            y = interlace.embedding_all_to_all(
                tables,
                tensors["indices"],
                tensors["offsets"],
                per_sample_weights=tensors.get("scale"),
                mode=self.mode,
                output_dtype=DTYPES[self.output],
                gradient=self._gradient(states),
                batch_size=self.batch,
                name=self.label,
                group=group,
                impl=self.impl_name,
                config=config,
            )
            if not self.backward:
                return [y]
            y.backward(tensors["grad"])
            if self.update in ("sgd", "adagrad"):
                return [y.detach(), *(table.detach() for table in tables), *states]
            grads = [
                torch.zeros_like(table) if table.grad is None else table.grad for table in tables
            ]
            return [y.detach(), *(grad.to_dense() for grad in grads)]

        return make

    def _gradient(self, states: list[torch.Tensor]) -> Gradient:
        if not self.backward:
            return "dense"
        if self.update == "sgd":
            return SGD(1.0)
        return RowWiseAdagrad(1.0, _EPSILON, states) if self.update == "adagrad" else self.update


def every(operator: str, impl: str, ranks: int) -> list[EmbeddingCase]:
    """Return a call for every kind of update, and one with a rank without tables."""
    widths = (16,), (20,), ()
    return [
        *(
            EmbeddingCase(OPERATOR, impl, "float32", True, widths, update=update)
            for update in UPDATES
        ),
        EmbeddingCase(OPERATOR, impl, "float16", True, ((), (4, 8)), output="float16", mode="mean"),
    ]


def draw(operator: str, impl: str, ranks: int, source: random.Random, large: bool) -> EmbeddingCase:
    """Return a random call."""
    widths, dtype, output = source.choice(_KINDS)
    backward = source.random() < 0.6
    update = source.choice(UPDATES if dtype == "float32" else ("dense", "sgd"))
    mode = source.choice(("sum", "mean"))
    return EmbeddingCase(
        OPERATOR,
        impl,
        dtype,
        backward,
        widths,
        source.choice((1, 2, 9, 64)),
        23,
        output,
        mode,
        mode == "sum" and source.random() < 0.3,
        update,
    )
