"""What the operators say of themselves to PyTorch's compiler."""

from __future__ import annotations

import torch

OPERATOR_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
"""Tags of every operator.

Not in CUDA graphs that Inductor makes by itself (``mode="reduce-overhead"``): during its warm-up it takes all memory from the
graph's pool, also what an operator keeps from call to call, and refuses to replay. Inductor cuts its graphs there. Graphs that a
program captures itself hold the operators, after one call outside.
"""
