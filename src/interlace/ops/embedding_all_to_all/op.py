"""``torch.ops.interlace.embedding_all_to_all``: schema, shape inference, gradient. Triton is imported by the first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.ops.embedding_all_to_all.layout import Layout

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    "embedding_all_to_all(Tensor[] weights, Tensor indices, Tensor offsets, Tensor? per_sample_weights, Tensor? anchor, "
    "Tensor[] states, SymInt batch, int[] counts, int[] widths, int rank, str mode, ScalarType dtype, str gradient, "
    "float learning_rate, float epsilon, str group_name, str impl, str config, bool check) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _run(
    weights: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    anchor: torch.Tensor | None,
    states: list[torch.Tensor],
    batch: int,
    counts: Sequence[int],
    widths: Sequence[int],
    rank: int,
    mode: str,
    dtype: torch.dtype,
    gradient: str,
    learning_rate: float,
    epsilon: float,
    group_name: str,
    impl: str,
    config: str,
    check: bool,
) -> torch.Tensor:
    from interlace.ops.embedding_all_to_all.launch import Call, run

    layout = Layout.of(counts, widths, batch)
    scale = per_sample_weights
    return run(Call(weights, indices, offsets, scale, layout, rank, mode, dtype, group_name, impl, config), check)


def _fake(
    weights: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    anchor: torch.Tensor | None,
    states: list[torch.Tensor],
    batch: int,
    counts: Sequence[int],
    widths: Sequence[int],
    rank: int,
    mode: str,
    dtype: torch.dtype,
    *_: object,
) -> torch.Tensor:
    layout = Layout.of(counts, widths, batch)
    return indices.new_empty([layout.samples(rank), layout.columns], dtype=dtype)


for _key in ("CPU", "CUDA"):
    _library.impl("embedding_all_to_all", _run, _key)
torch.library.register_fake("interlace::embedding_all_to_all", _fake, lib=_library)
