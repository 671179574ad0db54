"""``interlace tune profile``: fit a machine's profile to results that were measured on it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from interlace.bench import profile_fit
from interlace.bench.report import read_document
from interlace.cli.bench_sweep import summary_table
from interlace.cli.console import make_console
from interlace.cli.outputs import Outputs
from interlace.cli.tables import make_table
from interlace.costs.known_profiles import profile_of
from interlace.errors import ArgumentError


def run_profile(files: Sequence[Path], outputs: Outputs) -> None:
    """Fit how implementations compose their times to results, and print how far they are off.

    Raises:
        ArgumentError: The results are of several kinds of GPUs, or too few.
    """
    documents = [read_document(file) for file in files]
    gpus = {gpu for document in documents for gpu in document["machine"]["gpus"]}
    if len(gpus) != 1:
        raise ArgumentError(
            f"a profile must be of one kind of GPU; got {', '.join(sorted(gpus)) or 'none'}."
        )
    points = profile_fit.points_of(documents)
    start = profile_of(gpus.pop())
    fitted = profile_fit.fitted(start, points)
    if not fitted.compositions:
        raise ArgumentError(f"results must have more of a product's times; got {len(points)}.")
    calls = {(point.operator, point.call) for point in points}
    # The source keeps what earlier fits said of products and links, which this one leaves as it is.
    profile = dataclasses.replace(
        fitted,
        source=f"{start.source.split('; compositions')[0]}; compositions: {len(points)} times of "
        f"{len(calls)} calls",
        results=sorted(file.name for file in files),
    )
    table = make_table("operator", "implementation", "times", "median error", "90 % below")
    for (operator, name), wrong in profile_fit.deviations(profile, points).items():
        figures = statistics.median(wrong), wrong[int(0.9 * (len(wrong) - 1))]
        table.add_row(operator, name, str(len(wrong)), *(f"{value:.1%}" for value in figures))
    console = make_console()
    console.print(table)
    trusted = {*points}
    disturbed = [
        point
        for point in profile_fit.points_of(documents, with_disturbed=True)
        if point not in trusted
    ]
    unseen = profile_fit.unseen_choices(start, points, disturbed)
    compared = sum(map(len, unseen.values()))
    measured = len({(point.operator, point.call) for point in (*points, *disturbed)})
    caption = (
        f"{measured} calls measured, {compared} compared, {measured - compared} left out, which no "
        f"prediction or no stock pair has. {len(disturbed)} times that other work has lengthened "
        "count here, and nothing is fitted to them."
    )
    console.print(summary_table(unseen, "Calls that the fit has not seen", caption))
    outputs.write_json(lambda: dataclasses.asdict(profile))
    outputs.say_written(console, "Profile")
