"""Pages that list what is in the code: the reference, the primitives' signatures, the examples."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import math
import re
import runpy
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import interlace
from benchmarks.peers.capabilities import CAPABILITIES
from interlace import errors
from interlace.clients import CLIENTS

ROOT = Path(__file__).parents[1]
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
SOURCES = ROOT / "src"


def _first_cells(heading: str) -> list[str]:
    """Return the names in the first column of the tables below a heading of the reference."""
    section = REFERENCE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)


def test_every_public_name_has_its_line() -> None:
    public = set(interlace.__all__) - {"__version__"}
    raised = {name for name in public if name.endswith("Error")}
    assert sorted(_first_cells("Public names")) == sorted(public - raised)
    assert raised <= set(re.findall(r"\w+", REFERENCE.split("## Errors\n")[1].split("\n## ")[0]))


def test_every_environment_variable_has_its_line() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    words = {
        word
        for file in files
        for word in re.findall(r"\bINTERLACE_[A-Z_]*[A-Z]", file.read_text(encoding="utf-8"))
    }
    assert _first_cells("Environment variables") == sorted(words)


def test_the_tree_of_errors_is_that_of_the_module() -> None:
    tree = textwrap.dedent(errors.__doc__.split("::\n\n")[1].split("\n\nA message")[0])
    assert f"```\n{tree}\n```\n" in REFERENCE
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == {*re.findall(r"\w*Error\b(?!\))", tree)}


def test_errors_of_the_packages_beside_it_are_caught_as_well() -> None:
    named = re.findall(r"`(interlace_\w+)\.(\w+Error)`", REFERENCE)
    assert sorted(name for _, name in named) == [
        "DataError",
        "ProtocolError",
        "UnphysicalError",
    ]
    for package, name in named:
        assert issubclass(getattr(importlib.import_module(package), name), interlace.InterlaceError)


def test_every_field_of_faults_has_its_line() -> None:
    assert _first_cells("Fault injection") == list(interlace.Faults.__dataclass_fields__)


@pytest.mark.parametrize(
    ("folder", "module", "prefix"),
    [("interlace/language", "__init__.py", "il."), ("interlace_gin", "language.py", "")],
)
def test_signatures_of_the_language(folder: str, module: str, prefix: str) -> None:
    """The README has the signature of every public primitive, as the source has it."""
    from_source = {}
    for file in (SOURCES / folder).glob("*.py"):
        # The interpreter's twins of instructions have the same signatures.
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                from_source[node.name] = ast.unparse(node.args)
    text = (SOURCES / folder / "README.md").read_text(encoding="utf-8")
    block = text.split("## Signatures\n")[1].split("```\n")[1]
    block = re.sub(r"\n +", " ", block)
    listed = dict(re.findall(rf"^{re.escape(prefix)}(\w+)\((.*)\)$", block, flags=re.MULTILINE))
    public = ast.literal_eval((SOURCES / folder / module).read_text().split("__all__ = ")[1])
    assert sorted(listed) == public
    for name, arguments in listed.items():
        expected = from_source[name].replace("_RELEASE", "'release'")
        assert ast.unparse(ast.parse(f"def f({arguments}): pass").body[0].args) == expected


@pytest.mark.parametrize("folder", ["", "demos", "integrations", "notebooks"])
def test_every_example_has_its_line(folder: str) -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w/]+\.(?:py|ipynb))\)", text))
    here = [
        file
        for file in (ROOT / "examples" / folder).glob("*.*")
        if file.suffix in (".py", ".ipynb")
    ]
    assert {link for link in listed if str(Path(link).parent) == (folder or ".")} == {
        str(Path(folder) / file.name) for file in here
    }


def test_tables_of_results_are_those_of_the_measurements() -> None:
    """If this fails, ``python docs/tables.py`` writes them anew."""
    script = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    text = script["PAGE"].read_text(encoding="utf-8")
    tables = re.findall(r"^\|---", text, flags=re.MULTILINE)
    kinds = "<!-- interlace bench table", "<!-- host times", "<!-- figures of"
    # The first table is checked by a test of its own, below.
    assert sum(map(text.count, kinds)) == len(tables) - 1
    assert script["with_tables"](text) == text


def test_tables_of_memory_are_what_the_code_computes() -> None:
    """If this fails, ``python docs/tables.py`` writes them anew."""
    script = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    text = script["COSTS"].read_text(encoding="utf-8")
    assert text.count("<!-- symmetric memory") == 4
    assert script["with_tables"](text) == text


def test_tables_of_clients_are_what_the_code_has() -> None:
    """If this fails, ``python docs/tables.py`` writes them anew."""
    script = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    for page in script["CLIENT_PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert text.count(f"<!-- versions of {page.stem} -->") == 1
        assert script["with_tables"](text) == text
    vllm = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert vllm.count("<!-- memory of vllm") == 1


def test_pages_of_clients_say_what_doctor_says() -> None:
    """Each has the line, the check and the counter."""
    for client in CLIENTS.values():
        text = (ROOT / "docs" / f"{client.name}.md").read_text(encoding="utf-8")
        assert client.line in text
        assert re.search(rf"doctor --client {client.name}\b", text)
        assert "interlace.counts()" in text
        assert not client.variable or f"{client.variable}=0" in text


def test_tables_of_peers_are_those_of_the_measurements(tmp_path: Path) -> None:
    """If this fails, ``python docs/tables.py`` writes them anew."""
    script = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    text = script["PEERS"].read_text(encoding="utf-8")
    assert re.findall("<!-- peers: (.*) -->", text) == ["versions", *CAPABILITIES]
    assert script["with_tables"](text) == text
    # From a file: the fastest of a peer's ways, none that has failed, and of two files the last.
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    ways = {"pair": (10, 8), "Interlace": (6, 4), "QuACK, 1": (9, 5), "QuACK, 2": (7, 8)}
    result = {
        "peer": "QuACK", "capability": "all-gather + GEMM", "sizes": "8 x 8 x 8",
        "of_peer": ["QuACK, 1", "QuACK, 2", "QuACK, 3"],
        "ways": {
            name: {"host": {"median_us": host}, "graph": {"median_us": graph}}
            for name, (host, graph) in ways.items()
        } | {"QuACK, 3": {"failed": "wrong by 1"}},
    }  # fmt: skip
    peers = {"QuACK": {"version": "0.6.5", "install": ""}, "vLLM": {"install": ""}}
    document = {"machine": {}, "date": "2026-12-01", "peers": peers, "results": [result]}
    for day, times in (("2026-12-01", result), ("2026-12-02", result)):
        (results / f"{day}-peers.json").write_text(json.dumps(document | {"results": [times]}))
    script["with_tables"].__globals__["ROOT"] = tmp_path
    written = script["with_tables"](text)
    assert "| 8 x 8 x 8 | QuACK | 8 | 5 | 4 | 10 | 7 | 6 |\n" in written
    assert "QuACK's, 1 call: 0.80 in graphs (0.80 to 0.80), 0.86 of the host" in written
    assert written.count("| QuACK | 0.6.5 |") == 2
    assert "| vLLM |" not in written.split("## All-gather")[0]
    assert written.count("No file yet") == len(CAPABILITIES) - 1
    assert written.count("Why: ") == text.count("Why: ") > 1
    assert script["with_tables"](written) == written


def test_the_table_of_problems_is_that_of_the_measurement() -> None:
    """If this fails, ``python docs/tables.py`` writes it anew."""
    script = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    text = script["PROBLEMS"].read_text(encoding="utf-8")
    assert text.count("<!-- problems") == 1
    assert script["with_tables"](text) == text


def test_every_page_has_its_place_in_the_site() -> None:
    """``make docs`` refuses a page without one; decisions and operators follow from folders."""
    order = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    names = [page.relative_to(ROOT).as_posix() for page in pages]
    assert [name for name in names if f": {name}\n" not in order] == []


def test_the_citation_has_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == interlace.__version__
    assert citation["license"] == "Apache-2.0"


def test_what_is_tested_together_is_what_commands_run() -> None:
    """Versions of the matrix are those of the Makefile; classifiers are Pythons that were run."""
    section = REFERENCE.split("## What is tested together\n")[1].split("\n## ")[0]
    rows = [_cells(row) for row in re.findall(r"^\| \d.*", section, flags=re.MULTILINE)]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    script = (ROOT / "tests" / "pythons.py").read_text(encoding="utf-8")
    by_command = {
        command: row for row in rows for command in re.findall(r"`(make [\w-]+)`", row[4])
    }

    def pinned(name: str, text: str = makefile) -> list[str]:
        return re.findall(rf"{name}==([\d.]+)", text)

    (torch,), (triton, oldest) = pinned("torch"), pinned("triton")
    assert by_command["make test"][1:3] == [f"{torch}, CPU build", triton]
    assert by_command["make test-oldest-triton"][1:3] == [f"{torch}, CPU build", oldest]
    assert f" NCCL {pinned('nvidia-nccl-cu13')[0]}" in by_command["make test-gin"][5]
    for package, name in (("torchrec", "TorchRec"), ("torchtitan", "torchtitan")):
        assert f"{name} {pinned(package)[0]}" in by_command["make test-integrations"][5]
    others = by_command["make test-pythons"]
    assert others[1] == f"{pinned('torch', script)[0]}, CUDA build"
    assert f"\nPYTHONS = {others[0].replace(',', '')}\n" in makefile
    # In CI is what CI runs.
    runs = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command, row in by_command.items():
        is_run = command in re.findall(r"^make [\w-]+", runs, flags=re.MULTILINE)
        assert (row[6] == "CI") == is_run, command
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = {python for row in rows for python in row[0].split(", ")}
    assert pythons == set(re.findall(r":: (3\.\d+)", "\n".join(project["classifiers"])))
    for bound in ("torch>=2.11", "triton>=3.6;", "numpy<2.5"):
        assert any(line.startswith(bound) for line in project["dependencies"])
    assert "Python 3.11, torch 2.11 and Triton 3.6 or later, and NumPy below 2.5" in section
    assert project["requires-python"] == ">=3.11"


def test_the_changelog_can_be_read_in_one_go() -> None:
    """History is a page of its own; a version has no heading twice."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 120
    for version in text.split("\n## ")[1:]:
        headings = re.findall(r"^### (.*)$", version, flags=re.MULTILINE)
        assert len(headings) == len(set(headings))


