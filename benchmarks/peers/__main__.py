"""Run the drivers of peers, each in processes of its own, and write what they measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import interlace
from benchmarks.documents import write
from benchmarks.peers.capabilities import CAPABILITIES
from benchmarks.peers.driver import DRIVERS, WITHOUT_MULTICAST, folders_of, load, version
from benchmarks.peers.worker import worker

GRACE_S = 60.0
"""What a peer may take beyond its time, to start and to end its last case."""
LEAVING_S = 5.0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument(
        "--only", action="append", metavar="NAME",
        help=f"a peer, or a module that is a driver; again for more: {', '.join(DRIVERS)}",
    )  # fmt: skip
    parser.add_argument("--capability", default="", help="a part of the capability's name")
    parser.add_argument("--sizes", help="one case instead of all, as 4096x8192x2048")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--path", type=Path, help="a folder that pip install --target has made")
    parser.add_argument("--budget-s", type=float, default=420.0, help="for all peers together")
    parser.add_argument(
        "--check", action="store_true", help="compare results, and time nothing: without a GPU, too"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(name: str, options: argparse.Namespace, seconds: float) -> tuple[list[Any], str]:
    """Run a peer's processes, and return their results and what ended them before their end."""
    driver = load(name)
    folders = folders_of(driver, options.path)
    paths = [*folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**WITHOUT_MULTICAST, **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if hasattr(driver, "environment"):
        environment |= driver.environment(folders)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, "-m", "benchmarks.peers", *sys.argv[1:]]
        command += ["--child", name, str(file), "--budget-s", str(seconds)]
        # A session of its own, so that whatever the peer starts ends with it.
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            problem = _waited(child, file.with_suffix(".done"), seconds + GRACE_S)
        finally:
            _end(child)
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return found, problem


def _waited(child: subprocess.Popen[bytes], done: Path, seconds: float) -> str:
    """Wait until a peer's processes have ended, or should have; return what was wrong.

    Libraries that share a communicator may wait for one another while they are unloaded, so once
    all is measured the processes have a few seconds to end.
    """
    until = time.perf_counter() + seconds
    while (code := child.poll()) is None:
        if time.perf_counter() > until:
            return "" if done.exists() else f"it did not end within {seconds:.0f} s"
        if done.exists():
            until = min(until, time.perf_counter() + LEAVING_S)
        time.sleep(0.1)
    return f"its processes ended with {code}" if code and not done.exists() else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a peer's processes, those that it has left behind among them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _be_child(options: argparse.Namespace, chosen: list[str]) -> None:
    name, file = options.child
    sizes = None if options.sizes is None else tuple(map(int, options.sizes.split("x")))
    interlace.launch(
        worker, options.ranks, name, chosen, sizes, Path(file), options.budget_s,
        not options.check, backend="cpu" if options.check else "cuda",
    )  # fmt: skip


def main() -> None:
    """Run all peers that are installed, or those that are named."""
    options = _options()
    chosen = [name for name in CAPABILITIES if options.capability in name]
    if options.child:
        _be_child(options, chosen)
        return
    began = time.perf_counter()
    results: list[Any] = []
    peers: dict[str, dict[str, str]] = {}
    names = []
    for name in options.only or DRIVERS:
        driver = load(name)
        found = version(driver, folders_of(driver, options.path))
        peers[driver.NAME] = {"install": driver.INSTALL}
        if found is None:
            print(f"{driver.NAME} is not installed: {driver.INSTALL}", flush=True)
        elif set(chosen) & set(driver.WAYS):
            peers[driver.NAME]["version"] = found
            names.append(name)
    for place, name in enumerate(names):
        own, rest = load(name).NAME, options.budget_s - (time.perf_counter() - began)
        print(f"{own} {peers[own]['version']}", flush=True)
        problem = ""
        try:
            found_results, problem = run(name, options, max(rest / (len(names) - place), 1.0))
            results += found_results
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            peers[own]["problem"] = problem
            print(f"{own}: {problem}", flush=True)
        if options.json:
            write(options.json, results, peers=peers, ranks=options.ranks)


if __name__ == "__main__":
    main()
