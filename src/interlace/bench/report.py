"""What benchmark results say, as tables. Pure functions over the JSON that ``interlace bench``
writes; no GPU, no torch.

A file is ``{"machine": {...}, "command": str, "date": str, "results": [...]}``, each result as an
operator's ``bench`` returns it: sizes, ``floor_us``, and ``times``: name -> median_us, p10_us,
p90_us, skew_us. Names say what a time is: ``"fused"``; ``"<compute> + <collective>"``, an unfused
pair; ``"<something> alone"``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from interlace.errors import ArgumentError

if TYPE_CHECKING:
    from rich.table import Table

Result = Mapping[str, Any]

_COMPUTE_WORDS = ("GEMV", "cuBLAS", "product", "bag", "update", "grouped")

_PRODUCTS = ("gemm_all_to_all", "gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm")

WHAT_UNFUSED_RUNS = {
    **dict.fromkeys((*_PRODUCTS, "bmm_all_to_all", "all_to_all_bmm"), "cuBLAS + NCCL"),
    "gemv_all_reduce": "cuBLAS + NCCL",
    "embedding_all_to_all": "F.embedding_bag + NCCL + unpack",
    "mixture_of_experts": "F.linear + NCCL + permutes + sum",  # waits for the device: never measured, never chosen
}
"""The pair that ``impl="unfused"`` is; other pairs are faster at times, but are not what it runs.
"""

OURS = ("fused", "remote_stores", "chunked", "pushed", "triggered")
"""Implementations that are not stock pairs, as results name them."""

_AS_FAST = 1.02


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of one result that claims are made of; times are medians of the slowest rank, in
    microseconds.

    Attributes:
        unfused: the fastest unfused pair, and its time.
        compute: the fastest way to compute without communication, and its time.
        communication: the fastest way to communicate without compute, and its time.
        floor_us: no execution is faster.
    """

    fused_us: float
    unfused: tuple[str, float]
    compute: tuple[str, float]
    communication: tuple[str, float]
    floor_us: float

    @property
    def hidden_percent(self) -> float:
        """How much of the communication's own time disappears behind the compute."""
        return 100 * (1 - (self.fused_us - self.compute[1]) / self.communication[1])


def is_pair(name: str) -> bool:
    return " + " in name or name == "unfused"


def is_compute(name: str) -> bool:
    return name.endswith(" alone") and any(word in name for word in _COMPUTE_WORDS)


def is_communication(name: str) -> bool:
    return name.endswith(" alone") and not is_compute(name)


def summarise(result: Result) -> Summary:
    """The summary of one result.

    Raises:
        ArgumentError: the result lacks a kind of time.
    """
    medians = {name: float(time["median_us"]) for name, time in result["times"].items()}

    def fastest(kind: Any, what: str) -> tuple[str, float]:
        chosen = [(time, name) for name, time in medians.items() if kind(name)]
        if not chosen:
            raise ArgumentError(
                f"a benchmark result must have {what} among its times; got {', '.join(medians)}."
            )
        time, name = min(chosen)
        return name, time

    return Summary(
        fused_us=medians["fused"] if "fused" in medians else fastest(OURS.__contains__, "fused")[1],
        unfused=fastest(is_pair, "an unfused pair"),
        compute=fastest(is_compute, "compute alone"),
        communication=fastest(is_communication, "communication alone"),
        floor_us=float(result["floor_us"]),
    )


def fastest_impl(result: Result, among: Collection[str] = (*OURS, "unfused")) -> tuple[str, float]:
    """The fastest implementation of a result, which ``impl="auto"`` takes where the tuned table
    holds it; and its microseconds.

    Of several that are as fast within 2 %, which is what machines differ by, it is the one that the
    host enqueues soonest: outside CUDA graphs a program may be as slow as its host.

    Args:
        among: implementations to choose from, where they were measured.
    """
    unfused = WHAT_UNFUSED_RUNS[str(result["operator"])]
    ways = {**{way: way for way in OURS}, "unfused": unfused}
    medians = {name: float(time["median_us"]) for name, time in result["times"].items()}
    times = {
        impl: medians[name] for impl, name in ways.items() if impl in among and name in medians
    }
    host = result.get("host_us", {})
    fast = [impl for impl in times if times[impl] <= _AS_FAST * min(times.values())]
    impl = min(fast, key=lambda each: (host.get(ways[each], 0.0), times[each]))
    return impl, times[impl]


def shape(result: Result) -> str:
    """``"1 x 8192 x 2048"``: tokens, rows and columns; or what the result calls its shape."""
    return str(
        result.get("shape") or f"{result['tokens']} x {result['rows']} x {result['columns']}"
    )


def title(operator: str, result: Result) -> str:
    """``"gemv_all_reduce: x [1, 2048], w [8192, 2048] a rank, bfloat16, 4 ranks"``; other
    operators' results name their shape.
    """
    where = f"{result['dtype']}, {_count(result['world_size'], 'rank')}"
    if "shape" in result:
        return f"{operator}: {result['shape']}, {where}"
    tokens, rows, columns = result["tokens"], result["rows"], result["columns"]
    return f"{operator}: x [{tokens}, {columns}], w [{rows}, {columns}] a rank, {where}"


