"""Readers of Criteo's click logs: the tab-separated text of Kaggle and Terabyte, and
comma-separated copies of it.

A line is a label, 13 integers of up to 10 digits and 26 categories of up to 8 hexadecimal digits;
any but the label may be empty. Lines are parsed block by block with numpy: the separators give
every field's last character, and digit k from the right of all fields of a column range is one
gather.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from interlace.errors import ArgumentError
from interlace_dlrm.errors import DataError
from interlace_dlrm.records import CATEGORIES, INTEGERS, MISSING, Records

FIELDS = 1 + INTEGERS + CATEGORIES

_RECORD = f"a label, {INTEGERS} integers and {CATEGORIES} hexadecimal ids"

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 24
_MAX_DIGITS = 10
_HEX_DIGITS = 8
_HOPELESS = 1000
"""Lines after which a file without a single record is refused, instead of being read to its end."""

_GZIP = b"\x1f\x8b"
# How files begin that are no text, and what they are.
_OTHERS = {
    _GZIP: "gzip",
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    codecs.BOM_UTF16_LE: "UTF-16 text",
    codecs.BOM_UTF16_BE: "UTF-16 text",
}
_TAR = b"ustar"
_TAR_AT = 257

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

    Tabs or commas, with or without a header (40 names, or pandas' numbers 0 to 39), plain or gzip
    whatever the file's name, Unix or Windows line ends, with or without UTF-8's byte-order mark.
    Integers may be written as pandas does (``260.0``). A corrupt line (not 40 fields, a label other
    than 0 and 1, an integer or id that cannot be parsed) is counted and skipped, and a warning
    gives their number; with ``strict`` the first one is an error. A file in which no line is a
    record is an error, which says what it looks like; for a file without lines there is a warning.

    Args:
        paths: The files.
        strict: Whether to refuse corrupt lines.

    Attributes:
        corrupt: Number of skipped lines by file.

    Raises:
        ArgumentError: a path is not a file.
        DataError: during iteration: a line is corrupt under ``strict``, a file has lines and none
            of them is a record, or it cannot be read.

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
        line, found, corrupt, where, got, separator = 1, 0, 0, "", "", b""
        for block in _blocks(path):
            # The separator is chosen by all of the block: one corrupt line must not decide for all.
            separator = separator or max(b"\t", b",", key=block.count)
            start = block.index(b"\n") + 1 if line == 1 and _is_header(block, separator) else 0
            records, bad = parse(block[start:], separator)
            if bad.size and not corrupt:
                number = (start > 0) + int(bad[0])
                where = f"{path}, line {line + number}"
                got = _looks_like(block.split(b"\n", number + 1)[number], separator)
                if self.strict:
                    raise DataError(f"{where} must have {_RECORD}; got {got}.")
            line += block.count(b"\n")
            found += len(records)
            corrupt += bad.size
            if bad.size:
                self.corrupt[path] = self.corrupt.get(path, 0) + bad.size
            if corrupt >= _HOPELESS and not found:
                break
            yield records
        if corrupt and not found:
            raise DataError(
                f"{where} must have {_RECORD}; got {got}, and no record in {corrupt} lines. Give a "
                "click log in Criteo's format."
            )
        if corrupt:
            warnings.warn(
                f"{corrupt} corrupt lines skipped, the first in {where}: {got}.", stacklevel=3
            )
        elif not found:
            warnings.warn(f"{path} has no records.", stacklevel=3)


def _blocks(path: Path) -> Iterator[bytes]:
    """Read the file in pieces of complete lines, each ended by a newline."""
    partial, is_first = b"", True
    try:
        with contextlib.closing(_open(path)) as file:
            while piece := file.read(_BLOCK_BYTES):
                if is_first:
                    _require_text(path, piece)
                    piece, is_first = piece.removeprefix(codecs.BOM_UTF8), False
                complete, newline, partial = (partial + piece).rpartition(b"\n")
                if newline:
                    yield (complete + newline).replace(b"\r\n", b"\n")
                elif len(partial) > _MAX_LINE_BYTES:
                    raise DataError(
                        f"{path} must consist of lines; got {len(partial)} bytes without an end of "
                        "line."
                    )
    # Damage is an OSError in gzip's own header and checksum, and zlib's error in between.
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} must be readable; {error}.") from error
    # The last line of a file need not have an end.
    if partial:
        yield partial.removesuffix(b"\r") + b"\n"


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    with path.open("rb") as file:
        is_packed = file.read(len(_GZIP)) == _GZIP
    return gzip.open(path, "rb") if is_packed else path.open("rb")


def _require_text(path: Path, begin: bytes) -> None:
    """Refuse a file that begins, unpacked if it is gzip, as another kind of file.

    Raises:
        DataError: it does.
    """
    names = [name for magic, name in _OTHERS.items() if begin.startswith(magic)]
    if begin[_TAR_AT:].startswith(_TAR):
        names.append("a tar archive")
    if names:
        raise DataError(
            f"{path}, line 1 must be plain text or gzip of it; this is {names[0]}. Unpack it, or "
            "convert it to UTF-8 text."
        )


def _is_header(block: bytes, separator: bytes) -> bool:
    """Tell whether the first line has the right number of names, or of pandas' numbers."""
    fields = [field.strip(b"'\" ") for field in block.split(b"\n", 1)[0].split(separator)]
    if len(fields) != FIELDS:
        return False
    if fields == [b"%d" % i for i in range(FIELDS)]:
        return True
    # A name begins with a letter of any alphabet, or as Spark's _c0 does; no label or number does.
    first = fields[0][:1]
    return first.isalpha() or first == b"_" or first >= b"\x80"


def _looks_like(line: bytes, separator: bytes) -> str:
    """Return in words what is wrong with a corrupt line."""
    if b"\0" in line:
        return "binary data"
    if b"\r" in line:
        return "lines that end in carriage returns alone"

    def is_record(*fields: bytes) -> bool:
        return len(parse(separator.join(fields) + b"\n", separator)[0]) == 1

    fields = line.split(separator)
    if len(fields) == FIELDS - 1:
        return f"no label: {len(fields)} fields"
    if is_record(*fields[1:]):
        return f"an index before the label: {len(fields)} fields"
    if len(fields) != FIELDS:
        for other in (";", "|", " "):
            if line.count(other.encode()) == FIELDS - 1:
                return f"fields that are separated by {other!r}"
        return f"{len(fields)} field{'s' if len(fields) > 1 else ''}"
    if b'"' in line or b"'" in line:
        return "quoted fields"
    # The first field that makes an empty record a corrupt line.
    names = ["label", *(f"I{i + 1}" for i in range(INTEGERS))]
    names += [f"C{i + 1}" for i in range(CATEGORIES)]
    blank = [b"0", *[b""] * (FIELDS - 1)]
    wrong = next(
        i for i, field in enumerate(fields) if not is_record(*blank[:i], field, *blank[i + 1 :])
    )
    return f"{fields[wrong][:20].decode(errors='replace')!r} as {names[wrong]}"


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
