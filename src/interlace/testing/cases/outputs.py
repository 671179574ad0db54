"""Calls of what users build with: mapped outputs, triggered transfers, and a kernel with puts and
signals of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.comm.runtime.context import EPOCH_BITS
from interlace.testing.cases.base import DTYPES, Case, Make, Tensors, generator, thin, whole_numbers
from interlace.units import next_power_of_2

MAPPED, TRIGGERED, KERNEL = "mapped_output", "triggered_transfers", "put_signal kernel"
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    MAPPED: (
        "all_to_all",
        "all_to_all rotated",
        "reduce_scatter",
        "all_reduce",
        "gather",
        "scatter",
    ),
    TRIGGERED: (
        "all_to_all sent",
        "all_to_all counted",
        "reduce_scatter counted",
        "all_reduce counted",
    ),
    KERNEL: ("sum",),
}
_PIECES = 2
_SIZE = 64  # of the kernel's vectors

_KINDS = ((16, 64, 32, "float32"), (2, 130, 65, "bfloat16"), (64, 256, 48, "float16"))


@dataclasses.dataclass(frozen=True)
class OutputCase(Case):
    """A batch of products, ``rows x columns x inner`` for each rank, written into an output that is
    the peers' memory.

    ``impl`` is the collective, and how the output is written: in rotated order; in parts that are
    sent; or by a kernel that counts rows, and doubles its input rather than multiplying.
    """

    rows: int = 16
    columns: int = 64
    inner: int = 32

    @property
    def sizes(self) -> str:
        return f"{self.rows} x {self.columns} x {self.inner} for each rank"

    @property
    def poisonable(self) -> bool:
        # The other collectives return views of memory that peers write.
        return self.impl_name == "reduce_scatter"

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        source, dtype = generator(seed, rank), DTYPES[self.dtype]
        if self.variant == "counted":
            return {"x": whole_numbers(source, (ranks, self.rows, self.columns), 4).to(dtype)}
        return {
            "x": whole_numbers(source, (ranks, self.rows, self.inner), 2).to(dtype),
            "w": whole_numbers(source, (ranks, self.inner, self.columns), 1, thin(self.inner)).to(
                dtype
            ),
        }

    def results(self, inputs: list[Tensors]) -> list[list[torch.Tensor]]:
        made = [
            call["x"] * 2 if self.variant == "counted" else call["x"] @ call["w"] for call in inputs
        ]
        ranks = range(len(made))
        match self.impl_name:
            case "all_to_all":
                return [[torch.stack([parts[rank] for parts in made])] for rank in ranks]
            case "reduce_scatter":
                return [[torch.stack([parts[rank] for parts in made]).sum(0)] for rank in ranks]
            case "all_reduce":
                return [[torch.stack(made).sum(0).flatten(0, 1)] for _ in ranks]
            case "gather":
                return [[torch.stack(made)[: None if rank == 0 else 0]] for rank in ranks]
        return [[made[0][rank]] for rank in ranks]

    @property
    def takes_layouts(self) -> bool:
        # The kernel that counts is the case's own, and takes dense operands alone.
        return self.variant != "counted"

    def open(self, group: dist.ProcessGroup | None) -> Make:
        owner = group_of(group)
        rank, ranks = owner.rank, owner.world_size
        options: dict[str, Any] = {
            "shape": (ranks, self.rows, self.columns),
            "dtype": DTYPES[self.dtype],
            "group": group,
        }
        producer: Callable[..., Any] = torch.bmm
        if self.variant == "rotated":
            options["order"] = "rotated"
        elif self.variant == "sent":
            producer = _send_parts
            options["transport"] = "copy_engine"
        elif self.variant == "counted":
            producer = _double
            options |= {
                "transport": "copy_engine",
                "tiles": self.rows // _PIECES,
                "pieces": _PIECES,
            }
        run = interlace.fuse(producer, self.impl_name, **options)
        # In the rotated order a rank's own part is the last one, of the input as of the output.
        order = [(rank + 1 + i) % ranks for i in range(ranks)]

        def make(tensors: Tensors) -> list[torch.Tensor]:
            arguments = list(tensors.values())
            if self.variant == "rotated":
                arguments = [
                    torch.cat([tensor[first : first + 1] for first in order])
                    for tensor in arguments
                ]
            return [run(*arguments)]

        return make


def _send_parts(
    x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor, send: Callable[[int], None]
) -> None:
    for part in range(len(x)):
        torch.mm(x[part], w[part], out=out[part])
        send(part)


def _double(x: torch.Tensor, *, out: torch.Tensor, counters: torch.Tensor) -> None:
    from interlace.testing.cases.kernels import double_and_count

    parts, rows, columns = x.shape
    double_and_count[(parts * rows,)](
        x,
        out,
        counters,
        rows,
        rows // _PIECES,
        out.stride(0),
        out.stride(1),
        COLUMNS=columns,
        BLOCK=next_power_of_2(columns),
    )


@dataclasses.dataclass(frozen=True)
class KernelCase(Case):
    """A sum over ranks by a kernel with puts and signals of its own, in memory from
    ``empty_symmetric``; the host counts its calls.

    Attributes:
        calls_before: How many calls are taken to have been made before the first.
    """

    may_be_zero = ("calls_before",)

    calls_before: int = 0

    @property
    def sizes(self) -> str:
        return f"{_SIZE} elements"

    @property
    def capturable(self) -> bool:
        # The host counts this kernel's epochs, which a replayed graph would not.
        return False

    @property
    def takes_layouts(self) -> bool:
        return False

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        return {"x": whole_numbers(generator(seed, rank), (_SIZE,), 100)}

    def results(self, inputs: list[Tensors]) -> list[list[torch.Tensor]]:
        return [[torch.stack([call["x"] for call in inputs]).sum(0)]] * len(inputs)

    def open(self, group: dist.ProcessGroup | None) -> Make:
        from interlace.testing.cases.kernels import put_signal_sum

        owner = group_of(group)
        ranks = owner.world_size
        data = interlace.empty_symmetric((2, ranks, _SIZE), dtype=torch.float32, group=group)
        signals = interlace.empty_symmetric(ranks, dtype=torch.int32, group=group)
        # As kernels count their calls: numbers of signals are compared in EPOCH_BITS bits.
        epochs = (1 + call % (2**EPOCH_BITS - 2) for call in itertools.count(self.calls_before))

        def make(tensors: Tensors) -> list[torch.Tensor]:
            y = torch.empty_like(tensors["x"])
            with owner.running():
                put_signal_sum[(1,)](
                    tensors["x"],
                    y,
                    data.address,
                    signals.address,
                    next(epochs),
                    owner.context(KERNEL),
                    WORLD_SIZE=ranks,
                    SIZE=_SIZE,
                )
            return [y]

        return make


def every(operator: str, impl: str, ranks: int) -> list[Case]:
    """Return one small call; mapped outputs have no gradient."""
    return (
        [KernelCase(operator, impl)]
        if operator == KERNEL
        else [OutputCase(operator, impl, "bfloat16")]
    )


def draw(operator: str, impl: str, ranks: int, source: random.Random, large: bool) -> Case:
    """Return a random call."""
    if operator == KERNEL:
        return KernelCase(operator, impl)
    rows, columns, inner, dtype = source.choice(_KINDS)
    return OutputCase(operator, impl, dtype, False, rows, columns, inner)
