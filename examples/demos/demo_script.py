"""What the demos share: their options, the backend that they run on, and the file that they write.

Ranks import it with the demos, so it brings Rich only where a demo is started.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from interlace.errors import ArgumentError, InterlaceError
from interlace.extras import needing

Report = dict[str, Any]


def choose_backend(backend: str, world_size: int) -> str:
    """Return ``"cpu"`` or ``"cuda"``: for ``"auto"``, the latter where there are GPUs enough.

    Raises:
        ArgumentError: There is no such backend.
    """
    if backend not in ("auto", "cpu", "cuda"):
        raise ArgumentError(f"demo: --backend must be auto, cpu or cuda; got {backend!r}.")
    if backend == "auto":
        return "cuda" if torch.cuda.device_count() >= world_size else "cpu"
    return backend


def count(number: int, noun: str) -> str:
    """Return a number of things in words: ``"1 rank"``, ``"2 ranks"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parse_options(description: str | None, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """Return the options of a demo's command line.

    Args:
        description: What the demo does.
        more: Names of options of its own, with the arguments of ``add_argument``.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--world-size", type=int, default=4, help="ranks (default: 4)")
    parser.add_argument(
        "--backend", default="auto",
        help="auto, cpu or cuda; auto, the default, is cuda where there are GPUs enough",
    )  # fmt: skip
    for name, arguments in more:
        parser.add_argument(name, **arguments)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything to FILE as JSON"
    )
    return parser.parse_args()


def run_script(options: argparse.Namespace, run: Callable[..., Report], **own: Any) -> None:
    """Run a demo with its options, write its report, and end this process: with 0 if it passed.

    Args:
        options: What :func:`parse_options` returned.
        run: The demo; it takes a console, the number of ranks, the backend and ``own``.
        own: Further arguments of the demo.
    """
    command = shlex.join(["python", *sys.argv])
    try:
        with needing("A demo"):
            from interlace.cli.console import make_console
            from interlace.cli.outputs import Outputs

        outputs = Outputs(json=options.json)
        backend = choose_backend(options.backend, options.world_size)
        console = make_console()
        report = run(console, options.world_size, backend, **own)
        write(console, report, command, outputs)
    except InterlaceError as error:
        sys.exit(f"Error: {error}")
    sys.exit(0 if report["passed"] else 1)


def write(console: Any, report: Report, command: str, outputs: Any) -> None:
    """Write what was found, by which command and on which machine, to ``--json``."""
    from interlace.cli import machine

    outputs.write_json(lambda: {**machine.header(), "command": command, **report})
    if outputs.json is not None:
        console.print(f"All numbers: {outputs.json}")
