"""Write the tables of results, of costs, of clients, of problems and of peers anew: ``python
docs/tables.py``.

Those of measurements stand below a comment with the command that prints them, whose files are in
``benchmarks/results``; those of symmetric memory below one with the sizes, from which the code
computes them; those of versions below one with the client; those of peers below one with the capability. A test compares the tables with these.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import statistics
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from interlace.bench.report import machine_line
from interlace.cli.app import app
from interlace.cli.client_memory import memory_of
from interlace.clients import CLIENTS
from interlace.comm.groups.reservation import GPU_GRANULARITY
from interlace.gemm.choice import default_config
from interlace.gemm.config import GemmConfig
from interlace.gemm.operator import GemmOperator
from interlace.gemm.reservations import on_gpu
from interlace.gemm.terms import Terms
from interlace.registry import operator_named
from interlace.tuning.choice import Choice

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
COSTS = ROOT / "docs" / "costs.md"
CLIENT_PAGES = [ROOT / "docs" / f"{name}.md" for name in CLIENTS]
PROBLEMS = ROOT / "docs" / "parallel-kernel-bench.md"
PEERS = ROOT / "docs" / "peers.md"
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


# What benchmarks/parallel_kernel_bench/run.py writes.
_PROBLEMS = re.compile(
    r"(<!-- problems: (\S+) -->\n\n)(?:\|.*\n|.*right.*\n\n|No results yet\.\n)+"
)


def _problems(match: re.Match[str]) -> str:
    file = ROOT / "benchmarks" / "results" / match[2]
    if not file.exists():
        return match[1] + "No results yet.\n"
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    right = [result for result in results if result["right"]]
    faster = sum(result["ratio"] is not None and result["ratio"] >= 1 for result in right)
    lines = [
        "| problem | lines | right | reference, us | Interlace, us | ratio |",
        "|---|---:|---|" + 3 * "---:|",
    ]
    for result in results:
        times = (result["reference_us"], result["time_us"])
        cells = [result["problem"], str(result["lines"]), "yes" if result["right"] else "no"]
        cells += ["" if time is None else f"{time:.0f}" for time in times]
        cells.append("" if result["ratio"] is None else f"{result['ratio']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    summary = f"{len(right)} of {len(results)} are right, {faster} of them at least as fast."
    return match[1] + summary + "\n\n" + "\n".join(lines) + "\n"


# What benchmarks/peers writes, by capability: of each peer and size the result of the last file.
PEER_FILES = "*-peers*.json"
_PEERS = re.compile(
    r"(<!-- peers: ([\w +,-]+) -->\n\n)(?:\|.*\n|No file yet.*\n|\n?Interlace's time as a part.*\n)+"
)
_NO_PEERS = "No file yet: `make bench-peers`, on two GPUs, writes one.\n"
_WAYS = {"graph": ("alone", "pair", "peer", "Interlace"), "eager": ("pair", "peer", "Interlace")}
_WAYS["host"] = _WAYS["eager"]


def _medians(result: dict[str, Any], kind: str) -> dict[str, float]:
    """Return the fastest median of the pairs, of the peer's ways, and of the others, in us."""
    medians: dict[str, float] = {}
    for name, told in result["ways"].items():
        if kind in told:
            way = "peer" if name in result["of_peer"] else name.split(",")[0]
            median = told[kind]["median_us"]
            medians[way] = min(median, medians.get(way, median))
    return medians


def _against(peer: str, results: list[dict[str, Any]]) -> str:
    """Return a sentence with Interlace's times as parts of a peer's."""
    parts, most = [], 0
    for kind, words in (("graph", "in graphs"), ("eager", "eager"), ("host", "of the host")):
        pairs = [_medians(result, kind) for result in results]
        ratios = [each["Interlace"] / each["peer"] for each in pairs if each.keys() >= _BOTH]
        most = max(most, len(ratios))
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            parts.append(f"{mean:.2f} {words} ({min(ratios):.2f} to {max(ratios):.2f})")
    # A peer that refuses a call is in no ratio of it.
    calls = f"{most} call{'s'[: most > 1]}"
    return f"Interlace's time as a part of {peer}'s, {calls}: {', '.join(parts)}." if parts else ""


_BOTH = {"Interlace", "peer"}


