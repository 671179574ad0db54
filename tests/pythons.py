"""Run a wheel with other Pythons than the tests have: ``python -m tests.pythons WHEEL 3.12 3.13``.

Each gets a new environment with PyTorch, and the Triton and NumPy that come with it, from the
package index; then the wheel in an empty one beside it, as ``tests.package`` has it: all modules
are imported, and an operator, mapped outputs and a training run of two ranks on the CPU backend.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.package import run_installed

# The newest that was tried. The index has CUDA builds of it, of 5.4 GB when they are installed, so
# there is one environment at a time.
_TORCH = "torch==2.14.1"


def interpreter_of(version: str) -> str | None:
    """Return the path of this machine's interpreter of a Python, or None if it has none.

    Args:
        version: The first two numbers, such as ``3.12``.
    """
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in _candidates(version):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return python
    return None


def _candidates(version: str) -> Iterator[str]:
    """Yield the one that the shell finds, which may be a stand-in of pyenv's, and pyenv's own."""
    found = shutil.which(f"python{version}")
    if found is not None:
        yield found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True))


def run_with(python: str, wheel: Path) -> None:
    """Install what a wheel depends on for an interpreter, and run the wheel beside it.

    Raises:
        subprocess.CalledProcessError: the installation, an import or a command failed.
    """
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:
        own_python = f"{folder}/bin/python"
        pip = [own_python, "-m", "pip"]
        for command in (
            [python, "-m", "venv", folder],
            [*pip, "install", "-qq", _TORCH, f"{wheel.resolve()}[all]"],
            [*pip, "uninstall", "-qq", "--yes", "interlace"],  # its dependencies stay
        ):
            subprocess.run(command, check=True)
        versions = [
            subprocess.run(
                [own_python, "-c", f"import {name}; print({name}.__version__)"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
            for name in ("torch", "triton", "numpy")
        ]
        print("torch {}, Triton {}, NumPy {}".format(*versions), flush=True)
        run_installed(wheel, own_python)


def main() -> None:
    """Run the wheel with the Pythons of the command line, and end with 1 if one is absent."""
    wheel, *versions = sys.argv[1:]
    pythons = {version: interpreter_of(version) for version in versions}
    absent = [version for version, python in pythons.items() if python is None]
    if absent:
        sys.exit(
            f"Python {' and '.join(absent)} must be on this machine, as python3.x or by pyenv; it "
            "is not. Install it, or name those that are there: make test-pythons PYTHONS=3.12"
        )
    for version, python in pythons.items():
        assert python is not None
        print(f"Python {version}: {python}", flush=True)
        run_with(python, Path(wheel))


if __name__ == "__main__":
    main()
