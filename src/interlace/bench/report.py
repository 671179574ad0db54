"""Tables of benchmark results: pure functions over the JSON that ``interlace bench`` writes.

They need no GPU and no torch.

A file is ``{"machine": {...}, "command": str, "date": str, "results": [...]}``, each result as an
operator's ``bench`` returns it: sizes, ``floor_us``, and ``times``: name -> median_us, p10_us,
p90_us, skew_us, ``"role"``, which says what claims the time counts for, and ``"impl"``, the value
of ``impl`` by which the operator runs what was timed, if there is one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from interlace.documents import read_json
from interlace.errors import ArgumentError
from interlace.units import format_count

if TYPE_CHECKING:
    from rich.table import Table

Result = Mapping[str, Any]
AnyValue = TypeVar("AnyValue")

Role = Literal["ours", "pair", "compute", "communication"]
"""An implementation of the operator; a compute step and a collective that a program without
Interlace would run; compute without communication; communication without compute.
"""

PAIR_NAMES = {
    "unfused": "cuBLAS + NCCL",
    "symm_mem": "cuBLAS + torch symm_mem",
    "async_tp": "torch async-TP",
}
"""Display name of each stock pair, by the value of ``impl`` that runs it."""

_DISTURBED = 1.15
"""Ratio of the median to the 10th percentile of a time's samples, above which most samples met
other work on the machine. On machines without any, fewer than one time of a thousand is above it.
"""

_AS_FAST = 1.02


def is_disturbed(time: Mapping[str, Any]) -> bool:
    """Return whether other work on the machine has lengthened a time in a result.

    Such a time is measured again, and no prediction is fitted to it; where it stays so, it counts
    like any other: what made it so may be the implementation itself.

    Args:
        time: Its entry in the result.
    """
    return bool(time["median_us"] > _DISTURBED * time.get("p10_us", time["median_us"]))


def role_of(time: Mapping[str, Any]) -> tuple[str, str]:
    """Return the role of a time and the value of ``impl`` that runs it; empty if none does.

    Args:
        time: Its entry in the result.

    Raises:
        ArgumentError: The entry has no role, as those of versions before 0.2 had none.
    """
    if "role" not in time:
        raise ArgumentError(
            "every time of a result must have a role, as `interlace bench --json` writes them; "
            f"got one with {', '.join(time) or 'nothing'}. Measure again."
        )
    return str(time["role"]), str(time.get("impl", ""))


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of one result that claims are made of.

    Times are medians of the slowest rank, in microseconds.

    Attributes:
        fused_us: Time of the fused kernel, or of the fastest implementation if there is none.
        unfused: The fastest unfused pair, and its time.
        compute: The fastest way to compute without communication, and its time.
        communication: The fastest way to communicate without compute, and its time; an empty name
            and NaN if no library has the collective.
        floor_us: The time of the least work at the machine's ceilings.
    """

    fused_us: float
    unfused: tuple[str, float]
    compute: tuple[str, float]
    communication: tuple[str, float]
    floor_us: float

    @property
    def hidden_percent(self) -> float:
        """The percentage of the communication's own time that disappears behind the compute.

        NaN if communication alone was not measured, or takes no time, as on one rank.
        """
        exposed_us, communication_us = self.fused_us - self.compute[1], self.communication[1]
        return 100 * (1 - exposed_us / communication_us) if communication_us else math.nan


def summarise(result: Result) -> Summary:
    """Return the summary of one result.

    Raises:
        ArgumentError: The result lacks a kind of time.
    """

    def fastest(role: str, description: str) -> tuple[str, float]:
        times = result["times"].items()
        chosen = [(median_us(time), name) for name, time in times if role_of(time)[0] == role]
        us, name = min(_require(chosen, description, result))
        return name, us

    # An operator of another package may have a collective that is in no library.
    has_communication = any(
        role_of(time)[0] == "communication" for time in result["times"].values()
    )
    times, own_names = impl_times(result), _require(own_impls(result), "fused", result)
    return Summary(
        fused_us=times[_kernel(own_names, times)],
        unfused=fastest("pair", "an unfused pair"),
        compute=fastest("compute", "compute alone"),
        communication=(
            fastest("communication", "communication alone") if has_communication else ("", math.nan)
        ),
        floor_us=float(result["floor_us"]),
    )


def _kernel(own: list[str], times: Mapping[str, float]) -> str:
    """Return the implementation that others are compared with: the fused kernel, or the fastest of
    ours if there is none.

    Args:
        own: Our implementations.
        times: Their microseconds.
    """
    return "fused" if "fused" in own else min(own, key=times.__getitem__)


def _require(values: list[AnyValue], description: str, result: Result) -> list[AnyValue]:
    """Return the values if there are any.

    Raises:
        ArgumentError: There are none.
    """
    if not values:
        names = ", ".join(result["times"])
        raise ArgumentError(
            f"a benchmark result must have {description} among its times; got {names}."
        )
    return values


def median_us(time: Mapping[str, Any]) -> float:
    """Return the median of a time, in microseconds."""
    return float(time["median_us"])


def names_of_impls(result: Result) -> dict[str, str]:
    """Return the display name of each implementation's time."""
    named = {role_of(time)[1]: name for name, time in result["times"].items()}
    return {impl: name for impl, name in named.items() if impl}


def impl_times(result: Result) -> dict[str, float]:
    """Return the microseconds of each implementation of the operator."""
    return {impl: median_us(result["times"][name]) for impl, name in names_of_impls(result).items()}


