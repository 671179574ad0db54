"""Criteo files are read as written, whatever their dialect; what is corrupt is named."""

from __future__ import annotations

import codecs
import gzip
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace import ArgumentError
from interlace_dlrm import CriteoFiles, DataError, Records
from interlace_dlrm.criteo import parse

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


NAMES = ["label", *[f"I{i}" for i in range(1, 14)], *[f"C{i}" for i in range(1, 27)]]
HEADERS = {
    "no header": [],
    "names": NAMES,
    "a name of two words": ["is_click", *NAMES[1:]],
    "names with digits": [f"col_{i}" for i in range(40)],
    "Spark's names": [f"_c{i}" for i in range(40)],
    "pandas' numbers": [str(i) for i in range(40)],
    "quoted": [f'"{name}"' for name in NAMES],
}


@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["plain", "marked"])
def test_dialects(tmp_path: Path, separator: str, header: list[str], mark: bytes) -> None:
    """Whatever the lines' ends, and packed or not, whatever the name says of it."""
    for i, end in enumerate(["\n", "\r\n"]):
        # No newline at the end of the file.
        lines = [header, GOOD, GOOD] if header else [GOOD, GOOD]
        text = mark + end.join(separator.join(line) for line in lines).encode()
        for name, content in {
            "train.txt": text,
            "day_0.gz": gzip.compress(text),
            "packed.txt": gzip.compress(text),
            "plain.gz": text,
        }.items():
            path = tmp_path / f"{i}-{name}"
            path.write_bytes(content)
            _check(_all(path), [GOOD, GOOD])


@pytest.mark.parametrize("header", [[], NAMES], ids=["no header", "header"])
@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({0: "2"}, "'2' as label"),
        ({0: ""}, "'' as label"),
        ({0: "0x1"}, "'0x1' as label"),
        ({1: "1e3"}, "'1e3' as I1"),
        ({2: "--1"}, "'--1' as I2"),
        ({3: "1.5"}, "'1.5' as I3"),
        ({3: ".0"}, "'.0' as I3"),
        ({4: "12345678901"}, "'12345678901' as I4"),
        ({13: "-"}, "'-' as I13"),
        ({14: "05db91640"}, "'05db91640' as C1"),
        ({39: "xyz"}, "'xyz' as C26"),
        ({39: "-1"}, "'-1' as C26"),
        ({39: "ab\tcd"}, "41 fields"),
        ({38: '"ab"'}, "quoted fields"),
    ],
    ids=str,
)
def test_a_corrupt_line_is_skipped_and_counted_or_refused(
    tmp_path: Path, change: dict[int, str], got: str, header: list[str]
) -> None:
    bad = [change.get(i, field) for i, field in enumerate(GOOD)]
    path = tmp_path / "train.txt"
    lines = [*([header] if header else []), GOOD, bad, GOOD]
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    where, got = f"{path}, line {len(lines) - 1}", re.escape(got)
    files = CriteoFiles([path])
    with pytest.warns(
        UserWarning, match=rf"^1 corrupt lines skipped, the first in {where}: {got}\.$"
    ):
        _check(Records.join(files), [GOOD, GOOD])
    assert files.corrupt == {path: 1}
    with pytest.raises(
        DataError,
        match=rf"^{where} must have a label, 13 integers and 26 hexadecimal ids; got {got}\.$",
    ):
        _all(path)