def test_setup_takes_the_index_of_cpu_builds() -> None:
    """The index is for torch alone, and absent unless it is given."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert makefile.count("$(TORCH_INDEX:%=--index-url %) torch==") == 1
    assert re.search(r"^TORCH_INDEX =$", makefile, flags=re.MULTILINE)
    assert "http" not in makefile


def _numbers(value: Any) -> Iterator[float]:
    """Yield every number of a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def _is_rounded(figure: str, value: float) -> bool:
    """Return whether a figure is a value, of the same unit or of a thousandth of it, rounded."""
    half = 0.5001 * 10.0 ** -len(figure.partition(".")[2])
    return any(abs(value * unit - float(figure)) <= half for unit in (1.0, 1e-3))


_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BY_HAND = re.compile(r"<!-- figures of ([^>]*?) -->\n\n(\|.*)\n\|-.*\n((?:\|.*\n)+)")


def _cells(row: str) -> list[str]:
    return [cell.strip(" *") for cell in row[1:-1].split("|")]


def _figures(cell: str) -> list[str]:
    return [figure.replace(",", "") for figure in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]


def test_figures_of_tables_kept_by_hand_are_in_the_files_that_they_name() -> None:
    """Of every cell that begins with a number and has no percentage, but for the first column."""
    tables = checked = 0
    for page in _PAGES:
        for names, heading, rows in _BY_HAND.findall(page.read_text(encoding="utf-8")):
            tables += 1
            measured = {
                value
                for name in names.split()
                for value in _numbers(json.loads((RESULTS / name).read_text(encoding="utf-8")))
            }
            for row in rows.splitlines():
                cells = _cells(row)
                if cells[0] == "ratio":
                    continue
                for i, (name, cell) in enumerate(zip(_cells(heading), cells, strict=True)):
                    if i == 0 or "%" in cell or not cell[:1].isdigit():
                        continue
                    if name == "ratio":
                        (pair,), (auto,) = map(_figures, cells[i - 2 : i])
                        assert _is_rounded(_figures(cell)[0], float(auto) / float(pair)), row
                        continue
                    for figure in _figures(cell):
                        checked += 1
                        assert any(_is_rounded(figure, value) for value in measured), (
                            f"{page.name}: {figure} of {row} is not in {names}"
                        )
    assert tables >= 24
    assert checked > 400


