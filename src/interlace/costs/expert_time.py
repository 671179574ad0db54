"""The parts of the time of a layer of experts, as :mod:`interlace.costs.time` weighs them.

Where tokens go is not known before a call, so everything is the mean over even routing: each token
draws its experts without preference.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from interlace.costs.corrections import Schedule
from interlace.costs.time import MachineProfile
from interlace.units import ceil_div

_OPERATOR, _STOCK = "mixture_of_experts", "nccl"

STOCK_TILE = (128, 128)
"""Rows and columns that the tiles of the library's grouped products are taken to have."""


@dataclasses.dataclass(frozen=True, order=True)
class ExpertsCall:
    """The sizes of one forward pass through a layer of experts.

    Attributes:
        tokens: Tokens of each rank.
        hidden: Width of a token.
        ffn: Inner width of an expert.
        experts: Experts of all ranks.
        top_k: Experts per token.
        world_size: Number of ranks.
        itemsize: Bytes of an element.
        gates: 2 if experts have gate and up, 1 if they have no gate.
    """

    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    world_size: int
    itemsize: int = 2
    gates: int = 2

    @property
    def size(self) -> tuple[int, ...]:
        """Return the sizes by which measured calls are known."""
        *sizes, _, _ = dataclasses.astuple(self)
        return tuple(sizes)

    def parts_us(
        self,
        profile: MachineProfile,
        operator: str,
        schedule: Schedule,
        tile: tuple[int, int],
    ) -> dict[str, float]:
        """Return the parts of an implementation's time, in microseconds.

        They are ``fixed``, ``peers``, ``product``, ``link``, ``longer``, ``ramp`` and ``memory`` as
        for a product (:func:`interlace.costs.time.parts_us`): ``product`` is both grouped products,
        as long as their tiles or their memory take, and ``memory`` the time to read the weights of
        the experts that have rows. ``rows`` is the time to move all rows once, as each permutation
        does.

        Args:
            schedule: Which rows travel: ``"by_slot"``, one per token and expert; ``"by_token"``, a
                token once to each rank that has one of its experts, and a result per slot back;
                ``"to_all"``, all tokens to all ranks, and a sum of all of them back.
            tile: Rows and columns of the tiles of the products.
        """
        bytes_per_us = profile.product.memory_bytes_per_s / 1e6
        row_bytes = self.hidden * self.itemsize
        peers = self.world_size - 1
        rows = float(self.tokens * self.top_k)
        leaving = rows * peers / self.world_size
        if schedule == "to_all":
            sent = 2.0 * self.tokens * peers
            # Every rank permutes the rows of all ranks.
            rows *= self.world_size
        elif schedule == "by_token":
            sent = self.tokens * peers * self._reach + leaving
        else:
            sent = 2 * leaving
        link = sent * row_bytes / profile.link_bytes_per_s * 1e6
        weights = (self.gates + 1) * self.hidden * self.ffn * self.busy
        memory = weights * self.itemsize / bytes_per_us
        block_m, block_n = tile
        first = self.tiles_of_rows(block_m) * ceil_div(self.gates * self.ffn, block_n)
        second = self.tiles_of_rows(block_m) * ceil_div(self.hidden, block_n)
        flops = profile.product.flops_per_s
        if self.itemsize == 4:
            # Float32 without tensor cores; only our own kernels multiply it here.
            flops = profile.product.own_float32_flops_per_s
        compute = sum(
            math.ceil(tiles / profile.processors) * profile.tile_us(block_m, block_n, inner, flops)
            for tiles, inner in ((first, self.hidden), (second, self.ffn))
        )
        product = max(compute, memory)
        return {
            "fixed": 1.0,
            "peers": max(0.0, self.world_size - 2.0),
            "product": product,
            "link": link,
            "longer": max(product, link),
            "ramp": math.sqrt(link),
            "memory": memory,
            "rows": rows * row_bytes / bytes_per_us,
        }

    def computation_us(self, profile: MachineProfile, share: float = 1.0) -> float | None:
        """Return how long stock PyTorch's computation takes on one rank, without any exchange.

        Args:
            share: Fraction of all ranks' tokens that are multiplied by the rank's experts.

        Returns:
            Microseconds; None if the profile does not compose the stock implementation's time.
        """
        composition = profile.composition(_OPERATOR, _STOCK, self.itemsize)
        if composition is None:
            return None
        tokens = max(1, round(self.tokens * share))
        some = dataclasses.replace(self, tokens=tokens)
        parts = some.parts_us(profile, _OPERATOR, "to_all", STOCK_TILE)
        parts |= {"link": 0.0, "ramp": 0.0, "longer": parts["product"]}
        return sum(factor * parts[name] for name, factor in composition.items())

    @property
    def _reach(self) -> float:
        """Return the probability that a token has an expert on a given rank."""
        remote_experts = self.experts - self.experts // self.world_size
        return 1 - math.comb(remote_experts, self.top_k) / math.comb(self.experts, self.top_k)

    @property
    def _chances(self) -> tuple[int, float]:
        """Return how many tokens may come to an expert, and the probability of each."""
        return self.tokens * self.world_size, self.top_k / self.experts

    @property
    def busy(self) -> float:
        """Return the mean number of a rank's experts that have rows."""
        tokens, probability = self._chances
        return self.experts / self.world_size * (1 - (1 - probability) ** tokens)

    def tiles_of_rows(self, block_m: int) -> float:
        """Return the mean number of tiles of ``block_m`` rows that a rank's experts have."""
        return self.experts / self.world_size * _mean_tiles(*self._chances, block_m)


@functools.lru_cache(maxsize=4096)
def _mean_tiles(tokens: int, probability: float, block_m: int) -> float:
    """Return the mean number of tiles of an expert, whose rows have a binomial distribution.

    It is the sum over i of the probability that there are more than ``i * block_m`` rows; the
    distribution is taken for a normal one where i is not 0.
    """
    mean = tokens * probability
    deviation = math.sqrt(mean * (1 - probability))
    tiles = 1 - (1 - probability) ** tokens
    for i in range(1, ceil_div(tokens, block_m)):
        if deviation:
            distance = (i * block_m + 0.5 - mean) / deviation
            more = math.erfc(distance / math.sqrt(2)) / 2
        else:
            more = float(mean > i * block_m)
        if more < 1e-9:
            break
        tiles += more
    return tiles
