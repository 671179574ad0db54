"""Puts over the network on the CPU backend, where Gloo carries them: what arrives, what is counted,
what a late rank does, and which calls are refused.
"""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace_gin import open_gin
from interlace_gin.engine_cpu import Put, engine_at
from tests.errors import error_of
from tests.nodes.groups import process_group_of

SHAPES = [(4, 2), (2, 2), (2, 1)]
"""Ranks, and the nodes that they are on."""

PART, SENT = 4096, 1000


def _exchanged(nodes):
    """Every rank puts to every other in two rounds; what is wrong, and what was counted."""
    from interlace_gin import kernels

    with process_group_of(nodes) as process_group:
        group = interlace.group_of(process_group)
        gin = open_gin(group.world_size, group.world_size, process_group)
        source, landing = (gin.window(PART * group.world_size) for _ in range(2))
        peers = [peer for peer in range(group.world_size) if peer != group.rank]
        for peer in peers:
            source.data[peer * PART :][:PART] = 16 * group.rank + peer + 1
        arrived = torch.zeros(len(peers), dtype=torch.int32)
        group.traffic.reset()
        # Delays as of a network, between the puts of this rank.
        faults = interlace.Faults(seed=group.rank, max_delay_s=0.02)
        with interlace.inject(faults), group.running():
            kernels.exchange_ranges[(len(peers),)](
                    peers=torch.tensor(peers, dtype=torch.int32), arrived=arrived, rounds=2,
                    gin=gin.address, source=source.handle, landing=landing.handle, nbytes=SENT,
                    part_bytes=PART, ctx=group.context("gin"), **gin.options,
                )  # fmt: skip
        parts = landing.data.view(-1, PART)
        wrong = [
            peer
            for peer in peers
            if parts[peer].tolist() != [16 * peer + group.rank + 1] * SENT + [0] * (PART - SENT)
        ]
        dist.barrier(process_group)
        gin.close()
        return wrong, parts[group.rank].any().item(), arrived.tolist(), group.traffic.bytes_to


@pytest.mark.quick
@pytest.mark.parametrize(("count", "nodes"), SHAPES)
def test_ranges_arrive_at_every_rank_of_every_node(ranks, count, nodes):
    """The range and nothing else; each put counts as a message of its bytes."""
    for rank, found in enumerate(ranks(count).run(_exchanged, nodes)):
        peers = [peer for peer in range(count) if peer != rank]
        assert found == ([], False, [2] * len(peers), dict.fromkeys(peers, 2 * SENT))


def _counted():
    from tests.gin import kernels

    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        gin = open_gin(2, 2, process_group)
        window = gin.window(PART)
        found = torch.full((2,), -9, dtype=torch.int32)
        with group.running():
            kernels.put_some[(1,)](
                gin.address, window.handle, 0, 8, 1 - group.rank, 1, 1, 5, group.context("gin")
            )
            kernels.await_sent[(1,)](found[:1], gin.address, 1, 5, group.context("gin"))
            kernels.take[(1,)](
                found[1:], gin.address, 1, 2, 3, 1 - group.rank, group.context("gin")
            )
        dist.barrier(process_group)
        gin.close()
        return found.tolist()


def test_a_wait_takes_as_many_puts_as_it_waits_for(ranks):
    """Of five puts the first wait takes two and the second three; none is left."""
    assert ranks(2).run(_counted) == [[1, 0]] * 2


def _late():
    """Rank 1 puts nothing: rank 0 names it, and both can recover and go on."""
    from tests.gin import kernels

    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        gin = open_gin(1, 0, process_group)
        group.deadline_s = 1.0
        late = None
        if group.rank == 0:
            found = torch.zeros(1, dtype=torch.int32)
            try:
                with group.running():
                    kernels.take[(1,)](found, gin.address, 0, 1, 1, 1, group.context("takes"))
            except interlace.PeerTimeoutError as error:
                late = error.operator, error.peer, error.node, error.slice, found.item()
        group.deadline_s = 60.0
        interlace.recover(process_group)
        closed = error_of(gin.window, 64)[:2]
        again = open_gin(1, 0, process_group)
        again.window(64)
        dist.barrier(process_group)
        again.close()
        return late, closed


def test_a_late_rank_is_named_and_a_recovered_group_opens_anew(ranks):
    """The fourth element is the slice's number from 1; the result of the failed wait is told."""
    closed = "GroupError", "gin must be open for a new window; it was closed. Call open_gin again."
    first, second = ranks(2).run(_late)
    assert first == (("takes", 1, 1, 3, -1), closed)
    assert second == (None, closed)


def _refused():
    """What is said to calls with something wrong in each."""
    from tests.gin import kernels

    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        gin = open_gin(1, 0, process_group)
        # Memory fails on one rank: later windows have equal handles all the same.
        broken = mock.patch.object(torch, "zeros", side_effect=MemoryError)
        with broken if group.rank else nullcontext():
            failed = error_of(gin.window, 64)[0]
        window = gin.window(64)

        def put(address=gin.address, handle=window.handle, start=0, signal=0, counter=-1):
            with group.running():
                kernels.put_some[(1,)](
                    *(address, handle, start, 8, 1 - group.rank, signal, counter, 1),
                    group.context("gin"),
                )

        said = [
            error_of(put, **wrong)[:2]
            for wrong in (
                {"address": 7},
                {"handle": 5},
                {"start": 60},
                {"signal": 1},
                {"counter": 0},
            )
        ]
        said += [error_of(open_gin, 0)[:2], error_of(open_gin, 1, -1)[:2]]
        said.append(error_of(gin.window, 0)[:2])
        gin.close()
        return said, failed, group.exchange("handles", window.handle)


def test_a_process_on_its_own_puts_to_itself(monkeypatch):
    """Without a process group it has no store, by which ranks would connect."""
    monkeypatch.setenv("INTERLACE_BACKEND", "cpu")
    gin = open_gin(1)
    source, landing = gin.window(64), gin.window(64)
    source.data.fill_(3)
    engine_at(gin.address).put(0, Put(landing.handle, 8, source.handle, 0, 4, 0, -1))
    assert landing.data.tolist() == [0] * 8 + [3] * 4 + [0] * 52
    gin.close()


def test_what_a_card_would_answer_with_damage_is_refused(ranks):
    messages = [
        "gin must be the address of an open Gin; got 7. Pass the address that open_gin(...) has, "
        "and keep the object.",
        "gin_put: target must be the handle of a window; got 5.",
        "gin_put: target must lie in its window of 64 bytes; got 8 bytes from 60.",
        "gin: a signal must be one of the 1 that open_gin was asked for; got 1.",
        "gin: a counter must be one of the 0 that open_gin was asked for; got 0.",
        "open_gin: signals must be 1 to 65536; got 0.",
        "open_gin: counters must be 0 to 65536; got -1.",
        f"window: nbytes must be 1 to {2**40}; got 0.",
    ]
    expected = [("ArgumentError", message) for message in messages]
    assert ranks(2).run(_refused) == [(expected, "BackendError", [2, 2])] * 2
