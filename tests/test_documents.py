"""Pages that list what is in the code: the reference, the primitives' signatures, the examples."""

from __future__ import annotations

import ast
import re
import runpy
import textwrap
from pathlib import Path

import pytest
import yaml

import interlace
from interlace import errors

ROOT = Path(__file__).parents[1]
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
LANGUAGE = ROOT / "src" / "interlace" / "language"


def _first_cells(heading: str) -> list[str]:
    """Return the names in the first column of the tables below a heading of the reference."""
    section = REFERENCE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)


def test_every_public_name_has_its_line() -> None:
    public = set(interlace.__all__) - {"__version__"}
    raised = {name for name in public if name.endswith("Error")}
    assert sorted(_first_cells("Public names")) == sorted(public - raised)
    assert raised <= set(re.findall(r"\w+", REFERENCE.split("## Errors\n")[1].split("\n## ")[0]))


def test_every_environment_variable_has_its_line() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    words = {
        word
        for file in files
        for word in re.findall(r"\bINTERLACE_[A-Z_]*[A-Z]", file.read_text(encoding="utf-8"))
    }
    assert _first_cells("Environment variables") == sorted(words)


def test_the_tree_of_errors_is_that_of_the_module() -> None:
    tree = textwrap.dedent(errors.__doc__.split("::\n\n")[1].split("\n\nA message")[0])
    assert f"```\n{tree}\n```\n" in REFERENCE
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == {*re.findall(r"\w*Error\b(?!\))", tree)}


def test_every_field_of_faults_has_its_line() -> None:
    assert _first_cells("Fault injection") == list(interlace.Faults.__dataclass_fields__)


def test_signatures_of_the_language() -> None:
    """The README has the signature of every public primitive, as the source has it."""
    from_source = {}
    for file in LANGUAGE.glob("*.py"):
        # The interpreter's twins of instructions have the same signatures.
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                from_source[node.name] = ast.unparse(node.args)
    text = (LANGUAGE / "README.md").read_text(encoding="utf-8")
    block = text.split("## Signatures\n")[1].split("```\n")[1]
    block = re.sub(r"\n +", " ", block)
    listed = dict(re.findall(r"^il\.(\w+)\((.*)\)$", block, flags=re.MULTILINE))
    public = ast.literal_eval((LANGUAGE / "__init__.py").read_text().split("__all__ = ")[1])
    assert sorted(listed) == public
    for name, arguments in listed.items():
        expected = from_source[name].replace("_RELEASE", "'release'")
        assert ast.unparse(ast.parse(f"def f({arguments}): pass").body[0].args) == expected


@pytest.mark.parametrize("folder", ["", "integrations", "notebooks"])
def test_every_example_has_its_line(folder: str) -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w/]+\.(?:py|ipynb))\)", text))
    here = [
        file
        for file in (ROOT / "examples" / folder).glob("*.*")
        if file.suffix in (".py", ".ipynb")
    ]
    assert {link for link in listed if str(Path(link).parent) == (folder or ".")} == {
        str(Path(folder) / file.name) for file in here
    }


def test_tables_of_results_are_those_of_the_measurements() -> None:
    """If this fails, ``python docs/tables.py`` writes them anew."""
    script = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    text = script["PAGE"].read_text(encoding="utf-8")
    tables = re.findall(r"^\|---", text, flags=re.MULTILINE)
    assert text.count("<!-- interlace bench table") == len(tables)
    assert script["with_tables"](text) == text


def test_every_page_has_its_place_in_the_site() -> None:
    """``make docs`` refuses a page without one; decisions and operators follow from folders."""
    order = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    names = [page.relative_to(ROOT).as_posix() for page in pages]
    assert [name for name in names if f": {name}\n" not in order] == []


def test_the_citation_has_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == interlace.__version__
    assert citation["license"] == "Apache-2.0"


def test_setup_takes_the_index_of_cpu_builds() -> None:
    """The index is for torch alone, and absent unless it is given."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert makefile.count("$(TORCH_INDEX:%=--index-url %) torch==") == 1
    assert re.search(r"^TORCH_INDEX =$", makefile, flags=re.MULTILINE)
    assert "http" not in makefile
