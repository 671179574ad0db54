"""Plain tables for the terminal: no borders, columns two spaces apart."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.table import Table


def make_table(
    *columns: str, left: Collection[str] | None = None, title: str | None = None, **options: Any
) -> Table:
    """Make a table without borders.

    Args:
        columns: Headings in order.
        left: Headings of the columns that are aligned to the left; the first column by default.
            The other columns, which hold numbers, are aligned to the right.
        title: Heading above the table.
        options: Further arguments of every ``rich.table.Table.add_column``. A name or number that
            is too long for a narrow terminal goes on in the next line, and loses nothing.
    """
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name in columns:
        at_left = name in (columns[:1] if left is None else left)
        table.add_column(
            name, justify="left" if at_left else "right", **{"overflow": "fold", **options}
        )
    return table
