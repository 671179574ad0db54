"""Say in one sentence which optional package is absent, and how to install it.

``pip install interlace`` brings what its kernels need: PyTorch, Triton and NumPy. The command line,
pictures and the simulator need further packages, which are extras of the distribution.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from interlace.errors import BackendError

EXTRA_OF = {
    "typer": "cli",
    "rich": "cli",
    "matplotlib": "plot",
    "pydantic": "sim",
    "yaml": "sim",
    "chakra": "chakra",
}
"""The extra that brings a module, by the module's name."""


@contextlib.contextmanager
def needing(what: str) -> Iterator[None]:
    """Import optional packages within this context.

    Args:
        what: What needs them, as the subject of a sentence in the singular.

    Raises:
        BackendError: A package of an extra is absent. Other modules' absence is raised as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRA_OF:
            raise
        raise BackendError(
            f"{what} needs the module {name}, which is not installed. Run "
            f"pip install 'interlace[{EXTRA_OF[name]}]'."
        ) from error


__all__ = ["EXTRA_OF", "needing"]
