"""The command line: ``interlace doctor | demo | soak | bench | tune | sim``.

Ranks import ``interlace.cli.demo_ranks`` and ``interlace.cli.bench_ranks``: nothing here may import
Typer or Rich by itself.
"""


def main() -> None:
    """Run the ``interlace`` command."""
    from interlace.cli.app import app

    app(prog_name="interlace")


__all__ = ["main"]