def _times(file: str, ours: str, pair: str, **sizes: Any) -> tuple[float, float]:
    """Return two times of the one result of a file that has these sizes."""
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))["results"]
    (result,) = (each for each in results if sizes.items() <= each.items())
    return tuple(result["times"][name]["median_us"] for name in (ours, pair))  # type: ignore[return-value]


def _ways(file: str, ours: str, pair: str, *keys: str, index: int | None = None) -> Any:
    """Return two numbers of the entries of these ways in a file's results, or in one of them."""
    entries = json.loads((RESULTS / file).read_text(encoding="utf-8"))["results"]
    ways = {each["way"]: each for each in (entries if index is None else entries[index]["ways"])}
    found = []
    for way in (ours, pair):
        value = ways[way]
        for key in keys:
            value = value[key]
        found.append(value)
    return found


def _ratios(*seeds: str) -> list[float]:
    """Return auto / pair of every call of some sweeps."""
    results = [
        result
        for seed in seeds
        for result in json.loads((RESULTS / f"{seed}.json").read_text(encoding="utf-8"))["results"]
    ]
    ratios = []
    for result in results:
        times = result["times"]
        pairs = [time["median_us"] for time in times.values() if time["role"] == "pair"]
        ratios.append(times[result["auto"]]["median_us"] / min(pairs))
    return ratios


