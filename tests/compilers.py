"""Compile every kernel for every target, beside the other tests; the cases are in
``tests/test_compile_targets.py``.

What has compiled once is not compiled again: for each case a file whose name is a hash of the
kernel's source with all that it calls, the case's types and constants, Triton's version, the target
and this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from interlace.comm.launching.kernels import COMPILED_WITH

TARGETS = {"sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}
THOROUGH = "sm_90"
"""The target for which every case is compiled; for the others, each kernel's first."""

MOST_SPILLED_BYTES = 100
"""What a thread may spill where a configuration limits its registers: an embedding's update that
spilled 168 took a third longer on two H100s (decision 0006).
"""

ALIGNED = {"decode_first_gemm", "decode_second_gemm"}
"""Kernels whose operands are at multiples of 16 bytes in every call. One that loads float8 byte by
byte has lost a hint, and with it Triton's pipeline."""

PATIENCE_S = 600.0
"""Seconds in which at least one case compiles, on any machine with any other jobs. How long all of
them take says nothing: a busy machine needs half an hour, an idle one two minutes.
"""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """What compiles: a process of this or of another process that runs tests.

    Attributes:
        folder: Where its log and its failures are.
        process: None if another process that runs tests has started it.
    """

    folder: Path
    process: subprocess.Popen[bytes] | None

    def check(self, target: str) -> None:
        """Wait until all is compiled; fail with what was said about a target if something did not
        compile for it, or if nothing has compiled for ``PATIENCE_S``.
        """
        log = self.folder / "log"
        while not (self.folder / "failures.json").exists():
            assert time.time() - log.stat().st_mtime < PATIENCE_S, log.read_text()[-4000:]
            time.sleep(0.2)
        assert json.loads((self.folder / "failures.json").read_text())[target] == []


def _command(*arguments: object) -> tuple[list[str], dict[str, str]]:
    """A command that runs this file, and its environment: where TRITON_INTERPRET is set, a kernel
    is a Python function.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return [sys.executable, "-m", "tests.compilers", *map(str, arguments)], environment


def cases() -> list[str]:
    """The kernel and target of every case, from a process of its own."""
    command, environment = _command()
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=1000
    )
    return done.stdout.splitlines()


def start(folder: Path, compiled: Path) -> Compiler:
    """Start to compile, unless another process has already started with the same ``folder``.

    Args:
        folder: For logs and temporary files.
        compiled: Remembers what has compiled.
    """
    try:
        folder.mkdir()
    except FileExistsError:
        return Compiler(folder, None)
    command, environment = _command(compiled, folder / "failures.json")
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")  # empty: compile, not load
    environment["TRITON_DUMP_PTXAS_LOG"] = "1"
    with (folder / "log").open("w") as log:
        return Compiler(
            folder,
            subprocess.Popen(
                ["nice", "-n", "5", *command], env=environment, stdout=log, stderr=log
            ),
        )


@dataclasses.dataclass(frozen=True)
class Task:
    """One case to compile for one target.

    Attributes:
        kernel: The ``@triton.jit`` function.
        types: Triton's type of every argument, by the parameter's name; of a NamedTuple of
            arguments, such a NamedTuple of types, ``"constexpr"`` for a field that is None.
        constants: The values of the constants, and Triton's options.
        target: One of ``TARGETS``.
    """

    kernel: Any
    types: dict[str, Any]
    constants: dict[str, Any]
    target: str

    def source(self) -> Any:
        from triton.compiler import ASTSource

        constants = {
            name: value for name, value in self.constants.items() if name in self.kernel.arg_names
        }
        signature = {
            name: "constexpr" if name in constants else self.types[name]
            for name in self.kernel.arg_names
        }
        left_out = {
            (position, field): None
            for position, name in enumerate(self.kernel.arg_names)
            if isinstance(signature[name], tuple)
            for field, kind in enumerate(signature[name])
            if kind == "constexpr"
        }
        return ASTSource(self.kernel, signature, constants | left_out)

    @property
    def options(self) -> dict[str, int]:
        warps = self.constants.get("num_warps", 4)
        options = {"num_warps": warps, "num_stages": 3, **COMPILED_WITH}
        if "maxnreg" in self.constants:
            options["maxnreg"] = self.constants["maxnreg"]
        return options

    def key(self) -> str:
        """Changes with everything that the outcome depends on."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend

        backend = make_backend(GPUTarget(*TARGETS[self.target]))
        parts = [self.source().hash(), backend.hash(), backend.parse_options(self.options).hash()]
        parts += [triton.__version__, self.target, Path(__file__).read_text(encoding="utf-8")]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def compile(self) -> None:
        import triton
        from triton.backends.compiler import GPUTarget

        target = GPUTarget(*TARGETS[self.target])
        self._write_as_hooks_do(target)
        with contextlib.redirect_stdout(io.StringIO()) as log:  # ptxas's remarks; see start()
            compiled = triton.compile(self.source(), target=target, options=self.options)
        assert len(compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]) > 0
        if target.backend == "cuda":
            # Products whose matrix instructions ptxas serialises are right, and a quarter slower.
            assert "Compiling entry function" in log.getvalue()
            assert "serialized" not in log.getvalue()
            if self.kernel.__name__ in ALIGNED:
                assert not re.search(r"\bld\.global\S*\.[bu]8\b", compiled.asm["ptx"])
            if "maxnreg" in self.options:
                # Who limits registers wants more programs on an SM, not loads and stores of what
                # the registers no longer hold.
                spilled = int(re.findall(r"(\d+) bytes spill stores", log.getvalue())[-1])
                assert spilled <= MOST_SPILLED_BYTES, f"{spilled} bytes of a thread's registers"

    def _write_as_hooks_do(self, target: Any) -> None:
        """Write the constants as JSON, as Triton does in a program that has set one of its hooks
        for what is compiled. vLLM sets one when an engine has started.

        Raises:
            TypeError: JSON can hold no such constant.
        """
        from triton.compiler import make_backend
        from triton.runtime.jit import serialize_specialization_data

        source = self.source()
        given = {
            "name": self.kernel.__name__,
            "signature": source.signature,
            "constants": source.constants,
            "attrs": source.attrs,
            "options": make_backend(target).parse_options(self.options),
            "key": "",
            "target": target,
        }
        # Not every Triton takes the target.
        taken = inspect.signature(serialize_specialization_data).parameters
        serialize_specialization_data(**{name: given[name] for name in taken})


