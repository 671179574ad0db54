"""The deep learning recommendation model (DLRM) that trains on click logs, with Interlace.

The model with its training, metrics and checkpoints; click logs in Criteo's format, synthetic ones,
and batches of them. See ``docs/training-dlrm.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace_dlrm.batches import Batch, BatchStream, collate
    from interlace_dlrm.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
    from interlace_dlrm.criteo import CriteoFiles
    from interlace_dlrm.dlrm import DLRM
    from interlace_dlrm.errors import DataError
    from interlace_dlrm.metrics import area_under_roc, binary_cross_entropy, gather_rows
    from interlace_dlrm.records import CATEGORIES, INTEGERS, Records
    from interlace_dlrm.synthetic import SyntheticClicks
    from interlace_dlrm.training import Evaluation, StepTimes, Trainer, measure_step

# Public name -> module. Reading click logs imports no model.
_PUBLIC = {
    "CATEGORIES": "records",
    "DLRM": "dlrm",
    "INTEGERS": "records",
    "Batch": "batches",
    "BatchStream": "batches",
    "CriteoFiles": "criteo",
    "DataError": "errors",
    "Evaluation": "training",
    "Records": "records",
    "StepTimes": "training",
    "SyntheticClicks": "synthetic",
    "Trainer": "training",
    "area_under_roc": "metrics",
    "binary_cross_entropy": "metrics",
    "collate": "batches",
    "gather_rows": "metrics",
    "latest_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
    "measure_step": "training",
    "save_checkpoint": "checkpoint",
}

__all__ = [
    "CATEGORIES",
    "DLRM",
    "INTEGERS",
    "Batch",
    "BatchStream",
    "CriteoFiles",
    "DataError",
    "Evaluation",
    "Records",
    "StepTimes",
    "SyntheticClicks",
    "Trainer",
    "area_under_roc",
    "binary_cross_entropy",
    "collate",
    "gather_rows",
    "latest_checkpoint",
    "load_checkpoint",
    "measure_step",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'interlace_dlrm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"interlace_dlrm.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