def own_impls(result: Result) -> list[str]:
    """Return the implementations that are no pair of a compute step and a collective."""
    times = result["times"]
    return [
        impl for impl, name in names_of_impls(result).items() if role_of(times[name])[0] == "ours"
    ]


def fastest_impl(result: Result, among: Collection[str] | None = None) -> tuple[str, float]:
    """Return the fastest implementation of a result, and its microseconds.

    ``impl="auto"`` takes it where the tuned table holds it. Of several that are as fast within 2 %,
    which is the difference between machines, it is the one that the host enqueues soonest: outside
    CUDA graphs a program may be as slow as its host.

    Args:
        among: Implementations to choose from, where they were measured; None for all.
    """
    names, times = names_of_impls(result), impl_times(result)
    if among is not None:
        times = {impl: us for impl, us in times.items() if impl in among}
    # Older results have no times of the host; their implementations are equal in that.
    host = result.get("host_us", {})
    fast = [impl for impl in times if times[impl] <= _AS_FAST * min(times.values())]
    impl = min(fast, key=lambda impl: (host.get(names[impl], 0.0), times[impl]))
    return impl, times[impl]


def shape(result: Result) -> str:
    """Return a shape's name, such as ``"1 x 8192 x 2048"``."""
    return str(result["shape"])


def title(operator: str, result: Result) -> str:
    """Return a result's title: operator, shape, dtype and ranks.

    An example is ``"gemv_all_reduce: 1 x 8192 x 2048, bfloat16, 4 ranks"``.
    """
    ranks = format_count(result["world_size"], "rank")
    return f"{operator}: {shape(result)}, {result['dtype']}, {ranks}"


def table(operator: str, result: Result) -> Table:
    """Return a table of every time of a result, for a terminal."""
    summary = summarise(result)
    headings = ("what", "median us", "p10 - p90 us", "skew us", "fused is")
    view = table_of(operator, result, headings, left=("what",))
    times: dict[str, Any] = result["times"]
    kernel = _kernel(own_impls(result), impl_times(result))
    order = {name: _order(time, kernel) for name, time in times.items()}
    best = {summary.unfused[0], summary.compute[0]}
    for name in sorted(times, key=order.__getitem__):
        time = times[name]
        is_fused = role_of(time)[1] == kernel
        view.add_row(
            name,
            f"{time['median_us']:.2f}",
            f"{time['p10_us']:.2f} - {time['p90_us']:.2f}",
            f"{time['skew_us']:.2f}",
            "" if is_fused else against(summary.fused_us, time["median_us"]),
            style="bold green" if is_fused else "bold" if name in best else None,
        )
    # Work that depends on no gradient can run before the pass, and is no part of its time.
    for name, time in result.get("before", {}).items():
        view.add_row(
            f"{name}, not in any of these", f"{time['median_us']:.2f}", "", "", "", style="dim"
        )
    view.add_row(
        "physical floor",
        f"{summary.floor_us:.2f}",
        "",
        "",
        against(summary.fused_us, summary.floor_us),
        style="dim",
    )
    hidden = f"{summary.hidden_percent:.0f} % of the communication hidden; "
    view.caption = (
        ("" if math.isnan(summary.hidden_percent) else hidden)
        + f"relative error {result['relative_error']:.1e}; "
        + (f"configuration {result['config']}; " if result["config"] else "")
        + f"impl='auto' runs {result['auto']} here"
    )
    if "host_us" in result:
        host = ", ".join(f"{name} {us:.0f}" for name, us in result["host_us"].items())
        view.caption += f"; us that the host takes for a call outside a graph: {host}"
    return view


def table_of(
    operator: str, result: Result, headings: Sequence[str], left: Collection[str]
) -> Table:
    """Return an empty table of a result; columns other than ``left`` hold numbers."""
    # Imported here: the pure functions of this module need no terminal.
    from rich.table import Column, Table

    columns = [Column(name, justify="left" if name in left else "right") for name in headings]
    return Table(
        *columns, title=title(operator, result), title_justify="left", caption_justify="left"
    )


def _order(time: Mapping[str, Any], kernel: str) -> tuple[bool, bool, bool, float]:
    """Return the sort key of a time: the implementation that others are compared with, pairs,
    compute, the others.
    """
    role, impl = role_of(time)
    return impl != kernel, role != "pair", role != "compute", median_us(time)


def read_document(file: Path) -> dict[str, Any]:
    """Read a file that ``interlace bench --json`` wrote.

    Raises:
        ArgumentError: it is not one.
    """
    document: dict[str, Any] = read_json(file, "a JSON file that interlace bench wrote")
    if not isinstance(document, dict) or not {"machine", "results"} <= document.keys():
        raise ArgumentError(
            f"{file} must be a JSON file that interlace bench wrote; it lacks machine and results."
        )
    return document


def machine_line(machine: Mapping[str, Any], date: str = "") -> str:
    """Return one line on the machine that results come from."""
    gpus = machine.get("gpus") or []
    names = sorted(set(gpus))
    parts = [f"{gpus.count(name)} x {name}" for name in names] or ["no GPU"]
    labels = (
        ("driver", "driver"),
        ("cuda", "CUDA"),
        ("torch", "PyTorch"),
        ("triton", "Triton"),
        ("nccl", "NCCL"),
    )
    parts += [f"{label} {machine[key]}" for key, label in labels if machine.get(key)]
    return ", ".join([*parts, *([date[:10]] if date else [])]) + "."


def against(fused_us: float, other_us: float) -> str:
    """Return the fused time relative to another one, as ``"-41 %"``."""
    return f"{100 * (fused_us / other_us - 1):+.0f} %" if other_us else ""
