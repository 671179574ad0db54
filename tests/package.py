"""Check a wheel before it is given away: ``python -m tests.package dist/interlace-*.whl``.

It must hold every file of the package, Python or not, work from its own files, and name no place of
the machine that has built it. Installed into a new environment, its modules are imported and its
commands run: ``interlace demo`` with two ranks on the CPU backend among them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PACKAGES = ("interlace", "interlace_dlrm", "interlace_explorer", "interlace_gin", "interlace_sim")
# Imports neither torch nor Triton, and reads data files as an installed package does.
_COMMANDS = [
    ["doctor"],
    ["explain", "gemm_reduce_scatter", "8192x8192x2048", "-n", "4"],
    ["sim", "run", "dlrm", "--nodes", "16"],
    ["demo", "--world-size", "2", "--backend", "cpu"],
]
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import interlace
from interlace.costs.known_profiles import profile_of
assert interlace.__file__.startswith(sys.argv[1]), interlace.__file__
assert not profile_of("NVIDIA H200").is_guess
"""

# Imports every module of the packages that it gets, and prints how many they are.
_IMPORTS = """
import importlib, pkgutil, sys
names = [
    module.name
    for package in sys.argv[1:]
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
]
print(len([importlib.import_module(name) for name in names]))
"""


def files_of_package() -> dict[str, Path]:
    """Return all files that a wheel must have, by the names that they have in the wheel."""
    folders = {
        **{name: ROOT / "src" / name for name in _PACKAGES},
        "interlace/demos": ROOT / "examples" / "demos",
    }
    return {
        f"{name}/{file.relative_to(folder).as_posix()}": file
        for name, folder in folders.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def places_of_this_machine() -> set[str]:
    """Return the folders whose names are of no meaning elsewhere."""
    folders = {ROOT, ROOT.resolve(), Path.home(), Path(sys.prefix), Path(sys.base_prefix)}
    # What is in every Linux says nothing about a machine.
    common = {Path("/"), Path("/usr"), Path("/usr/local"), Path(tempfile.gettempdir())}
    return {f"{folder}/" for folder in folders - common}


def faults_of(wheel: Path, expected: Iterable[str], places: Iterable[str]) -> list[str]:
    """Return what is wrong with a wheel, one line each.

    Args:
        wheel: The file.
        expected: Names of the files that it must have beside its metadata.
        places: Texts that none of its files may contain.
    """
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    metadata = {name for name in contents if name.split("/")[0].endswith(".dist-info")}
    files, wanted = contents.keys() - metadata, set(expected)
    faults = [f"{name} is missing" for name in sorted(wanted - files)]
    faults += [f"{name} does not belong there" for name in sorted(files - wanted)]
    for ending in ("/licenses/LICENSE", "/entry_points.txt", "/METADATA"):
        if not any(name.endswith(ending) for name in metadata):
            faults.append(f"{ending[1:]} is missing from the metadata")
    for name, content in contents.items():
        faults += [f"{name} names {place}" for place in places if place.encode() in content]
    return faults


def run_installed(wheel: Path, python: str = sys.executable) -> None:
    """Install a wheel into a new environment, and import all modules and run its commands there.

    What it depends on is that of another environment, by its path alone: so no package that is
    installed there as an editable one, and nothing of this folder, is found.

    Args:
        wheel: The file.
        python: The interpreter of the environment that has what the wheel depends on; the new
            environment is of the same Python.

    Raises:
        subprocess.CalledProcessError: the installation, an import or a command failed.
    """
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def run(*command: str) -> str:
            done = subprocess.run(
                command, check=True, cwd=folder, env=clean, stdout=subprocess.PIPE, text=True
            )
            return done.stdout.strip()

        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        run(python, "-m", "venv", folder)
        bin_folder = Path(folder) / "bin"
        own_python = str(bin_folder / "python")
        packages = run(own_python, "-c", purelib)
        run(own_python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel.resolve()))
        (Path(packages) / "dependencies.pth").write_text(run(python, "-c", purelib) + "\n")
        found = run(own_python, "-c", "import interlace; print(interlace.__file__)")
        assert Path(found).is_relative_to(packages), found
        print(f"{run(own_python, '-c', _IMPORTS, *_PACKAGES)} modules are imported")
        for command in _COMMANDS:
            run(str(bin_folder / "interlace"), *command)
            print(f"interlace {' '.join(command)}: runs", flush=True)


def main() -> None:
    """Check the wheels of the command line, and end with 1 if one has a fault."""
    for wheel in map(Path, sys.argv[1:]):
        faults = faults_of(wheel, files_of_package(), places_of_this_machine())
        if faults:
            sys.exit(f"{wheel.name}:\n" + "\n".join(faults))
        # Isolated, in another folder: nothing but the wheel has a package of this name.
        command = [sys.executable, "-I", "-c", _PROGRAM, str(wheel.resolve())]
        subprocess.run(command, check=True, cwd=tempfile.gettempdir())
        run_installed(wheel)
        print(f"{wheel.name}: {len(files_of_package())} files, as they should be; commands run")


if __name__ == "__main__":
    main()
