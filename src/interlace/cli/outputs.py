"""The files that a command writes: refused early where they cannot be, written once, and named."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from interlace.cli.console import is_first_rank
from interlace.documents import to_json
from interlace.errors import ArgumentError

_PICTURES = (".png", ".svg", ".pdf")


class Outputs:
    """The output files that the user asked for, by option.

    A command's module makes one from its ``--json``, ``--csv``, ``--plot`` and ``--trace`` options
    and hands it on whole. Each ``write_...`` method does nothing for a file that was not asked for,
    and takes a function, so a document or picture that nobody asked for is not even made. Only the
    first rank of torchrun or Slurm writes; its peers run the same command.

    Args:
        json: File for everything, as JSON.
        csv: File for a table.
        plot: File for a picture: PNG, SVG or PDF.
        trace: File for a trace that Perfetto shows, as JSON.
        table: File for a tuned table.
        folder: Folder that is created for files of :meth:`write`, under names of the command's own.

    Attributes:
        json, csv, plot, trace, table, folder: The arguments.
        written: Files that were written, in order.

    Raises:
        ArgumentError: a file or the folder cannot be written; nothing has been computed yet.

    Example:
        >>> outputs = Outputs(json=Path("results.json"))
        >>> outputs.write_json(lambda: {"total_ns": 1})
        >>> outputs.say_written(console)
        Written: results.json
    """

    def __init__(
        self,
        *,
        json: Path | None = None,
        csv: Path | None = None,
        plot: Path | None = None,
        trace: Path | None = None,
        table: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self.json, self.csv, self.plot, self.trace = json, csv, plot, trace
        self.table, self.folder = table, folder
        self.written: list[Path] = []
        # Peers of the first rank write nothing, and may run on nodes without the folder.
        if not is_first_rank():
            return
        if folder is not None:
            _create_folder(folder)
        # A simulation or benchmark may run for minutes, so a path that cannot be written is refused
        # before it starts.
        for file in (json, csv, trace, table):
            if file is not None and (reason := _obstacle(file)):
                raise ArgumentError(
                    f"{file} must be a file that can be written; {reason.strerror}."
                )
        if plot is not None and (reason := _obstacle(plot)):
            raise ArgumentError(
                f"{plot} must be a PNG, SVG or PDF file that can be written; {reason}."
            )
        if plot is not None and plot.suffix.lower() not in _PICTURES:
            raise ArgumentError(
                f"{plot} must be a PNG, SVG or PDF file that can be written; its name must end in "
                ".png, .svg or .pdf."
            )

    def write_json(self, document: Callable[[], object]) -> None:
        """Write the document to ``--json``."""
        self._write(self.json, lambda file: write_text(file, to_json(document())))

    def write_csv(self, text: Callable[[], str]) -> None:
        """Write the table to ``--csv``."""
        self._write(self.csv, lambda file: write_text(file, text()))

    def write_trace(self, document: Callable[[], object]) -> None:
        """Write the trace to ``--trace``, on one line: it may have 100000 events."""
        self._write(self.trace, lambda file: write_text(file, to_json(document(), indent=None)))

    def write_table(self, document: Callable[[], object]) -> None:
        """Write the tuned table to ``--table``."""
        self._write(self.table, lambda file: write_text(file, to_json(document())))

    def write_plot(self, draw: Callable[[Path], Any], name: str = "") -> None:
        """Draw a picture to ``--plot``.

        Args:
            draw: Function that draws the picture to a file.
            name: Ending of the file's name before its suffix, for a second picture of a command.
        """
        # The second picture lies next to the first: step.png and step-bars.png.
        file = self.plot and self.plot.with_name(f"{self.plot.stem}{name}{self.plot.suffix}")
        self._write(file, draw)

    def write(self, name: str, content: object) -> None:
        """Write a file in ``folder``.

        Args:
            name: The file's name.
            content: Text, a function that draws a picture to a file, or a document for JSON.
        """
        assert self.folder is not None
        if callable(content):
            self._write(self.folder / name, content)
        else:
            text = content if isinstance(content, str) else to_json(content)
            self._write(self.folder / name, lambda file: write_text(file, text))

    def say_written(self, console: Console, title: str = "Written") -> None:
        """Name the written files in one line; print nothing if there are none."""
        if self.written:
            console.print(f"{title}: {', '.join(map(str, self.written))}")

    def _write(self, file: Path | None, write: Callable[[Path], Any]) -> None:
        if file is None or not is_first_rank():
            return
        write(file)
        # A command that writes its document twice, at its start and its end, names it once.
        if file not in self.written:
            self.written.append(file)


def write_text(file: Path, text: str) -> None:
    """Write a text file.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            f"{file} must be a file that can be written; {error.strerror}."
        ) from error


def _create_folder(folder: Path) -> None:
    """Create a folder and its parents.

    Raises:
        ArgumentError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"--out must be a folder that can be made; {error.strerror}. Name another."
        ) from error


def _obstacle(file: Path) -> OSError | None:
    """Return the error that writing ``file`` would meet, without creating the file; None if none.

    A file that can be opened may still fail later, on a full disk; the write methods say so then.
    """
    # Asking the file system instead of opening the file leaves no empty file behind if the command
    # then fails.
    try:
        folder = file.absolute().parent
        if not folder.exists():
            code = errno.ENOENT
        elif not folder.is_dir():
            code = errno.ENOTDIR
        elif file.is_dir():
            code = errno.EISDIR
        elif not os.access(file if file.exists() else folder, os.W_OK):
            code = errno.EACCES
        else:
            return None
    # A name may be too long to ask about, and the current folder may be gone.
    except OSError as error:
        return error
    return OSError(code, os.strerror(code), str(file))
