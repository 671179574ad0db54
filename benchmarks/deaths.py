"""Kill ranks at random moments, and check that every other rank ends with an error that names them.

    python benchmarks/deaths.py --deaths 500 --json deaths.json
    python benchmarks/deaths.py --deaths 20 --backend cpu --jobs 2

Each job starts two to four ranks on this machine, as one node or as two, and kills one of them,
rank 0 as often as all others together: before the first call, in it, between calls, in a call, in a
call with new arguments, in ``recover``, and, on GPUs, while a graph replays. The store of the
process group is a file, or is rank 0's own and dies with it. Every other rank must end with a
:class:`PeerTimeoutError` that names the dead one, within two deadlines of its death; half of the
ranks end their process right away then, as a program would, and the other half stay.

Jobs run side by side and share the GPUs. The exit code is 1 if any rank saw something else.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import documents

MOMENTS = ("start", "first call", "between calls", "call", "new call", "recover", "graph")
"""What the other ranks do when a rank dies; "start" is before their first call."""

_PRELOADED = (
    "torch",
    "interlace.operators",
    "interlace.comm.groups.launcher",
    "interlace.gemm.autotune",
)
_OPERATORS = {
    1: (
        ("gemm_all_reduce", "fused"),
        ("gemm_reduce_scatter", "fused"),
        ("gemv_all_reduce", "auto"),
    ),
    2: (("gemm_reduce_scatter", "chunked"), ("gemm_all_to_all", "chunked")),
}
"""Operators by the number of nodes, each with an implementation."""

_ROWS, _INNER, _COLUMNS = 16, 64, 64  # rows per rank
_NEW_CALLS = {"cpu": 6, "cuda": 64}
_START_S = 150.0  # in which the processes of a job have started and met
_WARM_DEADLINE_S = 120.0  # kernels are compiled meanwhile
# What a busy machine takes beyond two deadlines; ranks that meet wait for a verdict 5 s longer.
_SLACK_S = {"cpu": 15.0, "cuda": 2.0}
_MEETING_S = 5.0
# NCCL may connect nodes for a minute.
_CONNECTING_S = 60.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One start of ranks, of which one dies.

    Attributes:
        number: Number of the job; its choices follow from it and the seed.
        backend: ``"cpu"`` or ``"cuda"``.
        ranks, nodes: Number of ranks, and of nodes that they count as.
        victim: The rank that dies; -1 for none, to compile what the other jobs run.
        moment: One of :data:`MOMENTS`.
        delay_s: Time from the beginning of that moment to the death.
        operator, impl: What the ranks call.
        store: ``"file"``, or ``"rank 0"`` for a TCP store.
        leaves: Whether the other ranks end their processes as soon as they have their error.
        deadline_s: The deadline.
    """

    number: int
    backend: str
    ranks: int
    nodes: int
    victim: int
    moment: str
    delay_s: float
    operator: str
    impl: str
    store: str
    leaves: bool
    deadline_s: float

    @property
    def allowed_s(self) -> float:
        """Time from the death to the other ranks' errors, at most."""
        seconds = 2 * self.deadline_s + _SLACK_S[self.backend]
        if self.moment in ("start", "first call", "recover"):
            seconds += _MEETING_S
        if self.backend == "cuda" and self.nodes > 1 and self.moment in ("first call", "recover"):
            seconds += _CONNECTING_S
        return seconds


def draw(number: int, seed: int, backend: str, deadline_s: float) -> Job:
    """The job of a number, by the seed alone."""
    chosen = random.Random(f"{seed} {number}")
    ranks = chosen.choice((2, 3, 4))
    nodes = chosen.choice((1, 2)) if ranks != 3 else 1
    operator, impl = chosen.choice(_OPERATORS[nodes])
    return Job(
        number=number,
        backend=backend,
        ranks=ranks,
        nodes=nodes,
        victim=chosen.choice((0, chosen.randrange(1, ranks))),
        moment=chosen.choice(MOMENTS if backend == "cuda" else MOMENTS[:-1]),
        delay_s=chosen.uniform(0.0, 1.5),
        operator=operator,
        impl=impl,
        store=chosen.choice(("file", "rank 0")),
        leaves=chosen.random() < 0.5,
        deadline_s=deadline_s,
    )


