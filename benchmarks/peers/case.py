"""What a case of the benchmark of peers is: one call's tensors, and the ways to make it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[int], Any]
Sizes = tuple[Any, ...]


@dataclasses.dataclass
class Case:
    """Describe one call and its ways.

    Attributes:
        sizes: What the table of results shows.
        inputs: The tensors, for a peer's driver.
        ways: Calls by name, which take the turn's number and return what is compared.
        reference: The way whose result the others' must equal.
        tolerance: The largest relative error, as a norm, that roundings explain.
        is_captured: Whether the calls are timed in a CUDA graph as well.
        calls: Calls in a row of an eager sample, and in a graph.
        settling: Untimed calls before.
    """

    sizes: str
    inputs: Any
    ways: dict[str, Call]
    reference: str = "pair"
    tolerance: float = 1e-2
    is_captured: bool = True
    calls: int = 20
    settling: int = 40


def device() -> torch.device:
    """Return this rank's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return normal values in bfloat16, on this rank's device."""
    return (torch.randn(*shape, device=device()) * scale).bfloat16()


def ways_of(alone: Call, pair: Call, ours: Call, async_tp: Call | None = None) -> dict[str, Call]:
    """Return the ways of a case that needs no peer, by name."""
    ways = {"alone": alone, "pair": pair, "Interlace": ours}
    if async_tp is not None and device().type == "cuda":
        ways["pair, async-TP"] = async_tp
    return ways
