"""The configuration of ``mixture_of_experts``, tuned or set by the caller."""

from __future__ import annotations

import dataclasses
from typing import Any

from interlace.errors import ArgumentError
from interlace.operators.mixture_of_experts.layout import ROWS

OPERATOR = "mixture_of_experts"
OPERANDS = ("tiles", "pointers")


@dataclasses.dataclass(frozen=True)
class MixtureOfExpertsConfig:
    """One way to run the fused kernels. Every rank of a call must use the same one.

    Attributes:
        operands: loads and stores of the products: ``"tiles"`` (by tensor descriptors, where shapes
            and GPU allow) or ``"pointers"``.
        block_m: rows of a tile of every product; a power of two from 16 to 128.
        block_n: columns of a tile; a power of two from 32 on.
        block_k: steps along the products' inner dimension; a power of two from 16 on.
        group_m: tiles of rows that share columns of weights before the next columns, so that these
            are in the L2.
        num_warps: warps per program of the products.
        num_stages: steps in flight in the products' software pipeline.
        programs: programs that compute; 0 for one per SM.
        push_programs: programs that send tokens, in front of those and at the same time.
        push_rows: rows of one expert that such a program sends at a time; a power of two.
        sum_programs: maximum number of programs that add results.
        stagger: the programs of the second product start one after another, over this percentage of
            the time that a tile takes.
    """

    operands: str = "tiles"
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    programs: int = 0
    push_programs: int = 32
    push_rows: int = 64
    sum_programs: int = 2112
    stagger: int = 100

    def __post_init__(self) -> None:
        if self.operands not in OPERANDS:
            raise ArgumentError(
                f"MixtureOfExpertsConfig: operands must be one of {OPERANDS}; got "
                f"{self.operands!r}."
            )
        for name, minimum, maximum in (
            ("block_m", 16, ROWS),
            ("block_n", 32, 512),
            ("block_k", 16, 512),
            ("num_warps", 1, 32),
            ("push_rows", 1, 1024),
        ):
            value = getattr(self, name)
            if not minimum <= value <= maximum or value & (value - 1):
                raise ArgumentError(
                    f"MixtureOfExpertsConfig: {name} must be a power of two from {minimum} to "
                    f"{maximum}; got {value}."
                )
        for name, minimum, maximum in (
            ("group_m", 1, 64),
            ("num_stages", 1, 8),
            ("programs", 0, 2048),
            ("push_programs", 1, 2048),
            ("sum_programs", 1, 4096),
            ("stagger", 0, 1000),
        ):
            if not minimum <= getattr(self, name) <= maximum:
                raise ArgumentError(
                    f"MixtureOfExpertsConfig: {name} must be between {minimum} and {maximum}; got "
                    f"{getattr(self, name)}."
                )

    def __str__(self) -> str:
        """Return ``name=value, ...``, which :meth:`parse` reads and compiled graphs carry."""
        return ", ".join(
            f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self)
        )

    @classmethod
    def parse(cls, text: str) -> MixtureOfExpertsConfig:
        """Return the configuration whose ``str`` is ``text``.

        Raises:
            ArgumentError: ``text`` is anything else.
        """
        kinds: dict[str, Any] = {
            field.name: str if field.type == "str" else int for field in dataclasses.fields(cls)
        }
        try:
            items = (item.split("=", 1) for item in text.split(", "))
            config = cls(**{name: kinds[name](value) for name, value in items})
        except (KeyError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            config = None
        if config is None or str(config) != text:
            raise ArgumentError(
                f"MixtureOfExpertsConfig: text must be str() of a configuration; got {text!r}."
            )
        return config


# From this inner width on, tiles take twice as long to compute as the links take for all programs'
# tiles, so the links are not crowded.
_CALM = 4096


def default_config(*, ffn: int, itemsize: int) -> MixtureOfExpertsConfig:
    """Return a configuration for sizes that have not been measured.

    With its tile Triton is as fast as cuBLAS on H200s.
    """
    stagger = 100 if ffn < _CALM else 0
    if itemsize == 4:
        return MixtureOfExpertsConfig(
            block_m=64, block_n=64, block_k=32, num_warps=4, stagger=stagger
        )
    return MixtureOfExpertsConfig(stagger=stagger)
