"""Turn on Triton's interpreter, which must be decided before Triton is imported."""

from __future__ import annotations

import os
import sys

from interlace.errors import BackendError


def interpreting() -> bool:
    """Return whether ``@triton.jit`` functions run in the interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def require(backend: str) -> None:
    """Make sure that kernels of this process run on ``backend``.

    This must be called before Triton is first imported.

    Args:
        backend: ``"cuda"`` or ``"cpu"``.

    Raises:
        BackendError: Triton has been imported for the other backend already.
    """
    if backend == "cuda" and interpreting():
        raise BackendError(
            "the cuda backend must run compiled kernels; TRITON_INTERPRET is set. Unset it, or "
            "use CPU tensors."
        )
    if backend == "cpu" and not interpreting():
        if "triton" in sys.modules:
            raise BackendError(
                "the cpu backend must run kernels in Triton's interpreter, but Triton was "
                "imported without it. "
                "Set TRITON_INTERPRET=1 before the program starts, or start the ranks with "
                "interlace.launch(..., backend='cpu')."
            )
        os.environ["TRITON_INTERPRET"] = "1"