def _geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _eager_ratios(file: str) -> list[float]:
    """Return auto / pair of every call that has a pair and comes again, in an eager program."""
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))["results"]
    return [
        each["auto"]["eager"]["median_us"] / each["pair"]["eager"]["median_us"]
        for each in results
        if "pair" in each and "new rows" not in each["call"]
    ]


def test_the_first_table_of_the_results() -> None:
    """Times, their changes and numbers of calls, in the order of its rows."""
    products = {"shape": "8192 x 8192 x 2048"}
    decoding = "exploration/2026-11-25-huggingface-decode-2xh200.json"
    step = json.loads((RESULTS / decoding).read_text(encoding="utf-8"))["results"][0]
    expected = [
        _times("2026-11-20-gemv_all_reduce-4xh200-one-token.json", "gemv",
               "cuBLAS + torch two-shot", columns=8192, inner=2048),
        _times("2026-11-21-gemm_reduce_scatter-4xh200.json", "chunked",
               "torch async-TP", **products),
        _times("2026-11-21-gemm_all_to_all-4xh200.json", "fused", "cuBLAS + NCCL", **products),
        _times("2026-11-21-embedding_all_to_all-4xh200-forward.json", "fused", "our bags + NCCL",
               shape="64 x 200000 x 256, B = 4096, L = 8"),
        _times("2026-11-21-mixture_of_experts-4xh200.json", "fused",
               "torch._grouped_mm + NCCL + permutes + sum",
               shape="4096 tokens, 64 x 2048 x 1408, top 6, balanced, forward"),
        _ways("2026-11-21-compile-4xh200.json", "interlace", "Inductor, async-TP",
              "step_ms", "median", index=0),
        (step["interlace_us"], step["inductor_us"]),
        _times("2026-11-23-decoding-2xh200-seed-12.json", "fused",
               "cuBLAS + FlashInfer one-shot", shape="1 x 8192 x 3584", dtype="bfloat16"),
        _ways("2026-11-25-transformers-experts-2xh200.json", "interlace", "all_reduce", "block",
              "median_us"),
    ]  # fmt: skip
    table = (ROOT / "docs/results.md").read_text(encoding="utf-8").split("## In short\n")[1]
    lines = re.findall(r"^\|.*", table.split("\n## ")[0], flags=re.MULTILINE)
    rows = [_cells(line) for line in lines[2:]]
    assert len(rows) == len(expected) + 4
    for cells, (ours, pair) in zip(rows, expected, strict=False):
        for cell, value in ((cells[2], ours), (cells[3], pair)):
            figure = cell.split()[0]
            assert _is_rounded(figure, value), (cells, value)
        assert cells[4] == f"{100 * (ours / pair - 1):+.0f} %", cells
    for cells, seeds in (
        (rows[-4], [f"2026-11-26-sweep-2xh200-seed-{seed}" for seed in (214, 215, 216)]),
        (rows[-3], [f"2026-11-25-sweep-2xh100-seed-{seed}" for seed in (305, 306, 307, 308)]),
        (
            rows[-2],
            [f"2026-11-27-sweep-any-size-2xh100-seed-{seed}" for seed in (411, 412, 413)]
            + [f"2026-11-28-sweep-any-size-2xh100-seed-{seed}" for seed in (414, 415)],
        ),
    ):
        ratios = _ratios(*seeds)
        assert f" {len(ratios)} " in cells[0], cells
        assert cells[4] == f"{100 * (_geometric_mean(ratios) - 1):+.0f} %", cells
    ratios = _eager_ratios("2026-11-27-host_time-2xh100.json")
    assert f" {len(ratios)} calls" in rows[-1][0]
    assert rows[-1][4] == f"{100 * (_geometric_mean(ratios) - 1):+.0f} %"