def _tasks() -> Iterator[Task]:
    """Every case for one target: what is wrong with a case is rarely wrong on one GPU only. Else
    one per kernel.
    """
    from tests.test_compile_targets import cases_of, kernels

    for target in TARGETS:
        for kernel in kernels():
            tasks = [
                Task(kernel, types, constants, target)
                for types, constants in cases_of(kernel.__name__)
            ]
            if TARGETS[target][0] != "cuda":  # descriptors are NVIDIA's
                tasks = [
                    task
                    for task in tasks
                    if not any("tensordesc" in kind for kind in task.types.values())
                ]
            yield from tasks if target == THOROUGH else tasks[:1]


_tasks_to_compile: list[Task] = []


def _compile(index: int) -> str | None:
    """Compile one task in a worker; the traceback if it fails."""
    task = _tasks_to_compile[index]
    try:
        task.compile()
    except BaseException:
        return f"{task.kernel.__name__} for {task.target}:\n{traceback.format_exc()}"
    return None


def compile_all(compiled: Path) -> dict[str, list[str]]:
    """Compile what is not in ``compiled`` and add it there; the failures by target."""
    found: dict[str, list[str]] = {target: [] for target in TARGETS}
    keys = {}
    for task in _tasks():
        # A case that differs from another in what its kernel does not take would only be loaded.
        if not (compiled / task.key()).exists() and task.key() not in keys.values():
            keys[len(_tasks_to_compile)] = task.key()
            _tasks_to_compile.append(task)
    print(len(_tasks_to_compile), "kernels to compile", flush=True)
    # Forked workers have Triton and the kernels already.
    workers = max(1, min(8, len(os.sched_getaffinity(0))))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as executor:
        for index, failure in enumerate(executor.map(_compile, range(len(_tasks_to_compile)))):
            task = _tasks_to_compile[index]
            if failure is None:
                (compiled / keys[index]).touch()
            else:
                found[task.target].append(failure)
            print(
                task.kernel.__name__, task.target, "failed" if failure else "compiled", flush=True
            )
    return found


def main(compiled: Path, failures: Path) -> None:
    """Write the failures by target to ``failures`` when all is compiled, or when that has failed as
    a whole.
    """
    try:
        found = compile_all(compiled)
    except BaseException:
        found = {target: [traceback.format_exc()] for target in TARGETS}
    unfinished = failures.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(found))
    unfinished.rename(failures)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(*map(Path, sys.argv[1:]))
    else:
        for case in _tasks():
            print(case.kernel.__name__, case.target, case.key())
