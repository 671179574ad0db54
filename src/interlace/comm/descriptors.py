"""Passing file descriptors between the ranks of a machine: how processes come to share memory that has no name.

Over Unix sockets in the abstract namespace: nothing is left in any directory, however a process ends. A rank gives its descriptor
only to processes of its own user (``SO_PEERCRED``), and takes none from others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from interlace.errors import BackendError, PeerTimeoutError

if TYPE_CHECKING:
    from interlace.comm.group import Group


@contextlib.contextmanager
def exchanged_descriptors(group: Group, what: str, fd: int) -> Iterator[list[int]]:
    """Every rank's descriptor, duplicated into this process, in rank order (this rank's own is ``fd``). Collective.

    All of them, ``fd`` too, are closed at the end of the ``with`` block, or if the exchange fails. Within the block every
    rank holds all of them, so each may close its own.

    Raises:
        PeerTimeoutError: a peer did not join before the group's deadline.
        BackendError: a peer cannot be reached; on another machine or in another network namespace, say.
    """
    descriptors = [-1] * group.world_size
    descriptors[group.rank] = fd
    try:
        if group.world_size > 1:
            _exchange(group, what, descriptors)
        yield descriptors
    finally:
        for held in descriptors:
            if held != -1:
                os.close(held)


def _exchange(group: Group, what: str, descriptors: list[int]) -> None:
    """Send this rank's of ``descriptors`` to all peers, and fill in theirs, -1 so far."""
    end = time.monotonic() + group.deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = f"interlace-{secrets.token_hex(16)}"
        listener.bind("\0" + name)
        listener.listen(group.world_size)
        names = group.exchange(what, name)  # from here on, everyone listens
        for rank, peer_name in enumerate(names):
            if rank != group.rank:
                _send(peer_name, group.rank, descriptors[group.rank], rank)
        try:
            while -1 in descriptors:
                listener.settimeout(max(0.001, end - time.monotonic()))
                sender, received = _receive(listener)
                if sender is not None:
                    descriptors[sender] = received
        except TimeoutError as error:
            missing = descriptors.index(-1)
            raise PeerTimeoutError(operator=what, rank=group.rank, peer=missing, deadline_s=group.deadline_s) from error


def _send(name: str, rank: int, fd: int, peer: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect("\0" + name)
        except OSError as error:
            raise BackendError(
                f"rank {rank} must reach rank {peer} through a Unix socket to share memory; got {error.strerror}. "
                f"Run all ranks on one machine, in one network namespace."
            ) from error
        if _is_own_user(connection):
            socket.send_fds(connection, [struct.pack("<I", rank)], [fd])


def _receive(listener: socket.socket) -> tuple[int | None, int]:
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(listener.gettimeout())
        if not _is_own_user(connection):
            return None, -1
        message, received, _, _ = socket.recv_fds(connection, 4, 1)
        if len(message) != 4 or len(received) != 1:
            return None, -1
        return int(struct.unpack("<I", message)[0]), received[0]


def _is_own_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())
