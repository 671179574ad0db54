"""The command line: ``interlace doctor | demo | soak | bench | tune | sim``.

Ranks import ``interlace.cli.ranks``: nothing here may import Typer or Rich by itself.
"""

from __future__ import annotations

import sys

from interlace.errors import BackendError
from interlace.extras import needing


def main() -> None:
    """Run the ``interlace`` command."""
    try:
        with needing("The command line"):
            from interlace.cli.app import app
    except BackendError as error:
        sys.exit(f"interlace: {error}")
    app(prog_name="interlace")


__all__ = ["main"]
