"""``interlace bench table``: the tables of measurements in ``docs/results.md``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import sweep
from interlace.bench import report
from interlace.documents import reading
from interlace.errors import ArgumentError


def render(files: Sequence[Path]) -> str:
    """Return all results of files of ``interlace bench``, a sweep's or others', as one table."""
    documents = [report.read_document(file) for file in files]
    with reading(files, "JSON files that interlace bench wrote"):
        results = [result for document in documents for result in document["results"]]
        are_sweeps = bool(results) and all("model" in result for result in results)
        return sweep.markdown(documents) if are_sweeps else markdown(documents)


def markdown(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return all results of several files as one Markdown table, with a line on each machine.

    Operators with several implementations are shown by the fastest one that is not the unfused
    pair.

    Raises:
        ArgumentError: A result is not of an operator's implementations, as those of a soak are.
    """
    documents = list(documents)
    if any("times" not in result for document in documents for result in document["results"]):
        raise ArgumentError(
            "files must have the times of an operator's implementations in all results; these are "
            "of something else."
        )
    lines, machines = [], []
    several = any(
        impl != "fused"
        for document in documents
        for result in document["results"]
        for impl in report.own_impls(result)
    )
    ours = "Interlace" if several else "fused"
    # Results keep the order of their files; a reader compares rows, which a sort would tear apart.
    for document in documents:
        machine = report.machine_line(document["machine"], str(document.get("date", "")))
        # Files of one machine share its line.
        if machine not in machines:
            machines.append(machine)
        for result in document["results"]:
            summary = report.summarise(result)
            impl, impl_us = report.fastest_impl(result)
            ours_impl, ours_us = report.fastest_impl(result, report.own_impls(result))
            cells = [
                report.shape(result),
                str(result["world_size"]),
                str(result["dtype"]),
                f"**{ours_us:.1f}**" + (f" ({ours_impl})" if several else ""),
                f"{summary.unfused[1]:.1f} ({summary.unfused[0]})",
                report.against(ours_us, summary.unfused[1]),
                f"{summary.compute[1]:.1f}",
                f"{ours_us / summary.compute[1]:.2f}",
                f"{summary.floor_us:.1f}",
                impl if impl == ours_impl else f"{impl}, {impl_us:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    heading = [
        f"| shape a rank | ranks | dtype | {ours} us | best "
        f"unfused us | {ours} is "
        f"| compute alone us | {ours} / compute | floor us | auto |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*heading, *lines, "", *machines]) + "\n"
