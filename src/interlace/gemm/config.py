"""Configurations of fused kernels around a matrix product: how a kernel cuts its work."""

from __future__ import annotations

import dataclasses
from typing import Self

from interlace.errors import ArgumentError

_POWERS_OF_TWO = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 1}
_AT_LEAST = {"num_stages": 1, "max_programs": 0, "group_m": 1, "interleave": 1, "stagger": 0}
_MAX_WARPS = 32


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """One way to run a fused kernel. Every rank must use the same one in a call.

    Attributes:
        block_m, block_n: rows and columns of the result that a tile covers; powers of two, at least
            16.
        block_k: of K, that a program loads at a time; a power of two, at least 16.
        num_warps: warps per program.
        num_stages: loads in flight in the software pipeline.
        max_programs: programs at most, each taking several tiles; 0 for one per SM.
        group_m: rows of tiles that are computed together, so that weights stay in the L2.
        interleave: tiles for one rank before the next rank's turn.
        stagger: over how much of the time that a tile takes programs begin one after another, in
            percent.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    max_programs: int = 0
    group_m: int = 8
    interleave: int = 8
    stagger: int = 100

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, least in _POWERS_OF_TWO.items():
            value = getattr(self, field)
            if value < least or value & (value - 1):
                raise ArgumentError(
                    f"{name}: {field} must be a power of two, at least {least}; got {value}."
                )
        if self.num_warps > _MAX_WARPS:
            raise ArgumentError(
                f"{name}: num_warps must be at most {_MAX_WARPS}; got {self.num_warps}."
            )
        for field, least in _AT_LEAST.items():
            value = getattr(self, field)
            if value < least:
                raise ArgumentError(f"{name}: {field} must be at least {least}; got {value}.")

    def __str__(self) -> str:
        """Return ``"block_m=128, block_n=256, ..."``, which :meth:`parse` reads: operators carry it
        through compiled graphs.
        """
        fields = dataclasses.fields(self)
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the configuration whose ``str`` is ``text``.

        Raises:
            ArgumentError: It is not the text of a configuration.
        """
        pairs = [pair.partition("=") for pair in text.split(", ")]
        values = {name: value for name, _, value in pairs}
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) != names or not all(value.isdecimal() for value in values.values()):
            raise ArgumentError(
                f"{cls.__name__}: text must be str() of a configuration; got {text!r}."
            )
        return cls(**{name: int(value) for name, value in values.items()})
