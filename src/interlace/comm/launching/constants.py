"""Copy small tables of numbers to a group's device, once per set of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.comm.groups.group import Group
from interlace.comm.launching.within_node import WithinNode


def on_device(group: Group | WithinNode, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return ``rows`` as an int64 tensor on the group's device; see :class:`DeviceTables`.

    Raises:
        WorkspaceError: The numbers are new, and a CUDA graph is being captured.
    """
    return group.cache.tables.on_device(rows)