def _less(ratios: Iterable[float]) -> tuple[float, float]:
    """Return the least and the largest gain, in percent of the time without Interlace."""
    gains = [100 * (1 - ratio) for ratio in ratios]
    return min(gains), max(gains)


def _row(program: str) -> str:
    """Return the gains in a row of the first page's table, which begins with ``program``."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {program}"))
    return _cells(line)[3]


def test_gains_on_the_first_page_are_those_that_were_measured() -> None:
    """Each range is that of all sizes of a file, or what is said of it."""
    way = functools.partial(_ways, "2026-11-25-transformers-experts-2xh200.json", "interlace",
                            "all_reduce")  # fmt: skip
    layer, step = way("block", "median_us"), way("step", "median_us")
    experts = _row("transformers, experts")
    assert f"{100 * (1 - layer[0] / layer[1]):.0f} % of a layer's experts" in experts
    assert f"{100 * (1 - step[0] / step[1]):.0f} % of a step" in experts
    for text, (ours, pair) in _of_dense_models().items():
        assert f"{text} {100 * (1 - ours / pair):.0f} %" in _row("transformers, by `tp_plan`")

    seeds = [f"2026-11-26-sweep-2xh200-seed-{seed}" for seed in (214, 215, 216)]
    ratios = _ratios(*seeds)
    saved = f"{100 * (1 - _geometric_mean(ratios)):.0f} % on average over {len(ratios)} random"
    eager = _eager_ratios("2026-11-30-host_time-products-2xh200.json")
    own = _row("linear layers of your own")
    assert saved + f" calls, the worst {100 * (max(ratios) - 1):.0f} % *lost*, and " in own
    others = [
        each["auto_us"] / min(each["as_written_us"].values())
        for day, seed in ((29, 7301), (29, 7302), (30, 7303))
        for each in _results(f"2026-11-{day}-random-calls-2xh200-seed-{seed}.json")
    ]
    assert f"{100 * (1 - _geometric_mean(others)):.0f} % over {len(others):,} of [sizes of" in own
    assert f"the worst {100 * (max(others) - 1):.0f} % *lost* (graph)" in own
    mean = 100 * (1 - _geometric_mean(eager))
    assert f"{mean:.0f} % on average over {len(eager)} calls (eager)" in own

    losses = _results("2026-11-28-linear_cross_entropy-2xh200.json")
    least, most = _less(
        each["auto"]["eager"]["median_ms"] / each["loss_parallel"]["eager"]["median_ms"]
        for each in losses
    )
    less = [each["loss_parallel"]["memory_mib"] / each["auto"]["memory_mib"] for each in losses]
    loss = _row("a head and its loss")
    assert f"{least:.0f} to {most:.0f} % of `loss_parallel`" in loss
    assert f"and {int(min(less))} to {int(max(less))} times less memory" in loss

    engines = _row("vLLM")
    least, most = _less(_engines("decode_us", each) for each in ("1", "8", "32", "128"))
    assert f"decoding {least:.0f} to {most:.0f} % with 1 to 128 sequences" in engines
    host = "2026-11-30-vllm_engine-host-2xh200-{}.json".format
    lengths = "300", "600", "800", "1000", "1400", "2000", "4096"
    of_70b = [_engines("prefill_ms", each, file=host("llama-70b")) for each in lengths]
    of_70b += [_engines("prefill_ms", each) for each in ("1000", "2000", "4096")]
    least, most = _less(of_70b)
    assert f"of 300 to 4096 tokens {least:.0f} to {most:.0f} %, of new" in engines
    assert f"of new lengths {100 * (_engines('new_ms') - 1):.0f} % *lost*" in engines
    least, most = _less(_engines("prefill_ms", each, file=host("qwen3-8b")) for each in lengths)
    assert engines.endswith(f"eager: prefills of 300 to 4096 tokens {least:.0f} to {most:.0f} %")

    file = "2026-11-29-sglang_engine-2xh200.json"
    decoding = [_engines("decode_us", each, file=file) for each in ("1", "8", "32", "128")]
    prefills = [_engines("prefill_ms", each, file=file) for each in ("200", "1000", "2000", "4096")]
    row = _row("SGLang")
    least, most = _less(decoding[:2])
    assert f"decoding {least:.0f} to {most:.0f} % with 1 and 8 sequences, none with 32" in row
    assert [round(100 * ratio) for ratio in decoding[2:]] == [100, 100]
    least, most = _less(prefills[2:])
    assert f"2000 and 4096 tokens {least:.0f} to {most:.0f} %" in row
    lost = " and ".join(f"{100 * (ratio - 1):.0f}" for ratio in prefills[:2])
    assert f"of 200 and 1000 {lost} % *lost*" in row

    ratios = sorted(
        each["auto"]["graph"]["median_us"] / each["bfloat16"]["graph"]["median_us"]
        for each in _results("2026-11-29-experts-float8-2xh200.json")
    )
    least, most = _less(ratios[:-1])
    row = _row("float8")
    assert f" {least:.0f} to {most:.0f} % in {len(ratios) - 1} cases" in row
    assert f"{100 * (ratios[-1] - 1):.0f} % *lost* in one" in row


def _engines(*keys: str, file: str = "2026-11-30-vllm_engine-2xh200-llama-70b.json") -> float:
    """Return what engines with Interlace take of those without, both on the mean of repeats."""
    times: dict[str, float] = dict.fromkeys(("with", "without"), 0.0)
    for engine in _results(file):
        value = engine
        for key in keys:
            value = value[key]
        times[engine["way"]] += value[0] if isinstance(value, list) else value
    return times["with"] / times["without"]


def _results(file: str) -> Any:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))["results"]


def _of_dense_models() -> dict[str, tuple[float, float]]:
    """Return the times with Interlace and by Inductor of a prompt and of a training step."""
    times = {
        (each["workload"], each["way"]): each["step"]["median_us"]
        for each in _results("2026-11-25-transformers-dense-2xh200.json")
    }
    workloads = {"prompt": "prefill", "training step": "training"}
    return {
        text: (times[workload, "Interlace"], times[workload, "Inductor"])
        for text, workload in workloads.items()
    }
