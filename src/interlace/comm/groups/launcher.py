"""Start the ranks of one machine as processes, by torch's own process start and process group."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import multiprocessing
import numbers
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.constants import default_pg_timeout
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from interlace.cache_folder import write_whole
from interlace.comm.host.nodes import NODES_VARIABLE
from interlace.comm.host.rendezvous import meet
from interlace.comm.runtime.deadlines import NEVER, checked_deadline_s
from interlace.environment import changed, whole_number
from interlace.errors import ArgumentError, BackendError, LaunchError, PeerTimeoutError

_UNPICKLABLE = pickle.PicklingError, AttributeError, TypeError  # what pickle raises
_UNGUARDED = (
    "The start of a program must be guarded, since every rank imports the program. Call launch "
    "below `if __name__ == '__main__':`."
)
_LONGEST_PAUSE_S = 0.05


def launch(
    worker: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "auto",
    nodes: int | None = None,
    timeout_s: float | None = None,
    join_timeout_s: float | None = None,
) -> list[Any]:
    """Run ``worker(*args)`` on ``world_size`` ranks and return each rank's result, in rank order.

    This starts one process per rank on this machine, each with a default process group over all of
    them (``torch.distributed.get_rank()`` returns its rank), and waits for all. If this process
    already is a rank, because a process group is initialised or because torchrun or Slurm set
    ``RANK`` and ``WORLD_SIZE``, no process is started: the worker runs in this process, and the
    results of the group's ranks are gathered.

    Args:
        worker: Function that a new process can import: at the top level of a module or of a script,
            not a lambda, a local function, or a function that was typed into a notebook or an
            interactive session.
        world_size: Number of ranks; under an existing launcher it must be the group's size.
        args: Arguments of the worker; they and the result must be picklable. CPU tensors are
            copied.
        backend: ``"cuda"`` (GPUs, NCCL), ``"cpu"`` (kernels run in Triton's interpreter, Gloo), or
            ``"auto"``: cuda if every rank has a GPU of its own, else cpu. With ``"cuda"`` and fewer
            GPUs than ranks, the GPUs are dealt out round robin, and ranks that share one run by
            time slices: results are right, times mean nothing.
        nodes: Number of nodes that the ranks count as, in equal and consecutive parts, to try on
            one machine what runs on several: ranks of different nodes share no memory, and NCCL
            sends through sockets between them. Default: what the ranks are on.
        timeout_s: Seconds after which all processes are ended. Default: no limit. A rank whose
            worker has ended waits for the others as long as they take, whatever time-outs torch's
            process groups have.
        join_timeout_s: Seconds in which ranks of an existing launcher must join the default process
            group, and that torch's collectives of it may last, the exchange of results among them.
            Default: torch's, and no limit for the results.

    Raises:
        LaunchError: A rank failed (the message begins with the class and the text of the rank's
            error, its traceback follows, the error itself is ``__cause__`` if it can be pickled,
            and the other ranks are ended), or no process can be started for the worker.
        BackendError: The backend is cuda and there is no GPU.
        ArgumentError: The worker, the world size, the backend, the number of nodes or a time is
            invalid, or arguments of the worker cannot be pickled.
    """
    if not callable(worker):
        raise ArgumentError(f"launch: worker must be a function; got {worker!r}.")
    is_count = isinstance(world_size, numbers.Integral) and not isinstance(world_size, bool)
    if not is_count or world_size < 1:
        raise ArgumentError(
            f"launch: world_size must be a whole number, at least 1; got {world_size!r}."
        )
    if backend not in ("auto", "cuda", "cpu"):
        raise ArgumentError(f"launch: backend must be auto, cuda or cpu; got {backend!r}.")
    is_number = nodes is None or isinstance(nodes, numbers.Integral)
    if not is_number or (nodes is not None and (nodes < 1 or world_size % nodes)):
        raise ArgumentError(
            f"launch: nodes must be a number that divides the {world_size} ranks; got {nodes!r}."
        )
    for name, seconds in (("timeout_s", timeout_s), ("join_timeout_s", join_timeout_s)):
        if seconds is not None:
            checked_deadline_s(seconds, f"launch: {name}")
    declared = {} if nodes is None else {NODES_VARIABLE: str(nodes)}
    if dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        with changed(declared):
            return _run_as_rank(worker, world_size, args, backend, join_timeout_s)
    _require_importable(worker)
    gpus = torch.cuda.device_count()
    if backend == "auto":
        backend = "cuda" if gpus >= world_size else "cpu"
    if backend == "cuda" and gpus == 0:
        raise BackendError("launch: backend cuda must have a GPU; got none. Use backend='cpu'.")
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:  # readable by this user only
        with changed(_child_environment(backend) | declared):
            try:
                processes = mp.start_processes(
                    _child,
                    args=(worker, world_size, args, backend, folder),
                    nprocs=world_size,
                    join=False,
                    start_method="spawn",
                )
            except _UNPICKLABLE as error:  # before any starts
                raise ArgumentError(
                    f"launch: arguments of the worker must be picklable; got {error}."
                ) from error
        assert processes is not None
        _wait(processes, None if timeout_s is None else time.monotonic() + timeout_s, Path(folder))
        return [_result_of(rank, Path(folder)) for rank in range(world_size)]


def _result_of(rank: int, folder: Path) -> Any:
    """Return the result that a rank has left in ``folder``.

    Raises:
        LaunchError: The result was pickled, but cannot be unpickled.
    """
    try:
        return pickle.loads((folder / f"result-{rank}").read_bytes())
    except Exception as error:
        raise LaunchError(
            f"launch: the result of rank {rank} must be picklable; got one that was pickled and "
            f"cannot be unpickled ({type(error).__name__}: {error}).",
            rank,
        ) from error


def _require_importable(worker: Callable[..., Any]) -> None:
    """Refuse a worker that a new process could not import, before a process is started.

    Raises:
        LaunchError: the worker cannot be imported.
        SystemExit: this process is a new one that imports a program whose start is not guarded.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # One line, without the frames of an import that nobody has written: the process that
        # called launch first raises the error.
        raise SystemExit(f"launch: {_UNGUARDED}")
    name = getattr(worker, "__qualname__", repr(worker))
    try:
        pickle.dumps(worker)
    except _UNPICKLABLE as error:
        raise LaunchError(
            f"launch: worker must be a function that a new process can import; got {name}, which "
            "cannot be pickled "
            f"({error}). Define it with `def` at the top level of a module; arguments of launch "
            "reach it.",
            rank=-1,
        ) from None
    main = sys.modules["__main__"]
    # A new process finds the program by the name of its module (python -m) or of its file.
    importable = main.__spec__ is not None or Path(getattr(main, "__file__", None) or "").is_file()
    if getattr(worker, "__module__", "") == "__main__" and not importable:
        raise LaunchError(
            f"launch: worker must be a function that a new process can import; got {name} of a "
            "notebook, an interactive "
            "session or standard input. Put it into a file, say workers.py, and import it from "
            "there.",
            rank=-1,
        )


def _wait(processes: mp.ProcessContext, end: float | None, folder: Path) -> None:
    """Wait until all ranks have ended, and end all of them if one fails.

    Args:
        processes: The ranks.
        end: Deadline in seconds of ``time.monotonic()``; None: no limit.
        folder: Folder in which a rank leaves a file once it has imported the worker.

    Raises:
        LaunchError: A rank failed, or the ranks did not finish in time.
    """
    try:
        while not processes.join(
            timeout=0.2 if end is None else max(0.0, min(0.2, end - time.monotonic()))
        ):
            _require_results(processes, folder)
            if end is not None and time.monotonic() >= end:
                raise LaunchError(
                    "launch: the ranks did not finish in time and were ended.", rank=-1
                )
        _require_results(processes, folder)
    except mp.ProcessRaisedException as error:
        # Peers of a rank that has gone fail as well: that rank is the reason.
        _require_results(processes, folder)
        rank, trace = error.error_index, str(error).strip()
        line, cause = _error_of(rank, folder)
        raise LaunchError(f"launch: rank {rank} failed: {line}\n\n{trace}", rank) from cause
    except mp.ProcessExitedException as error:
        rank = error.error_index
        imported = error.exit_code != 1 or (folder / f"started-{rank}").exists()
        reason = f"{error}." if imported else f"it could not import the worker. {_UNGUARDED}"
        raise LaunchError(f"launch: rank {rank} ended without a result: {reason}", rank) from None
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
        for process in processes.processes:
            process.join()
        # Torch writes tracebacks to these files, and leaves them behind after a failure.
        for file in processes.error_files:
            Path(file).unlink(missing_ok=True)


def _require_results(processes: mp.ProcessContext, folder: Path) -> None:
    """Refuse a rank whose process has ended as if it had succeeded, but without a result.

    Raises:
        LaunchError: The worker of a rank has ended the process, or was interrupted.
    """
    for rank, process in enumerate(processes.processes):
        if process.exitcode == 0 and not (folder / f"result-{rank}").exists():
            raise LaunchError(
                f"launch: rank {rank} ended without a result: its process ended with exit code 0. "
                "The worker must return or raise an error, and neither end the process (sys.exit) "
                "nor be interrupted.",
                rank,
            ) from None


def _leave_error(error: Exception, file: Path) -> None:
    """Leave the error of a rank for :func:`_error_of`."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    line, *continued = (line for line in lines if not line.startswith(" "))  # others quote code
    # PyTorch's error of a state dict says in its further lines what is wrong.
    if line.endswith(":"):
        line = " ".join([line, *(text.strip() for text in continued if text.strip())])
    try:
        pickled = pickle.dumps(error)
    except Exception:  # errors may hold anything
        pickled = b""
    file.write_bytes(pickle.dumps((line, pickled)))


def _error_of(rank: int, folder: Path) -> tuple[str, BaseException | None]:
    """Return the class and the first line of a rank's error, and the error.

    A first line that ends with a colon has the others behind it.

    Only a rank of this launch writes to the folder, which it does with its result as well. The
    error is None if it cannot be pickled, or not be unpickled.
    """
    line, pickled = pickle.loads((folder / f"error-{rank}").read_bytes())
    try:
        error = pickle.loads(pickled)
    except Exception:
        return line, None
    return line, error if isinstance(error, BaseException) else None


def _child_environment(backend: str) -> dict[str, str]:
    """Return the environment variables of a rank on ``backend``."""
    environment = {"INTERLACE_BACKEND": backend}
    if backend == "cpu":
        environment["TRITON_INTERPRET"] = "1"
        # Ranks share the cores: more threads than that only wait for each other.
        environment.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # no socket listens beyond this machine
    return environment


def _child(
    rank: int,
    worker: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    backend: str,
    folder: str,
) -> None:
    """Run the worker as one rank in a new process, and leave the result in ``folder``."""
    _end_without_launcher()
    # The worker was unpickled before this call, so it could be imported, which the file tells the
    # parent.
    (Path(folder) / f"started-{rank}").touch()
    try:
        init_process_group(
            backend,
            rank=rank,
            world_size=world_size,
            init_method=f"file://{folder}/store",
            local_rank=rank,
        )
        # From here on the end of the launcher interrupts the rank, which may clean up.
        _prctl_pr_set_pdeathsig(signal.SIGINT)
        result = pickle.dumps(worker(*args))
        if backend == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        _leave_error(error, Path(folder) / f"error-{rank}")
        raise
    write_whole(Path(folder) / f"result-{rank}", result)
    # Peers may still be reading this rank's memory. They are awaited by their files: the process
    # group may be destroyed or broken, and has a time-out of its own. It is not destroyed here:
    # NCCL would wait for the CUDA graphs that the worker has left, and the process ends anyway.
    pause_s = 0.001
    while not all((Path(folder) / f"result-{peer}").exists() for peer in range(world_size)):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    # The result is stored, so the process may end without the interpreter's shutdown, during which
    # threads of libraries may use objects that are freed already: one rank in some thousands ended
    # with SIGABRT ("terminate called without an active exception").
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_without_launcher() -> None:
    """End this process if its launcher has ended, now or while the ranks meet.

    A signal that Python handles would wait until torch has met the other ranks, which may have
    ended.
    """
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)


def init_process_group(
    backend: str,
    *,
    rank: int,
    world_size: int,
    init_method: str | None = None,
    store: dist.Store | None = None,
    local_rank: int,
    ranks_here: int | None = None,
    timeout_s: float | None = None,
) -> None:
    """Join the default process group with Gloo, and with NCCL as well on the cuda backend.

    Args:
        backend: ``"cuda"`` or ``"cpu"``.
        rank: Rank of this process.
        world_size: Number of ranks.
        init_method: URL at which the ranks meet, as in ``torch.distributed``.
        store: Store in which the ranks meet, instead of a URL.
        local_rank: Rank of this process on its machine; GPUs are dealt out round robin.
        ranks_here: Number of ranks on this machine. Default: all of them.
        timeout_s: Seconds in which all ranks must join, and that torch's collectives of this group
            may last. Default: torch's.

    Raises:
        BackendError: The backend is cuda and there is no GPU.
        ArgumentError: ``INTERLACE_NODES`` is no number.
    """
    timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    backends, device_id = "gloo", None
    if backend == "cuda":
        gpus = torch.cuda.device_count()
        if gpus == 0:
            raise BackendError("the cuda backend must have a GPU; got none. Use backend='cpu'.")
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
        shared = (world_size if ranks_here is None else ranks_here) > gpus
        if shared:
            # NCCL refuses two ranks on one GPU of one host. Ranks with different host ids send
            # through sockets.
            os.environ["NCCL_HOSTID"] = f"interlace-{rank}"
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        elif nodes := whole_number(NODES_VARIABLE, 0, least=1):
            # Ranks that count as several nodes are so for NCCL, too.
            os.environ["NCCL_HOSTID"] = f"interlace-node-{rank * nodes // world_size}"
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        # Without device_id, NCCL starts with the first collective of tensors on GPUs: programs that
        # call only operators of their own do not depend on it.
        backends, device_id = "cpu:gloo,cuda:nccl", None if shared else device
    dist.init_process_group(
        backends,
        init_method=init_method,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device_id,
    )


def _run_as_rank(
    worker: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    backend: str,
    join_timeout_s: float | None,
) -> list[Any]:
    """Run the worker in this process, which another launcher has started as a rank.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        ArgumentError: ``world_size`` is not the size of the existing group, or a variable of the
            launcher is no number.
        LaunchError: Not all ranks came.
    """
    started = not dist.is_initialized()
    if started:
        rank = whole_number("RANK")
        local_rank = whole_number("LOCAL_RANK", rank)
        ranks_here = whole_number("LOCAL_WORLD_SIZE", local_rank + 1)
        if backend == "auto":
            backend = "cuda" if torch.cuda.device_count() >= ranks_here else "cpu"
        ranks = whole_number("WORLD_SIZE")
        environment = _child_environment(backend)
        if whole_number("LOCAL_WORLD_SIZE", ranks) < ranks:
            # Loopback reaches no other machine; Gloo finds the interface by the host's name.
            environment.pop("GLOO_SOCKET_IFNAME", None)
        os.environ.update(environment)
        try:
            init_process_group(
                backend, rank=rank, world_size=ranks,
                store=_store_of_a_launch(rank, ranks, join_timeout_s),
                local_rank=local_rank, ranks_here=ranks_here, timeout_s=join_timeout_s,
            )  # fmt: skip
        except (dist.DistError, PeerTimeoutError) as error:
            raise LaunchError(
                f"launch: all {ranks} ranks must join the process group in time; rank {rank} got: "
                f"{error}",
                rank,
            ) from error
    try:
        if dist.get_world_size() != world_size:
            raise ArgumentError(
                f"launch: world_size must be the existing group's; got {world_size} for a group "
                f"of {dist.get_world_size()}."
            )
        result = worker(*args)
        results: list[Any] = [None] * world_size
        with contextlib.nullcontext() if join_timeout_s else _patience():
            dist.all_gather_object(results, result)
        return results
    finally:
        if started:
            _destroy_process_group()


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Let collectives of the default process group wait as long as their peers live."""
    group = dist.group.WORLD
    assert group is not None
    backends = [group._get_backend(device) for device in group._device_types]
    limits = [
        (backend, backend.options._timeout) for backend in backends if hasattr(backend, "options")
    ]
    try:
        for backend, _ in limits:
            backend._set_default_timeout(NEVER)
        yield
    finally:
        for backend, limit in limits:
            backend._set_default_timeout(limit)


def _destroy_process_group() -> None:
    """Destroy the default process group of a worker that has ended.

    From 2.26 on, NCCL waits in this call until every CUDA graph with one of its collectives is
    gone. The graphs that ``torch.compile`` captured outlive the worker, so they are freed first.
    """
    if "torch._inductor.cudagraph_trees" in sys.modules:
        torch.compiler.reset()
        gc.collect()
    dist.destroy_process_group()


def _store_of_a_launch(rank: int, ranks: int, timeout_s: float | None) -> dist.Store:
    """Return the launcher's store under keys that no other process group uses. Collective.

    Process groups leave the addresses of their ranks in the store. A later group under the same
    keys, of this function or of the program's own ``init_process_group``, would read the addresses
    of a group that is gone, and wait for it for ever. The ranks meet for the keys, as an earlier
    launch may have failed on some of them only, before it had got so far.

    Args:
        rank: Rank of this process.
        ranks: Number of ranks.
        timeout_s: Seconds in which the store must answer, and all ranks come. Default: torch's.

    Raises:
        torch.distributed.DistError: The store does not answer.
        PeerTimeoutError: A rank did not come.
    """
    timeout: dict[str, Any] = {}
    if timeout_s is not None:
        timeout["timeout"] = datetime.timedelta(seconds=timeout_s)
    store, _, _ = next(dist.rendezvous("env://", **timeout))
    store = dist.PrefixStore("interlace/launch", store)
    wait_s = default_pg_timeout.total_seconds() if timeout_s is None else timeout_s
    return dist.PrefixStore(meet(store, "launch", rank, ranks, wait_s), store)
