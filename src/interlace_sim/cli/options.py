"""Options of ``interlace sim``: declared once, each with one meaning, and taken by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from interlace.cli.outputs import Outputs
from interlace.errors import ArgumentError
from interlace_sim.defaults import Defaults

Command = Callable[..., None]

Takes = Mapping[str, Sequence[str]]
"""The options that each kind of run takes: kind -> names."""


def underscored(name: str | None) -> str | None:
    """Return a name as it is spelled everywhere: ``all_to_all``, also for ``all-to-all``."""
    return name and name.replace("-", "_")


class _Option(NamedTuple):
    """An option: its type, default and help, the panel of ``--help``, and Typer's settings."""

    type: Any
    default: Any
    help: str
    panel: str | None = None
    flag: str = ""
    settings: Mapping[str, Any] = {}


_WHAT, _STEPS, _COLLECTIVE = "Workload and machine", "Training steps", "Collectives"
_T3, _CHAKRA, _FILES = "T3", "Chakra traces", "Files"
_TELLING = (_STEPS, _COLLECTIVE, _T3, _CHAKRA)
_AT_LEAST_1 = {"min": 1}
_NAME = {"callback": underscored}


def _flag(flag: str, text: str, panel: str | None = None) -> _Option:
    return _Option(bool, False, text, panel, flag)


def _file(text: str, panel: str = _FILES) -> _Option:
    return _Option(Path | None, None, text, panel, settings={"metavar": "FILE"})


# By the name under which a command's function gets the option, in the order of --help.
_OPTIONS = {
    "model": _Option(
        str | None, None, "A model preset or YAML file; see `interlace sim presets`.", _WHAT
    ),
    "machine": _Option(
        str | None, None, "A machine preset or YAML file; see `interlace sim presets`.", _WHAT
    ),
    "nodes": _Option(
        int | None,
        None,
        "Nodes of the machine's GPUs; single GPUs if its file has no node.",
        _WHAT,
        settings=_AT_LEAST_1,
    ),
    "topology": _Option(
        str | None,
        None,
        "ring, torus2d, torus3d, torus:AxB, switch, full, fattree\\[:LEAVESxDOWN/UP]. "
        "\\[default: the machine's]",
        _WHAT,
    ),
    "tensor": _Option(int, 8, "GPUs of a tensor-parallel group.", _WHAT, settings=_AT_LEAST_1),
    "changes": _Option(
        list[str] | None,
        None,
        "Change a value, say machine.network.latency_ns=500; several times.",
        _WHAT,
        "--set",
        {"metavar": "KEY=VALUE"},
    ),
    "all_ranks": _flag("--all-ranks", "Simulate every rank and link, not one of each kind.", _WHAT),
    "fused": _Option(str, "both", "Passes with fused operators: none, forward or both.", _STEPS),
    "slices": _Option(
        int,
        0,
        "Slices in which a fused kernel's output for a rank leaves. \\[default: the workload's]",
        _STEPS,
        settings={"min": 0, "show_default": False},
    ),
    "all_reduce": _Option(
        str,
        "ring",
        "The AllReduce: ring, direct, halving_doubling or double_binary_tree.",
        _STEPS,
        settings=_NAME,
    ),
    "all_to_all": _Option(
        str,
        "one_shot",
        "The unfused All-to-All: one_shot, direct, per_dimension or ring.",
        _STEPS,
        settings=_NAME,
    ),
    "pipeline": _Option(int, 8, "Pipeline stages.", _STEPS, settings=_AT_LEAST_1),
    "chakra": _Option(
        str | None,
        None,
        "Write the unfused step as Chakra traces, PREFIX.RANK.et.",
        _STEPS,
        settings={"metavar": "PREFIX"},
    ),
    "size": _Option(
        str, "16MiB", "Bytes of each rank's whole buffer, say 16MiB or 1TB.", _COLLECTIVE
    ),
    "algorithm": _Option(
        str | None,
        None,
        "One algorithm, such as ring. \\[default: a run takes all, a sweep the first]",
        _COLLECTIVE,
        settings=_NAME,
    ),
    "sublayer": _Option(str, "fc2", "op, fc2 (forward), fc1 or ip (backward).", _T3),
    "shape": _Option(
        str | None,
        None,
        "Any matrix product on each GPU, instead of a model's.",
        _T3,
        settings={"metavar": "ROWSxCOLUMNSxDEPTH"},
    ),
    "tokens": _Option(
        int | None,
        None,
        "Rows of the product, instead of the model's. Few: generation.",
        _T3,
        settings=_AT_LEAST_1,
    ),
    "collective": _Option(
        str,
        "reduce_scatter",
        "reduce_scatter (and all_gather), all_to_all, or all_gather (before the product).",
        _T3,
        settings=_NAME,
    ),
    "slowest": _Option(
        float | None,
        None,
        "Simulate every GPU, and let the first one compute this many times as long.",
        _T3,
        settings=_AT_LEAST_1,
    ),
    "pairs": _flag("--pairs", "Change assumed values two at a time. Several minutes.", _T3),
    "sequences": _Option(int, 8, "Sequences that generate tokens.", _T3, settings=_AT_LEAST_1),
    "rest_share": _Option(
        float,
        0.425,
        "Share of the time in operators that are not sliced.",
        _T3,
        settings={"min": 0, "max": 0.99},
    ),
    "every_case": _flag(
        "--every-case",
        "Simulate and write cases that no figure needs, too; twice as long.",
        _T3,
    ),
    "network_configuration": _file("ASTRA-sim's network YAML.", _CHAKRA),
    "system_configuration": _file("ASTRA-sim's system JSON.", _CHAKRA),
    "comm_group_configuration": _file("ASTRA-sim's communicator groups, JSON.", _CHAKRA),
    "congestion_unaware": _flag(
        "--congestion-unaware", "Every message has the network to itself: not physical.", _CHAKRA
    ),
    "network": _file(
        "The network, measured by `interlace tune machine`, in place of the machine's. "
        "\\[default: the document's, else two H200s over sockets]",
        _WHAT,
    ),
    "workers": _Option(
        int | None,
        None,
        "Processes. \\[default: all processors]",
        settings={"min": 1, "show_default": False},
    ),
    "cache": _Option(
        Path | None,
        None,
        "Where outcomes are remembered. \\[default: the user's cache]",
        settings={"metavar": "FOLDER", "show_default": False},
    ),
    "no_cache": _flag("--no-cache", "Run everything again, and remember nothing."),
    "json": _file("Write everything to FILE as JSON."),
    "csv": _file("Write the tasks, or a sweep's points, to FILE as CSV."),
    "plot": _file("Draw the outcome: PNG, SVG or PDF."),
    "trace": _file("Write a trace for ui.perfetto.dev."),
}
_OUTPUTS = ("json", "csv", "plot", "trace")


