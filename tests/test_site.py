"""What ``make docs`` checks of the site it has built, on sites that are made here; and the pages of
measurements.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import interlace
from tests.site import faults_of

ROOT = Path(__file__).parents[1]


_ORDER = ("compile.html", "api/operators.html", "architecture.html", "decisions/index.html")


def _site(folder: Path, boosts: tuple[float, ...] = (4.0, 3.0, 1.0, 0.5), **pages: str) -> Path:
    """Write pages and what the search counts those of ``_ORDER`` for."""
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    ranked = [
        {"location": page, "boost": boost} for page, boost in zip(_ORDER, boosts, strict=True)
    ]
    (folder / "search").mkdir()
    (folder / "search" / "search_index.json").write_text(json.dumps({"docs": ranked}))
    return folder


def test_a_site_whose_links_lead_somewhere(tmp_path: Path) -> None:
    site = _site(
        tmp_path,
        index=f"<title>A site of Interlace {interlace.__version__}</title>"
        '<a href="other.html#part">there</a><a href="https://elsewhere.org/">away</a>',
        other='<h2 id="part">Part</h2><a href="#part">here</a><a href="index.html">back</a>',
    )
    (site / "style.css").write_text("a { background: url(data:image/png;base64,AAAA) }")
    assert faults_of(site) == []


def test_what_is_wrong_with_a_site(tmp_path: Path) -> None:
    site = _site(
        tmp_path,
        (4.0, 3.0, 3.0, 0.5),
        index='<link href="https://fonts.org/a.css"><script src="none.js"></script>'
        '<a href="other.html#part">no anchor</a><a href="gone.html">no file</a>',
        other="",
    )
    (site / "style.css").write_text("@font-face { src: url('//fonts.org/a.woff2') }")
    assert faults_of(site) == [
        "index.html: https://fonts.org/a.css is fetched from another host",
        "index.html: none.js is fetched and does not exist",
        "index.html: the link other.html#part leads to no anchor",
        "index.html: the link gone.html leads to no file",
        "style.css: //fonts.org/a.woff2 is fetched from another host",
        f"index.html: the title must end with Interlace {interlace.__version__}",
        "search: compile.html, api/operators.html, architecture.html, decisions/index.html must "
        "count for less and less; they count [4.0, 3.0, 3.0, 0.5]",
    ]


def test_every_file_of_measurements_is_a_page(tmp_path: Path) -> None:
    page_of = runpy.run_path(str(ROOT / "docs" / "site" / "measurements.py"))["page_of"]
    files = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
    assert files
    for file in files:
        assert page_of(file).startswith(f"# {file.stem}\n")
    # Short results may name their values once.
    file = tmp_path / "named.json"
    results = {"columns": ["rows", "us"], "results": [[1, 2.5], [16, None]]}
    file.write_text(json.dumps({"machine": {}, **results}))
    assert page_of(file).endswith("| rows | us |\n|---:|---:|\n| 1 | 2.50 |\n| 16 |  |\n\n")
