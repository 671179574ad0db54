"""``interlace explain``: what ``impl="auto"`` takes on a GPU that need not be here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich.table import Table

from interlace.cli.bench_products import parse_work
from interlace.cli.console import make_console
from interlace.cli.tables import make_table
from interlace.costs.known_profiles import profile_of, profiled_gpus
from interlace.costs.network import NetworkRates, read_network
from interlace.costs.time import Call
from interlace.errors import ArgumentError, ConfigError
from interlace.gemm.between_nodes import predicted_times
from interlace.gemm.choice import Gpu, choose_on
from interlace.gemm.config import GemmConfig
from interlace.gemm.operator import GemmOperator
from interlace.registry import operator_matching, operator_named

_SHARED_BYTES = 227 << 10
"""Shared memory of a program on the GPUs whose profiles are shipped."""


def run_explain(
    operator: str,
    shapes: Sequence[str],
    gpu: str,
    world_size: int,
    dtype: str,
    nodes: int = 1,
    network: Path | None = None,
) -> None:
    """Print the predicted times of every implementation for each shape ``MxNxK``.

    Args:
        nodes: Number of nodes that the ranks are on, equally many on each.
        network: JSON file of the network between them, or of a machine profile with one.

    Raises:
        ConfigError: There is no such file, or none where there are several nodes.
        ArgumentError: The operator is not around one product, the GPU has no profile, or a shape is
            none.
    """
    declaration = operator_named(operator)
    if declaration.pattern[:1] == ("gemv",):
        # The two names are one decision.
        declaration = operator_matching("gemm", declaration.collective)
    if not isinstance(declaration, GemmOperator):
        raise ArgumentError(f"{operator} must be an operator around one product; it is not.")
    name = _gpu_named(gpu)
    rates = None
    if nodes > 1:
        if network is None:
            raise ConfigError(
                "--nodes must come with --network FILE, which `interlace tune machine` measures; "
                "no network is known without."
            )
        rates = read_network(network)
    console = make_console()
    for _, rows, columns, inner in parse_work(declaration.name, shapes, dtype):
        call = Call.of_dtype(dtype, rows, columns, inner, world_size)
        console.print(
            f"{declaration.name} of {rows} x {columns} x {inner}, {dtype}, {world_size} ranks, "
            f"{name}" + (f", {nodes} nodes, {rates.network}" if rates else "")
        )
        if rates is None:
            console.print(_table(declaration, name, call, dtype))
        else:
            console.print(_table_between_nodes(declaration, name, call, nodes, rates))
        console.print()
    console.print(f"Predicted, not measured: {profile_of(name).source}.", style="dim")


def _gpu_named(text: str) -> str:
    """Return the one profiled GPU whose name contains a text.

    Raises:
        ArgumentError: There is none, or several.
    """
    known = profiled_gpus()
    found = [name for name in known if text.lower() in name.lower()]
    if len(found) != 1:
        raise ArgumentError(f"--gpu must name one of {', '.join(known)}; got {text!r}.")
    return found[0]


def _table(declaration: GemmOperator, gpu: str, call: Call, dtype: str) -> Table:
    profile, tiled = profile_of(gpu), declaration.config_type
    choice = choose_on(
        Gpu(gpu, profile.processors, _SHARED_BYTES),
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


def _table_between_nodes(
    declaration: GemmOperator, gpu: str, call: Call, nodes: int, network: NetworkRates
) -> Table:
    profile = dataclasses.replace(profile_of(gpu), network=network)
    times = predicted_times(profile, declaration.name, nodes, call)
    assert times is not None
    table = make_table("implementation", "slices", "us", "of the best stock pair")
    pairs = [each.us for name, each in times.predictions.items() if declaration.is_pair(name)]
    for name in times.order(declaration):
        each = times.predictions[name]
        marked = f"{name} (PyTorch's)" if declaration.is_pair(name) else name
        table.add_row(
            marked, str(each.slices or ""), f"{each.us:.0f}", f"{each.us / min(pairs):.2f}"
        )
    product_us = profile.library_product_us(call)
    table.add_row("the product alone", "", f"{product_us:.0f}", "", style="dim")
    return table
