"""Compile every kernel to PTX, and compare the PTX of two checkouts.

    python benchmarks/compare_ptx.py dump /tmp/before
    python benchmarks/compare_ptx.py dump /tmp/after gemv_all_reduce_one_shot
    python benchmarks/compare_ptx.py diff /tmp/before /tmp/after

``dump`` compiles every case of ``tests/test_compile_targets.py`` for sm_90, without a GPU, and
writes one file per case, named ``KERNEL-NUMBER.ptx``. The kernels are those of the checkout that
``PYTHONPATH`` names (``PYTHONPATH=src:.``). Kernel names after the folder restrict the dump.

``diff`` ignores what has no effect on the machine code: names of functions, parameters and labels,
debug information and comments; registers are numbered in the order of their first use. For a case
that still differs it says by how many instructions: the opcodes with their types, without
registers, are counted on both sides. Equal counts mean that the same instructions stand in another
order or use registers differently. The exit code is 1 if any case differs or is on one side only.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

TARGET = "sm_90"

_COMMENT = re.compile(r"//.*")
_DEBUG = re.compile(r"\.(loc|file|section|reg|local)\b|\$L__(tmp|func|info|debug)\w*:")
# Registers, labels and parameters carry numbers that depend on the order of compilation.
_NUMBERED = re.compile(
    r"%([a-z]+)\d+|\$(L__BB)\d+_\d+|\b\w+_(param)_\d+|\b(global_smem|assert\w*)\b"
)
_PREDICATE = re.compile(r"^@!?\S+\s+")


def dump(folder: Path, names: Sequence[str]) -> None:
    """Compile the cases of the kernels in ``names``, or of all kernels, and write their PTX."""
    # With TRITON_INTERPRET set, a kernel is a Python function that cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)
    folder.mkdir(parents=True, exist_ok=True)
    cases = [case for case in _cases() if not names or case[0].__name__ in names]
    unknown = set(names) - {kernel.__name__ for kernel, *_ in cases}
    if unknown:
        raise SystemExit(f"compare_ptx: no cases for {', '.join(sorted(unknown))}.")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as executor:
        identifiers = [f"{kernel.__name__}-{number}" for kernel, number, *_ in cases]
        for identifier, text in zip(identifiers, executor.map(_compile, identifiers), strict=True):
            (folder / f"{identifier}.ptx").write_text(text)
            print(identifier, flush=True)


def _cases() -> Iterator[tuple[Any, int, dict[str, str], dict[str, Any]]]:
    """Each case: the kernel, the case's number, its argument types and its constants."""
    from tests.test_compile_targets import cases_of, kernels

    for kernel in kernels():
        for number, (types, constants) in enumerate(cases_of(kernel.__name__)):
            yield kernel, number, types, constants


def _compile(identifier: str) -> str:
    """Return the PTX of one case."""
    import triton
    from tests.compilers import TARGETS, Task
    from triton.backends.compiler import GPUTarget

    kernel, types, constants = next(
        (kernel, types, constants)
        for kernel, number, types, constants in _cases()
        if f"{kernel.__name__}-{number}" == identifier
    )
    task = Task(kernel, types, constants, TARGET)
    target = GPUTarget(*TARGETS[TARGET])
    compiled = triton.compile(task.source(), target=target, options=task.options)
    return str(compiled.asm["ptx"])


def normalise(text: str) -> list[str]:
    """Return the lines of a kernel that matter, with everything numbered in order of first use."""
    # Debug sections follow the code.
    code = re.split(r"^\s*\.section\s", text, maxsplit=1, flags=re.MULTILINE)[0]
    entry = re.search(r"\.entry\s+(\w+)", code)
    if entry is not None:
        code = code.replace(entry[1], "kernel")
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        if match[0] not in numbers:
            kind = next(filter(None, match.groups()))
            numbers[match[0]] = f"{kind}{len(numbers)}"
        return numbers[match[0]]

    lines = (_COMMENT.sub("", line).strip() for line in code.splitlines())
    # Parameters are declared in front of the code, in an order that is no instruction.
    return [
        _NUMBERED.sub(number, line)
        for line in lines
        if line and not _DEBUG.match(line) and not line.startswith(".param")
    ]


def instructions(lines: Sequence[str]) -> Counter[str]:
    """Count the opcodes with their types."""
    opcodes = (_PREDICATE.sub("", line).split()[0].rstrip(";") for line in lines)
    return Counter(opcode for opcode in opcodes if re.match(r"[a-z]", opcode))


def diff(before: Path, after: Path) -> int:
    """Print the cases that differ; return 1 if there are any."""
    cases = {folder: {path.stem for path in folder.glob("*.ptx")} for folder in (before, after)}
    different = 0
    for folder, other in ((before, after), (after, before)):
        for name in sorted(cases[folder] - cases[other]):
            print(f"{name}: only in {folder}")
            different += 1
    common = sorted(cases[before] & cases[after])
    for name in common:
        old, new = (normalise((folder / f"{name}.ptx").read_text()) for folder in (before, after))
        if old == new:
            continue
        different += 1
        counts = instructions(old), instructions(new)
        more, fewer = counts[1] - counts[0], counts[0] - counts[1]
        if not more and not fewer:
            print(f"{name}: same {counts[0].total()} instructions, in another order")
            continue
        print(
            f"{name}: {counts[0].total()} instructions before, {counts[1].total()} after; "
            f"+{more.total()} -{fewer.total()}"
        )
        for sign, changed in (("+", more), ("-", fewer)):
            for opcode, count in changed.most_common():
                print(f"    {sign}{count} {opcode}")
    print(f"{len(common)} cases on both sides; {different} differ")
    return int(different > 0)


def main() -> int:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    dumping = commands.add_parser("dump", help="compile all cases and write their PTX")
    dumping.add_argument("folder", type=Path)
    dumping.add_argument("kernels", nargs="*")
    comparing = commands.add_parser("diff", help="compare the PTX in two folders")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "diff":
        return diff(options.before, options.after)
    dump(options.folder, options.kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
