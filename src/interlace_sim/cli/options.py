"""Options that commands of ``interlace sim`` share: declared once, and taken by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.cli.options import Command, declare
from interlace.cli.outputs import Outputs


def underscored(name: str | None) -> str | None:
    """Return a name as it is spelled everywhere: ``all_to_all``, also for ``all-to-all``."""
    return name and name.replace("-", "_")


def _file(option: str, text: str) -> Any:
    return Annotated[Path | None, typer.Option(f"--{option}", metavar="FILE", help=text)]


def _changes(text: str) -> Any:
    return Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=text)]


def _named(text: str) -> Any:
    return Annotated[str, typer.Option(help=text, callback=underscored)]


# Annotation and default of each shared option, by the name under which a command gets it.
_SHARED: dict[str, tuple[Any, Any]] = {
    "nodes": (Annotated[int, typer.Option(min=1, help="Nodes of the machine's GPUs.")], 1),
    "machine": (
        Annotated[
            str, typer.Option(help="A machine preset or YAML file; see `interlace sim presets`.")
        ],
        "",
    ),
    "model": (
        Annotated[
            str, typer.Option(help="A model preset or YAML file; see `interlace sim presets`.")
        ],
        "",
    ),
    "topology": (
        Annotated[
            str | None,
            typer.Option(
                help="ring, torus2d, torus3d, torus:AxB, switch, full, "
                "fattree[:LEAVESxDOWN/UP]. \\[default: the machine's]",
            ),
        ],
        None,
    ),
    "fused": (
        Annotated[str, typer.Option(help="Passes with fused operators: none, forward or both.")],
        "both",
    ),
    "tensor": (
        Annotated[int, typer.Option(min=1, help="GPUs of a tensor-parallel group.")],
        8,
    ),
    "pipeline": (Annotated[int, typer.Option(min=1, help="Pipeline stages.")], 8),
    "all_to_all": (
        _named("The unfused All-to-All: one_shot, direct, per_dimension or ring."),
        "one_shot",
    ),
    "all_reduce": (
        _named("The AllReduce: ring, direct, halving_doubling or double_binary_tree."),
        "ring",
    ),
    "slices": (
        Annotated[
            int,
            typer.Option(
                min=0,
                help="Slices in which a fused kernel's output for a rank leaves. "
                "\\[default: the workload's]",
                show_default=False,
            ),
        ],
        0,
    ),
    "changes": (
        _changes(
            "Change a value, say model.tables=1024 or machine.network.latency_ns=500; several "
            "times."
        ),
        None,
    ),
    "all_ranks": (
        Annotated[
            bool,
            typer.Option("--all-ranks", help="Simulate every rank and link, not one of each kind."),
        ],
        False,
    ),
    "workers": (
        Annotated[
            int | None,
            typer.Option(min=1, help="Processes. \\[default: all processors]", show_default=False),
        ],
        None,
    ),
    "cache": (
        Annotated[
            Path | None,
            typer.Option(
                metavar="FOLDER",
                help="Where outcomes are remembered. \\[default: the user's cache]",
                show_default=False,
            ),
        ],
        None,
    ),
    "no_cache": (
        Annotated[
            bool, typer.Option("--no-cache", help="Run everything again, and remember nothing.")
        ],
        False,
    ),
    "sublayer": (
        Annotated[str, typer.Option(help="op, fc2 (forward), fc1 or ip (backward).")],
        "fc2",
    ),
    "shape": (
        Annotated[
            str | None,
            typer.Option(
                metavar="ROWSxCOLUMNSxDEPTH",
                help="Any matrix product on each GPU, instead of a model's.",
            ),
        ],
        None,
    ),
    "json": (_file("json", "Write everything to FILE as JSON."), None),
    "csv": (_file("csv", "Write the tasks to FILE as CSV."), None),
    "plot": (_file("plot", "Draw the timelines, and bars beside them (FILE-bars)."), None),
    "trace": (_file("trace", "Write a trace for ui.perfetto.dev."), None),
    "folder": (
        Annotated[
            Path, typer.Option("--out", metavar="FOLDER", help="Where JSON, CSV and pictures go.")
        ],
        None,
    ),
}
_FILES = ("json", "csv", "plot", "trace", "folder")


def options(
    *names: str, files: tuple[str, ...] = (), helps: dict[str, str] | None = None, **defaults: Any
) -> Callable[[Command], Command]:
    """Give a command shared options after its own.

    The command gets each option as a keyword. Files arrive together, as the
    :class:`interlace.cli.outputs.Outputs` of the keyword ``outputs``.

    Args:
        names: Options other than files, as keys of the table above.
        files: Files that the command writes: ``json``, ``csv``, ``plot``, ``trace``, ``folder``.
        helps: Texts of files that hold something else than a workload's, and of ``--set`` where its
            keys are others.
        defaults: Options by name whose default is the command's own.
    """

    def declare_shared(name: str) -> inspect.Parameter:
        annotation, default = _SHARED[name]
        if helps and name in helps:
            annotation = _changes(helps[name]) if name == "changes" else _file(name, helps[name])
        return declare(name, annotation, defaults.get(name, default))

    def decorate(command: Command) -> Command:
        parameters = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        shared = [declare_shared(name) for name in dict.fromkeys((*names, *defaults, *files))]

        @functools.wraps(command)
        def run(*args: Any, **values: Any) -> None:
            paths = {name: values.pop(name) for name in _FILES if name in values}
            command(*args, **values, **({"outputs": Outputs(**paths)} if paths else {}))

        # Typer reads a command's options from its signature.
        run.__signature__ = inspect.Signature([*parameters, *shared])  # type: ignore[attr-defined]
        return run

    return decorate