def _peer_documents() -> list[tuple[str, dict[str, Any]]]:
    files = sorted((ROOT / "benchmarks" / "results").glob(PEER_FILES))
    return [(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in files]


def _peer_versions(documents: list[tuple[str, dict[str, Any]]]) -> str:
    lines = ["| peer | version | measured on | file |", "|---|---|---|---|"]
    for name, document in documents:
        link = f"[{name.removesuffix('.json')}](../benchmarks/results/{name})"
        for peer, known in document["peers"].items():
            if "version" in known:
                machine = machine_line(document["machine"], document["date"])
                lines.append(f"| {peer} | {known['version']} | {machine} | {link} |")
    return "\n".join(lines) + "\n"


def _peers(match: re.Match[str]) -> str:
    documents = _peer_documents()
    if not documents:
        return match[1] + _NO_PEERS
    if match[2] == "versions":
        return match[1] + _peer_versions(documents)
    last = {
        (result["peer"], result["sizes"]): result
        for _, document in documents
        for result in document["results"]
        if result["capability"] == match[2]
    }
    if not last:
        return match[1] + _NO_PEERS
    rows: dict[tuple[str, str], list[float | None]] = {}
    of_peers: dict[str, list[dict[str, Any]]] = {}
    for (peer, sizes), result in last.items():
        times = {kind: _medians(result, kind) for kind in _WAYS}
        rows[sizes, peer] = [times[kind].get(way) for kind, ways in _WAYS.items() for way in ways]
        of_peers.setdefault(peer, []).append(result)
    heads = [f"{kind}: {way}" for kind, ways in _WAYS.items() for way in ways]
    known = [place for place, _ in enumerate(heads) if any(row[place] for row in rows.values())]
    lines = [f"| {' | '.join(['sizes', 'peer', *(heads[place] for place in known)])} |"]
    lines.append("|---|---|" + len(known) * "---:|")
    for names, row in rows.items():
        cells = ["" if row[place] is None else f"{row[place]:.0f}" for place in known]
        lines.append(f"| {' | '.join([*names, *cells])} |")
    sentences = [text for each in of_peers.items() if (text := _against(*each))]
    return match[1] + "\n".join(lines) + "\n" + "".join(f"\n{text}\n" for text in sentences)


# The symmetric memory of an operator's implementations, by N and K of a rank's product, ranks and
# tokens.
_MEMORY = re.compile(
    r"(<!-- symmetric memory: (\w+), (\d+) columns, (\d+) inner, (\d+) ranks, tokens ([\d ]+) -->"
    r"\n\n)(?:\|.*\n)+"
)
_SHARED_BYTES = 227 << 10  # of an H100 and an H200


def _memory(match: re.Match[str]) -> str:
    operator, columns, inner, ranks = match[2], *map(int, match.groups()[2:5])
    tokens = [int(number) for number in match[6].split()]
    declaration = operator_named(operator)
    assert isinstance(declaration, GemmOperator)
    cells: dict[str, list[str]] = {each.name: [] for each in declaration.implementations}
    for rows in tokens:
        config = default_config(
            declaration.config_type if declaration.command_module else GemmConfig,
            rows=rows // ranks, inner=inner, dtype=torch.bfloat16, shared_bytes=_SHARED_BYTES,
        )  # fmt: skip
        choice = Choice("fused", config, "")
        found = on_gpu(declaration, rows, columns, inner, torch.bfloat16, ranks, choice)
        terms = Terms.of_sizes(rows, columns, torch.bfloat16, "cuda", ranks)
        terms = dataclasses.replace(terms, is_even=rows % ranks == 0)
        for implementation in declaration.implementations:
            # PyTorch's own need another PyTorch on some machines, where nothing else differs.
            is_refused = not implementation.is_stock and implementation.refusal(terms) is not None
            reservation = None if is_refused else found.get(implementation.name)
            nbytes = None if reservation is None else reservation.nbytes(GPU_GRANULARITY)
            cells[implementation.name].append(
                "" if nbytes is None else f"{nbytes >> 20:,} MiB" if nbytes else "none"
            )
    lines = [
        "| implementation | "
        + " | ".join(f"{number} token{'s'[: number > 1]}" for number in tokens)
        + " |",
        "|---|" + len(tokens) * "---:|",
        *(f"| `{name}` | {' | '.join(row)} |" for name, row in cells.items() if any(row)),
    ]
    return match[1] + "\n".join(lines) + "\n"


# The versions of a client that were run, and the symmetric memory of models in it, by ranks and tokens.
_VERSIONS = re.compile(r"(<!-- versions of (\w+) -->\n\n)(?:\|.*\n)+")
_CLIENT_MEMORY = re.compile(r"(<!-- memory of (\w+): ([^;]+); tokens ([\d ]+) -->\n\n)(?:\|.*\n)+")


def _versions(match: re.Match[str]) -> str:
    lines = ["| version | ran on |", "|---|---|"]
    lines += [f"| {run.version} | {run.ran_on} |" for run in CLIENTS[match[2]].runs]
    return match[1] + "\n".join(lines) + "\n"


def _client_memory(match: re.Match[str]) -> str:
    tokens = [int(number) for number in match[4].split()]
    lines = [
        "| model | GPUs | " + " | ".join(f"{number:,} tokens" for number in tokens) + " |",
        "|---|---:|" + len(tokens) * "---:|",
    ]
    for model_and_ranks in match[3].split(", "):
        model, ranks = model_and_ranks.split()
        cells = []
        for number in tokens:
            memory = memory_of(CLIENTS[match[2]], model, number, int(ranks), "h200", torch.bfloat16)
            cells.append(f"{memory.first >> 20:,}, at most {memory.most >> 20:,} MiB")
        lines.append("| " + " | ".join([model, ranks, *cells]) + " |")
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

    text = _PROBLEMS.sub(_problems, _TABLE.sub(rendered, text))
    text = _PEERS.sub(_peers, text)
    text = _MEMORY.sub(_memory, _HOST_TIMES.sub(_host_times, text))
    return _CLIENT_MEMORY.sub(_client_memory, _VERSIONS.sub(_versions, text))


if __name__ == "__main__":
    for page in (PAGE, COSTS, PROBLEMS, PEERS, *CLIENT_PAGES):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
