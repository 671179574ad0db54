"""Cost of ``mixture_of_experts`` per rank, forward and backward, and the parts of its time.

In the functions of a cost ``counts[s][e]`` is the number of rows that rank s sends to expert e,
dropped rows left out. With L experts per rank, rank r has the experts from ``r L`` to ``(r + 1) L -
1``. ``gates`` is 2 if experts have gate and up, 1 if they have no gate. Biases, as long as a row of
each weight, are not counted.

Where tokens go is not known before a call, so everything in the parts of its time
(:class:`ExpertsCall`), as :mod:`interlace.costs.time` weighs them, is the mean over even routing:
each token draws its experts without preference.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from interlace.costs.registry import (
    Cost,
    NetworkCost,
    cost_of,
)
from interlace.costs.time import OWN_BLOCK_SCALES, MachineProfile, Schedule
from interlace.units import ceil_div, next_power_of_2

Counts = Sequence[Sequence[int]]

NUMBER_BYTES = 4
"""Bytes of a count, a granted buffer's number, a slot's weight, that weight's gradient, or a float8
block's scale.
"""


def operand_row_bytes(width: int, itemsize: int, *, is_float8: bool) -> int:
    """Return the bytes of a row as it is multiplied: of float8 with the scales of its blocks."""
    return width + ceil_div(width, _BLOCK) * NUMBER_BYTES if is_float8 else width * itemsize


_BLOCK = 128
"""Elements of a float8 row that share a scale."""


def arrivals(counts: Counts, rank: int) -> int:
    """Count the rows that ``rank``'s experts get from all ranks."""
    return sum(sum(source[expert] for expert in _local(counts, rank)) for source in counts)


def leaving(counts: Counts, rank: int) -> int:
    """Count the rows that ``rank`` sends to peers' experts; as many results come back."""
    return sum(counts[rank]) - sum(counts[rank][expert] for expert in _local(counts, rank))


def returning(counts: Counts, rank: int) -> int:
    """Count the rows that ``rank``'s experts get from peers; as many results go back."""
    return arrivals(counts, rank) - sum(counts[rank][expert] for expert in _local(counts, rank))


def floor_link_bytes(
    *, counts: Counts, rank: int, hidden: int, itemsize: int, is_float8: bool = False
) -> int:
    """Count the bytes that must leave ``rank`` in one pass.

    They are the rows of its tokens for peers' experts, and the results of peers' tokens.

    Args:
        is_float8: Whether rows of tokens leave as float8.
    """
    row_bytes = operand_row_bytes(hidden, itemsize, is_float8=is_float8)
    return leaving(counts, rank) * row_bytes + returning(counts, rank) * hidden * itemsize


def flops(*, counts: Counts, rank: int, hidden: int, ffn: int, gates: int = 2) -> int:
    """Count the FLOPs of the forward pass on ``rank``.

    An expert has ``gates + 1`` products with ``hidden x ffn`` weights each; the backward pass has
    twice as many FLOPs.
    """
    return 2 * (gates + 1) * arrivals(counts, rank) * hidden * ffn


def weight_bytes(
    *, counts: Counts, rank: int, hidden: int, ffn: int, itemsize: int, gates: int = 2
) -> int:
    """Count the bytes of the weights of ``rank``'s experts that have rows."""
    busy = sum(any(source[expert] for source in counts) for expert in _local(counts, rank))
    return (gates + 1) * busy * hidden * ffn * itemsize


def floor_memory_bytes(
    *, counts: Counts, rank: int, tokens: int, hidden: int, ffn: int, itemsize: int, trains: bool,
    gates: int = 2, is_float8: bool = False,
) -> int:  # fmt: skip
    """Count the bytes that ``rank``'s memory must move in the forward pass.

    Weights are read once. Tokens are read, written by the rank that they reach, and read there; the
    inner layer is written and read; results are written by the rank that they come back to, and
    read there; y is written.

    Args:
        tokens: Tokens of this rank.
        trains: Whether gate and up are written as well, for the backward pass.
        is_float8: Whether weights, and the rows that they are multiplied by, are float8; the scales
            of weights are not counted.
    """
    # The inner layer is written and read; training writes gate and up as well.
    rows, back = arrivals(counts, rank), sum(counts[rank])
    moved = sum(
        2 * rows * operand_row_bytes(width, itemsize, is_float8=is_float8)
        for width in (hidden, ffn)
    )
    others = 2 * hidden * (tokens + back) + (gates * ffn * rows if trains else 0)
    weights = weight_bytes(
        counts=counts, rank=rank, hidden=hidden, ffn=ffn, itemsize=1 if is_float8 else itemsize,
        gates=gates,
    )  # fmt: skip
    return weights + moved + others * itemsize