# On a rank


def serve(connection: Connection, job: Job, rank: int, place: str) -> None:
    """Be a rank of a job: tell what happened, and wait to be ended."""
    os.environ |= {
        "INTERLACE_NODES": str(job.nodes),
        "INTERLACE_DEADLINE_S": str(job.deadline_s),
        "LOCAL_WORLD_SIZE": str(job.ranks),
    }
    try:
        # The numbers that ranks share GPUs by differ between jobs, so that all GPUs are used alike.
        from interlace.comm.groups.launcher import init_process_group

        init_process_group(
            job.backend, rank=rank, world_size=job.ranks, init_method=place,
            local_rank=rank + job.number, ranks_here=1 << 10,
        )  # fmt: skip
        connection.send("ready")
        connection.recv()
        outcome = _observe(connection, job, rank)
    except BaseException:
        outcome = {"kind": "in the soak", "message": traceback.format_exc()}
    connection.send({"rank": rank, "at_s": time.monotonic(), **outcome})
    if not job.leaves:
        connection.recv()
    os._exit(0)


def _observe(connection: Connection, job: Job, rank: int) -> dict[str, Any]:
    """What ends this rank's calls, as a dictionary."""
    import interlace

    try:
        _work(connection, job, rank)
    except interlace.InterlaceError as error:
        return {
            "kind": type(error).__name__,
            "peer": getattr(error, "peer", None),
            "lost_store": getattr(error, "lost_store", False),
            "message": str(error),
        }
    except Exception as error:
        return {"kind": type(error).__name__, "message": traceback.format_exc()}
    return {"kind": "", "message": "nothing failed"}


def _work(connection: Connection, job: Job, rank: int) -> None:
    """Make calls until one fails; the victim does not return. Without a victim, make each once."""
    import torch

    import interlace

    dies = rank == job.victim
    if job.moment == "start" and dies:
        time.sleep(job.delay_s)
        _die(connection)
    if job.moment == "first call" and dies:
        _die_later(connection, job.delay_s)
    count = _NEW_CALLS[job.backend]
    device, dtype = torch.device("cpu"), torch.float32
    if job.backend == "cuda":
        device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    rows = 4 if job.operator == "gemv_all_reduce" else job.ranks * _ROWS
    # Calls differ by the length of their inner dimension.
    operands = [
        (torch.ones(rows, inner, device=device, dtype=dtype),
         torch.ones(_COLUMNS, inner, device=device, dtype=dtype))
        for inner in range(_INNER, _INNER * (count + 1), _INNER)
    ]  # fmt: skip

    def make(number: int) -> None:
        getattr(interlace, job.operator)(*operands[number], impl=job.impl)

    for number in range(count) if job.victim < 0 else (0, 0, 0):
        make(number)
        interlace.synchronize()
    if job.victim < 0:
        return
    graph = None
    if job.moment == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            make(0)
    if dies and job.moment == "between calls":
        _die(connection)
    if dies and job.moment != "first call":
        _die_later(connection, job.delay_s)
    end = time.monotonic() + job.delay_s + job.allowed_s
    for number in itertools.count():
        if time.monotonic() > end:
            return
        if job.moment == "recover":
            interlace.recover(timeout_s=job.deadline_s)
        if graph is not None:
            graph.replay()
        else:
            make(number % count if job.moment == "new call" else 0)
        interlace.synchronize()


