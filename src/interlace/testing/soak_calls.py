"""The calls of a soak's round on one rank: prepared cases, and graphs of some of them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.testing.cases import Prepared
from interlace.testing.soak_rounds import VARIANTS, Round, SoakStep

MOST_RESULTS = 8
"""Most results of one call."""

# Delays of a rank: probability, and longest duration.
_HOST_SLEEPS, _HOST_SLEEP_S = 0.02, 0.002
_DEVICE_SLEEPS, _DEVICE_SLEEP_CYCLES = 0.05, 1_000_000
_SLEEPS_IN_GRAPHS, _SLEEP_IN_GRAPH_CYCLES = 0.2, 100_000
# Probability that a rank returns its free memory to the driver before a call, so that later results
# lie in other pages at the same addresses.
_RETURNS = 0.002


@dataclasses.dataclass(frozen=True)
class Participant:
    """A rank of a soak, and its groups and streams.

    Attributes:
        rank: The rank.
        backend: ``"cpu"`` or ``"cuda"``.
        device: Its device.
        groups: All process groups of the soak; None for the default one.
        members: The ranks of each group.
        streams: CUDA streams of the calls; none on the CPU.
        spanning: Indices of the groups whose ranks are on several nodes.
    """

    rank: int
    backend: str
    device: torch.device
    groups: Sequence[dist.ProcessGroup | None]
    members: Sequence[tuple[int, ...]]
    streams: Sequence[torch.cuda.Stream]
    spanning: Sequence[int] = ()

    def own_groups(self) -> list[dist.ProcessGroup | None]:
        """Return the groups that this rank is a member of."""
        return [
            group
            for group, ranks in zip(self.groups, self.members, strict=True)
            if self.rank in ranks
        ]


class PreparedRound:
    """The prepared cases of a round, for the groups of this rank, and graphs of some of them.

    Args:
        participant: This rank.
        calls: The round.
        wrong: int64 ``[calls, MOST_RESULTS]``: the numbers of wrong elements; filled by calls.
    """

    def __init__(self, participant: Participant, calls: Round, wrong: torch.Tensor) -> None:
        self.participant, self.calls, self.wrong = participant, calls, wrong
        self.prepared: dict[int, Prepared] = {}
        for i, slot in enumerate(calls.slots):
            if participant.rank in participant.members[slot.group]:
                seeds = [VARIANTS * i + variant for variant in range(VARIANTS)]
                self.prepared[i] = slot.case.prepare(participant.groups[slot.group], seeds)
        # Graphs, each with the tensor that it writes its numbers of wrong elements into.
        self.graphs: list[tuple[Any, torch.Tensor]] = []
        self._synchronize_device()

    def make(self, step: SoakStep, offset: int, delays: random.Random) -> None:
        """Make a step's calls, and enqueue the comparison of their results.

        Args:
            step: The step.
            offset: Number of its first call within the round.
            delays: Source of this rank's random delays.
        """
        slot = self.calls.slots[step.slots[0]]
        if self.calls.graphs and len(self.graphs) == 0 and offset >= len(self.calls.slots):
            self._capture(delays)
        if step.slots[0] not in self.prepared:
            return
        if delays.random() < _HOST_SLEEPS:
            time.sleep(delays.uniform(0, _HOST_SLEEP_S))
        if self.participant.backend == "cpu":
            self._run(step, offset)
            return
        if delays.random() < _RETURNS:
            torch.cuda.empty_cache()
        with torch.cuda.stream(self.participant.streams[slot.stream]):
            if delays.random() < _DEVICE_SLEEPS:
                torch.cuda._sleep(delays.randrange(_DEVICE_SLEEP_CYCLES))
            # A group orders its calls on several streams, but not those of a replayed graph, which
            # whoever replays it must order. Kernels of several NCCL communicators must not run at
            # the same time; slices between nodes have one, too.
            uses_nccl = slot.case.impl == "unfused" or slot.group in self.participant.spanning
            if step.graph is not None or uses_nccl:
                with self._alone(slot.stream):
                    self._run(step, offset)
            else:
                self._run(step, offset)

    def _run(self, step: SoakStep, offset: int) -> None:
        """Make a step's calls, or replay its graph."""
        if step.graph is None:
            for i, (slot, variant) in enumerate(zip(step.slots, step.variants, strict=True)):
                self._call(slot, variant, self.wrong[offset + i])
        else:
            graph, wrong = self.graphs[step.graph]
            graph.replay()
            self.wrong[offset : offset + len(step.slots)] = wrong

    def _call(self, slot: int, variant: int, wrong: torch.Tensor) -> None:
        """Make one call, store its numbers of wrong elements, and overwrite its results."""
        prepared = self.prepared[slot]
        prepared.load(variant)
        results = prepared.run()
        prepared.count_wrong(results, variant, wrong)
        # A later call that returned this memory without writing it would be seen.
        if self.calls.slots[slot].case.poisonable:
            for result in results:
                result.fill_(float("nan"))

    def _capture(self, delays: random.Random) -> None:
        """Capture the round's graphs. Every slot in them has been called before."""
        self._synchronize_device()
        for step in self.calls.graphs:
            wrong = torch.zeros(
                len(step.slots), MOST_RESULTS, dtype=torch.int64, device=self.wrong.device
            )
            if step.slots[0] not in self.prepared:
                self.graphs.append((None, wrong))
                continue
            graph = torch.cuda.CUDAGraph()
            stream = self.participant.streams[self.calls.slots[step.slots[0]].stream]
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for i, (slot, variant) in enumerate(zip(step.slots, step.variants, strict=True)):
                    if delays.random() < _SLEEPS_IN_GRAPHS:
                        torch.cuda._sleep(delays.randrange(_SLEEP_IN_GRAPH_CYCLES))
                    self._call(slot, variant, wrong[i])
            self.graphs.append((graph, wrong))
        self._synchronize_device()

    @contextlib.contextmanager
    def _alone(self, stream: int) -> Iterator[None]:
        """Order the work of this block after earlier work of all streams, and before later work."""
        chosen = self.participant.streams[stream]
        peers = [peer for peer in self.participant.streams if peer is not chosen]
        for peer in peers:
            chosen.wait_stream(peer)
        yield
        for peer in peers:
            peer.wait_stream(chosen)

    def synchronize(self) -> None:
        """Wait for every call of the round.

        Raises:
            InterlaceError: a call of one of the groups has failed.
        """
        for group in self.participant.own_groups():
            interlace.synchronize(group)

    def close(self, release: bool) -> None:
        """Free the round's graphs and tensors. Collective.

        Args:
            release: True to release all workspaces of the groups, too.
        """
        self.graphs.clear()
        self.prepared.clear()
        if release:
            for group in self.participant.own_groups():
                group_of(group).release()

    def _synchronize_device(self) -> None:
        if self.participant.backend == "cuda":
            torch.cuda.synchronize(self.participant.device)