def backward_memory_bytes(
    *, counts: Counts, rank: int, tokens: int, hidden: int, ffn: int, itemsize: int, gates: int = 2
) -> int:
    """Count the bytes that ``rank``'s memory must move in the backward pass.

    The gradients of tokens and results move as tokens and results do in the forward pass, and are
    read twice. Weights are read and their gradients written; the tokens that arrived, gate and up
    are read again. The inner layer moves the product, the gradients of gate and up (read twice) and
    the weighted activation.
    """
    rows, back = arrivals(counts, rank), sum(counts[rank])
    weights = weight_bytes(
        counts=counts, rank=rank, hidden=hidden, ffn=ffn, itemsize=itemsize, gates=gates
    )
    # Gradients of all local experts are written, of experts without rows as zeros.
    written = (gates + 1) * len(_local(counts, rank)) * hidden * ffn * itemsize
    inner = ffn * rows * (4 + 4 * gates)
    return weights + written + itemsize * (hidden * (2 * tokens + 4 * rows + 2 * back) + inner)


@cost_of("mixture_of_experts", computation="experts", collective="all_to_all")
def forward(
    *, counts: Counts, rank: int, tokens: int, hidden: int, ffn: int, itemsize: int,
    push_tile: tuple[int, int], product_tile: tuple[int, int], trains: bool = False,
    gates: int = 2, is_float8: bool = False,
) -> Cost:  # fmt: skip
    """Compute the cost of the fused forward kernels on ``rank``.

    Products that store by tensor descriptors send entire tiles, so up to a tile's rows more travel
    per source and expert; those rows are not counted.

    Args:
        tokens: Tokens of this rank.
        push_tile: Rows and columns of tokens that one put sends.
        product_tile: Rows and columns of results that one put sends.
        trains: Whether gate and up are written for the backward pass.
        is_float8: Whether weights are float8; so are the rows of tokens then, whose scales are a
            put of their own.
    """
    peers = len(counts) - 1
    link_bytes = floor_link_bytes(
        counts=counts, rank=rank, hidden=hidden, itemsize=itemsize, is_float8=is_float8
    )
    sent = _pushes(counts, rank, push_tile[0]) * ceil_div(hidden, push_tile[1])
    results = _puts(counts, rank, product_tile[0]) * ceil_div(hidden, product_tile[1])
    # Every peer gets this rank's counts per expert, and the number of the granted buffer.
    numbers = NUMBER_BYTES * (len(counts[0]) + 1)
    return Cost(
        flops=flops(counts=counts, rank=rank, hidden=hidden, ffn=ffn, gates=gates),
        memory_bytes=floor_memory_bytes(
            counts=counts,
            rank=rank,
            tokens=tokens,
            hidden=hidden,
            ffn=ffn,
            itemsize=itemsize,
            trains=trains,
            gates=gates,
            is_float8=is_float8,
        ),
        link_bytes=peers * numbers + link_bytes,
        messages=2 * peers + (2 if is_float8 else 1) * sent + results,
        signals=2 * peers + _busy_elsewhere(counts, rank),
    )


def exchanges_between_nodes(
    *, rank: int, tokens: int, hidden: int, top_k: int, itemsize: int, node_of_rank: Sequence[int],
    slices: int, backward: bool = False,
) -> tuple[NetworkCost, NetworkCost]:  # fmt: skip
    """Compute the traffic between nodes of a layer whose tokens go to every rank, and of their sums
    back, each in slices. The stamps that peers get are not counted.

    Tokens travel with their experts and weights, 4 bytes each. In the backward pass their gradients
    travel, too, and the gradients of weights come back with those of tokens.

    Args:
        tokens: Tokens of this rank, not fewer than slices.
        slices: Number of slices of the tokens, and of the sums.
        backward: Whether it is the backward pass.
    """
    far = sum(node != node_of_rank[rank] for node in node_of_rank)
    rows, numbers = tokens * hidden * itemsize, tokens * top_k * NUMBER_BYTES
    # Tokens alone, or tokens and gradients; then sums alone, or with gradients of weights.
    pieces = 2 if backward else 1
    return (
        # All tokens leave at once.
        NetworkCost(far * (pieces * rows + 2 * numbers), (pieces + 1) * far * slices, slices, 0.0),
        NetworkCost(
            far * (rows + (pieces - 1) * numbers),
            pieces * far * slices,
            slices,
            # The sums of all ranks' tokens are read, and those of this rank's written.
            landing_bytes=(len(node_of_rank) + 1) * rows // slices,
        ),
    )