def _die(connection: Connection) -> None:
    """Tell the time of death, and die."""
    connection.send(time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def _die_later(connection: Connection, delay_s: float) -> None:
    """Let this rank die after a time, whatever it does then."""
    threading.Timer(delay_s, _die, (connection,)).start()


# On the machine


def run(job: Job, context: Any) -> dict[str, Any]:
    """Run a job; return it with the time of death, the outcomes of the other ranks, and in
    ``"wrong"`` what is wrong with each.
    """
    processes, connections = [], []
    with tempfile.TemporaryDirectory(prefix="interlace-deaths-") as folder:
        place = f"file://{folder}/store"
        if job.store == "rank 0":
            place = f"tcp://127.0.0.1:{_free_port(job.number)}"
        for rank in range(job.ranks):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, job, rank, place), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            connections.append(here)
        try:
            return _watch(job, processes, connections)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for connection in connections:
                connection.close()


def _free_port(number: int) -> int:
    """Return a port that nobody listens on, and that no connection of other jobs is given."""
    for port in itertools.count(20_000 + number % 10_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def _watch(job: Job, processes: list[Any], connections: list[Connection]) -> dict[str, Any]:
    end = time.monotonic() + _START_S
    for rank, connection in enumerate(connections):
        if not connection.poll(max(0.0, end - time.monotonic())):
            return {**dataclasses.asdict(job), "wrong": [f"rank {rank} did not start"]}
        if (told := _received(connection)) != "ready":
            return {**dataclasses.asdict(job), "wrong": [f"rank {rank} did not start: {told}"]}
    for connection in connections:
        connection.send("go")
    died_s: float | None = None
    outcomes: dict[int, Any] = {}
    waiting: dict[Any, int] = dict(zip(connections, range(job.ranks), strict=True))
    end = time.monotonic() + _START_S
    while waiting and (ready := wait([*waiting], max(0.0, end - time.monotonic()))):
        for connection in ready:
            rank = waiting.pop(connection)
            if rank == job.victim:
                told = _received(connection)
                if not isinstance(told, float):
                    return {**dataclasses.asdict(job), "wrong": [f"the victim did not die: {told}"]}
                died_s = told
                end = died_s + job.allowed_s + _SLACK_S[job.backend]
            else:
                outcomes[rank] = _received(connection)
    wrong = [] if job.victim < 0 or died_s is not None else ["the victim did not die"]
    for rank in range(job.ranks):
        if rank != job.victim:
            fault = _fault(job, outcomes.get(rank), died_s)
            wrong += [f"rank {rank}: {fault}"] if fault else []
    seconds = [
        outcome["at_s"] - died_s for outcome in outcomes.values() if died_s and "at_s" in outcome
    ]
    return {
        **dataclasses.asdict(job),
        "outcomes": outcomes,
        "seconds": seconds,
        "wrong": wrong,
    }


def _received(connection: Any) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return {"kind": "died", "message": "the process ended without a word"}


def _fault(job: Job, outcome: dict[str, Any] | None, died_s: float | None) -> str:
    """What is wrong with an outcome; empty if nothing is."""
    if outcome is None:
        return "hangs"
    said = f"{outcome['kind']}: {outcome['message']}"
    if job.victim < 0:
        return "" if not outcome["kind"] else said
    if outcome["kind"] != "PeerTimeoutError":
        return said
    if outcome["peer"] != job.victim:
        return f"names rank {outcome['peer']}: {said}"
    if died_s is None or outcome["at_s"] < died_s:
        return f"before the death: {said}"
    late_s = outcome["at_s"] - died_s
    return f"after {late_s:.1f} s: {said}" if late_s > job.allowed_s else ""


def warm(backend: str) -> list[Job]:
    """Jobs without a death, which compile what the others run."""
    return [
        Job(number, backend, ranks, nodes, -1, "call", 0.0, operator, impl, "file", False,
            _WARM_DEADLINE_S)
        for number, (nodes, ranks, (operator, impl)) in enumerate(
            (nodes, ranks, operator)
            for nodes, several in _OPERATORS.items()
            for ranks in ((2, 3, 4) if nodes == 1 else (2, 4))
            for operator in several
        )
    ]  # fmt: skip


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of deaths and of wrong ones by what was drawn, and the times of the errors."""
    seconds = sorted(itertools.chain.from_iterable(result.get("seconds", ()) for result in results))
    by: dict[str, dict[str, list[int]]] = {}
    for name in ("moment", "store", "nodes", "ranks", "victim", "operator", "leaves"):
        counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
        for result in results:
            counts[str(result[name])][0] += 1
            counts[str(result[name])][1] += bool(result["wrong"])
        by[name] = dict(sorted(counts.items()))
    wrong = [result for result in results if result["wrong"]]
    return {
        "deaths": len(results),
        "errors_of_living_ranks": len(seconds),
        "wrong": len(wrong),
        "seconds_from_death_to_error": {
            "median": statistics.median(seconds) if seconds else None,
            "longest": max(seconds, default=None),
        },
        "named_because_the_store_was_gone": sum(
            bool(outcome.get("lost_store"))
            for result in results
            for outcome in result.get("outcomes", {}).values()
        ),
        "deaths_and_wrong_by": by,
        "wrong_jobs": wrong,
    }


def _row(result: dict[str, Any]) -> dict[str, Any]:
    """A job as a row of the file: what was drawn, and the seconds until each error."""
    names = ("number", "ranks", "nodes", "victim", "moment", "operator", "impl", "store", "leaves")
    seconds = [round(each, 3) for each in result.get("seconds", ())]
    return {**{name: result[name] for name in names}, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--deaths", type=int, default=500, help="number of jobs, each with a death")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no job after this time")
    parser.add_argument(
        "--backend", choices=("cpu", "cuda"), help="default: cuda if there is a GPU"
    )
    parser.add_argument("--jobs", type=int, help="jobs side by side; default 16, on the CPU 2")
    parser.add_argument("--deadline", type=float, help="seconds; default 5, on the CPU 10")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="number of the first job")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    chosen = parser.parse_args()
    # The server of forks must not begin to use CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    backend = chosen.backend or ("cuda" if torch.cuda.device_count() else "cpu")
    os.environ |= {
        "INTERLACE_BACKEND": backend, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    if backend == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    jobs = chosen.jobs or (16 if backend == "cuda" else 2)
    deadline_s = chosen.deadline or (5.0 if backend == "cuda" else 10.0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])
    begun = time.monotonic()
    results: list[dict[str, Any]] = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as threads:
        if backend == "cuda":
            for result in threads.map(functools.partial(run, context=context), warm(backend)):
                if result["wrong"]:
                    print("without a death:", *result["wrong"], sep="\n  ")
                    return 1
            print(f"Kernels are compiled after {time.monotonic() - begun:.0f} s.", flush=True)

        def one(number: int) -> dict[str, Any] | None:
            if chosen.seconds and time.monotonic() - begun > chosen.seconds:
                return None
            return run(draw(number, chosen.seed, backend, deadline_s), context)

        numbers = range(chosen.start, chosen.start + chosen.deaths)
        for result in filter(None, threads.map(one, numbers)):
            results.append(result)
            if result["wrong"]:
                print(f"job {result['number']}, {result['moment']}, rank {result['victim']} of "
                      f"{result['ranks']}, {result['nodes']} node(s), store {result['store']}:",
                      *result["wrong"], sep="\n  ", flush=True)  # fmt: skip
            if len(results) % 20 == 0:
                print(f"{len(results)} deaths after {time.monotonic() - begun:.0f} s", flush=True)
    took_s = round(time.monotonic() - begun, 1)
    found = summary(results)
    documents.write(
        chosen.json, [_row(result) for result in results], backend=backend, seed=chosen.seed,
        jobs=jobs, deadline_s=deadline_s, seconds=took_s, **found,
    )  # fmt: skip
    wrong = found["wrong"]
    print(f"{len(results)} deaths, {wrong} wrong, in {took_s} s; see {chosen.json}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
