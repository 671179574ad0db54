"""Try GPU-initiated puts between all ranks of a group: in a process of its own, with a deadline.

A put of NCCL that goes wrong may hang a kernel for ever, and with it the process and its GPU's
context. So :func:`try_gin` starts one process per rank, which is killed when its time is up. In it,
:func:`main` puts a pattern to every rank of another node, small and large, compares what it gets,
measures, and at last waits for a signal that nobody sends, which the deadline must end.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.groups.group import Group, group_of
from interlace.errors import BackendError, InterlaceError, PeerTimeoutError
from interlace.units import format_binary_bytes
from interlace_gin.gin import Gin, Window, open_gin

SIZES = (64, 65536, 4 * 2**20)
"""Bytes of the ranges that are put; every size is compared, and timed on GPUs."""

_ROUNDS = 20  # exchanges of one timed launch
_LAUNCHES = 5  # timed launches, of which the median counts
_SHORT_DEADLINE_S = 1.0  # of the wait that must expire
_RESULT = "self-test of gin: "  # precedes the result in what a process prints
_MODULUS = 251  # a prime, so that no pattern equals a shifted one


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Say how the self-test of one rank, or of all ranks, has ended.

    Attributes:
        passed: Whether every pattern arrived and the deadline worked.
        carrier: What carried the puts: NCCL's version and back end, or Gloo; empty if unknown.
        exchange_us: Time of one exchange with all peers by bytes, in us; empty on the CPU backend.
        reason: Why it has not passed; empty if it has.
    """

    passed: bool
    carrier: str = ""
    exchange_us: dict[int, float] = dataclasses.field(default_factory=dict)
    reason: str = ""


def try_puts(group: Group) -> dict[str, Any] | None:
    """Run the self-test on a rank for ``interlace doctor --network``. Collective.

    Returns:
        The outcome of all ranks, for :func:`puts_sentences`; None on the CPU backend and on one
        node, where there is nothing to try.
    """
    if group.backend == "cpu" or not group.spans_nodes:
        return None
    return dataclasses.asdict(try_gin(group))


def puts_sentences(outcome: dict[str, Any] | None) -> list[str]:
    """Return what the self-test has shown, in one sentence; none if it was not run."""
    if outcome is None:
        return []
    if not outcome["passed"]:
        return [
            f"GPU-initiated puts (gin) cannot be used here: {outcome['reason'].rstrip('.')}. "
            "Nothing uses them unless it is asked to."
        ]
    times = ", ".join(
        f"{format_binary_bytes(int(nbytes))} in {us:.0f} us"
        for nbytes, us in outcome["exchange_us"].items()
    )
    return [
        f"GPU-initiated puts (gin) passed their self-test, by {outcome['carrier']}: one exchange "
        f"with every remote rank {times}. Nothing uses them unless it is asked to "
        "(interlace_gin.open_gin). Please report it: they have run nowhere else."
    ]


def try_gin(group: Group, limit_s: float = 120.0) -> Outcome:
    """Run the self-test on all ranks of a group. Collective.

    Args:
        group: The group; its own memory and streams are not used.
        limit_s: Seconds after which a rank's process is killed.

    Returns:
        The outcome of all ranks: the first failure, or the slowest exchanges.
    """
    place = [_own_host(), _free_port()] if group.rank == 0 else None
    host, port = group.exchange("self-test of gin", place)[0]
    command = [
        *(sys.executable, "-m", "interlace_gin.self_test", host, str(port)),
        *(str(group.rank), str(group.world_size), str(group.device), str(limit_s)),
    ]
    told = group.exchange(
        "outcome of gin", dataclasses.asdict(_run(command, limit_s)), deadline_s=2 * limit_s + 60
    )
    outcomes = [Outcome(**one) for one in told]
    for rank, outcome in enumerate(outcomes):
        if not outcome.passed:
            return dataclasses.replace(outcome, reason=f"rank {rank}: {outcome.reason}")
    times = [outcome.exchange_us for outcome in outcomes]
    slowest = {int(size): max(one[size] for one in times) for size in times[0]}
    return dataclasses.replace(outcomes[0], exchange_us=slowest)


def _run(command: list[str], limit_s: float) -> Outcome:
    """Run one rank's process and return what it says; kill it after its time."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # Not waited for: the driver keeps a process whose kernel hangs until the kernel ends.
        return Outcome(False, reason=f"no answer in {limit_s:g} s; its process was killed")
    lines = [line for line in said.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith(_RESULT):
            return Outcome(**json.loads(line.removeprefix(_RESULT)))
    last = lines[-1] if lines else "it printed nothing"
    return Outcome(False, reason=f"its process ended with {process.returncode}: {last}")


def _own_host() -> str:
    """Return the name by which other ranks reach the machine of rank 0."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def main(
    host: str, port: str, rank_text: str, ranks_text: str, device_text: str, limit_text: str
) -> None:
    """Be one rank of the self-test; print the outcome as the last line."""
    rank, ranks, limit_s = int(rank_text), int(ranks_text), float(limit_text)
    device = torch.device(device_text)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"  # which connects nothing before its first collective, and there is none
    patience = datetime.timedelta(seconds=limit_s)
    store = dist.TCPStore(host, int(port), ranks, is_master=rank == 0, timeout=patience)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=patience)
    try:
        outcome = _check(group_of(device=device), limit_s)
    except InterlaceError as error:
        outcome = Outcome(False, reason=error.line)
    print(_RESULT + json.dumps(dataclasses.asdict(outcome)), flush=True)
    # The store is rank 0's: it stays until all have read what they need.
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait([f"done {other}" for other in range(ranks)], patience)
    # Neither kernels that hang nor threads that wait are waited for.
    os._exit(0)


