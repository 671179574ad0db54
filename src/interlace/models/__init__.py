"""Models made of the fused operators, with their training, metrics and checkpoints."""

from interlace.models.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from interlace.models.dlrm import DLRM
from interlace.models.metrics import area_under_roc, binary_cross_entropy, gather_rows
from interlace.models.training import Evaluation, StepTimes, Trainer, measure_step

__all__ = [
    "DLRM",
    "Evaluation",
    "StepTimes",
    "Trainer",
    "area_under_roc",
    "binary_cross_entropy",
    "gather_rows",
    "latest_checkpoint",
    "load_checkpoint",
    "measure_step",
    "save_checkpoint",
]
