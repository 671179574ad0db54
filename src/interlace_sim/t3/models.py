"""The published models, and their sub-layers that end in an all-reduce.

Presets lie in ``presets/t3_models``.
"""

from __future__ import annotations

from typing import Literal

from interlace.errors import ConfigError
from interlace_sim.configfile import Strict, load
from interlace_sim.machine import Given, find
from interlace_sim.t3.machine import SourcedList
from interlace_sim.t3.product import Product

SubLayerName = Literal["op", "fc2", "fc1", "ip"]
SUBLAYERS: dict[SubLayerName, int] = {"op": 1, "fc2": 4, "fc1": 4, "ip": 3}
"""Inner dimension of each sub-layer's product, times the tensor-parallel degree over H.

``op`` and ``fc2`` are the output projection and the second linear layer, forward; ``fc1`` and
``ip`` are the first linear layer and the input projection, backward.
"""


class T3Model(Strict):
    """A Transformer, and the sizes at which the paper runs it."""

    name: str
    hidden: Given
    layers: Given
    tokens: Given
    tensor_parallel: SourcedList
    """Tensor-parallel degrees that the paper uses."""

    def product(self, sublayer: str, ranks: int, tokens: int | None = None) -> Product:
        """Return the matrix product of a sub-layer on one of ``ranks`` GPUs.

        Args:
            sublayer: Key of :data:`SUBLAYERS`.
            ranks: Tensor-parallel degree.
            tokens: Rows of the product; the paper's by default. The generation of tokens has few:
                one per sequence.

        Raises:
            ConfigError: there is no such sub-layer, or the degree does not divide its inner
                dimension.
        """
        if sublayer not in SUBLAYERS:
            raise ConfigError(
                f"a sub-layer must be one of {', '.join(SUBLAYERS)}; got {sublayer!r}."
            )
        hidden = int(self.hidden.value)
        depth = SUBLAYERS[sublayer] * hidden
        # A single GPU has no collective, and the model is about collectives.
        if ranks < 2 or depth % ranks:
            raise ConfigError(
                f"the tensor-parallel degree must be at least 2 and divide {depth}; got {ranks}."
            )
        rows = int(self.tokens.value) if tokens is None else tokens
        return Product(f"{self.name} {sublayer}, TP {ranks}", rows, hidden, depth // ranks)


def load_t3_model(name: str) -> T3Model:
    """Load a model from a preset, in upper or lower case, or from a YAML file.

    Raises:
        ConfigError: there is no such preset, or the file is wrong.
    """
    return load(
        T3Model,
        find("t3_models", name if name.endswith((".yaml", ".yml", ".json")) else name.lower()),
    )
