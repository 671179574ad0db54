"""Files of ``benchmarks/results`` as pages: every time of every result, in tables.

The tables of ``docs/results.md`` are those of ``interlace bench table``; these are the rest of what
the files hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.bench import report
from interlace.bench.report import role_of

Row = Mapping[str, object]
_RESULTS = "benchmarks/results"


def page_of(file: Path) -> str:
    """Return the page of one file: its machine, its command, and its results."""
    document = json.loads(file.read_text(encoding="utf-8"))
    parts = [
        f"# {file.stem}",
        report.machine_line(document["machine"], document.get("date", "")),
        *([f"{document['what']}."] if "what" in document else []),
        f"The file: [{file.name}]({file.name}).",
    ]
    if document.get("command"):
        parts.append("```{.text .wrapped}\n" + document["command"].replace("; ", "\n") + "\n```")
    parts += _tables(document)
    return "\n\n".join(parts) + "\n"


def index_of(files: Iterable[Path]) -> str:
    """Return a table of files, which stand in one folder or below it."""
    rows = []
    for file in files:
        document = json.loads(file.read_text(encoding="utf-8"))
        name = file.as_posix().rsplit(f"{_RESULTS}/", 1)[1]
        gpus = document["machine"].get("gpus") or []
        rows.append(
            {
                "date": document.get("date", "")[:10],
                "file": f"[{name.removesuffix('.json')}]({name}.md)",
                "GPUs": len(gpus),
                "results": len(document.get("results", [])) or None,
            }
        )
    return "\n" + _table(sorted(rows, key=lambda row: (row["date"], row["file"]), reverse=True))


def _tables(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of a document, or its text if it has no list of results."""
    results = document.get("results")
    if not isinstance(results, list):
        rest = {key: value for key, value in document.items() if key not in ("machine", "command")}
        yield f"```json\n{json.dumps(rest, indent=1)}\n```"
    elif "columns" in document:
        # Many short results: the names of their values stand once, before them.
        names = document["columns"]
        yield _table([dict(zip(names, values, strict=True)) for values in results])
    elif all("model" in result and "times" in result for result in results):
        yield _table([_call_of_a_model(result) for result in results])
    elif all("times" in result and "floor_us" in result for result in results):
        rows = [row for result in results for row in _rows_of_times(result)]
        yield _table(rows)
    else:
        yield from _sections(results)


def _rows_of_times(result: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each time of an operator's result, the fastest first."""
    start = {
        "operator": f"`{result.get('operator', '')}`",
        "shape": report.shape(result),
        "dtype": result["dtype"],
    }
    for name, time in sorted(result["times"].items(), key=lambda item: item[1]["median_us"]):
        role, impl = role_of(time)
        yield {
            **start,
            "what": f"`impl=\"{impl}\"`, {name}" if impl and impl != name else name,
            "role": role,
            "median us": time["median_us"],
            "p10 us": time.get("p10_us"),
            "p90 us": time.get("p90_us"),
            "skew us": time.get("skew_us"),
        }
    yield {**start, "what": "physical floor", "role": "floor", "median us": result["floor_us"]}


def _call_of_a_model(result: Mapping[str, Any]) -> Row:
    """Return the row of a call of a sweep."""
    times = report.impl_times(result)
    pairs = [
        report.median_us(time)
        for time in result["times"].values()
        if role_of(time)[0] == "pair"
    ]
    best = min(times, key=times.__getitem__)
    auto = result["times"].get(result["auto"])
    row = {
        "model": f"{result['model']}, {result['layer']}",
        "operator": f"`{result['operator']}`",
        "M": result["rows"],
        "N": result["columns"],
        "K": result["inner"],
        "predicted": f"`{result['auto']}`",
        "its us": report.median_us(auto) if auto else None,
        "fastest": f"`{best}`",
        "fastest us": times[best],
        "best stock pair us": min(pairs, default=None),
    }
    if auto and pairs:
        row["predicted / pair"] = report.median_us(auto) / min(pairs)
    return row


def _sections(results: Iterable[Mapping[str, Any]], about: str = "") -> Iterator[str]:
    """Yield other results as tables: one of those that hold times or no table themselves, and then
    those that they hold, each below a line that says what it is.
    """
    rows, below = [], []
    for result in results:
        tables = {key: value for key, value in result.items() if _is_table(value)}
        row = _row_of({key: value for key, value in result.items() if key not in tables})
        is_shown = not tables or "median_us" in row
        rows += [row] if is_shown else []
        words = str(row.get("what", "")) if is_shown else _words(row)
        for name, table in tables.items():
            entries = table if isinstance(table, list) else _entries(table)
            below += _sections(entries, ", ".join(filter(None, [about, words, name])))
    if rows:
        yield f"{about}:" if about else ""
        yield _table(rows)
    yield from below


def _is_table(value: Any) -> bool:
    """Return whether a value is a list of mappings, or a mapping of them."""
    inner = value.values() if isinstance(value, dict) else value
    return isinstance(value, (list, dict)) and bool(value) and all(isinstance(v, dict) for v in inner)


def _entries(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"what": name, **entry} for name, entry in table.items()]


def _row_of(result: Mapping[str, Any]) -> dict[str, object]:
    """Return a result's values by their names; those of a mapping in it have both names."""
    row: dict[str, object] = {}
    for key, value in result.items():
        if isinstance(value, dict):
            row |= {f"{key}, {name}": inner for name, inner in _row_of(value).items()}
        elif not isinstance(value, list):
            row[key] = value
    return row


def _words(row: Row) -> str:
    """Return a row as text: what it is, and the names and values of the rest."""
    rest = (f"{key} {_cell(value)}" for key, value in row.items() if key not in ("what", "command"))
    command = [f"`{row['command']}`"] if "command" in row else []
    return ", ".join([*(str(row[key]) for key in ("what",) if key in row), *rest, *command])


def _table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table with a column for each key; numbers are to the right.

    What is the same in all rows is said once, above the table.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    first = rows[0]
    same = [key for key in columns if all(row.get(key) == first.get(key) for row in rows)]
    if len(rows) > 2 and same:
        columns = [key for key in columns if key not in same]
        about = ", ".join(f"{key} {_cell(first[key])}" for key in same if first.get(key) is not None)
        head = [f"All: {about}.", ""] if about else []
    else:
        head = []
    numbers = {
        key
        for key in columns
        if all(isinstance(row.get(key), (int, float, type(None))) for row in rows)
    }
    lines = [
        *head,
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("---:" if key in numbers else "---" for key in columns) + "|",
    ]
    lines += ["| " + " | ".join(_cell(row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:#.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value).replace("|", "\\|").replace("\n", " ")