def backward(
    *, counts: Counts, rank: int, tokens: int, hidden: int, ffn: int, itemsize: int,
    push_tile: tuple[int, int], product_tile: tuple[int, int], number_rows: int, gates: int = 2,
) -> Cost:  # fmt: skip
    """Compute the cost of the fused backward kernels on ``rank``.

    Args:
        tokens: Tokens of this rank.
        push_tile: Rows and columns of gradients that one put sends.
        product_tile: Rows and columns of results that one put sends.
        number_rows: Rows whose weights' gradients one put sends.
    """
    # Every row travels with one number: its slot's weight, or that weight's gradient.
    peers, row_bytes = len(counts) - 1, hidden * itemsize + NUMBER_BYTES
    sent = _pushes(counts, rank, push_tile[0]) * (ceil_div(hidden, push_tile[1]) + 1)
    results = _puts(counts, rank, product_tile[0]) * ceil_div(hidden, product_tile[1])
    return Cost(
        flops=2 * flops(counts=counts, rank=rank, hidden=hidden, ffn=ffn, gates=gates),
        memory_bytes=backward_memory_bytes(
            counts=counts,
            rank=rank,
            tokens=tokens,
            hidden=hidden,
            ffn=ffn,
            itemsize=itemsize,
            gates=gates,
        ),
        link_bytes=(leaving(counts, rank) + returning(counts, rank)) * row_bytes,
        messages=sent + results + _puts(counts, rank, number_rows),
        signals=2 * peers + _busy_elsewhere(counts, rank),
    )


