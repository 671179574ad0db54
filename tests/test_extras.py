"""Without the extras the library is whole, and what needs one says so in a sentence."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from interlace.errors import BackendError
from interlace.extras import EXTRA_OF, needing

_WITHOUT = f"""
import sys
for name in {sorted(EXTRA_OF)!r}:
    sys.modules[name] = None
"""


def _run(code: str) -> tuple[int, str, str]:
    """Run a program in which the packages of the extras are absent."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT + code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_every_extra_is_one_of_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(EXTRA_OF.values()) < set(extras)
    assert [each.split(">")[0].split("<")[0] for each in project["dependencies"]] == [
        "torch",
        "triton",
        "numpy",
    ]


def test_all_of_the_library_is_imported_without_them() -> None:
    """All modules but those of the command line and of other programs."""
    code = """
import importlib, pkgutil, interlace
left_out = ("interlace.cli.", "interlace.integrations.", "interlace.__main__")
for module in pkgutil.walk_packages(interlace.__path__, "interlace."):
    if not module.name.startswith(left_out):
        importlib.import_module(module.name)
print("all")
"""
    assert _run(code) == (0, "all\n", "")


def test_the_command_line_says_what_is_missing() -> None:
    code, output, error = _run("from interlace.cli import main; main()")
    assert (code, output) == (1, "")
    assert error.strip() == (
        "interlace: The command line needs the module typer, which is not installed. Run "
        "pip install 'interlace[cli]'."
    )


@pytest.mark.parametrize(
    ("code", "what", "module", "extra"),
    [
        ("from interlace_sim import Scenario", "The simulator", "pydantic", "sim"),
        (
            "from interlace.figure import open_figure\nwith open_figure('x.png', 1, 1): pass",
            "A picture",
            "matplotlib",
            "plot",
        ),
    ],
)
def test_what_needs_an_extra_names_it(code: str, what: str, module: str, extra: str) -> None:
    status, _, error = _run(code)
    assert status == 1
    assert error.splitlines()[-1] == (
        f"interlace.errors.BackendError: {what} needs the module {module}, which is not "
        f"installed. Run pip install 'interlace[{extra}]'."
    )


def test_other_modules_are_missing_as_they_are() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_module_has_this_name"), needing("This"):
        import no_module_has_this_name  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(BackendError), needing("This"):
        raise ModuleNotFoundError(name="rich.table")
