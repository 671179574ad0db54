"""``interlace explain``: what ``impl="auto"`` takes on a GPU that need not be here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from interlace.cli import bench
from interlace.cli.console import make_console, make_table
from interlace.cli.gpus import choice_on, gpu_named
from interlace.comm.groups.reservation import GPU_GRANULARITY
from interlace.costs.known_profiles import profile_of
from interlace.costs.network import NetworkRates, read_network
from interlace.costs.time import SizedCall
from interlace.errors import ArgumentError, ConfigError
from interlace.gemm.between_nodes import predicted_times
from interlace.gemm.choice import Gpu
from interlace.gemm.operator import GemmOperator
from interlace.gemm.reservations import on_gpu
from interlace.registry import operator_named, operators
from interlace.tuning.choice import Choice
from interlace.units import format_memory


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
        dtype: bfloat16, float16, or float32 without tensor cores.
        nodes: Number of nodes that the ranks are on, equally many on each.
        network: JSON file of the network between them, or of a machine profile with one; None for
            what the GPU's own profile has.

    Raises:
        ConfigError: There is no such file, or no network where there are several nodes.
        ArgumentError: The operator is not around one product, the GPU has no profile, or a shape is
            none.
    """
    declaration = operator_named(operator)
    if not isinstance(declaration, GemmOperator):
        products = [
            name for name in sorted(operators()) if isinstance(operator_named(name), GemmOperator)
        ]
        raise ArgumentError(
            f"operator must be one around one product, such as {', '.join(products)}; got "
            f"{operator!r}. docs/results.md has what was measured of the others."
        )
    device = gpu_named(gpu)
    name = device.name
    rates = None
    if nodes > 1:
        rates = profile_of(name).network if network is None else read_network(network)
        if rates is None:
            raise ConfigError(
                f"--nodes must have a measured network; the profile of {name} has none. Measure it "
                "by `interlace tune machine` on the nodes, or say --network FILE."
            )
    console = make_console()
    bench.require_dtype(dtype)
    meaning, example = "MxNxK, the sizes of one rank's product", "4096x4096x4096"
    sizes = [bench.parse_sizes(shape, meaning, example) for shape in shapes]
    for rows, columns, inner in sizes:
        call = SizedCall.of_dtype(dtype, rows, columns, inner, world_size)
        console.print(
            f"{declaration.name} of {rows} x {columns} x {inner}, {dtype}, {world_size} ranks, "
            f"{name}" + (f", {nodes} nodes, {rates.network}" if rates else "")
        )
        if rates is None:
            choice = choice_on(device, declaration, call, getattr(torch, dtype))
            memory = _memory(declaration, device, call, choice, getattr(torch, dtype))
            console.print(_table(declaration, device, call, choice, memory))
            if not choice.times_us:
                console.print(
                    f"No time of {declaration.name} is predicted: `interlace tune profile` fits "
                    f"its times to what `interlace bench {declaration.name}` has measured. "
                    f"impl='auto' takes {choice.impl}: {choice.reason}."
                )
        else:
            console.print(_table_between_nodes(declaration, name, call, nodes, rates))
        console.print()
    console.print(
        f"In the order in which impl='auto' takes them: ours goes before PyTorch's if it is "
        f"{profile_of(name).margin:.0%} faster.",
        style="dim",
    )
    console.print(f"Predicted, not measured: {profile_of(name).source}.", style="dim")


def _memory(
    declaration: GemmOperator, gpu: Gpu, call: SizedCall, choice: Choice[Any], dtype: torch.dtype
) -> dict[str, str]:
    """Return the symmetric memory of each implementation in words, by name."""
    reservations = on_gpu(
        declaration, call.rows, call.columns, call.inner, dtype, call.world_size, choice.config,
        processors=gpu.processors,
    )  # fmt: skip
    counts = {
        name: each.nbytes(GPU_GRANULARITY)
        for name, each in reservations.items()
        if each is not None
    }
    return {name: format_memory(count) if count else "none" for name, count in counts.items()}


def _table(
    declaration: GemmOperator,
    gpu: Gpu,
    call: SizedCall,
    choice: Choice[Any],
    memory: dict[str, str],
) -> Table:
    profile = profile_of(gpu.name)
    table = make_table("implementation", "symmetric memory", "us", "of the best stock pair")
    pairs = [us for name, us in choice.times_us.items() if declaration.is_pair(name)]
    for name, us in choice.times_us.items():
        marked = f"{name} (PyTorch's)" if declaration.is_pair(name) else name
        times = f"{us:.0f}", f"{us / min(pairs):.2f}" if pairs else ""
        table.add_row(marked, memory.get(name, ""), *times)
    product_us = profile.library_product_us(call)
    table.add_row("the product alone", "", f"{product_us:.0f}", "", style="dim")
    links_us = profile.link_us(declaration.name, call)
    table.add_row("the links alone", "", f"{links_us:.0f}", "", style="dim")
    return table


def _table_between_nodes(
    declaration: GemmOperator, gpu: str, call: SizedCall, nodes: int, network: NetworkRates
) -> Table:
    profile = dataclasses.replace(profile_of(gpu), network=network)
    times = predicted_times(profile, declaration.name, nodes, call)
    assert times is not None
    table = make_table("implementation", "slices", "us", "of the best stock pair")
    pairs = [each.us for name, each in times.predictions.items() if declaration.is_pair(name)]
    for name in times.order(declaration):
        each = times.predictions[name]
        marked = f"{name} (PyTorch's)" if declaration.is_pair(name) else name
        table.add_row(marked, each.cut, f"{each.us:.0f}", f"{each.us / min(pairs):.2f}")
    product_us = profile.library_product_us(call)
    table.add_row("the product alone", "", f"{product_us:.0f}", "", style="dim")
    return table
