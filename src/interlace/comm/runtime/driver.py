"""Call the CUDA driver through the package cuda-bindings, which the CUDA backend alone needs."""

from __future__ import annotations

import functools
from typing import Any

from interlace.errors import BackendError


@functools.cache
def driver() -> Any:
    """Return the bindings of the CUDA driver.

    Raises:
        BackendError: The package cuda-bindings is not installed.
    """
    # Not imported above: the CPU backend must run where there is no CUDA.
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendError(
            "the cuda backend must have the package cuda-bindings, which CUDA builds of torch "
            "bring along; it cannot be imported. Run: pip install cuda-bindings"
        ) from error
    return driver


def values_of(result: tuple[Any, ...]) -> Any:
    """Return the values of a driver call.

    Raises:
        BackendError: The call failed.
    """
    # Every call of the bindings returns its error first, and then what the call itself returns.
    code, *values = result
    if int(code) != 0:
        raise BackendError(
            f"a CUDA driver call failed: {code.name}. Run `interlace doctor` to see what is "
            "missing."
        )
    return values[0] if len(values) == 1 else tuple(values)


def require_enqueued(result: tuple[Any, ...], operation: str, *numbers: int) -> None:
    """Check a driver call that enqueues an operation and returns nothing but an error.

    Args:
        operation: What was enqueued, with a ``%d`` for each of ``numbers``.

    Raises:
        BackendError: The driver refuses the operation.
    """
    (error,) = result
    if int(error) != 0:
        raise BackendError(
            f"{operation % numbers} must be accepted by the CUDA driver; got {error.name}."
        )
