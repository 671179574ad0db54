"""Criteo files are read as written, whatever their dialect; what is corrupt is named."""

from __future__ import annotations

import gzip
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace import ArgumentError, DataError
from interlace.data import CriteoFiles, Records
from interlace.data.criteo import parse

INTEGER = st.one_of(
    st.just(""), st.integers(-(10**9), 10**9).map(str), st.integers(0, 999).map("{}.0".format)
)
CATEGORY = st.one_of(
    st.just(""),
    st.integers(0, 2**32 - 1).map("{:08x}".format),
    st.integers(0, 255).map("{:X}".format),
)
LINE = st.builds(
    lambda label, integers, ids: [label, *integers, *ids],
    st.sampled_from("01"),
    st.lists(INTEGER, min_size=13, max_size=13),
    st.lists(CATEGORY, min_size=26, max_size=26),
)
GOOD = ["1", "3", "", "-2", "260.0", *[""] * 9, "05db9164", "", "FF", *[""] * 23]


def _slow(fields: list[str]) -> tuple[int, list[int], list[int]]:
    """One line, as anyone would write it."""
    integers = [int(float(field)) if field else 0 for field in fields[1:14]]
    return int(fields[0]), integers, [int(field, 16) if field else -1 for field in fields[14:]]


def _check(records: Records, lines: list[list[str]]) -> None:
    assert len(records) == len(lines)
    for i, fields in enumerate(lines):
        assert (
            records.labels[i],
            records.integers[i].tolist(),
            records.categories[i].tolist(),
        ) == _slow(fields)


def _all(path: Path, *, strict: bool = True) -> Records:
    return Records.join(CriteoFiles([path], strict=strict))


@given(st.lists(LINE, max_size=5), st.sampled_from("\t,"))
def test_every_line_as_read_one_by_one(lines: list[list[str]], separator: str) -> None:
    text = "".join(separator.join(line) + "\n" for line in lines)
    records, corrupt = parse(text.encode(), separator.encode())
    assert not corrupt.size
    _check(records, lines)


@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_dialects(tmp_path: Path, separator: str, header: bool, end: str, packed: bool) -> None:
    names = (
        [["label", *[f"I{i}" for i in range(1, 14)], *[f"C{i}" for i in range(1, 27)]]]
        if header
        else []
    )
    # No newline at the end of the file
    text = end.join(separator.join(line) for line in [*names, GOOD, GOOD]).encode()
    path = tmp_path / ("day_0.gz" if packed else "train.txt")
    path.write_bytes(gzip.compress(text) if packed else text)
    _check(_all(path), [GOOD, GOOD])


@pytest.mark.parametrize(
    "change",
    [
        {0: "2"},
        {0: ""},
        {0: "x"},
        {1: "1e3"},
        {2: "--1"},
        {3: "1.5"},
        {4: "12345678901"},
        {13: "-"},
        {14: "05db91640"},
        {39: "xyz"},
        {39: "-1"},
        {39: "ab\tcd"},
        {38: '"ab"'},
    ],
    ids=str,
)
def test_a_corrupt_line_is_skipped_and_counted_or_refused(
    tmp_path: Path, change: dict[int, str]
) -> None:
    bad = [change.get(i, field) for i, field in enumerate(GOOD)]
    path = tmp_path / "train.txt"
    path.write_text("".join("\t".join(line) + "\n" for line in [GOOD, bad, GOOD]))
    files = CriteoFiles([path])
    with pytest.warns(
        UserWarning, match=rf"^1 corrupt lines skipped, the first in {path}, line 2\.$"
    ):
        _check(Records.join(files), [GOOD, GOOD])
    assert files.corrupt == {path: 1}
    with pytest.raises(
        DataError,
        match=rf"^{path}, line 2 must have a label, 13 integers and 26 hexadecimal ids; it has not",
    ):
        _all(path)


def test_short_lines_empty_lines_and_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that a block cuts in two are whole again, and line numbers go on from block to
    block.
    """
    monkeypatch.setattr("interlace.data.criteo._BLOCK_BYTES", 100)
    path = tmp_path / "train.csv"
    path.write_text(
        "label,"
        + ",".join("x" * 39)
        + "\n"
        + (",".join(GOOD) + "\n") * 5
        + "\n1,2,3\n"
        + ",".join(GOOD)
        + "\n"
    )
    with pytest.warns(UserWarning, match="1 corrupt lines skipped, the first in .*, line 8"):
        _check(_all(path, strict=False), [GOOD] * 6)


def test_a_corrupt_line_does_not_decide_on_the_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stands: first in the file, or first in a block."""
    monkeypatch.setattr("interlace.data.criteo._BLOCK_BYTES", 100)
    path = tmp_path / "train.txt"
    path.write_text("a, b, c\n" + ("\t".join(GOOD) + "\nx,y\n") * 7)
    with pytest.warns(UserWarning, match=r"^8 corrupt lines skipped, the first in .*, line 1\.$"):
        _check(_all(path, strict=False), [GOOD] * 7)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"^CriteoFiles: every path must be a file; got .*nowhere\.$"
    ):
        CriteoFiles([tmp_path / "nowhere"])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(DataError, match=r"cut\.gz must be readable"):
        _all(tmp_path / "cut.gz")
    (tmp_path / "zeros.txt").write_bytes(bytes(17 << 20))
    with pytest.raises(
        DataError, match=r"zeros\.txt must consist of lines; got \d+ bytes without an end of line"
    ):
        _all(tmp_path / "zeros.txt")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert list(CriteoFiles([tmp_path / "empty.txt"])) == []


SAMPLE = Path(__file__).parents[3] / "shared" / "data" / "criteo_sample.csv"


@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample of real rows is not here")
def test_real_rows() -> None:
    lines = [line.split(",") for line in SAMPLE.read_text().splitlines()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = _all(SAMPLE)
    _check(records, lines[1:])
    assert records.labels.sum() == 49
    assert np.abs(records.integers).max() > 10_000
