"""Refusals: the calls that an implementation cannot take, as sentences for
``Implementation.refusal``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from interlace.gemm.terms import Terms


def needs(
    *,
    gpu: bool = False,
    torch_operator: str = "",
    most_rows: int | None = None,
    even_rows: bool = False,
    same_dtype: bool = False,
    dtypes: Sequence[torch.dtype] = (),
    no_bias: bool = False,
    multiple_bytes: int = 1,
    most_bytes: int | None = None,
    most_parts_bytes: int | None = None,
) -> Callable[[Terms], str | None]:
    """Return a refusal of calls without these properties.

    Args:
        gpu: The operands must be on a GPU.
        torch_operator: PyTorch must have this operator in ``torch.ops.symm_mem``.
        most_rows: There must be at most so many rows of x.
        even_rows: Every rank must get as many rows from every rank.
        same_dtype: The result must have the dtype that comes by default: that of x, and bfloat16
            for float8.
        dtypes: The operands must have one of these dtypes; any, if there are none.
        no_bias: There must be no bias.
        multiple_bytes: The size of the whole product must be a multiple of so many bytes.
        most_bytes: The whole product must have at most so many bytes.
        most_parts_bytes: So must the parts of all ranks together, each as large as the product.
    """
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    dtype_names = " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))

    def refusal(terms: Terms) -> str | None:
        # Every new number of rows comes here for each implementation, and most lack nothing.
        lacking = []
        has_gpu = terms.device_type == "cuda"
        if gpu and not has_gpu:
            lacking.append("a GPU")
        # Without a GPU PyTorch's operators need not be looked for, which imports a lot.
        if torch_operator and has_gpu and not _has(torch_operator):
            lacking.append(f"a PyTorch with torch.ops.symm_mem.{torch_operator}")
        if most_rows is not None and terms.rows > most_rows:
            lacking.append(f"at most {most_rows} rows")
        if even_rows and not terms.is_even:
            lacking.append("rows that are split evenly")
        if same_dtype and terms.converts:
            lacking.append("a result of the dtype that comes by default")
        if dtypes and terms.dtype not in dtypes:
            lacking.append(f"{dtype_names} operands")
        if no_bias and terms.has_bias:
            lacking.append("no bias")
        if terms.result_bytes % multiple_bytes:
            lacking.append(f"a result whose size is a multiple of {multiple_bytes} bytes")
        limit = most_bytes
        if most_parts_bytes is not None:
            limit = most_parts_bytes // terms.world_size
        if limit is not None and terms.result_bytes > limit:
            lacking.append(f"a result of at most {limit / 2**20:.3g} MiB")
        return " and ".join(lacking) or None

    return refusal


def _has(operator: str) -> bool:
    """Return whether this PyTorch has ``torch.ops.symm_mem.<operator>``."""
    # The import defines the operators.
    import torch.distributed._symmetric_memory

    return hasattr(torch.ops.symm_mem, operator)
