"""``interlace demo``: start the demos, which are scripts that run by themselves, too."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import interlace
from interlace.cli.console import command_line, make_console
from interlace.cli.outputs import Outputs
from interlace.errors import BackendError


def load(name: str) -> Any:
    """Import a script of the demos by its name.

    They are beside the package's modules, where a wheel puts them, or in the source tree.

    Raises:
        BackendError: They are in neither.
    """
    package = Path(interlace.__file__).parent
    folders = (package / "demos", package.parents[1] / "examples" / "demos")
    for folder in map(str, filter(Path.is_dir, folders)):
        # The path stays: ranks are processes that get it, and import their function by its name.
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return importlib.import_module(name)
    raise BackendError(
        f"demo: its scripts must be in {folders[0]} or {folders[1]}; got neither folder. Install "
        "Interlace again."
    )


def run(
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
    script = load("demo_script")
    outputs, console = Outputs(json=json), make_console()
    chosen = script.choose_backend(backend, world_size)

    def start(name: str, **own: Any) -> dict[str, Any]:
        report: dict[str, Any] = load(name).run(console, world_size, chosen, **own)
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
