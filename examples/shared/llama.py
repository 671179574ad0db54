"""What examples of a Llama-shaped model share: their options, and a block around its parts."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
import typer
from torch import nn

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


class Block(nn.Module):
    """Attention and MLP, each with normalised input and a residual connection."""

    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))
