"""Faults of one rank, and what every living rank sees of them: the same on the CPU backend and on
GPUs.

Each function below runs on every rank. One rank, ``FAULTY``, is late, dies, calls something else or
fails; the others do what they should. What a rank saw is an :class:`Outcome`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import Faults
from interlace.comm import Group, group_of
from interlace.testing.cases import Case, Prepared
from interlace.testing.cases.products import GemvCase, ProductCase
from tests.pool import Pool

FAULTY = 1
DEADLINE_S = 2.0
"""The deadline of waits that must expire."""
SLACK_S = 40.0
"""How much later the error may come on a machine whose cores have other work."""
LONG_S = 90.0
"""The deadline of waits that must not expire."""

GEMV = GemvCase("gemv_all_reduce", "gemv two_phase", "float32", False, 2, 64, 32)
SHORTER = dataclasses.replace(GEMV, columns=48)
LARGER = dataclasses.replace(GEMV, rows=64, columns=4096)
SUM = ProductCase("gemm_all_reduce", "fused", "bfloat16", False, 32, 64, 32)
SCATTER = ProductCase("gemm_reduce_scatter", "fused", "float32", False, 48, 32, 16)

CASES: dict[str, Case] = {"gemv": GEMV, "all_reduce": SUM, "reduce_scatter": SCATTER}
"""Cases of three protocols: packed words in two phases, tiles that are added up, and tiles for
their owner.
"""

OTHERS: dict[str, Case] = {"operator": SCATTER, "shape": SHORTER}
"""Calls that do not fit ``GEMV``, by what differs."""


@dataclasses.dataclass
class Outcome:
    """What a rank saw.

    Attributes:
        kind: The type of the error that was raised; empty if there was none.
        peer: The rank that a PeerTimeoutError names; -1 otherwise.
        seconds: From the call to its end or its error.
        wrong: Wrong numbers in the results of calls that ended without an error; NaN is not one.
        free: Whether the device does other work at once afterwards.
        broken: Whether the group is broken afterwards.
    """

    kind: str = ""
    message: str = ""
    peer: int = -1
    seconds: float = 0.0
    wrong: int = 0
    free: bool = True
    broken: bool = False
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    def expired(self, peer: int) -> bool:
        """Whether a wait for ``peer`` ended with its error, soon after the deadline, and the device
        was free.
        """
        in_time = DEADLINE_S * 0.9 <= self.seconds <= DEADLINE_S + SLACK_S
        return (
            (self.kind, self.peer, self.broken, self.wrong) == ("PeerTimeoutError", peer, True, 0)
            and self.free
            and in_time
        )


def observe(group: Group, make: Callable[[], int], calls: int = 1) -> Outcome:
    """Make up to ``calls`` calls until one fails; ``make`` returns the number of wrong elements."""
    outcome, start = Outcome(), time.monotonic()
    try:
        for _ in range(calls):
            start = time.monotonic()
            outcome.wrong += make()
    except interlace.InterlaceError as error:
        outcome.kind, outcome.message = type(error).__name__, str(error)
        outcome.fields = {
            name: value for name, value in vars(error).items() if not name.startswith("_")
        }
        outcome.peer = outcome.fields.get("peer", -1)
    outcome.seconds = time.monotonic() - start
    outcome.broken = group.broken
    outcome.free = _is_free(group.device)
    return outcome


def _is_free(device: torch.device) -> bool:
    start = time.monotonic()
    torch.ones(1000, device=device).sum().item()
    return time.monotonic() - start < SLACK_S / 2


def _prepared(case: Case, group: dist.ProcessGroup | None) -> Prepared:
    """The case after one right call, in which everything is agreed on, allocated and compiled."""
    prepared = case.prepare(group)
    assert not any(prepared.check())
    return prepared


def _own_group(case: Case) -> tuple[dist.ProcessGroup | None, Group, Prepared]:
    """A group that may break, and a case on it."""
    process_group = dist.new_group()
    interlace.set_deadline(LONG_S, process_group)
    return process_group, group_of(process_group), _prepared(case, process_group)


def _check(prepared: Prepared) -> Callable[[], int]:
    """A call, after which the number of wrong elements is known. NaN, which says that data is
    missing, is not counted.
    """

    def make() -> int:
        prepared.load(0)
        wrong = torch.zeros(
            prepared.result_count, dtype=torch.int64, device=group_of(prepared.group).device
        )
        results = prepared.run()
        prepared.count_wrong(results, 0, wrong)
        interlace.synchronize(prepared.group)
        return int(wrong.sum()) - sum(int(result.isnan().sum()) for result in results)

    return make


# The faulty rank lives


def late_in_time(name: str) -> Outcome:
    """The faulty rank comes late, but before the deadline, and its GPU is late, too: every result
    is right.
    """
    _, group, prepared = _own_group(CASES[name])
    if group.rank == FAULTY:
        time.sleep(0.5)
        if group.backend == "cuda":
            torch.cuda._sleep(500_000_000)
    return observe(group, lambda: sum(prepared.check()), calls=2)


def too_late(name: str) -> Outcome:
    """The faulty rank comes when the others have given up. Its own next wait for them expires,
    too.
    """
    process_group, group, prepared = _own_group(CASES[name])
    interlace.set_deadline(DEADLINE_S, process_group)
    if group.rank == FAULTY:
        dist.barrier()  # the others are here once they have their error
        return observe(group, _check(prepared), calls=3)
    outcome = observe(group, _check(prepared))
    dist.barrier()
    return outcome


def other_call_agreed_on(name: str) -> Outcome:
    """The faulty rank makes another call of ``OTHERS``; all ranks have made both calls before."""
    process_group, group, prepared = _own_group(GEMV)
    other = _prepared(OTHERS[name], process_group)
    interlace.set_deadline(DEADLINE_S, process_group)
    return observe(group, _check(other if group.rank == FAULTY else prepared))


def other_call(name: str) -> Outcome:
    """The faulty rank makes another call of ``OTHERS``, and nobody has made either call before."""
    process_group = dist.new_group()
    group = group_of(process_group)
    case = OTHERS[name] if group.rank == FAULTY else GEMV
    return observe(group, lambda: sum(case.prepare(process_group).check()))


def out_of_memory() -> tuple[Outcome, int]:
    """On the faulty rank the workspace cannot grow. Afterwards, wrong elements of a call that needs
    no more memory.
    """
    process_group, group, prepared = _own_group(GEMV)
    larger = LARGER.prepare(process_group)
    with _no_memory(group) if group.rank == FAULTY else contextlib.nullcontext():
        outcome = observe(group, _check(larger))
    return outcome, sum(prepared.check())  # NaN counts here


@contextlib.contextmanager
def _no_memory(group: Group) -> Iterator[None]:
    """Symmetric memory of this process does not fit."""
    with pytest.MonkeyPatch.context() as patch:
        if group.backend == "cpu":

            def refuse(*_: object) -> int:
                raise OSError(12, "Cannot allocate memory")

            patch.setattr(os, "memfd_create", refuse)
        else:
            from cuda.bindings import driver

            failure = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
            patch.setattr(driver, "cuMemCreate", lambda *_: failure)
        yield


def interrupted() -> Outcome:
    """Ctrl-C reaches the faulty rank in the program's own code, before its call, which it then does
    not make.
    """
    process_group, group, prepared = _own_group(SUM)
    interlace.set_deadline(DEADLINE_S, process_group)
    if group.rank != FAULTY:
        return observe(group, _check(prepared))
    return Outcome(kind=_interrupted_in(lambda: time.sleep(60)))


def interrupted_in_a_wait() -> tuple[Outcome, Outcome]:
    """Ctrl-C reaches the faulty rank while it waits for the others, who do not come; then, its next
    call.

    A GPU's kernel ends by its deadline; the host sees the interrupt when it has waited for that.
    """
    process_group, group, prepared = _own_group(SUM)
    interlace.set_deadline(DEADLINE_S, process_group)
    first = Outcome()
    if group.rank == FAULTY:
        first.kind = _interrupted_in(_check(prepared))
        group.streams.synchronize()  # a barrier that is Gloo's would let the others come in time
    dist.barrier()
    # What the faulty rank sent before the interrupt may complete the others' first call.
    return first, observe(group, _check(prepared), calls=2)


def _interrupted_in(work: Callable[[], object]) -> str:
    """The type of the error that ends ``work``, during which this process gets SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        work()
        timer.join()
        time.sleep(1)  # the signal comes now, at the latest
    except (KeyboardInterrupt, interlace.InterlaceError) as error:
        with contextlib.suppress(KeyboardInterrupt):
            timer.join()
            time.sleep(0.5)
        return type(error).__name__
    return ""


