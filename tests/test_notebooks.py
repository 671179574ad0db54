"""The notebooks run, and are kept without outputs.

``make docs`` runs them, as each starts a kernel of Jupyter: ``pytest -m documents``. The site shows
the executed copies, which are in ``build/notebooks``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_no_outputs_are_kept(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


@pytest.mark.documents
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="make docs installs what notebooks need")
    nbformat = pytest.importorskip("nbformat")
    content = nbformat.read(notebook, as_version=4)
    in_folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(content, timeout=300, resources=in_folder).execute()
    # Python keeps the bytecode of modules that a notebook has written and deleted.
    assert {path.name for path in tmp_path.iterdir()} <= {"__pycache__"}
    executed = ROOT / "build" / "notebooks" / notebook.name
    executed.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(content, executed)
