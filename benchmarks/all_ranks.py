"""Try everything on more GPUs of one host than before, in half an hour, one step after another.

    python benchmarks/all_ranks.py --ranks 8 --out FOLDER [--budget-s S] [--only STEP ...]

Each step is a command in a process of its own, with a time limit of its own: a step that fails or
hangs is ended with all processes that it started, and the next one begins. What a step prints goes
to ``FOLDER/STEP.log``; what it measures, to ``FOLDER/STEP.json``. ``FOLDER/summary.json`` has the
outcome of every step. It is written after each step, and keeps the outcomes of earlier runs with
the same folder, so the steps can be divided among several runs by ``--only``. A step begins only
if its limit fits into what is left of ``--budget-s``; the last line lists the steps that did not
begin. ``--dry-run`` prints the commands. The exit code is 1 if a step did not pass.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

GRACE_S = 10.0
"""Seconds from the interrupt of a step that is out of time until its processes are killed."""

SWEEP_S = 60
"""The budget of each of the two sweeps."""

PASSED, FAILED, TIMED_OUT, NO_TIME = "passed", "failed", "timed out", "no time left"


@dataclasses.dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        limit_s: Seconds after which it is ended.
        command: The arguments of Python.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]


def steps(ranks: int, folder: Path) -> tuple[Step, ...]:
    """Return all steps, in the order in which they are to run."""

    def interlace(name: str, limit_s: float, command: str) -> Step:
        words = ("-m", "interlace", *command.split(), "--json", str(folder / f"{name}.json"))
        return Step(name, limit_s, words)

    def tests(name: str, limit_s: float, marks: str, *more: str) -> Step:
        words = ("-m", "pytest", "tests/gpu", "-m", marks, "--ranks", str(ranks), "-v", "-rfE")
        return Step(name, limit_s, (*words, *more))

    sweep = f"bench sweep -n {ranks} --budget {SWEEP_S}"
    embedding = f"bench embedding_all_to_all -n {ranks}"
    experts = "--shape 128x2048x768x8 --shape 8x4096x14336x2"
    return (
        interlace("doctor", 60, "doctor"),
        tests("smoke", 90, "gpu and smoke"),
        tests("gpu-tests", 360, "gpu and not alone and not smoke", "-n8", "--dist=worksteal"),
        interlace("sweep", SWEEP_S + 90, f"{sweep} --seed 8"),
        interlace("sweep-any-size", SWEEP_S + 90, f"{sweep} --seed 9 --any-size"),
        interlace("decoding", 90, f"bench gemv_all_reduce -n {ranks} --tokens 1,4,16,64"),
        interlace("embedding", 120, f"{embedding} --lookups 1,20,64"),
        interlace("embedding-backward", 60, f"{embedding} --lookups 20 --backward"),
        interlace("experts", 150, f"bench mixture_of_experts -n {ranks} {experts}"),
        interlace("soak", 100, f"soak -n {ranks} --seconds 60 --seed 8"),
        interlace("network", 60, f"doctor --network -n {ranks} --nodes 2"),
        interlace("nodes", 60, f"soak -n {ranks} --nodes 2 --seconds 30 --seed 9"),
    )


def run(step: Step, log: Path) -> tuple[str, float]:
    """Run a step; return its outcome and its seconds. Nothing that it started is left running."""
    paths = (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
    }
    started = time.perf_counter()
    with log.open("w") as output:
        # Its own session, whose processes can be killed together.
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            outcome = FAILED if process.wait(step.limit_s) else PASSED
        except subprocess.TimeoutExpired:
            outcome = TIMED_OUT
            # Interrupted, pytest prints the failures, and a soak writes its calls so far.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            # The group is gone once all of its processes have ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return outcome, round(time.perf_counter() - started, 1)


def run_all(chosen: Sequence[Step], folder: Path, budget_s: float) -> int:
    """Run steps one after another, and write their outcomes; return 1 if one did not pass."""
    summary = folder / "summary.json"
    outcomes = json.loads(summary.read_text()) if summary.exists() else {}
    ends = time.perf_counter() + budget_s
    for step in chosen:
        if step.limit_s > ends - time.perf_counter():
            outcome, seconds = NO_TIME, 0.0
        else:
            print(f"{step.name}: begins, at most {step.limit_s:.0f} s", flush=True)
            outcome, seconds = run(step, folder / f"{step.name}.log")
        print(f"{step.name}: {outcome}, {seconds} s", flush=True)
        outcomes[step.name] = {"outcome": outcome, "seconds": seconds}
        summary.write_text(json.dumps(outcomes, indent=1) + "\n")
    left = [step.name for step in chosen if outcomes[step.name]["outcome"] == NO_TIME]
    if left:
        print(f"Not begun: --only {' '.join(left)}", flush=True)
    return int(any(outcomes[step.name]["outcome"] != PASSED for step in chosen))


def main() -> int:
    """Read the options, and run the steps or print their commands; return the exit code."""
    names = [step.name for step in steps(1, Path())]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8, help="number of GPUs; default: 8")
    parser.add_argument("--out", type=Path, required=True, help="folder of what comes out")
    parser.add_argument("--budget-s", type=float, default=1800.0, help="seconds of this run")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STEP")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    options = parser.parse_args()
    folder = options.out.resolve()
    chosen = [step for step in steps(options.ranks, folder) if step.name in options.only]
    if options.dry_run:
        for step in chosen:
            print(f"{step.name}, {step.limit_s:.0f} s: python {shlex.join(step.command)}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    return run_all(chosen, folder, options.budget_s)


if __name__ == "__main__":
    sys.exit(main())
