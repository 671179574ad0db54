"""``impl="chunked"`` between nodes where ranks sum or gather: within the node first, then by rail.

A *rail* is the ranks of one index within their nodes. Only they exchange over the network, so each
row crosses it once per node and not once per rank. Within the node, the kernels of
:mod:`interlace.gemm.implementations.pushed` move rows and add them.

Dimensions: R ranks on G nodes, L of each; M rows, K inner, N columns.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from interlace.comm.groups.slices import Step
from interlace.comm.host.nodes import ranks_of_nodes
from interlace.comm.launching.within_node import WithinNode, distance
from interlace.costs.gemm import exchanges_sums
from interlace.gemm.call import GemmCall
from interlace.gemm.choice import MAX_RANKS
from interlace.gemm.implementations import network
from interlace.gemm.implementations.network import (
    counters_of,
    cut,
    cut_all,
    run_products,
    slice_count,
    steps_of,
)
from interlace.gemm.implementations.pushed import push_and_sum, push_rows, reserve
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.operands import FLOATS, RowPart
from interlace.gemm.products import multiply_into
from interlace.gemm.terms import Terms
from interlace.mapped.stamped import Landing, StampedQueue

Pair = tuple[torch.Tensor, torch.Tensor]

_needs = needs(even_rows=True, same_dtype=True, dtypes=FLOATS)


def needs_rails(terms: Terms) -> str | None:
    """Return what a call between nodes must have for two levels and has not, or None."""
    nodes = ranks_of_nodes(terms.node_of_rank)
    rules = (
        (len({len(ranks) for ranks in nodes}) == 1, "as many ranks on every node"),
        (all(map(distance, nodes)), "ranks of a node at equal distances"),
        (max(map(len, nodes)) <= MAX_RANKS, f"at most {MAX_RANKS} ranks on a node"),
    )
    lacking = [rule for holds, rule in rules if not holds]
    return " and ".join([*filter(None, [_needs(terms)]), *lacking]) or None


@dataclasses.dataclass(frozen=True)
class _Levels:
    """The two levels of one call.

    Attributes:
        call: The call.
        nodes: The ranks of each node.
        node: The number of this rank's node.
        within: The ranks of this node, for kernels.
        peers: The other ranks of this rank's rail by their nodes, from the next node on.
    """

    call: GemmCall
    nodes: Sequence[Sequence[int]]
    node: int
    within: WithinNode
    peers: dict[int, int]

    @staticmethod
    def of(call: GemmCall) -> _Levels:
        """Return the levels of a call."""
        members = call.group.members
        nodes, within = ranks_of_nodes(members.node_of_rank), WithinNode(call.group)
        turn = [(members.node + step) % len(nodes) for step in range(1, len(nodes))]
        peers = {node: nodes[node][within.rank] for node in turn}
        return _Levels(call, nodes, members.node, within, peers)

    def reserve(self, rows: int, row_bytes: int) -> None:
        """Allocate memory for what is summed or gathered within the node at a time, at most.

        Collective when it must grow, so it comes before anything is enqueued.
        """
        if self.within.world_size > 1:
            reserve(self.within, self.call.operator.name, rows * row_bytes)

    @property
    def landings(self) -> list[Landing]:
        """Return the landings of slices that are compared one by one: none at the end."""
        return [Landing(peer, 0, 0) for peer in self.peers.values()]

    def shares(self, rows: torch.Tensor, node: int) -> torch.Tensor:
        """Return a node's rows, ``[L, M/R, ...]``, of those of all ranks, ``[M, ...]``."""
        first, last, step = self.nodes[node][0], self.nodes[node][-1], distance(self.nodes[node])
        by_rank: torch.Tensor = rows.unflatten(0, (self.call.group.world_size, -1))
        return by_rank[first : last + 1 : step or 1]

    def slices(self, rows: torch.Tensor, node: int, count: int) -> list[torch.Tensor]:
        """Return a node's rows in slices, each of every rank's: ``[L, rows, ...]``."""
        return cut(self.shares(rows, node), count, 1)

    def slices_of_peers(self, rows: torch.Tensor, count: int) -> network.Slices:
        """Return the slices of each peer's node."""
        return {peer: self.slices(rows, node, count) for node, peer in self.peers.items()}

    def multiply(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Multiply the rows of every rank of a node: ``out [L, rows, N]``, ``x [L, rows, K]``."""
        weight = self.call.operands.weight()
        if not out.numel():
            return
        if len(x) == 1:
            multiply_into(out[0], RowPart(x[0]), weight, bias)
            return
        # One launch, as the rows of one rank may be too few for all SMs.
        weights = weight.transposed.expand(len(x), -1, -1)
        if bias is None:
            torch.bmm(x, weights, out=out)
        else:
            torch.baddbmm(bias, x, weights, out=out)

    def sum_product(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply rows for every rank of the node, and sum this rank's over the node.

        Parts are rounded to the result's dtype, added in float32 in the order of ranks, and rounded
        once more.

        Args:
            x: ``[L, rows, K]``.
            out: ``[rows, N]``, contiguous.
        """
        if not out.numel():
            return
        if self.within.world_size == 1:
            self.multiply(out[None], x, None)
            return
        name, mark = self.call.operator.name, self.call.mark
        parts = out.new_empty([len(x), *out.shape])
        self.multiply(parts, x, None)
        with self.within.running(name):
            push_and_sum(self.within, name, parts, out, None, mark)()

    def gather(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        """Bring each rank's rows to all ranks of the node.

        Args:
            rows: ``[rows, columns]``, contiguous; of this rank.
            target: ``[L, rows, columns]``, whose rows are contiguous.
        """
        if not rows.numel() or (len(target) == 1 and rows.data_ptr() == target.data_ptr()):
            return
        if len(target) == 1:
            target[0].copy_(rows)
            return
        name, mark, count = self.call.operator.name, self.call.mark, len(rows)
        pitch = target.stride(0) // target.stride(1)
        flat = target.as_strided(
            [(len(target) - 1) * pitch + count, target.shape[2]], [target.stride(1), 1]
        )
        offsets = [local * pitch for local in range(len(target))]
        with self.within.running(name):
            push_rows(self.within, name, rows, flat, [count] * len(target), mark, offsets=offsets)()

    def span(self, share: int) -> int:
        """Return the rows from a node's first to its last one, if each rank has ``share`` rows."""
        steps = (distance(ranks) or 1 for ranks in self.nodes)
        return ((self.within.world_size - 1) * max(steps) + 1) * share


def _add_nodes(parts: Sequence[torch.Tensor], bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Add what each node has for the same rows, float32 in the order of nodes; then the bias."""
    if len(parts) == 2 and bias is None:
        # torch adds two values in float32 and rounds once.
        torch.add(*parts, out=out)
        return
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    if bias is not None:
        total += bias
    out.copy_(total)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """The sums over ranks of the rows that each rank owns, as many on each.

    Attributes:
        levels: The two levels.
        count: The number of slices.
        x: ``[M, K]``.
        own: ``[M/R, N]``: what this node has for this rank.
        sent: What this node has for each peer of the rail, ``[M/R, N]``.
        arriving: What the peers' nodes have for this rank, ``[M/R, N]``.
    """

    levels: _Levels
    count: int
    x: torch.Tensor
    own: torch.Tensor
    sent: network.Rows
    arriving: network.Rows

    @staticmethod
    def of(levels: _Levels, x: torch.Tensor, count: int) -> _Sums:
        """Return memory for the sums, in ``count`` slices each. Collective when it must grow."""
        columns = levels.call.operands.columns
        share, peers = len(x) // levels.call.group.world_size, levels.peers.values()
        own_rows = x.new_empty([share, columns])
        levels.reserve(levels.within.world_size * share, columns * x.element_size())
        sent, arriving = ({peer: torch.empty_like(own_rows) for peer in peers} for _ in range(2))
        return _Sums(levels, count, x, own_rows, sent, arriving)

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the sums are made in."""
        return self.own, *self.sent.values(), *self.arriving.values()

    def steps(self, counters: torch.Tensor) -> list[Step]:
        """Return the exchanges."""
        sent, arriving = (cut_all(rows, self.count) for rows in (self.sent, self.arriving))
        return steps_of(sent, arriving, counters)

    def send(self, counters: torch.Tensor, queue: StampedQueue) -> None:
        """Multiply and sum within the node what the rail's peers own, and send each slice."""
        levels, sent = self.levels, cut_all(self.sent, self.count)
        x = levels.slices_of_peers(self.x, self.count)
        for number in range(self.count):
            for peer, rows in x.items():
                levels.sum_product(rows[number], sent[peer][number])
            counters[number : number + 1].add_(1)
            queue.release(number + 1)

    def sum_own(self) -> None:
        """Multiply and sum within the node what its ranks own, in pieces beside the exchange."""
        slices = self.levels.slices(self.x, self.levels.node, self.count)
        for rows, own_slice in zip(slices, cut(self.own, self.count), strict=True):
            self.levels.sum_product(rows, own_slice)

    def arrived(self, queue: StampedQueue) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield what the nodes have for each slice, in their order, once the slice has arrived."""
        levels = self.levels
        by_node = [
            cut(self.own if node == levels.node else self.arriving[levels.peers[node]], self.count)
            for node in range(len(levels.nodes))
        ]
        for number, parts in enumerate(zip(*by_node, strict=True)):
            queue.wait(number)
            yield parts


def run_reduce_scatter(call: GemmCall) -> torch.Tensor:
    """Send each rail's peers what this node has for them, and add what theirs have for this rank.

    Rows of other nodes come first: a slice is multiplied, summed within the node, and leaves. This
    node's rows are multiplied beside the exchange. Collective in the group's first call.

    Returns:
        ``[M/R, N]``: the sum over nodes, in their order, of sums over a node's ranks, in theirs.
    """
    levels, x = _Levels.of(call), call.operands.x
    y = x.new_empty([call.rows.result, call.operands.columns])
    count = slice_count(call, len(y), y.shape[1] * y.element_size())
    sums, counters = _Sums.of(levels, x, count), counters_of(call, count)

    def enqueue() -> None:
        steps = sums.steps(counters)
        with network.exchanging(call, steps, counters, levels.landings, y) as queue:
            sums.send(counters, queue)
            sums.sum_own()
            for parts, rows in zip(sums.arrived(queue), cut(y, count), strict=True):
                _add_nodes(parts, call.operands.bias, rows)

    run_products(call, count, enqueue, y, *sums.memory)
    return y


def run_all_gather(call: GemmCall) -> Pair:
    """Gather rows by rail and within the node, and multiply each slice once it has arrived.

    This rank's rows leave at once; this node's rows are multiplied first. Collective in the group's
    first call.

    Returns:
        The product ``[M, N]``, and the gathered x, ``[M, K]`` or no rows.
    """
    levels, operands = _Levels.of(call), call.operands
    x, bias, row_bytes = (
        operands.x.contiguous(),
        operands.bias,
        operands.inner * operands.x.itemsize,
    )
    y = x.new_empty([call.rows.result, operands.columns])
    gathered = x.new_empty([len(y), operands.inner])
    count = slice_count(call, len(x), row_bytes)
    levels.reserve(levels.span(len(x)), row_bytes)
    landing, counters = _landing(levels, gathered, count), counters_of(call, 1)

    def enqueue() -> None:
        steps = steps_of(dict.fromkeys(levels.peers.values(), cut(x, count)), landing, None)
        with network.exchanging(call, steps, counters, levels.landings, y) as queue:
            queue.release(1)
            own_rows = levels.shares(gathered, levels.node)
            if call.gather or levels.within.world_size > 1:
                levels.gather(x, own_rows)
            else:
                own_rows = x[None]
            own_products = levels.slices(y, levels.node, count)
            own_slices = zip(own_products, cut(own_rows, count, 1), strict=True)
            for number, (products, rows) in enumerate(own_slices):
                levels.multiply(products, rows, bias)
                queue.release(number + 2)
            rows_of, products_of = (levels.slices_of_peers(rows, count) for rows in (gathered, y))
            for number in range(count):
                queue.wait(number)
                for peer, arrived in landing.items():
                    rows = rows_of[peer][number]
                    levels.gather(arrived[number], rows)
                    levels.multiply(products_of[peer][number], rows, bias)

    run_products(call, count, enqueue, x, y, gathered, *itertools.chain(*landing.values()))
    return y, gathered if call.gather else x.new_empty([0, operands.inner])


def run_all_reduce(call: GemmCall) -> torch.Tensor:
    """Sum over all ranks on every rank, by the exchange that takes fewer bytes.

    Collective in the group's first call.

    Returns:
        ``[M, N]``: the sum over nodes, in their order, of sums over a node's ranks, in theirs; the
        same on every rank.
    """
    levels, operands = _Levels.of(call), call.operands
    row_bytes = operands.columns * operands.x.itemsize
    levels.reserve(operands.rows, row_bytes)
    if exchanges_sums(
        rows=operands.rows,
        row_bytes=row_bytes,
        nodes=len(levels.nodes),
        node_ranks=levels.within.world_size,
    ):
        return _exchange_sums(levels)
    return _reduce_and_gather(levels)


def _exchange_sums(levels: _Levels) -> torch.Tensor:
    """Exchange the sums of all nodes by rail, each rank those of 1/L of the rows."""
    call, x, ranks = levels.call, levels.call.operands.x, levels.within.world_size
    y = x.new_empty([len(x), call.operands.columns])
    shares, results = x.unflatten(0, (ranks, -1)), y.unflatten(0, (ranks, -1))
    count = slice_count(call, results.shape[1], y.shape[1] * y.element_size())
    peers = levels.peers.values()
    node_sum = torch.empty_like(results[0])
    total = results[0] if ranks == 1 else torch.empty_like(node_sum)
    arriving = {peer: torch.empty_like(node_sum) for peer in peers}
    sums = _Sums(levels, count, x, node_sum, dict.fromkeys(peers, node_sum), arriving)
    counters = counters_of(call, count)

    def enqueue() -> None:
        steps = sums.steps(counters)
        with network.exchanging(call, steps, counters, levels.landings, y) as queue:
            products = zip(cut(shares, count, 1), cut(node_sum, count), strict=True)
            for number, (x_rows, rows) in enumerate(products):
                levels.sum_product(x_rows, rows)
                counters[number : number + 1].add_(1)
                queue.release(number + 1)
            totals = zip(cut(total, count), cut(results, count, 1), strict=True)
            for parts, (rows, target) in zip(sums.arrived(queue), totals, strict=True):
                _add_nodes(parts, call.operands.bias, rows)
                levels.gather(rows, target)

    run_products(call, count, enqueue, y, total, *sums.memory)
    return y


def _reduce_and_gather(levels: _Levels) -> torch.Tensor:
    """Sum a share of the rows on each rank, and gather the sums."""
    call, x = levels.call, levels.call.operands.x
    y = x.new_empty([len(x), call.operands.columns])
    share = len(x) // call.group.world_size
    count = slice_count(call, share, y.shape[1] * y.element_size())
    sums, total = _Sums.of(levels, x, count), y.new_empty([share, y.shape[1]])
    landing, counters = _landing(levels, y, count), counters_of(call, 2 * count)

    def enqueue() -> None:
        totals = cut(total, count)
        to_gather = dict.fromkeys(levels.peers.values(), totals)
        steps = [*sums.steps(counters), *steps_of(to_gather, landing, counters[count:])]
        with network.exchanging(call, steps, counters, levels.landings, y) as queue:
            sums.send(counters, queue)
            sums.sum_own()
            for number, parts in enumerate(sums.arrived(queue)):
                _add_nodes(parts, call.operands.bias, totals[number])
                counters[count + number : count + number + 1].add_(1)
                queue.release(count + number + 1)
            levels.gather(total, levels.shares(y, levels.node))
            rows_of = levels.slices_of_peers(y, count)
            for number in range(count):
                queue.wait(count + number)
                for peer, arrived in landing.items():
                    levels.gather(arrived[number], rows_of[peer][number])

    run_products(call, count, enqueue, y, total, *itertools.chain(*landing.values()), *sums.memory)
    return y


def _landing(levels: _Levels, rows: torch.Tensor, count: int) -> network.Slices:
    """Return memory for the slices of the rail's peers, whose place is in ``rows [M, columns]``."""
    if levels.within.world_size == 1:
        return {
            peer: cut(levels.shares(rows, node)[0], count) for node, peer in levels.peers.items()
        }
    # Each slice has memory of its own: Triton's interpreter writes the whole storage back that a
    # kernel has read, while later slices arrive.
    share = len(rows) // levels.call.group.world_size
    like = rows.new_empty([share, rows.shape[1]])
    return {
        peer: [torch.empty_like(part) for part in cut(like, count)]
        for peer in levels.peers.values()
    }
