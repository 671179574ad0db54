"""Launches and whole programs whose processes are forked rather than started: see
``tests/preloaded.py``.
"""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing.reduction
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

from tests.pool import fork_server

_start_processes = torch.multiprocessing.start_processes


@contextmanager
def quick_launches() -> Iterator[None]:
    """Within it, the ranks of ``interlace.launch`` come from the tests' server of processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.multiprocessing, "start_processes", _from_server)
        yield


def _from_server(fn: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
    fork_server()
    arguments = (dict(os.environ), fn, args)
    return _start_processes(_in_environment, arguments, **options | {"start_method": "forkserver"})


def _in_environment(
    rank: int, environment: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    fn(rank, *args)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a program ended."""

    returncode: int
    stdout: str
    stderr: str


def run_program(path: Path, *arguments: object, folder: Path, forked: bool = True) -> Ended:
    """Run a Python program on the CPU backend, in a process of its own; ``folder`` is where its
    output is kept.

    Args:
        forked: Whether its ranks are forks of it, and not new processes that import it again.
    """
    outputs = [folder / "stdout", folder / "stderr"]
    argv = [str(path), *map(str, arguments)]
    process = fork_server().Process(
        target=_run, args=(argv, [str(output) for output in outputs], forked)
    )
    process.start()
    process.join(500)
    if process.is_alive():
        process.kill()
    process.join()
    return Ended(process.exitcode, *(output.read_text() for output in outputs))


def _run(argv: list[str], outputs: list[str], forked: bool) -> None:
    for descriptor, output in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = argv
    # As Python does for a program: it may import what lies beside it.
    sys.path.insert(0, str(Path(argv[0]).parent))
    if forked:
        torch.multiprocessing.start_processes = _forked
    runpy.run_path(argv[0], run_name="__main__")


def _forked(fn: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
    # A new process would have to import the worker, so it must be one that can be imported.
    multiprocessing.reduction.ForkingPickler.dumps((fn, args))
    return _start_processes(_as_new_process, (fn, args), **options | {"start_method": "fork"})


def _as_new_process(rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    atexit._clear()  # what the program has to clean up is not this rank's
    fn(rank, *args)
