"""The table of ``make mutants`` does not rot: its texts and tests are there, for every folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutation import ROOT, changed, main
from tests.mutation_table import MUTANTS, Mutant

SOURCES = ROOT / "src"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: f"{each.file}: {each.old[:30]}")
def test_every_text_is_there_once_and_its_tests_exist(mutant: Mutant) -> None:
    text = (SOURCES / mutant.file).read_text(encoding="utf-8")
    mistaken = changed(text, mutant)
    assert mistaken != text
    if mutant.file.endswith(".py"):
        compile(mistaken, mutant.file, "exec")
    file, _, name = mutant.tests.partition("[")[0].partition("::")
    tests = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert not name or re.search(rf"^def {name}\(", tests, re.MULTILINE)


def test_every_folder_has_mutants_and_nearly_all_die() -> None:
    folders = {path.parent.name for path in (SOURCES / "interlace").glob("*/__init__.py")}
    parts = [Path(mutant.file).parts for mutant in MUTANTS]
    assert folders <= {each[1] for each in parts if each[0] == "interlace"}
    packages = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
    assert {each[0] for each in parts} == packages
    assert sum(1 for mutant in MUTANTS if mutant.survives) <= len(MUTANTS) / 20


def test_a_text_that_is_not_there_once_is_refused() -> None:
    mutant = Mutant("a.py", "x", "y", "")
    for text in ("", "x x"):
        with pytest.raises(ValueError, match=r"^a\.py must have 'x' once; it has it [02] times\.$"):
            changed(text, mutant)


def test_a_file_without_mistakes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["interlace/gemm", "interlace/nothing.py"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("has no mistake in interlace/nothing.py")
