"""Ranks for tests: processes that are started once per world size and then run any number of
functions.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 900.0
"""Seconds that a function may take. Other jobs may have all cores of a slow machine, on which ranks
that take 10 s by themselves were seen to take 150, and the ranks may still have to start.
"""
COMPILING_S = 1800.0
"""Seconds for a function that Inductor compiles, which takes one and a half minutes of a core that
has nothing else to do.
"""

_ENVIRONMENTS = {
    "cpu": {
        "TRITON_INTERPRET": "1",
        "INTERLACE_BACKEND": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "INTERLACE_DEADLINE_S": "90",
    },
    "cuda": {"INTERLACE_BACKEND": "cuda", "GLOO_SOCKET_IFNAME": "lo", "INTERLACE_DEADLINE_S": "90"},
}
"""Waits for peers that do come may be long on a machine with other jobs; ``TIMEOUT_S`` is longer,
so that a test that hangs fails with the error of the wait."""


_starting = threading.Lock()
"""Held while ranks start, as they take over the environment, which is one for all threads."""


class RankFailure(AssertionError):
    """A function failed on a rank, or did not end in time; the message says where."""


class Pool:
    """``world_size`` processes with a default process group, waiting for functions to run.

    Args:
        world_size: Number of processes.
        backend: ``"cpu"``: kernels run in Triton's interpreter, and the process group is Gloo.
            ``"cuda"``: the ranks are dealt to the machine's GPUs round robin, and the process group
            has NCCL for tensors on GPUs and Gloo for others.
        store: Where the process group's store is: ``"file"``, or ``"rank 0"``, with which it dies.
    """

    def __init__(self, world_size: int, backend: str = "cpu", store: str = "file") -> None:
        self.world_size = world_size
        self.backend = backend
        self._store = store
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
    ) -> list[Any]:
        """``function(*args)`` on every rank; its results in rank order.

        After a failure the processes are replaced: ranks that stopped at different points no longer
            agree.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((function, args))
        try:
            for rank, connection in enumerate(self._connections):
                try:
                    connection.send_bytes(message)
                except OSError:  # it has died since its last function, or while it started
                    raise self._death(function.__name__, rank) from None
            return self._collect(function.__name__, time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        # None can end while a kernel of it waits for a peer that lives.
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder, self._processes, self._connections = None, [], []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="interlace-tests-")
        context = fork_server() if self.backend == "cpu" else multiprocessing.get_context("spawn")
        place = f"file://{self._folder.name}/store"
        if self._store == "rank 0":
            place = f"tcp://127.0.0.1:{free_port()}"
        with _starting, _environment_of(self.backend):
            for rank in range(self.world_size):
                here, there = context.Pipe()
                folder = self._folder.name
                arguments = (there, self.backend, rank, self.world_size, folder, place)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                there.close()
                self._processes.append(process)
                self._connections.append(here)

    def _collect(self, name: str, end: float) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = dict(zip(self._connections, range(self.world_size), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise RankFailure(
                    f"{name}: ranks {sorted(waiting.values())} did not end in "
                    f"time.\n{self._stacks()}"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, results[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    raise self._death(name, rank) from None
                if not succeeded:
                    raise RankFailure(f"{name}: rank {rank} failed first.\n{results[rank]}")
        return [results[rank] for rank in range(self.world_size)]

    def _death(self, name: str, rank: int) -> RankFailure:
        """Return the error that says how a rank has died."""
        self._processes[rank].join(5)
        code = self._processes[rank].exitcode
        return RankFailure(f"{name}: rank {rank} died (exit code {code}).\n{self._stacks()}")

    def _stacks(self) -> str:
        assert self._folder is not None
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # the signal handler writes; nothing tells when it is done
        files = (Path(self._folder.name) / f"stack-{rank}" for rank in range(self.world_size))
        return "\n".join(
            f"--- rank {rank}\n{file.read_text() if file.exists() else ''}"
            for rank, file in enumerate(files)
        )


@contextlib.contextmanager
def _environment_of(backend: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # A launch of several nodes may be what starts the server, whose later processes are of one.
        for name in ("TRITON_INTERPRET", "INTERLACE_NODES"):
            patch.delenv(name, raising=False)
        for name, value in _ENVIRONMENTS[backend].items():
            patch.setenv(name, value)
        yield


def free_port() -> int:
    """Return a port on which nobody listens, and which no system gives to a program that asks for
    any: until it is taken, another program would get it.
    """
    while True:
        port = random.SystemRandom().randrange(10000, 32768)  # from there on they are given away
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def fork_server() -> Any:
    """Processes of the cpu backend, forked from one that has imported what they need: that takes
    seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with _environment_of("cpu"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def pools(backend: str) -> Iterator[Callable[[int], Pool]]:
    """A function that returns the pool of a world size, the same one each time; all are closed at
    the end.
    """
    started: dict[int, Pool] = {}

    def pool(world_size: int) -> Pool:
        return started.setdefault(world_size, Pool(world_size, backend))

    yield pool
    for each in started.values():
        each.close()


def _destroy_groups() -> int:
    """Destroy the process groups that functions have made, when all ranks have ended the last one;
    return how many.

    Each of Gloo's groups has a thread that looks for messages a hundred times a second. Hundreds of
    them take a fifth of two cores.
    """
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    made = [group for group in world.pg_map if group != dist.group.WORLD]
    for process_group in made:
        dist.destroy_process_group(process_group)
    return len(made)


def _serve(
    connection: Connection, backend: str, rank: int, world_size: int, folder: str, place: str
) -> None:
    with open(Path(folder) / f"stack-{rank}", "w") as stacks:
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        import torch

        from interlace.comm import init_process_group

        torch.set_num_threads(1)
        if backend == "cpu":
            # Memory that nobody wrote is NaN (integers: the largest number), so that no test passes
            # because it happened to be zero. This is what fills it; use_deterministic_algorithms
            # would import the whole of Inductor.
            torch.set_deterministic_debug_mode("warn")
            torch.utils.deterministic.fill_uninitialized_memory = True
        local_rank = rank if backend == "cpu" else rank % torch.cuda.device_count()
        if backend == "cuda":
            # All ranks are on this machine, though some may share a GPU.
            os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
        init_process_group(
            backend, rank=rank, world_size=world_size, init_method=place, local_rank=local_rank
        )
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:  # the tests are over
                return
            if backend == "cpu" and _destroy_groups():
                gc.collect()  # their memory is unmapped now, and not while the function runs
            try:
                function, args = pickle.loads(message)
                answer = pickle.dumps((True, function(*args)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)
