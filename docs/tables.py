"""Write the tables of measurements in ``docs/results.md`` anew: ``python docs/tables.py``.

Each stands below a comment with the command that prints it, whose files are in
``benchmarks/results``. A test compares the tables with the files.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from interlace.cli.app import app

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
# The table of a sweep is followed by how many calls it has.
_TABLE = re.compile(
    r"(<!-- interlace (bench\s+table\s[^>]*?) -->\n\n)(?:\|.*\n)+(?:\n\d+ calls drawn.*\n)?"
)


# The times of calls as programs make them, as benchmarks/host_time.py writes them.
_HOST_TIMES = re.compile(r"(<!-- host times: (\S+) -->\n\n)(?:\|.*\n)+")
_KINDS = ("host", "eager", "graph")


def _host_times(match: re.Match[str]) -> str:
    file = ROOT / "benchmarks" / "results" / match[2]
    lines = [
        "| operator | sizes | host: pair | `auto` | eager: pair | `auto` | graph: pair | `auto` |",
        "|---|---|" + 6 * "---:|",
    ]
    for result in json.loads(file.read_text(encoding="utf-8"))["results"]:
        name, *more = result["call"].split(", ")
        cells = [", ".join([f"`{name}`", *more]), result["sizes"]]
        for kind in _KINDS:
            for way in ("pair", "auto"):
                times = result.get(way, {}).get(kind)
                cells.append("" if times is None else f"{times['median_us']:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return match[1] + "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """Return a page's text, in which the tables are what the commands above them print, and what
    the files above them hold.
    """

    def rendered(match: re.Match[str]) -> str:
        words = shlex.split(match[2])
        files = [str(ROOT / "benchmarks" / "results" / name) for name in words[2:]]
        result = CliRunner().invoke(app, [*words[:2], *files], catch_exceptions=False)
        if result.exit_code:
            raise ValueError(f"{match[2]}: {result.output}")
        *kept, _machines = result.output.strip().split("\n\n")
        return match[1] + "\n\n".join(kept) + "\n"

    return _HOST_TIMES.sub(_host_times, _TABLE.sub(rendered, text))


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
