"""Count how much there is to know in the package, and in those beside it.

    python -m tests.house

prints a table of the package's sources, in statements of Python's grammar, and a line for each
package beside it; with ``--wheel FILE`` also the
size of a wheel and the time that ``import interlace`` takes.
"""

from __future__ import annotations

import argparse
import ast
import collections
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "interlace"
OTHER_PACKAGES = sorted(file.parent for file in PACKAGE.parent.glob("*/__init__.py"))
OTHER_PACKAGES.remove(PACKAGE)


class Kernel(NamedTuple):
    """A function that Triton compiles."""

    name: str
    parameters: int
    lines: int


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="a wheel whose size is printed")
    wheel = parser.parse_args().wheel
    rows = figures()
    if wheel is not None:
        rows["size of the wheel, KB"] = f"{wheel.stat().st_size / 1000:.0f}"
        rows["import interlace, ms"] = f"{_import_ms():.0f}"
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")


def figures() -> dict[str, str]:
    """Return what is counted, by name, in the order of the table."""
    trees = trees_of(PACKAGE)
    lines = {file: len(file.read_text().splitlines()) for file in trees}
    kernels = list(_kernels(trees))
    most, longest = max(kernels, key=lambda k: k.parameters), max(kernels, key=lambda k: k.lines)
    repeated = repeated_classes(PACKAGE)
    declared = operators()
    return {
        "statements": str(_statements(PACKAGE)),
        "files": str(len(trees)),
        "median file, lines": f"{statistics.median(lines.values()):.0f}",
        "operators": str(len(declared)),
        "implementations": str(sum(declared.values())),
        "class names with several meanings": str(len(repeated)),
        "most parameters of a kernel": f"{most.parameters} ({most.name})",
        "longest kernel, lines": f"{longest.lines} ({longest.name})",
        "lines of cli": str(sum(n for file, n in lines.items() if "cli" in file.parts)),
        "base dependencies": str(len(_project()["dependencies"])),
        **{f"statements of {other.name}": str(_statements(other)) for other in OTHER_PACKAGES},
    }


def trees_of(package: Path) -> dict[Path, ast.Module]:
    """Return the syntax tree of each file of a package."""
    return {file: ast.parse(file.read_text()) for file in sorted(package.rglob("*.py"))}


def _statements(package: Path) -> int:
    nodes = (node for tree in trees_of(package).values() for node in ast.walk(tree))
    return sum(isinstance(node, ast.stmt) for node in nodes)


def repeated_classes(package: Path) -> dict[str, list[str]]:
    """Return the files of each class name that several classes of a package have."""
    files = collections.defaultdict(list)
    for file, tree in trees_of(package).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(file.relative_to(package)))
    return {name: found for name, found in sorted(files.items()) if len(found) > 1}


def operators() -> dict[str, int]:
    """Return the number of implementations of each of Interlace's operators."""
    from interlace.registry import operators

    return {name: len(declared.implementations) for name, declared in operators().items()}


def _kernels(trees: dict[Path, ast.Module]) -> Iterator[Kernel]:
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                parameters = len(node.args.args) + len(node.args.kwonlyargs)
                assert node.end_lineno is not None
                yield Kernel(node.name, parameters, node.end_lineno - node.lineno + 1)


def _project() -> dict[str, list[str]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _import_ms() -> float:
    """Return the shortest of five times that a new process takes to import the package, without
    what it takes to start.
    """

    def shortest(program: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            times.append(time.perf_counter() - start)
        return min(times)

    return 1000 * (shortest("import interlace") - shortest("pass"))


if __name__ == "__main__":
    main()
