"""``torch.ops.interlace.all_to_all_bmm``: schema and shape inference.

The pass for ``torch.compile`` makes it, after autograd, so it has no gradient. Triton is imported
by the first call.
"""

from __future__ import annotations

import torch

from interlace.comm.registration import OPERATOR_TAGS, register

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    "all_to_all_bmm(Tensor x, Tensor w, str group_name, str impl) -> (Tensor, Tensor)",
    tags=OPERATOR_TAGS,
)


def _run(
    x: torch.Tensor, w: torch.Tensor, group_name: str, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    from interlace.operators.all_to_all_bmm.launch import run

    return run(x, w, group_name, impl)


def _fake(x: torch.Tensor, w: torch.Tensor, *_: str) -> tuple[torch.Tensor, torch.Tensor]:
    count, inner, columns = w.shape
    rows = x.shape[0] // count
    return x.new_empty([count, rows, columns]), x.new_empty([count, rows, inner])


register(_library, "all_to_all_bmm", _run, _fake)
