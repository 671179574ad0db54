"""Meetings of all ranks' streams on the device: a kernel that waits until every rank has come."""

from __future__ import annotations

import torch

from interlace.comm import Group
from interlace.comm.groups.workspace import Workspace
from interlace.comm.launching.kernels import MOST_MOVERS, Launch
from interlace.comm.runtime.interpreter import require
from interlace.mapped.layout import BARRIERS

_LEAST_BYTES = 4096


def meeting_workspace(group: Group, operator: str) -> Workspace:
    """Return the signals of an operator's meetings. Collective where they are not there yet."""
    signals = BARRIERS * MOST_MOVERS * 2 * group.world_size
    return group.workspace(operator, _LEAST_BYTES, signals)


def meet(
    group: Group,
    operator: str,
    workspace: Workspace,
    mark: int,
    is_valid: torch.Tensor | None = None,
) -> None:
    """Let the current stream wait until all ranks' streams are here, with the same call.

    What earlier kernels of any rank have stored is visible to all of them behind it.

    Args:
        operator: Name of the operator, for the error of a rank that does not come.
        workspace: The operator's, as :func:`meeting_workspace` makes it.
        mark: The number of the call. Ranks with different ones break the group by the deadline, and
            the error says that the calls differ.
        is_valid: int32 on the device: 0 if this rank has failed, so that no peer meets it.
    """
    if group.world_size == 1:
        return
    require(group.backend)
    from interlace.mapped import kernel  # imports Triton

    with group.running():
        arguments = {
            "signals": workspace.signals.address,
            "epochs": workspace.epochs,
            "ctx": group.context(operator),
            "is_valid": is_valid,
            "call": mark,
        }
        constants = {"WORLD_SIZE": group.world_size, "num_warps": 1}
        Launch(kernel.meet, (1,), arguments, constants)()
