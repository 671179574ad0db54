"""``interlace bench OPERATOR`` and ``interlace tune OPERATOR``, made from the registry.

An operator of a family, a matrix product or a batch of them, gets its commands from the family.
Another operator gets them from the module ``interlace.cli.bench_<name>``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperGroup

from interlace.registry import Operator


class OperatorCommands(TyperGroup):
    """A group of commands to which the registered operators add theirs.

    Operators are imported, and torch with them, when a command of the group is looked for: the help
    of ``interlace`` itself does without.
    """

    verb = ""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the operators' commands and then the group's own."""
        return [*operator_commands(self.verb), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of that name; the group's own need no operator."""
        # `interlace bench table` needs no torch, so it is looked for first.
        command = super().get_command(ctx, cmd_name)
        return command or operator_commands(self.verb).get(cmd_name)


class BenchCommands(OperatorCommands):
    """The group ``interlace bench``."""

    verb = "bench"


class TuneCommands(OperatorCommands):
    """The group ``interlace tune``."""

    verb = "tune"


def operator_commands(verb: str) -> dict[str, Any]:
    """Return the commands of all operators by their names; ``verb`` is ``bench`` or ``tune``."""
    return _all_commands()[verb]


@functools.cache
def _all_commands() -> dict[str, dict[str, Any]]:
    from interlace.registry import operators

    # Typer reads options from functions when they are added to an application.
    apps = {verb: typer.Typer(rich_markup_mode="rich") for verb in ("bench", "tune")}
    for operator in operators().values():
        module = _command_module(operator)
        if module is not None:
            module.add_commands(operator, apps["bench"], apps["tune"])
    return {verb: dict(typer.main.get_group(app).commands) for verb, app in apps.items()}


def _command_module(operator: Operator) -> ModuleType | None:
    """Return the module that makes an operator's commands; None if there is none."""
    from interlace.bench import batches
    from interlace.gemm.operator import GemmOperator

    name = f"interlace.cli.bench_{operator.name}"
    if isinstance(operator, GemmOperator):
        name = "interlace.cli.bench_products"
    elif operator.pattern in batches.CASES:
        name = "interlace.cli.bench_batches"
    # An operator of another kind, from another package, has no benchmark.
    elif importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name)


_WORDS = {"gemm": "GEMM", "bmm": "batch of GEMMs", "all_to_all": "All-to-All"}


def title_of(operator: Operator) -> str:
    """Return a title such as ``"AllGather + GEMM"``: computation and collective in their order."""
    steps = operator.pattern or ("gemm", operator.collective)
    # Collectives are written as NCCL writes them, AllReduce, but for All-to-All.
    words = [_WORDS.get(step) or step.title().replace("_", "") for step in steps]
    title = " + ".join(words)
    return title[0].upper() + title[1:]
