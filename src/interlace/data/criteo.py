"""Readers of Criteo's click logs: the tab-separated text of Kaggle and Terabyte, and
comma-separated copies of it.

A line is a label, 13 integers and 26 categories of up to 8 hexadecimal digits; any but the label
may be empty. Lines are parsed block by block with numpy: the separators give every field's last
character, and digit k from the right of all fields of a column range is one gather.
"""

from __future__ import annotations

import contextlib
import gzip
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from interlace.data.records import CATEGORIES, INTEGERS, MISSING, Records
from interlace.errors import ArgumentError, DataError

FIELDS = 1 + INTEGERS + CATEGORIES

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 24
_MAX_DIGITS = 10
_HEX_DIGITS = 8
# Digits of a base as a table by character; a character that is no digit is _BAD.
_BAD = 255
_NEWLINE, _POINT, _MINUS, _ZERO = b"\n.-0"

_DECIMAL = np.full(256, _BAD, np.uint8)
_DECIMAL[np.frombuffer(b"0123456789", np.uint8)] = np.arange(10)
_HEX = _DECIMAL.copy()
_HEX[np.frombuffer(b"abcdef", np.uint8)] = _HEX[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(
    10, 16
)

_Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


class CriteoFiles:
    """The records of one or several files, in order, read as a stream.

    Tabs or commas, with or without a header, plain or gzip (``.gz``), Unix or Windows line ends.
    Integers may be written as pandas does (``260.0``). A corrupt line (not 40 fields, a label other
    than 0 and 1, an integer or id that cannot be parsed) is counted and skipped, and a warning
    gives their number; with ``strict`` the first one is an error.

    Args:
        paths: the files.
        strict: whether to refuse corrupt lines.

    Attributes:
        corrupt: number of skipped lines by file.

    Raises:
        ArgumentError: a path is not a file.
        DataError: during iteration: a line is corrupt under ``strict``, or a file cannot be read.

    Example:
        >>> for records in CriteoFiles(["day_0.gz"]):
        ...     records.categories  # int64 [some thousands, 26]
    """

    def __init__(self, paths: Sequence[Path | str], *, strict: bool = False) -> None:
        self.paths = [Path(path) for path in paths]
        for path in self.paths:
            if not path.is_file():
                raise ArgumentError(f"CriteoFiles: every path must be a file; got {path}.")
        self.strict = strict
        self.corrupt: dict[Path, int] = {}

    def __iter__(self) -> Iterator[Records]:
        """Iterate over the records block by block, from the first file."""
        self.corrupt.clear()
        for path in self.paths:
            yield from self._read(path)

    def _read(self, path: Path) -> Iterator[Records]:
        line, first, separator = 1, "", b""
        for block in _blocks(path):
            # The separator is chosen by all of the block: one corrupt line must not decide for all.
            separator = separator or max(b"\t", b",", key=block.count)
            start = block.index(b"\n") + 1 if line == 1 and _is_header(block, separator) else 0
            records, bad = parse(block[start:], separator)
            if bad.size:
                location = f"{path}, line {line + (start > 0) + int(bad[0])}"
                if self.strict:
                    raise DataError(
                        f"{location} must have a label, 13 integers and 26 hexadecimal ids; it has "
                        "not."
                    )
                first = first or location
                self.corrupt[path] = self.corrupt.get(path, 0) + bad.size
            line += block.count(b"\n")
            yield records
        if first:
            warnings.warn(
                f"{self.corrupt[path]} corrupt lines skipped, the first in {first}.", stacklevel=3
            )


def _blocks(path: Path) -> Iterator[bytes]:
    """Read the file in pieces of complete lines, each ended by a newline."""
    partial = b""
    try:
        with contextlib.closing(_open(path)) as file:
            while piece := file.read(_BLOCK_BYTES):
                complete, newline, partial = (partial + piece).rpartition(b"\n")
                if newline:
                    yield (complete + newline).replace(b"\r\n", b"\n")
                elif len(partial) > _MAX_LINE_BYTES:
                    raise DataError(
                        f"{path} must consist of lines; got {len(partial)} bytes without an end of "
                        "line."
                    )
    except (OSError, EOFError) as error:
        raise DataError(f"{path} must be readable; {error}.") from error
    # The last line of a file need not have an end.
    if partial:
        yield partial.removesuffix(b"\r") + b"\n"


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _is_header(block: bytes, separator: bytes) -> bool:
    """Tell whether the first line has the right number of names."""
    fields = block.split(b"\n", 1)[0].split(separator)
    return len(fields) == FIELDS and fields[0].strip(b'" ').isalpha()


def parse(text: bytes, separator: bytes) -> tuple[Records, _Ints]:
    r"""Parse complete lines, each ended by ``\n``.

    Returns:
        The records of the good lines, and the numbers of the corrupt ones, counted from 0. Empty
        lines are neither.
    """
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero((data == separator[0]) | (data == _NEWLINE))
    # The index in `ends` of each line's last field.
    last = np.flatnonzero(data[ends] == _NEWLINE)
    # Lines with another number of fields are corrupt, and their characters are never parsed.
    fields = np.diff(last, prepend=-1)
    if not len(last):
        return Records.empty(), np.zeros(0, np.int64)
    empty = np.diff(ends[last], prepend=-1) == 1
    lines = np.flatnonzero(fields == FIELDS)
    # The separators before a line's end are the ends of its fields.
    stop = ends[last[lines, None] + np.arange(1 - FIELDS, 1)]
    start = np.where(lines > 0, ends[last[lines] - FIELDS], -1)[:, None] + 1
    start = np.concatenate([start, stop[:, :-1] + 1], axis=1)
    numbers, good_numbers = _integers(data, start[:, : 1 + INTEGERS], stop[:, : 1 + INTEGERS])
    ids, good_ids = _hexadecimals(data, start[:, 1 + INTEGERS :], stop[:, 1 + INTEGERS :])
    labels = numbers[:, 0]
    good = good_numbers & good_ids & ((labels == 0) | (labels == 1)) & (start[:, 0] < stop[:, 0])
    corrupt = ~empty
    corrupt[lines[good]] = False
    return Records(labels[good].astype(np.uint8), numbers[good, 1:], ids[good]), np.flatnonzero(
        corrupt
    )


def _integers(data: npt.NDArray[np.uint8], start: _Ints, stop: _Ints) -> tuple[_Ints, _Flags]:
    """Parse fields ``[start, stop)`` as integers, 0 if empty; tell which rows are all integers."""
    # Pandas writes integers of a column with gaps as floats, 260.0.
    pandas = (stop - start > 2) & (data[stop - 1] == _ZERO) & (data[stop - 2] == _POINT)
    stop = np.where(pandas, stop - 2, stop)
    # A lone minus sign is no integer, so the sign needs a digit after it.
    negative = (stop - start > 1) & (data[np.minimum(start, data.size - 1)] == _MINUS)
    values, good = _digits(data, start + negative, stop, _DECIMAL, 10, _MAX_DIGITS)
    values[negative] *= -1
    return values, good


def _hexadecimals(data: npt.NDArray[np.uint8], start: _Ints, stop: _Ints) -> tuple[_Ints, _Flags]:
    """Parse fields as ids, :data:`MISSING` if empty; and tell which rows are all ids."""
    values, good = _digits(data, start, stop, _HEX, 16, _HEX_DIGITS)
    values[start == stop] = MISSING
    return values, good


def _digits(
    data: npt.NDArray[np.uint8],
    start: _Ints,
    stop: _Ints,
    digit_of: npt.NDArray[np.uint8],
    base: int,
    max_digits: int,
) -> tuple[_Ints, _Flags]:
    length = stop - start
    values = np.zeros(length.shape, np.int64)
    good: _Flags = length <= max_digits
    # One gather per digit for all fields together; fields that are shorter contribute 0.
    for digit_index in range(min(max_digits, int(length.max(initial=0)))):
        present = digit_index < length
        digit = digit_of[data[np.maximum(stop - 1 - digit_index, 0)]]
        good &= ~present | (digit != _BAD)
        values += np.where(present, digit, 0).astype(np.int64) * base**digit_index
    return values, np.asarray(good.all(axis=1))
