"""Write the tables of measurements in ``docs/results.md`` anew: ``python docs/tables.py``.

Each stands below a comment with the command that prints it, whose files are in
``benchmarks/results``. A test compares the tables with the files.
"""

from __future__ import annotations

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


def with_tables(text: str) -> str:
    """Return a page's text, in which the tables are what the commands above them print."""

    def rendered(match: re.Match[str]) -> str:
        words = shlex.split(match[2])
        files = [str(ROOT / "benchmarks" / "results" / name) for name in words[2:]]
        result = CliRunner().invoke(app, [*words[:2], *files], catch_exceptions=False)
        if result.exit_code:
            raise ValueError(f"{match[2]}: {result.output}")
        *kept, _machines = result.output.strip().split("\n\n")
        return match[1] + "\n\n".join(kept) + "\n"

    return _TABLE.sub(rendered, text)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
