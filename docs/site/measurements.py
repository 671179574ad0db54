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
from interlace.bench.roles import role_of

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
    elif all("model" in result and "times" in result for result in results):
        yield _table([_call_of_a_model(result) for result in results])
    elif all("times" in result and "floor_us" in result for result in results):
        rows = [row for result in results for row in _rows_of_times(result)]
        yield _table(rows)
    else:
        yield from _nested(results)


def _rows_of_times(result: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each time of an operator's result, the fastest first."""
    start = {
        "operator": f"`{result.get('operator', '')}`",
        "shape": report.shape(result),
        "dtype": result["dtype"],
    }
    for name, time in sorted(result["times"].items(), key=lambda item: item[1]["median_us"]):
        role, impl = role_of(name, time)
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
        for name, time in result["times"].items()
        if role_of(name, time)[0] == "pair"
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


def _nested(results: Sequence[Any]) -> Iterator[str]:
    """Yield what other results hold: a table of those that are flat, and a table for each other."""
    flat = [result for result in results if not _parts(result)]
    if flat:
        yield _table([_scalars(result) for result in flat])
    for result in results:
        for name, part in _parts(result).items():
            about = ", ".join(f"{key} {value}" for key, value in _scalars(result).items())
            yield f"{about}, **{name}**:" if about else f"**{name}**:"
            yield _table(list(_rows_of_part(part)))


def _parts(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a result that are tables themselves: mappings and lists of them."""
    return {
        key: value
        for key, value in result.items()
        if (isinstance(value, dict) and value)
        or (isinstance(value, list) and value and isinstance(value[0], dict))
    }


def _rows_of_part(part: Any) -> Iterator[Row]:
    """Yield a row for each entry of a mapping or of a list of mappings."""
    if isinstance(part, list):
        for entry in part:
            inner = {f"{k}: {n}": v for k, p in _parts(entry).items() for n, v in _flat(p)}
            yield _scalars(entry) | inner
        return
    for name, entry in part.items():
        if isinstance(entry, dict):
            yield {"what": name, **_scalars(entry)}
        else:
            yield {"what": name, "value": entry}


def _flat(part: Any) -> Iterator[tuple[str, object]]:
    if isinstance(part, dict):
        yield from ((name, value) for name, value in part.items() if not isinstance(value, dict))


def _scalars(result: Mapping[str, Any]) -> dict[str, object]:
    return {k: v for k, v in result.items() if not isinstance(v, (dict, list))}


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