class Options:
    """The shared options of a command, not all of which every kind of its runs takes.

    Args:
        context: Typer's context of the command, which knows what the user gave.
        values: Value of each option, by name.
        takes: The options that each kind of run takes.
        defaults: Model, machine and nodes of the kinds of runs that have such defaults.
    """

    def __init__(
        self,
        context: typer.Context,
        values: Mapping[str, Any],
        takes: Takes,
        defaults: Mapping[str, Defaults],
    ) -> None:
        self._context, self._values = context, values
        self._takes, self._defaults = takes, defaults

    def are_given(self, *names: str) -> bool:
        """Return whether the user gave all of these options."""
        sources = (self._context.get_parameter_source(name) for name in names)
        return all(source is not None and source.name == "COMMANDLINE" for source in sources)

    def of(self, kind: str) -> dict[str, Any]:
        """Return the options that a kind of run takes, by name; its files are ``outputs``.

        Raises:
            ArgumentError: The user gave an option that this kind of run does not take.
        """
        values: dict[str, Any] = {}
        for name, value in self._values.items():
            if name in self._takes[kind]:
                default = getattr(self._defaults.get(kind), name, None)
                values[name] = default if value is None else value
            elif self.are_given(name):
                flag = _OPTIONS[name].flag or f"--{name.replace('_', '-')}"
                raise ArgumentError(
                    f"{flag} must be given with {' or '.join(_takers(name, self._takes))}; got it "
                    f"with {kind}. Leave it out."
                )
        files = {name: values.pop(name) for name in _OUTPUTS if name in values}
        return {**values, "outputs": Outputs(**files)} if files else values


def options(takes: Takes, defaults: Mapping[str, Defaults]) -> Callable[[Command], Command]:
    """Give a command shared options after its own, and their values as the keyword ``options``.

    Args:
        takes: The options that each kind of run takes, as keys of the table above.
        defaults: Model, machine and nodes of the kinds of runs that have such defaults.
    """
    taken = {name for names in takes.values() for name in names}
    shared = [
        _declare(name, _annotation(name, takes, defaults), option.default)
        for name, option in _OPTIONS.items()
        if name in taken
    ]

    def decorate(command: Command) -> Command:
        own = [
            parameter.replace(kind=parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "options"
        ]

        @functools.wraps(command)
        def run(context: typer.Context, **values: Any) -> None:
            given = {parameter.name: values.pop(parameter.name) for parameter in own}
            command(**given, options=Options(context, values, takes, defaults))

        # Typer reads a command's options from its signature.
        context = _declare("context", typer.Context, inspect.Parameter.empty)
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [context, *own, *shared]
        )
        return run

    return decorate


def _declare(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return an option for the signature of a command, which gets it as a keyword."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _annotation(name: str, takes: Takes, defaults: Mapping[str, Defaults]) -> Any:
    """Return an option's annotation, whose help names up to three kinds that alone take it."""
    option, takers = _OPTIONS[name], _takers(name, takes)
    text = option.help
    if len(takers) <= 3 and len(takers) < len(takes) and not _is_told(name, takes):
        text = f"{', '.join(takers)}: {text}"
    if name in Defaults._fields:
        kinds: dict[Any, list[str]] = {}
        for kind in takers:
            kinds.setdefault(getattr(defaults[kind], name), []).append(kind)
        values = (f"{value} ({', '.join(of_value)})" for value, of_value in kinds.items())
        text = f"{text} \\[default: {', '.join(values) if len(kinds) > 1 else str(*kinds)}]"
    flags = (option.flag,) if option.flag else ()
    return Annotated[
        option.type,
        typer.Option(*flags, help=text, rich_help_panel=option.panel, **option.settings),
    ]


def _is_told(name: str, takes: Takes) -> bool:
    """Return whether the title of the option's panel says which kinds take the option."""
    panel = _OPTIONS[name].panel
    beside = (_takers(other, takes) for other in _OPTIONS if _OPTIONS[other].panel == panel)
    return panel in _TELLING and set(_takers(name, takes)) == set().union(*beside)


def _takers(name: str, takes: Takes) -> list[str]:
    return [kind for kind, names in takes.items() if name in names]
