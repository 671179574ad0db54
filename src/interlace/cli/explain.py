"""``interlace explain``: what ``impl="auto"`` takes on a GPU that need not be here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from interlace.cli import bench
from interlace.cli.console import make_console, make_table
from interlace.cli.gpus import choice_on, gpu_named, provenance, times_on
from interlace.cli.outputs import Outputs
from interlace.comm.groups.reservation import GPU_GRANULARITY
from interlace.costs.known_profiles import profile_of
from interlace.costs.network import read_network
from interlace.costs.time import SizedCall
from interlace.errors import ArgumentError, ConfigError
from interlace.gemm.between_nodes import predicted_times
from interlace.gemm.operator import GemmOperator, product_operator
from interlace.gemm.reservations import on_gpu
from interlace.registry import Operator
from interlace.tuning.choice import Choice
from interlace.tuning.gpu import Gpu
from interlace.units import format_memory


def run_explain(
    operator: str,
    shapes: Sequence[str],
    gpu: str,
    world_size: int,
    dtype: str,
    nodes: int,
    network: Path | None,
    outputs: Outputs,
) -> None:
    """Print the predicted times of every implementation for each shape ``MxNxK``.

    Args:
        dtype: bfloat16, float16, or float32 without tensor cores.
        nodes: Number of nodes that the ranks are on, equally many on each.
        network: JSON file of the network between them, or of a machine profile with one; None for
            what the GPU's own profile has.
        outputs: The files to write.

    Raises:
        ConfigError: There is no such file, or no network where there are several nodes.
        ArgumentError: The operator is not around one product, the GPU has no profile, or a shape is
            none.
    """
    try:
        declaration = product_operator(operator)
    except ArgumentError as error:
        raise ArgumentError(
            f"{error} Experts and embeddings are explained as calls of a model: interlace explain "
            "--model mixtral-8x7b."
        ) from None
    if nodes > world_size:
        raise ArgumentError(f"--nodes must be at most the {world_size} ranks; got {nodes}.")
    device = gpu_named(gpu)
    name, profile, rates = device.name, profile_of(device.name), None
    if nodes > 1:
        rates = profile.network if network is None else read_network(network)
        if rates is None:
            raise ConfigError(
                f"--nodes must have a measured network; the profile of {name} has none. Measure it "
                "by `interlace tune machine` on the nodes, or say --network FILE."
            )
    console = make_console()
    bench.require_dtype(dtype)
    calls: list[dict[str, Any]] = []
    for rows, columns, inner in [bench.parse_product(shape) for shape in shapes]:
        call = SizedCall.of_dtype(dtype, rows, columns, inner, world_size)
        console.print(
            f"{declaration.name} of {rows} x {columns} x {inner}, {dtype}, {world_size} ranks, "
            f"{name}" + (f", {nodes} nodes, {rates.network}" if rates else "")
        )
        alone = {}
        if rates is None:
            choice = choice_on(device, declaration, call, getattr(torch, dtype))
            times_us = times_on(device, declaration, call, getattr(torch, dtype))
            impl = choice.impl
            alone = {"links": profile.least_link_us(declaration.name, call)}
            column = "symmetric memory"
            words = _memory(declaration, device, call, choice, getattr(torch, dtype))
        else:
            measured = dataclasses.replace(profile, network=rates)
            times = predicted_times(measured, declaration.name, nodes, call)
            assert times is not None
            times_us = {name: times.predictions[name].us for name in times.order(declaration)}
            impl = next(iter(times_us))
            column, words = "slices", {name: times.predictions[name].cut for name in times_us}
        alone = {"product": profile.library_product_us(call), **alone}
        console.print(_table(declaration, times_us, column, words, alone))
        if not times_us:
            console.print(
                f"No time of {declaration.name} is predicted: `interlace tune profile` fits "
                f"its times to what `interlace bench {declaration.name}` has measured."
            )
        if rates is None and (choice.is_exact or impl != next(iter(times_us), None)):
            console.print(f"impl='auto' takes {impl}: {choice.reason}.")
        sized = {"rows": rows, "columns": columns, "inner": inner}
        calls.append({**sized, "impl": impl, "times_us": times_us})
        console.print()
    names = list(dict.fromkeys(name for call in calls for name in call["times_us"]))
    if names:
        console.print(
            f"In the order in which impl='auto' takes them: ours goes before PyTorch's if it is "
            f"{profile.margin:.0%} faster.",
            style="dim",
        )
        console.print(
            f"Predicted, not measured: {profile.source}. {provenance(device, world_size)}",
            style="dim",
        )
        # Between nodes, implementations of the same names exchange in other ways.
        if nodes == 1:
            print_legend(console, [(declaration, name) for name in names])
    outputs.write_json(
        lambda: {
            "operator": declaration.name, "gpu": name, "world_size": world_size, "dtype": dtype,
            "nodes": nodes, "calls": calls,
        }
    )  # fmt: skip
    outputs.say_written(console)


def print_legend(console: Console, implementations: Iterable[tuple[Operator, str]]) -> None:
    """Print a line for each implementation that says what it does.

    Args:
        implementations: Operators, and names of implementations of each. An implementation that
            does the same in several operators has one line.
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for declaration, name in implementations:
        known = lines.setdefault((name, declaration.implementation(name).summary), [])
        if declaration.name not in known:
            known.append(declaration.name)
    of_several = len({name for known in lines.values() for name in known}) > 1
    for (name, summary), known in lines.items():
        suffix = f" ({', '.join(known)})" if of_several else ""
        console.print(f"{name}{suffix}: {summary}.", style="dim")


def _memory(
    declaration: GemmOperator, gpu: Gpu, call: SizedCall, choice: Choice[Any], dtype: torch.dtype
) -> dict[str, str]:
    """Return the symmetric memory of each implementation in words, by name."""
    reservations = on_gpu(
        declaration, call.rows, call.columns, call.inner, dtype, call.world_size, choice
    )
    counts = {
        name: reservation.nbytes(GPU_GRANULARITY)
        for name, reservation in reservations.items()
        if reservation is not None
    }
    return {name: format_memory(count) if count else "none" for name, count in counts.items()}


def _table(
    declaration: GemmOperator,
    times_us: Mapping[str, float],
    column: str,
    words: Mapping[str, str],
    alone: Mapping[str, float],
) -> Table:
    """Return the times of implementations beside the best stock pair's.

    Args:
        column, words: Heading of a further column, and its text for each implementation.
        alone: Microseconds of each part of a call by itself.
    """
    table = make_table("implementation", column, "us", "of the best stock pair")
    pairs = [us for name, us in times_us.items() if declaration.is_pair(name)]
    for name, us in times_us.items():
        marked = f"{name} (PyTorch's)" if declaration.is_pair(name) else name
        times = f"{us:.0f}", f"{us / min(pairs):.2f}" if pairs else ""
        table.add_row(marked, words.get(name, ""), *times)
    for part, us in alone.items():
        table.add_row(f"the {part} alone", "", f"{us:.0f}", "", style="dim")
    return table
