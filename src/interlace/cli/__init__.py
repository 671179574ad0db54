"""The command line: ``interlace doctor | demo | soak | bench | tune | sim``.

Ranks import ``interlace.cli.ranks``: nothing here may import Typer or Rich by itself.
"""

from __future__ import annotations

import os
import sys

from interlace.errors import BackendError
from interlace.extras import needing


def main() -> None:
    """Run the ``interlace`` command."""
    # A shell may close both, and what asks whether they are terminals needs a file.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    # Of a terminal that does not know its width; Rich would print nothing.
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)
    try:
        with needing("The command line"):
            from interlace.cli.app import app
    except BackendError as error:
        sys.exit(f"interlace: {error}")
    app(prog_name="interlace")


__all__ = ["main"]