# The faulty rank dies


def dies_before_a_call(name: str, faulty: int) -> Outcome:
    """A rank is killed between two calls."""
    process_group, group, prepared = _own_group(CASES[name])
    interlace.set_deadline(DEADLINE_S, process_group)
    if group.rank == faulty:
        os.kill(os.getpid(), signal.SIGKILL)
    return observe(group, _check(prepared))


def dies_in_a_kernel(faulty: int) -> Outcome:
    """A rank is killed while its kernel has sent a part of what it should, or waits for
    the others.

    On GPUs it enters its kernel alone, has sent what it can, and waits; the others come after its
    death.
    """
    process_group, group, prepared = _own_group(GEMV)
    interlace.set_deadline(DEADLINE_S, process_group)
    if group.rank != faulty:
        time.sleep(2.0 if group.backend == "cuda" else 0.0)
        return observe(group, _check(prepared), calls=2)
    interlace.set_deadline(LONG_S, process_group)
    if group.backend == "cpu":
        with interlace.inject(Faults(die_after_puts=1)):
            prepared.check()
    prepared.load(0)
    prepared.run()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process must not go on")


class MortalPool(Pool):
    """Ranks of which some may die: a dead rank's result is None, and the others' are waited for."""

    def _collect(self, name: str, end: float) -> list[Any]:
        results: list[Any] = [None] * self.world_size
        waiting = dict(zip(self._connections, range(self.world_size), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            assert ready, f"{name}: ranks {sorted(waiting.values())} did not end in time"
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                with contextlib.suppress(EOFError):
                    succeeded, results[rank] = pickle.loads(connection.recv_bytes())
                    assert succeeded, results[rank]
        return results
