"""List the defaults of each kind of scenario; commands import this module to print their help."""

from __future__ import annotations

from typing import NamedTuple


class Defaults(NamedTuple):
    """Model preset, machine preset and number of nodes; a workload may do without some."""

    model: str = ""
    machine: str = ""
    nodes: int = 0


DEFAULTS = {
    "dlrm": Defaults("model-i", "sc24-torus", 128),
    "transformer": Defaults("gpt3-175b", "h200-cluster", 64),
    "moe": Defaults("deepseek-v3", "h200-cluster", 8),
    "collective": Defaults("", "sc24-torus", 128),
}
"""Defaults of each kind of scenario; a collective has no model."""
