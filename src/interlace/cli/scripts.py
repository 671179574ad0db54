"""Programs that are beside the package: the demos, and a source tree's benchmarks, which commands
of ``interlace bench`` and ``interlace tune`` start.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

import interlace
from interlace.cli.console import command_line, make_console
from interlace.cli.outputs import Outputs
from interlace.errors import BackendError
from interlace.registry import Operator

_PACKAGE = Path(interlace.__file__).parent
_TREE = _PACKAGE.parents[1]
_BENCHMARKS = {
    "embedding_all_to_all": "embedding_commands",
    "gemv_all_reduce": "gemv_commands",
    "mixture_of_experts": "expert_commands",
}
"""Modules of ``benchmarks`` with an ``add_commands``, by the commands' name."""


def demo(name: str) -> Any:
    """Import a script of the demos: from where a wheel puts them, or from the source tree.

    Raises:
        BackendError: They are in neither.
    """
    folders = (_PACKAGE / "demos", _TREE / "examples" / "demos")
    for folder in filter(Path.is_dir, folders):
        return _import_from(folder, name)
    raise BackendError(
        f"demo: its scripts must be in {folders[0]} or {folders[1]}; got neither folder. Install "
        "Interlace again."
    )


def benchmark(name: str) -> Any:
    """Import a module of ``benchmarks``, which makes the results that the project shows.

    Raises:
        BackendError: The package does not run from a source tree.
    """
    if not (_TREE / "benchmarks" / f"{name}.py").is_file():
        raise BackendError(
            "this command must run from a source tree of Interlace, whose folder benchmarks has "
            f"it; got the installed package {_PACKAGE}. Clone the repository, and run pip install "
            "--editable there."
        )
    return _import_from(_TREE, f"benchmarks.{name}")


def add_commands(operator: Operator, bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add an operator's commands, which ``benchmarks`` has."""
    add_benchmark(operator.name, bench_app, tune_app)


def add_benchmark(name: str, bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add the commands of that name from ``benchmarks``; in a wheel, some that refuse to run."""
    _add_from(_BENCHMARKS[name], {"bench": (name,), "tune": (name,)}, bench_app, tune_app)


def add_results(bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add the commands that make and show the project's own results, as :func:`add_benchmark`."""
    names = {"bench": ("sweep", "batch-invariance", "table"), "tune": ("profile",)}
    _add_from("result_commands", names, bench_app, tune_app)


def _add_from(
    module: str, names: Mapping[str, Sequence[str]], bench_app: typer.Typer, tune_app: typer.Typer
) -> None:
    """Add the commands of a module of ``benchmarks``, or of these names if there is none."""

    def refuse(_: typer.Context) -> None:
        """Only from a source tree."""
        benchmark(module)

    try:
        benchmark(module).add_commands(bench_app, tune_app)
    except BackendError:
        # The options are those of the source tree, too.
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        for verb, app in (("bench", bench_app), ("tune", tune_app)):
            for name in names[verb]:
                app.command(name, context_settings=settings)(refuse)


def run_demos(
    world_size: int,
    backend: str,
    tokens: int,
    nodes: int | None,
    plot: Path | None,
    json: Path | None,
) -> int:
    """Run one demo after the other; return the exit code: 0 if all passed.

    Args:
        world_size: Number of ranks.
        backend: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        tokens: Tokens that the down projection decodes at once.
        nodes: Nodes of the demo between nodes, which then runs instead of the others; or None.
        plot: The file of the down projection's picture.
        json: The file of all demos' reports.

    Raises:
        ArgumentError: There is no such backend, or a file cannot be written.
    """
    script = demo("demo_script")
    outputs, console = Outputs(json=json), make_console()
    chosen = script.choose_backend(backend, world_size)

    def start(name: str, **own: Any) -> dict[str, Any]:
        report: dict[str, Any] = demo(name).run(console, world_size, chosen, **own)
        return report

    if nodes is not None:
        report = start("between_nodes", nodes=nodes)
    else:
        report = start("down_projection", tokens=tokens, plot=plot)
        report["mapped"] = start("mapped_output")
        report["dlrm"] = start("train_small_dlrm")
        report["passed"] = all(
            part["passed"] for part in (report, report["mapped"], report["dlrm"])
        )
    script.write(console, report, command_line(), outputs)
    return 0 if report["passed"] else 1


def _import_from(folder: Path, name: str) -> Any:
    # The path stays: ranks are processes that get it, and import their function by its name.
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)
