"""A pass for ``torch.compile`` that replaces matrix products and their collectives by fused
operators; docs/compile.md describes it.
"""

from interlace.compile.backends import (
    InductorPass,
    backend,
    eager_backend,
    explain,
    install,
    installed,
    uninstall,
)
from interlace.compile.findings import Finding, Report, recording
from interlace.compile.rewrite import fuse

__all__ = [
    "Finding",
    "InductorPass",
    "Report",
    "backend",
    "eager_backend",
    "explain",
    "fuse",
    "install",
    "installed",
    "recording",
    "uninstall",
]
