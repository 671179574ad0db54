"""The time that an implementation of an operator takes on a machine, predicted before it runs.

A prediction has two parts. A :class:`MachineProfile` says how long the machine takes for a product
and for the bytes that leave a rank, each by itself. A *composition*, one for every implementation,
says how these times make up the whole: an implementation that overlaps them takes little more than
the longer one, a stock pair takes their sum. Compositions are fitted to measurements
(:mod:`interlace.bench.profile_fit`) and shipped with the profile.

``impl="auto"`` and ``interlace.explain`` read it. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from interlace.costs.registry import find_cost
from interlace.errors import ConfigError
from interlace.units import ceil_div, round_up

Schedule = Literal["whole", "batch", "by_rank", "tiled"]
"""How an implementation computes its product: one product of the library; one batch of the
library's products, a product for each rank's rows; one product of the library after another, for
each rank's rows; or tiles of its own kernel, none of which covers two ranks' rows.
"""

Composition = Mapping[str, float]
"""Factor of each part of the time; the parts are the names that :func:`parts_us` gives them."""

_LIBRARY_TILES = (
    (64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64), (128, 192), (192, 128),
    (128, 256), (256, 128), (256, 256),
)  # fmt: skip
_LIBRARY_SPLITS = (1, 2, 3, 4, 6, 8)
_SMALL_TILE = 64 * 64
_K_STEP = 64
"""A tile's K is rounded up to this many elements, in the library's kernels and in ours."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes of one call of an operator around a product.

    Attributes:
        rows, columns, inner: M, N and K of the product on one rank, ``x [M, K] @ w[N, K].T``. For
            an all-gather, M counts the rows of all ranks.
        itemsize: bytes of an element of x and w.
        world_size: number of ranks.
    """

    rows: int
    columns: int
    inner: int
    itemsize: int
    world_size: int


@dataclasses.dataclass(frozen=True)
class ProductRates:
    """How fast a GPU multiplies.

    The library's time for a product is modelled as waves of tiles: the GPU's processors compute one
    tile each at a time, of the shape and with the split of K that take the least time.

    Attributes:
        flops_per_s: dense FLOPs per second of 16-bit operands that large tiles reach.
        memory_bytes_per_s: bytes per second that operands and results are read and written with.
        small_tile_efficiency: fraction of ``flops_per_s`` that tiles of 64 x 64 reach.
        launch_us: time of a product that is nearly empty.
        tile_us: time of a tile beside its multiplications.
        split_us: time of adding up the parts, where K is split.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    small_tile_efficiency: float
    launch_us: float
    tile_us: float
    split_us: float


@dataclasses.dataclass(frozen=True)
class MachineProfile:
    """A GPU, its links, and how implementations compose the times of both.

    Attributes:
        gpu: the GPU's name, as ``torch.cuda.get_device_name`` has it.
        source: where the figures come from.
        results: names of the files of results to which the compositions were fitted.
        processors: number of streaming multiprocessors.
        product: rates of products.
        link_bytes_per_s: bytes per second that leave a GPU for all its peers together.
        compositions: the composition of each implementation, by operator and name.
        is_guess: whether the figures are another GPU's, scaled.
    """

    gpu: str
    source: str
    processors: int
    product: ProductRates
    link_bytes_per_s: float
    compositions: Mapping[str, Mapping[str, Composition]]
    results: Sequence[str] = ()
    is_guess: bool = False

    def tile_us(self, block_m: int, block_n: int, inner: int, itemsize: int) -> float:
        """Return how long a processor takes for one tile of a product, in microseconds."""
        # Tensor cores multiply 8-bit operands twice as fast as 16-bit ones.
        flops_per_us = self.product.flops_per_s / 1e6 / self.processors * 2 / itemsize
        if block_m * block_n <= _SMALL_TILE:
            flops_per_us *= self.product.small_tile_efficiency
        flops = 2 * block_m * block_n * round_up(inner, _K_STEP)
        return flops / flops_per_us + self.product.tile_us

    def library_product_us(
        self, rows: int, columns: int, inner: int, itemsize: int, *, products: int = 1
    ) -> float:
        """Return how long the library takes for a product of ``rows x columns x inner``, in us.

        Args:
            products: number of such products with the same w, as one batch.
        """
        bytes_per_us = self.product.memory_bytes_per_s / 1e6
        results = products * rows * columns
        shortest = min(
            self._waves_us(products, rows, columns, inner, itemsize, block_m, block_n, split)
            + (self.product.split_us + 4 * split * results / bytes_per_us if split > 1 else 0.0)
            for block_m, block_n in _LIBRARY_TILES
            for split in _LIBRARY_SPLITS
        )
        # The products of a batch follow one another, and the cache seldom holds all of w.
        read_elements = products * (rows + columns) * inner
        moved_bytes = itemsize * read_elements + max(itemsize, 2) * results
        return self.product.launch_us + max(shortest, moved_bytes / bytes_per_us)

    def _waves_us(
        self,
        products: int,
        rows: int,
        columns: int,
        inner: int,
        itemsize: int,
        block_m: int,
        block_n: int,
        split: int,
    ) -> float:
        tiles = products * ceil_div(rows, block_m) * ceil_div(columns, block_n) * split
        waves = ceil_div(tiles, self.processors)
        return waves * self.tile_us(block_m, block_n, ceil_div(inner, split), itemsize)

    def link_us(self, operator: str, call: Call) -> float:
        """Return how long the bytes that an operator's call sends are on their way, in us."""
        cost = find_cost(operator).formula(**dataclasses.asdict(call))
        return float(cost.link_bytes) / self.link_bytes_per_s * 1e6

    def predict_us(
        self,
        operator: str,
        implementation: str,
        call: Call,
        schedule: Schedule,
        tile: tuple[int, int],
    ) -> float | None:
        """Return how long an implementation takes for a call, in microseconds.

        Args:
            schedule: how the implementation computes its product.
            tile: rows and columns of the tiles of a tiled schedule.

        Returns:
            The time; None if the profile has no composition for the implementation.
        """
        composition = self.compositions.get(operator, {}).get(implementation)
        if composition is None:
            return None
        parts = parts_us(self, operator, call, schedule, tile)
        return sum(factor * parts[name] for name, factor in composition.items())


