"""``launch``: the ranks of one machine as processes, with torch's own process start and process group."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from interlace.errors import ArgumentError, BackendError, LaunchError


def launch(
    worker: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "auto",
    timeout_s: float | None = None,
) -> list[Any]:
    """Run ``worker(*args)`` on ``world_size`` ranks and return each rank's result, in rank order.

    Starts one process a rank on this machine, each with a default process group over all of them
    (``torch.distributed.get_rank()`` tells which one it is), and waits for all. If this process already is a rank, because a
    process group is initialised or because torchrun or Slurm set ``RANK`` and ``WORLD_SIZE``, nothing is started:
    the worker runs here, and the results of the group's ranks are gathered.

    Args:
        worker: a function that a new process can import (not a lambda or a local function).
        world_size: how many ranks; under an existing launcher it must be the group's size.
        args: passed on; they and the result must be picklable. CPU tensors are copied.
        backend: ``"cuda"`` (a GPU a rank, NCCL), ``"cpu"`` (kernels run in Triton's interpreter, Gloo), or
            ``"auto"``: cuda where there are GPUs enough.
        timeout_s: end everything after this time; default: no limit.

    Raises:
        LaunchError: a rank failed: with its traceback; the others are ended.
        BackendError: fewer GPUs than ranks.
        ArgumentError: a bad world size or backend.
    """
    if world_size < 1:
        raise ArgumentError(f"launch: world_size must be at least 1; got {world_size}.")
    if backend not in ("auto", "cuda", "cpu"):
        raise ArgumentError(f"launch: backend must be auto, cuda or cpu; got {backend!r}.")
    if dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return _run_as_rank(worker, world_size, args, backend)
    gpus = torch.cuda.device_count()
    if backend == "auto":
        backend = "cuda" if gpus >= world_size else "cpu"
    if backend == "cuda" and gpus < world_size:
        raise BackendError(f"launch: backend cuda must have a GPU for each of {world_size} ranks; got {gpus}. Use backend='cpu'.")
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:  # readable by this user only
        with _environment(_child_environment(backend)):
            processes = mp.start_processes(
                _child, args=(worker, world_size, args, backend, folder), nprocs=world_size, join=False, start_method="spawn"
            )
        assert processes is not None
        _wait(processes, None if timeout_s is None else time.monotonic() + timeout_s)
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _wait(processes: mp.ProcessContext, end: float | None) -> None:
    try:
        while not processes.join(timeout=0.2 if end is None else max(0.0, min(0.2, end - time.monotonic()))):
            if end is not None and time.monotonic() >= end:
                raise LaunchError("launch: the ranks did not finish in time and were ended.", rank=-1)
    except mp.ProcessRaisedException as error:
        raise LaunchError(f"launch: rank {error.error_index} failed.{error}", error.error_index) from None
    except mp.ProcessExitedException as error:
        raise LaunchError(f"launch: rank {error.error_index} ended without a result: {error}.", error.error_index) from None
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
        for process in processes.processes:
            process.join()
        for file in processes.error_files:  # torch's, with the traceback; left there after a failure
            Path(file).unlink(missing_ok=True)


def _child_environment(backend: str) -> dict[str, str]:
    environment = {"INTERLACE_BACKEND": backend}
    if backend == "cpu":
        environment["TRITON_INTERPRET"] = "1"
        # Ranks share the cores: more threads than that only wait for each other.
        environment.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # nothing listens beyond this machine
    return environment


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _child(rank: int, worker: Callable[..., Any], world_size: int, args: tuple[Any, ...], backend: str, folder: str) -> None:
    init_process_group(backend, rank=rank, world_size=world_size, init_method=f"file://{folder}/store", local_rank=rank)
    result = worker(*args)
    (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()  # peers may still be reading this rank's memory
    dist.destroy_process_group()
    # The result is kept, nobody needs this process any more. While an interpreter goes down, threads of libraries may outlive what
    # they use: a rank in some thousands ended with SIGABRT ("terminate called without an active exception").
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def init_process_group(backend: str, *, rank: int, world_size: int, init_method: str, local_rank: int) -> None:
    """Join the default process group with Gloo, and NCCL beside it on the cuda backend."""
    if backend == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=init_method, rank=rank, world_size=world_size, device_id=device)
    else:
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)


def _run_as_rank(worker: Callable[..., Any], world_size: int, args: tuple[Any, ...], backend: str) -> list[Any]:
    started = not dist.is_initialized()
    if started:
        rank = int(os.environ["RANK"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        if backend == "auto":
            backend = "cuda" if torch.cuda.device_count() > local_rank else "cpu"
        os.environ.update(_child_environment(backend))
        init_process_group(
            backend, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), init_method="env://", local_rank=local_rank
        )
    try:
        if dist.get_world_size() != world_size:
            raise ArgumentError(
                f"launch: world_size must be the existing group's; got {world_size} for a group of {dist.get_world_size()}."
            )
        result = worker(*args)
        results: list[Any] = [None] * world_size
        dist.all_gather_object(results, result)
        return results
    finally:
        if started:
            dist.destroy_process_group()
