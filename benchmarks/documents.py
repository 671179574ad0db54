"""Files of results as the scripts of this folder write them, with what ``interlace bench`` adds."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from interlace.cli.console import now
from interlace.cli.machine import describe
from interlace.documents import to_json


def write(file: Path, results: Any, **more: Any) -> None:
    """Write results with the machine, the command and the date.

    Args:
        file: Where they go.
        results: What ``json`` can write.
        more: Further fields of the document.
    """
    script, *arguments = sys.argv
    name = Path(script).resolve()
    root = Path(__file__).parents[1]
    name = name.relative_to(root) if name.is_relative_to(root) else Path("benchmarks", name.name)
    # A folder of the machine that measured says nothing to those who read the file.
    command = [Path(each).name if each.startswith("/") else each for each in arguments]
    document = {
        "machine": describe(),
        "command": shlex.join(["python", str(name), *command]),
        "date": now(),
        **more,
        "results": results,
    }
    file.write_text(to_json(document), encoding="utf-8")
