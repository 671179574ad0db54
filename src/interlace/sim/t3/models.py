"""The published models and their sub-layers that end in an all-reduce; presets lie in
``presets/t3_models``.
"""

from __future__ import annotations

from typing import Literal

from interlace.errors import ConfigError
from interlace.sim.configfile import Strict, load
from interlace.sim.machine import Given, find
from interlace.sim.t3.machine import SourcedList
from interlace.sim.t3.product import Product

SubLayerName = Literal["op", "fc2", "fc1", "ip"]
SUBLAYERS: dict[SubLayerName, int] = {"op": 1, "fc2": 4, "fc1": 4, "ip": 3}
"""Output projection and second linear layer forward, first linear layer and input projection
backward: inner dimension x TP / H.
"""


class T3Model(Strict):
    """A Transformer and how the paper runs it."""

    name: str
    hidden: Given
    layers: Given
    tokens: Given
    tensor_parallel: SourcedList
    """Degrees that the paper uses."""

    def product(self, sublayer: str, ranks: int, tokens: int | None = None) -> Product:
        """The matrix product of a sub-layer on one of ``ranks`` GPUs.

        Args:
            tokens: its rows; the paper's by default. Few of them are the generation of tokens: one
                of each sequence.

        Raises:
            ConfigError: no such sub-layer, or a degree that does not divide its inner dimension.
        """
        if sublayer not in SUBLAYERS:
            raise ConfigError(
                f"a sub-layer must be one of {', '.join(SUBLAYERS)}; got {sublayer!r}."
            )
        hidden = int(self.hidden.value)
        depth = SUBLAYERS[sublayer] * hidden
        if ranks < 2 or depth % ranks:
            raise ConfigError(
                f"the tensor-parallel degree must be at least 2 and divide {depth}; got {ranks}."
            )
        rows = int(self.tokens.value) if tokens is None else tokens
        return Product(f"{self.name} {sublayer}, TP {ranks}", rows, hidden, depth // ranks)


def load_t3_model(name: str) -> T3Model:
    """A preset, in any case, or a YAML file.

    Raises:
        ConfigError: there is none, or it is wrong.
    """
    return load(
        T3Model,
        find("t3_models", name if name.endswith((".yaml", ".yml", ".json")) else name.lower()),
    )
