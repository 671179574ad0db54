"""Configurations that no kernel can run are refused, each with its message."""

from __future__ import annotations

import re
from typing import Any

import pytest

from interlace import (
    ArgumentError,
    EmbeddingAllToAllConfig,
    GemmReduceScatterConfig,
    GemvAllReduceConfig,
    MixtureOfExpertsConfig,
)

BAD: dict[type, list[tuple[str, Any, str]]] = {
    GemmReduceScatterConfig: [
        ("block_m", 0, "a power of two from 16 to 1024"),
        ("block_n", 8, "a power of two from 16 to 1024"),
        ("block_k", 100, "a power of two from 16 to 1024"),
        ("num_warps", 3, "a power of two from 1 to 32"),
        ("num_warps", 64, "a power of two from 1 to 32"),
        ("num_stages", 0, "between 1 and 1048576"),
        ("max_programs", -1, "between 0 and 1048576"),
        ("group_m", 0, "between 1 and 1048576"),
        ("interleave", 0, "between 1 and 1048576"),
    ],
    GemvAllReduceConfig: [
        ("protocol", "ring", "one of ('one_shot', 'two_phase')"),
        ("block_n", 0, "a power of two from 1 to 1024"),
        ("block_n", 12, "a power of two from 1 to 1024"),
        ("block_k", 100, "a power of two from 16 to 65536"),
        ("block_k", 8, "a power of two from 16 to 65536"),
        ("num_warps", 3, "a power of two from 1 to 32"),
        ("num_warps", 64, "a power of two from 1 to 32"),
        ("num_stages", 0, "between 1 and 32"),
        ("max_programs", -1, "between 0 and 1048576"),
        ("max_registers", -1, "between 0 and 255"),
    ],
    EmbeddingAllToAllConfig: [
        ("protocol", "ring", "one of ('direct', 'tiles', 'sliced')"),
        ("order", "any", "one of ('interleaved', 'remote_first', 'local_first')"),
        ("block_bags", 3, "a power of two from 1 to 64"),
        ("push_rows", 128, "a power of two from 1 to 64"),
        ("num_warps", 0, "a power of two from 1 to 32"),
        ("unroll", 0, "between 1 and 32"),
        ("max_programs", 0, "between 1 and 4096"),
        ("slice_blocks", 1025, "between 1 and 1024"),
        ("run_lookups", 1, "between 2 and 1048576"),
    ],
    MixtureOfExpertsConfig: [
        ("block_m", 256, "a power of two from 16 to 128"),
        ("push_programs", 0, "between 1 and 2048"),
    ],
}


@pytest.mark.parametrize(
    ("config", "field", "value", "rule"),
    [(config, *case) for config, cases in BAD.items() for case in cases],
)
def test_bad_configurations(config: type, field: str, value: Any, rule: str) -> None:
    message = f"{config.__name__}: {field} must be {rule}; got {value!r}."
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        config(**{field: value})
