"""Notebooks as Markdown: their cells in order, with the outputs of an executed copy."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any


class Notebook:
    """A notebook to show.

    Args:
        notebook: The notebook, which has no outputs.
        executed: Where ``make docs`` leaves a copy with outputs. It is shown if it is there, and of
            the same cells.
    """

    def __init__(self, notebook: Path, *, executed: Path) -> None:
        self._cells = _cells(notebook)
        if executed.is_file():
            cells = _cells(executed)
            if [cell["source"] for cell in cells] == [cell["source"] for cell in self._cells]:
                self._cells = cells

    def pictures(self) -> dict[str, bytes]:
        """Return the contents of the PNG files that the outputs consist of, by their names."""
        return {
            name: base64.b64decode(output["data"]["image/png"])
            for name, output in self._outputs().items()
            if "image/png" in output.get("data", {})
        }

    def markdown(self, folder: str) -> str:
        """Return the page; its pictures are in ``folder``."""
        parts = []
        for number, cell in enumerate(self._cells):
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                parts.append(re.sub(r"(\]\([^)]+\.ipynb)\)", r"\1.md)", source))  # a page as well
                continue
            parts.append(f"```python\n{source}\n```")
            for name, output in self._outputs(number).items():
                data = output.get("data", {})
                if "image/png" in data:
                    parts.append(f"![Output of the cell above]({folder.split('/')[-1]}/{name})")
                else:
                    text = "".join(output.get("text") or data["text/plain"]).rstrip("\n")
                    parts.append(f'```{{.text .output title="Output"}}\n{_plain(text)}\n```')
        return "\n\n".join(parts) + "\n"

    def _outputs(self, cell: int | None = None) -> dict[str, Any]:
        """Return the outputs of one cell or of all; those that are pictures by their files'
        names.
        """
        return {
            f"{number}-{index}.png": output
            for number, content in enumerate(self._cells)
            if cell in (None, number)
            for index, output in enumerate(content.get("outputs", []))
        }


def _cells(notebook: Path) -> list[Any]:
    cells: list[Any] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return cells


def _plain(text: str) -> str:
    """Return text without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
