"""Click logs in Criteo's format: readers, synthetic logs, and batches."""

from interlace.data.batches import Batch, BatchStream, collate
from interlace.data.criteo import CriteoFiles
from interlace.data.records import CATEGORIES, INTEGERS, Records
from interlace.data.synthetic import SyntheticClicks

__all__ = [
    "CATEGORIES",
    "INTEGERS",
    "Batch",
    "BatchStream",
    "CriteoFiles",
    "Records",
    "SyntheticClicks",
    "collate",
]
