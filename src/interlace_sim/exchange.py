"""Exchange of messages in a task: rounds of a library's collective, slices of a fused kernel, and
two trees.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

from interlace.errors import ConfigError
from interlace.units import ceil_div
from interlace_sim.astra.algorithms import binary_tree
from interlace_sim.collectives import Group, Round
from interlace_sim.engine import Engine
from interlace_sim.fabric import Fabric
from interlace_sim.machine import Machine
from interlace_sim.topology import Hierarchical, Topology
from interlace_sim.work import Collective

# A bound on the number of events: large messages in small pieces would be millions.
_MAX_PIECES = 64
# Pieces in which each tree's half of the buffer flows through the tree.
TREE_PIECES = 16
# "Rounds" under which a fused kernel's messages arrive; a collective's rounds are 0 and up. The
# parts of an all-reduce have one for each slice, from _PARTS down.
_PRODUCED, _GATHERED, _PARTS = -1, -2, -3


@dataclasses.dataclass(frozen=True)
class Setting:
    """Machine, network and clock of a step, shared by everything in it."""

    machine: Machine
    topology: Topology
    engine: Engine
    fabric: Fabric
    all_ranks: bool


def in_pieces(step: Round, piece_bytes: float) -> Round:
    """Cut a round's messages into pieces of ``piece_bytes`` that go round the destinations."""
    largest_send = max(size for _, size in step.sends)
    pieces = min(_MAX_PIECES, max(1, round(largest_send / piece_bytes)))
    if pieces == 1:
        return step
    return dataclasses.replace(
        step,
        sends=tuple((to, ceil_div(size, pieces)) for _ in range(pieces) for to, size in step.sends),
    )


class Rounds:
    """A collective that all ranks go through round by round."""

    def __init__(self, setting: Setting, rounds: list[Round], group: Group, kind: str) -> None:
        self.setting, self.rounds, self.group, self.kind = setting, rounds, group, kind
        # Messages that arrived, by rank and round: a fast peer may be a round ahead.
        self.arrived: dict[tuple[int, int], int] = {}
        self.at: dict[int, int] = {}
        self.ends: dict[int, Callable[[], None]] = {}
        # Functions that slices register, which are called on every arrival at a rank.
        self.hooks: dict[int, Callable[[], None]] = {}

    def enter(self, rank: int, end: Callable[[], None]) -> None:
        self.ends[rank] = end
        self._begin(rank, 0)

    def _begin(self, rank: int, number: int) -> None:
        self.at[rank] = number
        if number == len(self.rounds):
            self.ends[rank]()
            return
        step = self.rounds[number]
        efficiency = self.setting.machine.collectives.library_efficiency(self.kind)
        for to, size in step.sends:
            self.send(rank, to, size, number, efficiency, step.exchange)
        self._check(rank, number)

    def send(
        self,
        rank: int,
        to: int,
        size: int,
        number: int,
        efficiency: float,
        exchange: bool = False,
        overhead_ns: int = 0,
    ) -> None:
        """Send to the rank ``to`` further on in the group.

        The message arrives as a part of round ``number``. With ``exchange`` the receiver's index in
        the group is the sender's XOR ``to``.
        """
        fabric, topology, group = self.setting.fabric, self.setting.topology, self.group
        # One rank that stands for all receives its own messages: its peer on the other side sends
        # it one like them at the same time.
        if not self.setting.all_ranks:
            destination, receiver = group.displacement(to), 0
        elif exchange:
            members = group.members(rank)
            destination = receiver = members[group.index(rank) ^ to]
        else:
            destination = receiver = topology.shift(rank, group.displacement(to))
        fabric.send(
            rank,
            destination,
            size,
            lambda: self._arrive(receiver, number),
            traffic=self.kind,
            efficiency=efficiency,
            overhead_ns=overhead_ns,
        )

    def _arrive(self, rank: int, number: int) -> None:
        self.arrived[rank, number] = self.arrived.get((rank, number), 0) + 1
        self._check(rank, number)
        hook = self.hooks.get(rank)
        if hook is not None:
            hook()

    def _check(self, rank: int, number: int) -> None:
        if not 0 <= number < len(self.rounds):
            return
        step = self.rounds[number]
        if self.at.get(rank) != number or self.arrived.get((rank, number), 0) < len(step.sends):
            return
        machine = self.setting.machine
        reduce = machine.reduction_ns(step.reduced)
        # Between rounds, so that a late message cannot complete the round a second time.
        self.at[rank] = -1
        self.setting.engine.after(
            round(machine.collectives.step_ns.value) + reduce, self._begin, rank, number + 1
        )


