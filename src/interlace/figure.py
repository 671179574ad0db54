"""A figure that is drawn, written to its file and closed; and the units of its time axis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interlace.errors import ArgumentError
from interlace.extras import needing


@contextlib.contextmanager
def open_figure(file: Path, width: float, height: float) -> Iterator[Any]:
    """Open a figure of ``width`` x ``height`` inches, and write it to ``file`` at the end.

    Raises:
        ArgumentError: the file cannot be written, or its suffix is no picture's.
        BackendError: matplotlib is not installed.
    """
    # Imported when a picture is drawn: matplotlib takes longer to import than most runs take. The
    # agg backend needs no display.
    with needing("A picture"):
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

    figure = pyplot.figure(figsize=(width, height), layout="constrained")
    try:
        yield figure
        try:
            figure.savefig(file, dpi=150)
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"{file} must be a PNG, SVG or PDF file that can be written; {error}."
            ) from error
    finally:
        pyplot.close(figure)


def time_unit(largest_ns: float) -> tuple[float, str]:
    """Return the nanoseconds of a time axis's unit, and the unit's name."""
    return (1e6, "milliseconds") if largest_ns >= 1e6 else (1e3, "microseconds")
