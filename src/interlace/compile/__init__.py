"""A pass for ``torch.compile`` that fuses products with their collectives without being asked: see
docs/compile.md.
"""

from interlace.compile.backends import InductorPass, backend, eager_backend, installed
from interlace.compile.findings import Finding, recording
from interlace.compile.report import Report, explain
from interlace.compile.rewrite import fuse

__all__ = [
    "Finding",
    "InductorPass",
    "Report",
    "backend",
    "eager_backend",
    "explain",
    "fuse",
    "installed",
    "recording",
]
