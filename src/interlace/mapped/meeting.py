"""Meetings of all ranks' streams on the device: kernels that wait until every rank has come."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from interlace.comm import Group
from interlace.comm.groups.reservation import WorkspaceSize
from interlace.comm.groups.symmetric_memory import Workspace
from interlace.comm.host.agreement import Family
from interlace.comm.launching.kernels import MOST_MOVERS, Launch
from interlace.comm.runtime.interpreter import require
from interlace.mapped.layout import BARRIERS

_LEAST_BYTES = 4096


def memory_of(operator: str, world_size: int) -> WorkspaceSize:
    """Return the size of the workspace in which an operator's streams meet."""
    return WorkspaceSize(operator, _LEAST_BYTES, BARRIERS * MOST_MOVERS * 2 * world_size)


def compare_once(group: Group, family: Family | None, operator: str, size: int) -> None:
    """Let ranks' GPUs compare the size of a call by a stock collective, once for each size of a
    family.

    Signals of our kernels carry the call's mark, so different sizes are found in each call. A stock
    collective has no mark, and may wait for ever. Its first call of a size comes after a kernel
    that compares the marks, which takes the host no exchange; a call that is captured goes without.

    Args:
        group: The ranks.
        family: What ranks have agreed on for all sizes; None if they have compared this one.
        operator: Name of the operator.
        size: The size by which calls of the family differ.
    """
    is_compared = family is None or group.world_size == 1 or size in family.met
    if family is None or is_compared or group.capture_id() is not None:
        return
    family.met.add(size)
    # A pair must run under any limit.
    name = f"{operator}, comparison of rows"
    StreamMeeting.of(group, name, family.mark(size), is_limited=False)()


@dataclasses.dataclass(frozen=True)
class StreamMeeting:
    """Hold the memory of kernels in which all ranks meet.

    Attributes:
        group: The ranks.
        operator: Name of the operator, for the error of a rank that does not come.
        workspace: Its signals.
        mark: The number of the call. Ranks with different ones break the group by the deadline, and
            the error says that the calls differ.
    """

    group: Group
    operator: str
    workspace: Workspace
    mark: int

    @staticmethod
    def of(group: Group, operator: str, mark: int, *, is_limited: bool = True) -> StreamMeeting:
        """Return the meeting of an operator's calls. Collective where its signals are new.

        Args:
            group, operator, mark: Those of the class.
            is_limited: Whether the group's limit of symmetric memory applies to the signals.
        """
        size = memory_of(operator, group.world_size)
        workspace = group.workspace(*size, is_limited=is_limited)
        return StreamMeeting(group, operator, workspace, mark)

    def __call__(self, is_valid: torch.Tensor | None = None) -> None:
        """Let the current stream wait until all ranks' streams are here, with the same call.

        What earlier kernels of any rank have stored is visible to all of them behind it.

        Args:
            is_valid: int32 on the device: 0 if this rank has failed, so that no peer meets it.
        """
        if self.group.world_size == 1:
            return
        require(self.group.backend)
        from interlace.mapped import kernel  # imports Triton

        self.launch(kernel.meet, 1, {"is_valid": is_valid}, {"num_warps": 1})

    def launch(
        self, function: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        """Launch a kernel in which ranks meet.

        Args:
            function: The kernel.
            programs: The number of programs.
            arguments: What it takes beside signals, epochs, context and mark.
            constants: The values of constants beside the number of ranks, and Triton's options.
        """
        with self.group.running():
            shared = {
                "signals": self.workspace.signals.address,
                "epochs": self.workspace.epochs,
                "ctx": self.group.context(self.operator),
                "call": self.mark,
            }
            constants = {"WORLD_SIZE": self.group.world_size, **constants}
            Launch(function, (programs,), shared | arguments, constants)()