def _check(group: Group, limit_s: float) -> Outcome:
    """Exchange patterns with every peer, then let a wait expire."""
    group.deadline_s = limit_s / 2
    peers = group.members.remote_ranks or tuple(
        rank for rank in range(group.world_size) if rank != group.rank
    )
    gin = open_gin(signals=group.world_size + 1, counters=group.world_size)
    part = max(SIZES)
    source, landing = (gin.window(part * group.world_size) for _ in range(2))
    parts = [window.data.view(group.world_size, part) for window in (source, landing)]
    exchange_us: dict[int, float] = {}
    for number, nbytes in enumerate(SIZES):
        for rank in range(group.world_size):
            parts[0][rank] = _pattern(group.rank, rank, number, part, group.device)
        _meet(group, "patterns")
        rounds = _exchange(group, gin, source, landing, nbytes, part, peers, 1)
        _meet(group, "exchange")
        for peer, complete in zip(peers, rounds, strict=True):
            expected = _pattern(peer, group.rank, number, part, group.device)[:nbytes]
            if complete != 1 or not torch.equal(parts[1][peer, :nbytes], expected):
                raise BackendError(
                    f"a put of {nbytes} bytes must arrive as it was; from rank {peer} something "
                    "else arrived behind its signal."
                )
        if group.backend == "cuda":
            exchange_us[nbytes] = _time(group, gin, source, landing, nbytes, part, peers)
            _meet(group, "timed exchange")
    _expire(group, gin, peers[0])
    return Outcome(True, gin.carrier, exchange_us)


def _pattern(
    sender: int, receiver: int, number: int, nbytes: int, device: torch.device
) -> torch.Tensor:
    """Return bytes that differ by sender, receiver and size, uint8 ``[nbytes]``."""
    start = 1 + 101 * sender + 37 * receiver + 13 * number
    return ((torch.arange(nbytes, device=device) * 7 + start) % _MODULUS).to(torch.uint8)


def _meet(group: Group, step: str) -> None:
    """Wait until all ranks' kernels have ended."""
    group.synchronize()
    group.exchange(f"gin: {step}", None)


def _exchange(
    group: Group, gin: Gin, source: Window, landing: Window, nbytes: int, part: int,
    peers: tuple[int, ...], rounds: int,
) -> list[int]:  # fmt: skip
    """Launch the kernel and return the number of complete rounds by peer."""
    from interlace_gin import kernels

    arrived = torch.zeros(len(peers), dtype=torch.int32, device=group.device)
    with group.running():
        kernels.exchange_ranges[(len(peers),)](
            peers=torch.tensor(peers, dtype=torch.int32, device=group.device),
            arrived=arrived, gin=gin.address, source=source.handle, landing=landing.handle,
            nbytes=nbytes, part_bytes=part, rounds=rounds, ctx=group.context("self-test of gin"),
            **gin.options,
        )  # fmt: skip
    group.synchronize()
    return [int(complete) for complete in arrived.tolist()]


def _time(
    group: Group, gin: Gin, source: Window, landing: Window, nbytes: int, part: int,
    peers: tuple[int, ...],
) -> float:  # fmt: skip
    """Return the time of one exchange with all peers, in us, without that of a launch."""
    seconds = {}
    for rounds in (1, 1 + _ROUNDS):
        samples = []
        for _ in range(_LAUNCHES):
            group.exchange("gin: a timed launch", None)
            begin = time.perf_counter()
            _exchange(group, gin, source, landing, nbytes, part, peers, rounds)
            samples.append(time.perf_counter() - begin)
        seconds[rounds] = statistics.median(samples)
    return max(0.0, (seconds[1 + _ROUNDS] - seconds[1]) / _ROUNDS * 1e6)


def _expire(group: Group, gin: Gin, peer: int) -> None:
    """Wait for a signal that nobody sends.

    Raises:
        BackendError: The deadline did not end the wait.
    """
    from interlace_gin import kernels

    group.deadline_s = _SHORT_DEADLINE_S
    arrived = torch.ones(1, dtype=torch.int32, device=group.device)
    try:
        with group.running():
            kernels.await_nothing[(1,)](
                arrived=arrived, gin=gin.address, signal=group.world_size, peer=peer,
                ctx=group.context("self-test of gin"), **gin.options,
            )  # fmt: skip
        group.synchronize()
    except PeerTimeoutError:
        return
    raise BackendError("a wait for a signal that nobody sends must end by its deadline.")


if __name__ == "__main__":
    main(*sys.argv[1:])
