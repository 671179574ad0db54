"""``interlace explain``: what ``impl="auto"`` takes on a GPU that need not be here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from rich.table import Table

from interlace.cli.bench_products import parse_work
from interlace.cli.console import make_console
from interlace.cli.gpus import gpu_named
from interlace.cli.tables import make_table
from interlace.costs.known_profiles import profile_of
from interlace.costs.time import Call
from interlace.errors import ArgumentError
from interlace.gemm.choice import Gpu, choose_on
from interlace.gemm.config import GemmConfig
from interlace.gemm.operator import GemmOperator
from interlace.registry import operator_matching, operator_named, operators


def run_explain(
    operator: str, shapes: Sequence[str], gpu: str, world_size: int, dtype: str
) -> None:
    """Print the predicted times of every implementation for each shape ``MxNxK``.

    Raises:
        ArgumentError: The operator is not around one product, the GPU has no profile, or a shape is
            none.
    """
    declaration = operator_named(operator)
    if declaration.pattern[:1] == ("gemv",):
        # The two names are one decision.
        declaration = operator_matching("gemm", declaration.collective)
    if not isinstance(declaration, GemmOperator):
        products = [name for name in operators() if isinstance(operator_named(name), GemmOperator)]
        raise ArgumentError(
            f"operator must be one around one product, such as {', '.join(products)}; got "
            f"{operator!r}. docs/results.md has what was measured of the others."
        )
    device = gpu_named(gpu)
    name = device.name
    console = make_console()
    for _, rows, columns, inner in parse_work(declaration.name, shapes, dtype):
        call = Call.of_dtype(dtype, rows, columns, inner, world_size)
        title = operator if operator == declaration.name else f"{operator} or {declaration.name}"
        console.print(
            f"{title} of {rows} x {columns} x {inner}, {dtype}, {world_size} ranks, {name}"
        )
        console.print(_table(declaration, device, call, dtype))
        console.print()
    console.print(
        f"In the order in which impl='auto' takes them: ours goes before PyTorch's if it is "
        f"{profile_of(name).margin:.0%} faster.",
        style="dim",
    )
    console.print(f"Predicted, not measured: {profile_of(name).source}.", style="dim")


def _table(declaration: GemmOperator, gpu: Gpu, call: Call, dtype: str) -> Table:
    profile, tiled = profile_of(gpu.name), declaration.config_type
    choice = choose_on(
        gpu,
        declaration.name,
        # The tiles of a kernel whose configuration has none are not asked for.
        cast(Any, tiled if issubclass(tiled, GemmConfig) else GemmConfig),
        rows=call.rows,
        columns=call.columns,
        inner=call.inner,
        dtype=getattr(torch, dtype),
        world_size=call.world_size,
    )
    table = make_table("implementation", "us", "of the best stock pair")
    pairs = [us for name, us in choice.times_us.items() if declaration.is_pair(name)]
    for name, us in choice.times_us.items():
        marked = f"{name} (PyTorch's)" if declaration.is_pair(name) else name
        table.add_row(marked, f"{us:.0f}", f"{us / min(pairs):.2f}" if pairs else "")
    product_us = profile.library_product_us(call)
    table.add_row("the product alone", f"{product_us:.0f}", "", style="dim")
    table.add_row(
        "the links alone", f"{profile.link_us(declaration.name, call):.0f}", "", style="dim"
    )
    return table
