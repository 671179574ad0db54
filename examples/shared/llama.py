"""The options of examples that run a Llama-shaped model on several ranks."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from shared import commands

Positions = Annotated[int, typer.Option(help="Positions; the ranks must divide them.")]
Sequences = Annotated[int, typer.Option(help="Sequences.")]


@dataclasses.dataclass(frozen=True)
class LlamaSettings:
    """Settings, the same on every rank. Sizes are those of the full model."""

    width: Annotated[int, typer.Option(help="Model dimension.")] = 32
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4
    kv_heads: Annotated[
        int, typer.Option(help="Key and value heads; the ranks must divide them.")
    ] = 2
    hidden: Annotated[int, typer.Option(help="Hidden features of the MLP.")] = 48
    sequence: Positions = 16
    batch: Sequences = 8
    dtype: commands.Dtype = "float32"

    def require_fitting(self, ranks: int, **other_sizes: int) -> None:
        """Refuse sizes that do not fit each other, or that the ranks do not divide.

        Raises:
            typer.BadParameter: a size does not fit.
        """
        commands.require_dtype(self.dtype)
        if self.width % self.heads or self.heads % self.kv_heads:
            raise typer.BadParameter(
                "--heads must divide --width, and --kv-heads must divide --heads."
            )
        commands.require_even(
            ranks,
            kv_heads=self.kv_heads,
            hidden=self.hidden,
            sequence=self.sequence,
            **other_sizes,
        )