LINES = "".join("\t".join(GOOD) + "\n" for _ in range(5)).encode()


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"".join(line.partition(b"\t")[2] + b"\n" for line in LINES.splitlines()), "no label: 39"),
        (
            b"".join(b"7\t" + line + b"\n" for line in LINES.splitlines()),
            "an index before the label",
        ),
        (LINES.replace(b"\t", b";"), "fields that are separated by ';'"),
        (LINES.replace(b"\t", b'","'), "quoted fields"),
        (LINES.replace(b"\n", b"\r"), "lines that end in carriage returns alone"),
        (b"It is not clicks.\n" * 5, "1 field, and no record in 5 lines"),
        (b"\x7fELF\0\0\1\n", "binary data"),
    ],
    ids=["labels", "index", "semicolons", "quotes", "returns", "prose", "binary"],
)
def test_a_file_without_a_record_is_refused_and_says_what_it_looks_like(
    tmp_path: Path, content: bytes, got: str
) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(content)
    files = CriteoFiles([path])
    with pytest.raises(DataError, match=rf"^{path}, line 1 must have a label.*; got {got}"):
        list(files)
    assert files.corrupt == {path: content.count(b"\n") or 1}


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (gzip.compress(LINES), "gzip"),
        (b"PK\x03\x04" + LINES, "a zip archive"),
        (bytes(257) + b"ustar" + LINES, "a tar archive"),
        (LINES.decode().encode("utf-16"), "UTF-16 text"),
    ],
    ids=["gzip", "zip", "tar", "utf-16"],
)
def test_other_kinds_of_files_are_refused(tmp_path: Path, content: bytes, kind: str) -> None:
    """Those that are gzip have been packed twice."""
    path = tmp_path / "train.txt"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=rf"^{path}, line 1 must be plain text.*; this is {kind}\."):
        list(CriteoFiles([path]))


def test_a_file_without_records_is_read_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlace_dlrm.criteo._BLOCK_BYTES", 1000)
    path = tmp_path / "train.txt"
    path.write_bytes(b"1,2,3\n" * 2000 + LINES)
    with pytest.raises(
        DataError, match=r"line 1 must have .*; got 3 fields, and no record in 1\d+ "
    ):
        list(CriteoFiles([path]))


def test_short_lines_empty_lines_and_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that a block cuts in two are whole again, and line numbers go on from block to
    block.
    """
    monkeypatch.setattr("interlace_dlrm.criteo._BLOCK_BYTES", 100)
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
    with pytest.warns(
        UserWarning, match="1 corrupt lines skipped, the first in .*, line 8: 3 fields"
    ):
        _check(_all(path, strict=False), [GOOD] * 6)


def test_a_corrupt_line_does_not_decide_on_the_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stands: first in the file, or first in a block."""
    monkeypatch.setattr("interlace_dlrm.criteo._BLOCK_BYTES", 100)
    path = tmp_path / "train.txt"
    path.write_text("a, b, c\n" + ("\t".join(GOOD) + "\nx,y\n") * 7)
    with pytest.warns(
        UserWarning, match=r"^8 corrupt lines skipped, the first in .*, line 1: 1 field\.$"
    ):
        _check(_all(path, strict=False), [GOOD] * 7)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"^CriteoFiles: every path must be a file; got .*nowhere\.$"
    ):
        CriteoFiles([tmp_path / "nowhere"])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(DataError, match=r"cut\.gz must be readable"):
        _all(tmp_path / "cut.gz")
    # Damage between header and checksum is not an OSError.
    packed = bytearray(gzip.compress(LINES * 400, mtime=0))
    for at in range(15, 120, 15):
        packed[at] ^= 0x5A
        (tmp_path / "damaged.gz").write_bytes(packed)
        with pytest.raises(DataError, match=r"damaged\.gz must be readable"):
            _all(tmp_path / "damaged.gz")
        packed[at] ^= 0x5A
    (tmp_path / "zeros.txt").write_bytes(bytes(17 << 20))
    with pytest.raises(
        DataError, match=r"zeros\.txt must consist of lines; got \d+ bytes without an end of line"
    ):
        _all(tmp_path / "zeros.txt")
    for name, content in {"empty.txt": b"", "names.csv": ",".join(NAMES).encode()}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.warns(UserWarning, match=rf"^{tmp_path / name} has no records\.$"):
            assert not sum(map(len, CriteoFiles([tmp_path / name])))


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