def parts_us(
    profile: MachineProfile,
    operator: str,
    call: Call,
    schedule: Schedule,
    tile: tuple[int, int],
) -> dict[str, float]:
    """Return the parts of an implementation's time that its composition weighs, in microseconds.

    All implementations have these: ``fixed``, 1 us; ``peers``, 1 us for every peer beyond the
    first; ``product`` and ``link``, the times of the product and of the link, each alone;
    ``longer``, the longer one of them; ``ramp``, the square root of the link's time, since
    transfers reach the link's rate by and by; ``memory``, the time to read x and w once, which
    kernels for few rows are limited by.
    """
    link = profile.link_us(operator, call)
    bytes_per_us = profile.product.memory_bytes_per_s / 1e6
    rows_of_rank = ceil_div(call.rows, call.world_size)
    if schedule == "tiled":
        block_m, block_n = tile
        tiles = call.world_size * ceil_div(rows_of_rank, block_m) * ceil_div(call.columns, block_n)
        tile_us = profile.tile_us(block_m, block_n, call.inner, call.itemsize)
        product = ceil_div(tiles, profile.processors) * tile_us
    elif schedule == "batch":
        product = profile.library_product_us(
            rows_of_rank, call.columns, call.inner, call.itemsize, products=call.world_size
        )
    elif schedule == "by_rank":
        product = call.world_size * profile.library_product_us(
            rows_of_rank, call.columns, call.inner, call.itemsize
        )
    else:
        product = profile.library_product_us(call.rows, call.columns, call.inner, call.itemsize)
    return {
        "fixed": 1.0,
        "peers": call.world_size - 2.0,
        "product": product,
        "link": link,
        "longer": max(product, link),
        "ramp": math.sqrt(link),
        "memory": call.itemsize * (call.rows + call.columns) * call.inner / bytes_per_us,
    }


# Profiles that are shipped


@functools.cache
def profile_of(gpu: str, processors: int = 132) -> MachineProfile:
    """Return the profile of a GPU; a guess if there is none.

    The guess is the profile of the NVIDIA H200, with products scaled by the number of processors.
    Links and memory stay as they are, so it ranks implementations rather than times them.

    Args:
        gpu: the GPU's name, as ``torch.cuda.get_device_name`` has it.
        processors: its number of streaming multiprocessors, for a guess.
    """
    name = re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")
    folder = importlib.resources.files("interlace.costs") / "profiles"
    file = folder / f"{name}.json"
    if file.is_file():
        return parse_profile(file.read_text(encoding="utf-8"))
    model = parse_profile((folder / "nvidia_h200.json").read_text(encoding="utf-8"))
    rate = model.product.flops_per_s * processors / model.processors
    return dataclasses.replace(
        model,
        gpu=gpu,
        source=f"a guess: {model.gpu}'s, with {processors} of {model.processors} processors",
        processors=processors,
        product=dataclasses.replace(model.product, flops_per_s=rate),
        is_guess=True,
    )


def profiled_gpus() -> list[str]:
    """Return the names of the GPUs whose profiles are shipped."""
    folder = importlib.resources.files("interlace.costs") / "profiles"
    files = (file for file in folder.iterdir() if file.name.endswith(".json"))
    return sorted(parse_profile(file.read_text(encoding="utf-8")).gpu for file in files)


def parse_profile(text: str) -> MachineProfile:
    """Return the profile that a JSON text describes.

    Raises:
        ConfigError: it is not a profile.
    """
    try:
        values = json.loads(text)
        return MachineProfile(**values | {"product": ProductRates(**values["product"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"a machine profile must be JSON with all its fields; {error}."
        ) from error