def table(operator: str, result: Result) -> Table:
    """One result, every time of it, for a terminal."""
    from rich.table import Table

    summary = summarise(result)
    view = Table(title=title(operator, result), title_justify="left", caption_justify="left")
    view.add_column("what")
    for heading in ("median us", "p10 - p90 us", "skew us", "fused is"):
        view.add_column(heading, justify="right")
    times: dict[str, Any] = result["times"]
    order = {
        name: (name != "fused", not is_pair(name), not is_compute(name), times[name]["median_us"])
        for name in times
    }
    best = {summary.unfused[0], summary.compute[0]}
    for name in sorted(times, key=order.__getitem__):
        time = times[name]
        view.add_row(
            name,
            f"{time['median_us']:.2f}",
            f"{time['p10_us']:.2f} - {time['p90_us']:.2f}",
            f"{time['skew_us']:.2f}",
            "" if name == "fused" else _against(summary.fused_us, time["median_us"]),
            style="bold green" if name == "fused" else "bold" if name in best else None,
        )
    for name, time in result.get("before", {}).items():
        view.add_row(
            f"{name}, not in any of these", f"{time['median_us']:.2f}", "", "", "", style="dim"
        )
    view.add_row(
        "physical floor",
        f"{summary.floor_us:.2f}",
        "",
        "",
        _against(summary.fused_us, summary.floor_us),
        style="dim",
    )
    view.caption = (
        f"{summary.hidden_percent:.0f} % of the communication hidden; relative error "
        f"{result['relative_error']:.1e}; "
        + (f"configuration {result['config']}; " if result["config"] else "")
        + f"impl='auto' runs {result['auto']} here"
    )
    if "host_us" in result:
        host = ", ".join(f"{name} {us:.0f}" for name, us in result["host_us"].items())
        view.caption += f"; us that the host takes for a call outside a graph: {host}"
    return view


def study_table(operator: str, result: Result) -> Table:
    """Time against occupancy, in both orders, for a terminal."""
    from rich.table import Table

    view = Table(title=title(operator, result), title_justify="left", caption_justify="left")
    for heading in ("occupancy", "order", "programs", "median us", "p10 - p90 us", "skew us"):
        view.add_column(heading, justify="left" if heading == "order" else "right")
    for point in result["points"]:
        view.add_row(
            f"{point['occupancy_percent']} %",
            str(point["order"]),
            str(point["programs"]),
            f"{point['median_us']:.1f}",
            f"{point['p10_us']:.1f} - {point['p90_us']:.1f}",
            f"{point['skew_us']:.1f}",
        )
    view.caption = f"{result['resident_programs']} programs fit; configuration {result['config']}"
    return view


def transports_table(operator: str, result: Result) -> Table:
    """Every way to carry a product to its ranks, with the kernels that it runs, for a terminal."""
    from rich.table import Table

    view = Table(title=title(operator, result), title_justify="left", caption_justify="left")
    for heading in (
        "way",
        "median us",
        "p10 - p90 us",
        "over cuBLAS alone us",
        "kernels: blocks, us",
    ):
        view.add_column(
            heading, justify="left" if heading in ("way", "kernels: blocks, us") else "right"
        )
    alone = result["ways"]["cuBLAS alone"]["median_us"]
    for name, way in sorted(result["ways"].items(), key=lambda item: item[1]["median_us"]):
        view.add_row(
            name,
            f"{way['median_us']:.1f}",
            f"{way['p10_us']:.1f} - {way['p90_us']:.1f}",
            "" if name.endswith(" alone") else f"{way['median_us'] - alone:+.1f}",
            "\n".join(
                f"{kernel['name'][:28]}: {kernel['blocks'] or 'no'} blocks, "
                f"{kernel['each_call']:g} x {kernel['median_us']:.1f}"
                for kernel in way["kernels"][:4]
            ),
        )
    view.caption = f"configuration {result['config']}; kernels by the profiler, on rank 0"
    return view


def markdown(documents: Iterable[Mapping[str, Any]]) -> str:
    """All results of several files as one Markdown table, with a line on each machine; for README
    and documentation.

    Operators with several implementations are shown by the fastest one that is not the unfused
    pair.
    """
    documents = list(documents)
    lines, machines, named = [], [], False
    several = any(
        way in result["times"]
        for document in documents
        for result in document["results"]
        for way in OURS[1:]
    )
    ours = "Interlace" if several else "fused"
    for document in documents:
        machine = machine_line(document["machine"], str(document.get("date", "")))
        if machine not in machines:
            machines.append(machine)
        for result in document["results"]:
            summary, (impl, impl_us), (own, own_us) = (
                summarise(result),
                fastest_impl(result),
                fastest_impl(result, OURS),
            )
            named = named or "shape" in result
            cells = [
                shape(result),
                str(result["world_size"]),
                str(result["dtype"]),
                f"**{own_us:.1f}**" + (f" ({own})" if several else ""),
                f"{summary.unfused[1]:.1f} ({summary.unfused[0]})",
                _against(own_us, summary.unfused[1]),
                f"{summary.compute[1]:.1f}",
                f"{own_us / summary.compute[1]:.2f}",
                f"{summary.floor_us:.1f}",
                impl if impl == own else f"{impl}, {impl_us:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    heading = [
        f"| {'shape a rank' if named else 'tokens x N x K/R'} | ranks | dtype | {ours} us | best "
        f"unfused us | {ours} is "
        f"| compute alone us | {ours} / compute | floor us | auto |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*heading, *lines, "", *machines]) + "\n"


def machine_line(machine: Mapping[str, Any], date: str = "") -> str:
    """One line on where results come from."""
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


def _against(fused_us: float, other_us: float) -> str:
    """``"-41 %"``: fused time relative to another."""
    return f"{100 * (fused_us / other_us - 1):+.0f} %" if other_us else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
