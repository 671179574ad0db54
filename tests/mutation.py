"""``make mutants``: every mistake of :mod:`tests.mutation_table`, each made in a copy of the tree.

A line for each says whether a test has failed, as one must. The working tree is never changed.
``python -m tests.mutation interlace_sim/ interlace_dlrm/criteo.py`` tries the mistakes in some
files only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.mutation_table import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 600.0
"""Seconds after which tests count as failed: a mistake may make them wait for ever."""

_PROCESSES = max(1, (os.cpu_count() or 2) // 2)
_LEFT_OUT = (".*", "build", "dist", "__pycache__", "*.egg-info")


def main(files: list[str]) -> int:
    """Try the mutants whose file begins as one of ``files``; return 1 if one is not as it must be,
    or if there is none for one of ``files``.

    The tests must pass on an unchanged copy first, or their failures would say nothing.
    """
    unknown = [file for file in files if not any(each.file.startswith(file) for each in MUTANTS)]
    if unknown:
        print("tests/mutation_table.py has no mistake in", ", ".join(unknown))
        return 1
    # What takes longest to import is imported once, before processes are forked.
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    chosen = [each for each in MUTANTS if not files or each.file.startswith(tuple(files))]
    wrong = killed = 0
    with tempfile.TemporaryDirectory(prefix="interlace-mutants-") as folder:
        tree = Path(folder) / "unchanged"
        process = _start(None, list(dict.fromkeys(each.tests for each in chosen)), tree)
        if os.waitpid(process, 0)[1]:
            print("A test fails without a mistake:", (tree / "log").read_text(errors="replace"))
            return 1
        for each, outcome in _try_all(chosen, Path(folder)):
            is_killed = outcome != "SURVIVED"
            killed += is_killed
            wrong += is_killed == bool(each.survives)
            reason = f" ({each.survives})" if each.survives else ""
            print(f"{outcome}{reason}: {each.file}: {each.old!r} -> {each.new!r}", flush=True)
    print(f"{killed} of {len(chosen)} killed, {wrong} not as the table says.")
    return int(wrong > 0)


def changed(text: str, mutant: Mutant) -> str:
    """Return a file's text with the mistake in it.

    Raises:
        ValueError: The text that is to be replaced does not occur exactly once.
    """
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.file} must have {mutant.old!r} once; it has it {count} times.")
    return text.replace(mutant.old, mutant.new)


def _try_all(mutants: list[Mutant], folder: Path) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant and what has become of it; several are tried at the same time."""
    waiting = mutants[::-1]
    running: dict[int, tuple[Mutant, Path, float]] = {}
    while waiting or running:
        while waiting and len(running) < _PROCESSES:
            mutant, tree = waiting.pop(), folder / str(len(waiting))
            process = _start(mutant, [mutant.tests], tree)
            running[process] = mutant, tree, time.monotonic() + TIMEOUT_S
        time.sleep(0.1)
        for process, (mutant, tree, until) in list(running.items()):
            is_late = time.monotonic() > until
            if is_late:
                os.killpg(process, signal.SIGKILL)
            ended, status = os.waitpid(process, 0 if is_late else os.WNOHANG)
            if not ended:
                continue
            # Ranks and other processes of the tests.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            del running[process]
            code = os.waitstatus_to_exitcode(status)
            if not is_late and code not in (0, 1):
                log = (tree / "log").read_text(errors="replace")
                raise SystemExit(f"{mutant} must run its tests; pytest ended with {code}:\n{log}")
            shutil.rmtree(tree, ignore_errors=True)
            yield (
                mutant,
                "killed by the time limit" if is_late else "killed" if code else "SURVIVED",
            )


def _start(mutant: Mutant | None, tests: list[str], tree: Path) -> int:
    """Make a mistake, or none, in a copy of the tree, and start tests there; return the process."""
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    if mutant is not None:
        file = tree / "src" / mutant.file
        file.write_text(changed(file.read_text(encoding="utf-8"), mutant), encoding="utf-8")
    process = os.fork()
    if process:
        return process
    os.setpgid(0, 0)
    log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    # Processes that the tests start import the copy, too, and keep what they know to themselves.
    os.environ.update(
        PYTHONPATH=f"{tree / 'src'}{os.pathsep}{tree}",
        PYTHONDONTWRITEBYTECODE="1",
        INTERLACE_CACHE_DIR=str(tree / "cache"),
    )
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(tree / "src"), str(tree)]
    # The modules of the table itself came from the working tree.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "interlace")]:
        del sys.modules[name]
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code = pytest.main([*options, *(f"tests/{test}" for test in tests)])
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
