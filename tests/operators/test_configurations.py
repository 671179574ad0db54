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

# Of each configuration's fields the rule, and values that break it.
BAD: dict[type, dict[str, tuple[Any, ...]]] = {
    GemmReduceScatterConfig: {
        "block_m": ("a power of two from 16 to 1024", 0),
        "block_n": ("a power of two from 16 to 1024", 8),
        "block_k": ("a power of two from 16 to 1024", 100),
        "num_warps": ("a power of two from 1 to 32", 3, 64),
        "num_stages": ("between 1 and 1048576", 0),
        "max_programs": ("between 0 and 1048576", -1),
        "group_m": ("between 1 and 1048576", 0),
        "interleave": ("between 1 and 1048576", 0),
    },
    GemvAllReduceConfig: {
        "protocol": ("one of ('one_shot', 'two_phase')", "ring"),
        "block_n": ("a power of two from 1 to 1024", 0, 12),
        "block_k": ("a power of two from 16 to 65536", 100, 8),
        "num_warps": ("a power of two from 1 to 32", 3, 64),
        "num_stages": ("between 1 and 32", 0),
        "max_programs": ("between 0 and 1048576", -1),
        "max_registers": ("between 0 and 255", -1),
    },
    EmbeddingAllToAllConfig: {
        "block_bags": ("a power of two from 1 to 64", 3),
        "push_rows": ("a power of two from 1 to 64", 128),
        "num_warps": ("a power of two from 1 to 32", 0),
        "stages": ("between 1 and 16", 0),
        "max_programs": ("between 1 and 4096", 0),
        "slice_blocks": ("between 1 and 1024", 1025),
        "run_lookups": ("between 2 and 1048576", 1),
    },
    MixtureOfExpertsConfig: {
        "block_m": ("a power of two from 16 to 128", 256),
        "push_programs": ("between 1 and 2048", 0),
    },
}


@pytest.mark.parametrize(
    ("config", "field", "rule", "value"),
    [
        (config, field, rule, value)
        for config, fields in BAD.items()
        for field, (rule, *values) in fields.items()
        for value in values
    ],
)
def test_bad_configurations(config: type, field: str, rule: str, value: Any) -> None:
    message = f"{config.__name__}: {field} must be {rule}; got {value!r}."
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        config(**{field: value})
