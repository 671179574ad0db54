"""Check a wheel before it is given away: ``python -m tests.package dist/interlace-*.whl``.

It must hold every file of the package, Python or not, work from its own files, and name no place of
the machine that has built it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Imports neither torch nor Triton, and reads data files as an installed package does.
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import interlace
from interlace.costs.known_profiles import profile_of
assert interlace.__file__.startswith(sys.argv[1]), interlace.__file__
assert not profile_of("NVIDIA H200").is_guess
"""


def files_of_package() -> set[str]:
    """Return the names of all files that a wheel must have, as the wheel names them."""
    source = ROOT / "src"
    return {
        file.relative_to(source).as_posix()
        for file in (source / "interlace").rglob("*")
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
        wheel: the file.
        expected: names of the files that it must have beside its metadata.
        places: texts that none of its files may contain.
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


def main() -> None:
    """Check the wheels of the command line, and end with 1 if one has a fault."""
    for wheel in map(Path, sys.argv[1:]):
        faults = faults_of(wheel, files_of_package(), places_of_this_machine())
        if faults:
            sys.exit(f"{wheel.name}:\n" + "\n".join(faults))
        # Isolated, in another folder: nothing but the wheel has a package of this name.
        command = [sys.executable, "-I", "-c", _PROGRAM, str(wheel.resolve())]
        subprocess.run(command, check=True, cwd=tempfile.gettempdir())
        print(f"{wheel.name}: {len(files_of_package())} files, as they should be")


if __name__ == "__main__":
    main()
