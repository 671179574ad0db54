"""What runs the solutions shares: ParallelKernelBench's references and inputs, and its comparison.

Nothing of it is in this repository: all of this takes the folder of a clone.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SOLUTIONS = Path(__file__).parent / "solutions_triton"
TOLERANCE = 1e-2
"""Absolute and relative, as the bench's own ``run_local.py`` compares by default."""


def number_of(stem: str) -> int:
    """Return the number of a problem whose name is like ``1_allreduce``."""
    return int(stem.split("_")[0])


def stems() -> list[str]:
    """Return the names of the problems that have a solution here, in order."""
    names = [file.stem.removesuffix("_triton") for file in SOLUTIONS.glob("[0-9]*_triton.py")]
    return sorted(names, key=number_of)


def lines_of(stem: str) -> int:
    """Return the number of lines of a solution that are neither empty nor a comment."""
    source = (SOLUTIONS / f"{stem}_triton.py").read_text(encoding="utf-8")
    source = re.sub(r'"""[\s\S]*?"""', "", source)
    return sum(bool(line.split("#")[0].strip()) for line in source.splitlines())


def load(file: Path) -> ModuleType:
    """Return a file as a module, as the bench's worker loads solutions."""
    name = f"parallel_kernel_bench_{file.parent.name}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def solution_of(stem: str) -> Callable[..., Any]:
    """Return the function of a solution."""
    return load(SOLUTIONS / f"{stem}_triton.py").solution  # type: ignore[no-any-return]


def reference_of(harness: Path, stem: str) -> Callable[..., Any]:
    """Return the function of the bench's reference."""
    return load(harness / "reference" / f"{stem}.py").solution  # type: ignore[no-any-return]


def inputs_of(harness: Path, stem: str, ranks: int, rank: int, **more: Any) -> tuple[Any, ...]:
    """Return the arguments of a problem on a rank, always the same ones.

    Args:
        more: ``base_shape``, ``dtype``, ``device`` and ``trial`` of the bench.
    """
    module = load(harness / "utils" / "input_output_tensors.py")
    return tuple(module.create_input_tensor(rank, ranks, number_of(stem), **more))


def difference(wanted: Any, got: Any, path: str = "result") -> str:
    """Return the first difference of two results in words; "" if there is none.

    Tensors must have equal shapes, and be close within the tolerance as float32.
    """
    if isinstance(wanted, (tuple, list, dict)):
        if not isinstance(got, (tuple, list, dict)) or len(wanted) != len(got):
            return f"{path}: other parts"
        keys = wanted if isinstance(wanted, dict) else range(len(wanted))
        found = (difference(wanted[key], got[key], f"{path}[{key!r}]") for key in keys)
        return next((each for each in found if each), "")
    if not isinstance(wanted, torch.Tensor):
        return "" if wanted == got else f"{path}: {got!r} instead of {wanted!r}"
    if not isinstance(got, torch.Tensor) or wanted.shape != got.shape:
        return f"{path}: {tuple(getattr(got, 'shape', ()))} instead of {tuple(wanted.shape)}"
    one, other = (_real(tensor).detach().cpu().float() for tensor in (wanted, got))
    if torch.allclose(one, other, atol=TOLERANCE, rtol=TOLERANCE):
        return ""
    away = (one - other).abs()
    far = ~torch.isclose(other, one, atol=TOLERANCE, rtol=TOLERANCE)
    most = float(away.max()) if away.numel() else math.nan
    return f"{path}: {int(far.sum())} of {far.numel()} differ, by up to {most:.3g}"


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def first_tensor(
    arguments: tuple[Any, ...],
) -> tuple[torch.Tensor, Callable[[Any], tuple[Any, ...]]]:
    """Return the tensor that the bench takes turns with, and what puts another in its place."""
    for i, each in enumerate(arguments):
        if isinstance(each, torch.Tensor):
            return each, lambda t, i=i: (*arguments[:i], t, *arguments[i + 1 :])  # type: ignore[misc]
    for i, each in enumerate(arguments):
        if isinstance(each, (list, tuple)) and each and isinstance(each[0], torch.Tensor):
            return each[0], lambda t, i=i: (  # type: ignore[misc]
                *arguments[:i], [t, *arguments[i][1:]], *arguments[i + 1 :],
            )  # fmt: skip
    raise ValueError("no argument is a tensor")
