"""Bound the waits of a group, wait for its kernels, and make it usable again after a failure."""

from __future__ import annotations

import torch.distributed as dist

from interlace.comm.groups.group import group_of


def set_deadline(seconds: float, group: dist.ProcessGroup | None = None) -> None:
    """Let every wait of ``group`` last at most ``seconds`` from now on, on this rank.

    The default is 30 s, or ``INTERLACE_DEADLINE_S`` from the environment.

    Raises:
        ArgumentError: ``seconds`` is not above 0 and below a million.
    """
    group_of(group).deadline_s = seconds


def synchronize(group: dist.ProcessGroup | None = None) -> None:
    """Wait for this rank's kernels and raise the error of the first failure, if there was one.

    Raises:
        PeerTimeoutError: A wait of a kernel expired.
        MiscountError: A kernel miscounted.
        GroupError: A call was interrupted on this rank when its kernels might have started.
    """
    group_of(group).synchronize()


def recover(group: dist.ProcessGroup | None = None, timeout_s: float | None = None) -> None:
    """Make a broken group usable again without ending a process. Collective.

    After a :class:`PeerTimeoutError` or a :class:`MiscountError`, ranks no longer agree on the
    number of their calls. This waits until all ranks are here and none has a kernel running, and
    then begins anew: epochs, signals, flags, agreements, and the graphs of calls that come again.
    The next call of each kind is as slow as the first one was.

    A rank that has not noticed the failure must come, too. It learns of the failure by its next
    call on the group, one deadline later, which is why this waits for three deadlines. It may also
    be called when nothing has failed.

    These are lost: results of calls that have failed (NaN), views that
    :meth:`MappedOutput.exchange` and ``fuse`` have returned, and CUDA graphs that the program has
    captured with the group, which must be captured again and not be replayed. Tensors that
    operators have returned, symmetric tensors, and mapped outputs that every rank has keep working.

    Args:
        group: Process group. Default: the default process group.
        timeout_s: Seconds to wait for the other ranks. Default: three deadlines of the group.

    Raises:
        PeerTimeoutError: A rank did not come, within at most twice the time; raised on every rank
            that did, with that rank's number. It is dead, or does something else: the group stays
            broken. Without that rank, build a new process group.
        WorkspaceError: A CUDA graph is being captured.
    """
    group_of(group).recover(timeout_s)