class Slices:
    """One rank's part in a fused task: slices that leave and slices that arrive."""

    def __init__(
        self,
        setting: Setting,
        rank: int,
        shared: Rounds,
        block: int,
        slices: int,
        shares: Sequence[int] = (),
    ) -> None:
        """Cut what leaves for each peer.

        Args:
            setting: The engine, machine and topology.
            rank: This rank.
            shared: What has arrived at all ranks of the group.
            block: Bytes for each peer.
            slices: Number of slices.
            shares: Relative sizes of the slices; by default they are equal.
        """
        self.setting, self.rank, self.shared = setting, rank, shared
        self.block, self.slices = block, slices
        # Behind slice n, ends[n + 1] of ends[slices] parts are computed.
        self.ends = [0, *itertools.accumulate(shares or (1,) * slices)]
        self.peers = shared.group.size - 1
        machine, topology = setting.machine, setting.topology
        self.efficiency = machine.collectives.fused_efficiency.value
        message = machine.collectives.message_ns
        # A single node of several GPUs has only its inner network.
        has_nodes = machine.node is None or isinstance(topology, Hierarchical)
        self.overhead_ns = round(message.value) if message is not None and has_nodes else 0

    def _piece(self, number: int, block: int) -> int:
        """Return the bytes of a slice of a block; all slices together are the block."""
        whole = self.ends[-1]
        return block * self.ends[number + 1] // whole - block * self.ends[number] // whole

    def produce(self, launch: int, body: int, complete: Callable[[], None] | None) -> None:
        """Send the remote slices first, round the peers; the rank's own block is computed last.

        Args:
            launch: Nanoseconds before the computation begins.
            body: Nanoseconds of the computation; slices leave evenly spread over it.
            complete: Called when the computation is done and the peers' slices have arrived; None
                if no one waits.
        """
        start = self.setting.engine.now + launch
        self._send_remote(start, body, lambda number: _PRODUCED)
        if complete is not None:
            self._call_after(start + body, complete)

    def _remote(self) -> int:
        """Count the slices that leave, which are as many as arrive."""
        return self.peers * self.slices if self.block else 0

    def _send_remote(self, start: int, body: int, round_of: Callable[[int], int]) -> None:
        """Send each remote slice when it is computed.

        Args:
            start: Time at which the computation begins.
            body: Nanoseconds of the computation.
            round_of: Function from a slice's number to the round under which it arrives.
        """
        # The kernel computes one slice per rank and number, in the order of the numbers.
        total = (self.peers + 1) * self.ends[-1]
        for index in range(self._remote()):
            number, peer = divmod(index, self.peers)
            share = self.ends[number + 1] - self.ends[number]
            done = self.ends[number] * self.peers + share * (peer + 1)
            self.setting.engine.at(
                start + body * done // total,
                self.shared.send,
                self.rank,
                peer + 1,
                self._piece(number, self.block),
                round_of(number),
                self.efficiency,
                False,
                self.overhead_ns,
            )

    def all_reduce(
        self, launch: int, body: int, receive: int, block: int, complete: Callable[[], None]
    ) -> None:
        """Send the remote slices, then add up and send the sums of each own slice when it is done.

        The own slices are computed last, so most of the peers' parts have arrived by then, and the
        sums of one slice travel while the next one is computed.

        Args:
            launch: Nanoseconds before the computation begins.
            body: Nanoseconds of the computation; slices are spread evenly over it.
            receive: Nanoseconds of adding up, spread evenly over the own slices.
            block: Bytes of the sums that this rank sends to each peer.
            complete: Called when the last sums are sent and the peers' have arrived.
        """
        engine, rank, arrived = self.setting.engine, self.rank, self.shared.arrived
        start = engine.now + launch
        # Slices of one number come from all peers, so each number is counted by itself.
        self._send_remote(start, body, lambda number: _PARTS - number)
        parts = self.peers if self.block else 0
        pieces = [self._piece(number, block) for number in range(self.slices)]
        awaited = self.peers * sum(piece > 0 for piece in pieces)
        flag = round(self.setting.machine.collectives.slice_ns.value)
        total, remote = (self.peers + 1) * self.slices, self.peers * self.slices
        state = {"next": 0, "free": start + body * remote // total}
        called: list[bool] = []

        def work() -> None:
            number = state["next"]
            while number < self.slices and arrived.get((rank, _PARTS - number), 0) >= parts:
                at = remote + number
                computed = state["free"] + body * (at + 1) // total - body * at // total
                # A part is usable when its signal is seen, a little later than its bytes.
                summed = max(computed, engine.now + flag if parts else 0) + (
                    receive * (number + 1) // self.slices - receive * number // self.slices
                )
                if pieces[number]:
                    for to in range(1, self.peers + 1):
                        engine.at(
                            summed,
                            self.shared.send,
                            rank,
                            to,
                            pieces[number],
                            _GATHERED,
                            self.efficiency,
                            False,
                            self.overhead_ns,
                        )
                number += 1
                state["free"], state["next"] = summed, number
                if number == self.slices:
                    engine.at(summed, work)
            done = number == self.slices and engine.now >= state["free"]
            if done and not called and arrived.get((rank, _GATHERED), 0) >= awaited:
                # The hook stays registered, and a later message would call it again.
                called.append(True)
                complete()

        self.shared.hooks[rank] = work
        work()

    def _call_after(self, not_before: int, complete: Callable[[], None]) -> None:
        """Call ``complete()`` once all slices have arrived, at ``not_before`` at the earliest."""
        engine, rank = self.setting.engine, self.rank
        # The hook stays registered after its call, and a later message would call it again.
        called: list[bool] = []

        def check() -> None:
            if (
                not called
                and engine.now >= not_before
                and self.shared.arrived.get((rank, _PRODUCED), 0) >= self._remote()
            ):
                called.append(True)
                complete()

        self.shared.hooks[rank] = check
        engine.at(not_before, check)

    def consume(self, launch: int, body: int, end: Callable[[], None], send: bool) -> None:
        """Compute the rank's own block first, then each slice in the order of arrival.

        Args:
            launch: Nanoseconds before the computation begins.
            body: Nanoseconds of the computation, spread evenly over the slices.
            end: Called when the last slice is done.
            send: Whether this task also sends the slices.
        """
        engine, rank = self.setting.engine, self.rank
        total = (self.peers + 1) * self.slices
        count = self._remote()
        # A slice is usable when its signal is seen, which takes a little longer than its bytes.
        flag = round(self.setting.machine.collectives.slice_ns.value)
        state = {"free": engine.now + launch + body * (total - count) // total, "seen": 0}

        def work() -> None:
            while state["seen"] < self.shared.arrived.get((rank, _PRODUCED), 0):
                state["seen"] += 1
                share = (
                    body * (total - count + state["seen"]) // total
                    - body * (total - count + state["seen"] - 1) // total
                )
                state["free"] = max(state["free"], engine.now + flag) + share
                if state["seen"] == count:
                    engine.at(state["free"], end)

        for number in range(count if send else 0):
            self.shared.send(
                rank,
                number % self.peers + 1,
                self._piece(number // self.peers, self.block),
                _PRODUCED,
                self.efficiency,
                overhead_ns=self.overhead_ns,
            )
        self.shared.hooks[rank] = work
        if count == 0:
            engine.at(state["free"], end)
        else:
            work()


class Trees:
    """An all-reduce over two binary trees, half of the buffer each, in pieces one after another."""

    def __init__(self, setting: Setting, work: Collective, group: Group) -> None:
        if work.kind != "all_reduce":
            raise ConfigError(
                f"double_binary_tree must be of an all_reduce; got {work.kind}. Use ring or direct."
            )
        self.setting = setting
        self.group = group
        self.piece = ceil_div(work.size, 2 * TREE_PIECES)
        # A rank is a leaf of one tree and inside the other, so both directions of its links work.
        self.trees: dict[tuple[int, bool], dict[int, tuple[int, int, int]]] = {}
        self.left: dict[int, int] = {}
        self.ends: dict[int, Callable[[], None]] = {}
        self.waiting: dict[tuple[int, bool, int], int] = {}

    def _links(self, rank: int, last: bool) -> tuple[int, int, int]:
        members = self.group.members(rank)
        key = (members[0], last)
        if key not in self.trees:
            self.trees[key] = binary_tree(members, last)
        return self.trees[key][rank]

    def enter(self, rank: int, end: Callable[[], None]) -> None:
        if self.group.size == 1 or self.piece == 0:
            end()
            return
        self.ends[rank] = end
        self.left[rank] = 2 * TREE_PIECES
        for last in (True, False):
            for piece in range(TREE_PIECES):
                self._ready(rank, last, piece)

    def _ready(self, rank: int, last: bool, piece: int) -> None:
        """Count one of the parts that ``rank`` adds up: its own, or a child's."""
        parent, *children = self._links(rank, last)
        key = (rank, last, piece)
        self.waiting[key] = self.waiting.get(key, 0) + 1
        if self.waiting[key] <= sum(child >= 0 for child in children):
            return
        machine = self.setting.machine
        reduce = machine.reduction_ns(self.piece)
        # A leaf has nothing to add, so only inner ranks pay for the reduction.
        delay = round(machine.collectives.step_ns.value) + (reduce if max(children) >= 0 else 0)
        if parent >= 0:
            self.setting.engine.after(
                delay, self._send, rank, parent, lambda: self._ready(parent, last, piece)
            )
        else:
            self.setting.engine.after(delay, self._down, rank, last, piece)

    def _down(self, rank: int, last: bool, piece: int) -> None:
        """Pass the sum, which ``rank`` has, on to its children."""
        for child in self._links(rank, last)[1:]:
            if child >= 0:
                self._send(rank, child, functools.partial(self._down, child, last, piece))
        self.left[rank] -= 1
        if self.left[rank] == 0:
            self.ends[rank]()

    def _send(self, rank: int, destination: int, arrived: Callable[[], None]) -> None:
        efficiency = self.setting.machine.collectives.library_efficiency("all_reduce")
        self.setting.fabric.send(
            rank, destination, self.piece, arrived, traffic="all_reduce", efficiency=efficiency
        )
