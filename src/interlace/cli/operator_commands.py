"""``interlace bench OPERATOR`` and ``interlace tune OPERATOR``, made from the registry.

An operator's declaration names the module that adds its commands; those around a matrix product
share one.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from interlace.cli import scripts
from interlace.registry import Operator


class OperatorCommands(TyperGroup):
    """``interlace bench`` or ``interlace tune``: the commands that registered operators add, and a
    source tree's for its results.

    Operators are imported, and torch with them, when a command of the group is looked for: the help
    of ``interlace`` itself does without.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the operators' commands, those for results, and then the group's own."""
        verb = str(self.name)
        return [*operator_commands()[verb], *_result_commands(verb), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of that name; operators are looked at last."""
        # `interlace bench table` needs no torch.
        command = super().get_command(ctx, cmd_name) or _result_commands(str(self.name)).get(
            cmd_name
        )
        return command or operator_commands()[str(self.name)].get(cmd_name)


@functools.cache
def operator_commands() -> dict[str, dict[str, Any]]:
    """Return the commands of all operators by their names, for ``"bench"`` and for ``"tune"``."""
    from interlace.registry import operators

    apps = _applications()
    for operator in operators().values():
        if not operator.command_module:
            continue
        try:
            module = importlib.import_module(operator.command_module)
            module.add_commands(operator, apps["bench"], apps["tune"])
        except Exception as error:  # a module of another package raises anything
            warnings.warn(
                f"interlace: the module {operator.command_module} must add the commands of "
                f"{operator.name}; it raised {type(error).__name__}: {error}. The other commands "
                "are there.",
                RuntimeWarning,
                stacklevel=2,
            )
    return {verb: _commands_of(app) for verb, app in apps.items()}


def _result_commands(verb: str) -> dict[str, Any]:
    apps = _applications()
    scripts.add_results(apps["bench"], apps["tune"])
    return _commands_of(apps[verb])


def _applications() -> dict[str, typer.Typer]:
    # Typer reads options from functions when they are added to an application.
    return {verb: typer.Typer(rich_markup_mode="rich") for verb in ("bench", "tune")}


def _commands_of(app: typer.Typer) -> dict[str, Any]:
    return dict(typer.main.get_group(app).commands)


_WORDS = {"gemm": "GEMM", "all_to_all": "All-to-All"}


def title_of(operator: Operator) -> str:
    """Return a title such as ``"AllGather + GEMM"``: computation and collective in their order."""
    steps = operator.pattern or (operator.computation, operator.collective)
    # Collectives are written as NCCL writes them, AllReduce, but for All-to-All.
    words = [_WORDS.get(step) or step.title().replace("_", "") for step in steps]
    title = " + ".join(words)
    return title[0].upper() + title[1:]