def copies(chosen: Sequence[Sequence[Sequence[int]]], rank: int, local: int) -> int:
    """Count the tokens that ``rank`` sends to peers in decoding: one to each that has an expert of
    the token.

    Args:
        chosen: ``chosen[s][t]`` are the experts of rank s's token t; numbers beyond the experts
            stand for none.
        local: Experts per rank.
    """
    peers = set(range(len(chosen))) - {rank}
    return sum(
        len(peers & {expert // local for expert in experts if expert >= 0})
        for experts in chosen[rank]
    )


def decode(
    *, counts: Counts, copies: int, rank: int, tokens: int, top_k: int, hidden: int, ffn: int,
    itemsize: int, senders: int, columns: int, product_tile: tuple[int, int],
    is_float8: bool = False,
) -> Cost:  # fmt: skip
    """Compute the cost of ``impl="decode"`` on ``rank``.

    Args:
        copies: Tokens that leave; see :func:`copies`.
        tokens: Tokens of this rank.
        senders: Programs that send tokens.
        columns: Columns of a token that one put sends.
        product_tile: Rows and columns of results that one put sends.
        is_float8: As in :func:`forward`. The inner layer is written in x's dtype, and then as
            float8.
    """
    peers = len(counts) - 1
    token_bytes = operand_row_bytes(hidden, itemsize, is_float8=is_float8)
    inner_bytes = 2 * arrivals(counts, rank) * ffn * itemsize if is_float8 else 0
    results = _puts(counts, rank, product_tile[0]) * ceil_div(hidden, product_tile[1])
    # Every peer gets the experts that this rank's slots name, up to 2048 of them in one put.
    slots = tokens * top_k
    named = peers * ceil_div(slots, min(2048, next_power_of_2(max(16, len(counts) * slots))))
    return Cost(
        flops=flops(counts=counts, rank=rank, hidden=hidden, ffn=ffn),
        memory_bytes=floor_memory_bytes(
            counts=counts, rank=rank, tokens=tokens, hidden=hidden, ffn=ffn, itemsize=itemsize,
            trains=False, is_float8=is_float8,
        ) + inner_bytes,
        link_bytes=peers * NUMBER_BYTES * slots
        + copies * token_bytes
        + returning(counts, rank) * hidden * itemsize,
        messages=named + copies * ceil_div(hidden, columns) * (2 if is_float8 else 1) + results,
        # Each sender has a signal of its own; then one says that results are complete.
        signals=peers * (senders + 1),
    )  # fmt: skip


def _local(counts: Counts, rank: int) -> range:
    experts = len(counts[0]) // len(counts)
    return range(rank * experts, (rank + 1) * experts)


def _busy_elsewhere(counts: Counts, rank: int) -> int:
    """Count the peers' experts to which ``rank`` sends rows."""
    local = _local(counts, rank)
    return sum(count > 0 and expert not in local for expert, count in enumerate(counts[rank]))


def _pushes(counts: Counts, rank: int, rows: int) -> int:
    """Count the blocks of ``rows`` rows that ``rank`` sends to peers' experts."""
    local = _local(counts, rank)
    return sum(
        ceil_div(count, rows) for expert, count in enumerate(counts[rank]) if expert not in local
    )


def _puts(counts: Counts, rank: int, rows: int) -> int:
    """Count the puts that return results from ``rank``'s experts.

    An expert's rows lie source by source and are cut into blocks of ``rows``. A block that holds
    rows of several sources needs a put for each of them.
    """
    puts = 0
    for expert in _local(counts, rank):
        begin = 0
        for source, sent in enumerate(counts):
            end = begin + sent[expert]
            # The number of blocks that rows [begin, end) touch; the first and the last may be
            # shared with other sources.
            if source != rank and end > begin:
                puts += (end - 1) // rows - begin // rows + 1
            begin = end
    return puts


_OPERATOR, _STOCK = "mixture_of_experts", "unfused"

STOCK_TILE = (128, 128)
"""Rows and columns that the tiles of the library's grouped products are taken to have."""


_LARGE_TILE = 128 * 256
"""Elements of a tile of :data:`_DECODING`."""

_DECODING = 2.1, 0.87
"""How much longer the products of decoding compute than tiles of their size do elsewhere, as they
are made for few rows, and how much less of it there is with tiles of 128 x 256. With the factor
that is fitted to ``product``: 1.7 times with tiles of 64 x 128, 1.4 with 160 x 128 and 1.1 with
128 x 256 (three layers of 64 to 4096 tokens on one H200, decision 0022).
"""

_FLOAT8_DECODING = 2.5, 1.1
"""How much longer the products of decoding compute, and read weights, where these are float8. With
these the faster of ``decode`` and ``fused`` is taken, or one within 1 %, in 42 calls of four layers
of 1 to 512 tokens on one and two H200s: ``decode`` up to some 16 rows an expert (decision 0031).
"""


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
        is_float8: Whether weights, and the rows that they are multiplied by, are float8 with scales
            of blocks; ``itemsize`` is that of tokens and results.
    """

    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    world_size: int
    itemsize: int = 2
    gates: int = 2
    is_float8: bool = False

    @property
    def size(self) -> tuple[int, ...]:
        """Return the sizes by which measured calls are known."""
        *sizes, _, _, _ = dataclasses.astuple(self)
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
        for a product (:meth:`interlace.costs.time.SizedCall.parts_us`): ``product`` is both grouped
        products, as long as their tiles or their memory take, and ``memory`` the time to read the
        weights of the experts that have rows. ``rows`` is the time to move all rows once, as each
        permutation does.

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
        leaving_rows = rows * peers / self.world_size
        # Tokens leave as they are multiplied, and come back as results.
        token_bytes = operand_row_bytes(self.hidden, self.itemsize, is_float8=self.is_float8)
        if schedule == "to_all":
            sent_bytes = 2.0 * self.tokens * peers * row_bytes
            # Every rank permutes the rows of all ranks.
            rows *= self.world_size
        elif schedule == "by_token":
            copies = self.tokens * peers * self._reach
            sent_bytes = copies * token_bytes + leaving_rows * row_bytes
        else:
            sent_bytes = leaving_rows * (token_bytes + row_bytes)
        link = sent_bytes / profile.link_bytes_per_s * 1e6
        weights = (self.gates + 1) * self.hidden * self.ffn * self.busy
        memory = weights * (1 if self.is_float8 else self.itemsize) / bytes_per_us
        block_m, block_n = tile
        first = self.tiles_of_rows(block_m) * ceil_div(self.gates * self.ffn, block_n)
        second = self.tiles_of_rows(block_m) * ceil_div(self.hidden, block_n)
        flops = profile.product.flops_per_s
        if self.itemsize == 4:
            # Float32 without tensor cores; only our own kernels multiply it here.
            flops = profile.product.own_float32_flops_per_s
        elif self.is_float8:
            flops *= 2 / OWN_BLOCK_SCALES
        compute = sum(
            math.ceil(tiles / profile.processors) * profile.tile_us(block_m, block_n, inner, flops)
            for tiles, inner in ((first, self.hidden), (second, self.ffn))
        )
        if schedule == "by_token":
            if self.is_float8:
                compute *= _FLOAT8_DECODING[0]
                memory *= _FLOAT8_DECODING[1]
            else:
                slowest, gain = _DECODING
                compute *= slowest - gain * min(1.0, block_m * block_n / _LARGE_TILE)
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
        part = dataclasses.replace(self, tokens=tokens)
        parts = part.parts_us(profile, _OPERATOR, "to_all", STOCK_TILE)
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
