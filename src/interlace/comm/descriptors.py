"""Passing file descriptors between the ranks of a machine: how processes come to share memory that has no name.

Over Unix sockets in the abstract namespace: nothing is left in any directory, however a process ends. A rank gives its descriptor
only to processes of its own user (``SO_PEERCRED``), and takes none from others.
"""

from __future__ import annotations

import contextlib
import itertools
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
def exchanged_descriptors(group: Group, what: str, fds: list[int]) -> Iterator[list[list[int]]]:
    """Every rank's descriptors, duplicated into this process, in rank order (this rank's own are ``fds``). Collective.

    Every rank has equally many. All of them, ``fds`` too, are closed at the end of the ``with`` block, or if the exchange
    fails. Within the block every rank holds all of them, so each may close its own.

    Raises:
        PeerTimeoutError: a peer did not join before the group's deadline.
        BackendError: a peer cannot be reached; on another machine or in another network namespace, say.
    """
    descriptors: list[list[int]] = [[] for _ in range(group.world_size)]
    descriptors[group.rank] = fds
    try:
        if group.world_size > 1:
            _exchange(group, what, descriptors)
        yield descriptors
    finally:
        for held in itertools.chain.from_iterable(descriptors):
            os.close(held)


def _exchange(group: Group, what: str, descriptors: list[list[int]]) -> None:
    """Send this rank's of ``descriptors`` to all peers, and fill in theirs, none so far."""
    count = len(descriptors[group.rank])
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
            while [] in descriptors:
                listener.settimeout(max(0.001, end - time.monotonic()))
                sender, received = _receive(listener, count)
                if sender is not None:
                    descriptors[sender] = received
        except TimeoutError as error:
            missing = descriptors.index([])
            raise PeerTimeoutError(operator=what, rank=group.rank, peer=missing, deadline_s=group.deadline_s) from error


def _send(name: str, rank: int, fds: list[int], peer: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect("\0" + name)
        except OSError as error:
            raise BackendError(
                f"rank {rank} must reach rank {peer} through a Unix socket to share memory; got {error.strerror}. "
                f"Run all ranks on one machine, in one network namespace."
            ) from error
        if _is_own_user(connection):
            socket.send_fds(connection, [struct.pack("<I", rank)], fds)


def _receive(listener: socket.socket, count: int) -> tuple[int | None, list[int]]:
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(listener.gettimeout())
        if not _is_own_user(connection):
            return None, []
        message, received, _, _ = socket.recv_fds(connection, 4, count)
        if len(message) != 4 or len(received) != count:
            for fd in received:
                os.close(fd)
            return None, []
        return int(struct.unpack("<I", message)[0]), list(received)


def _is_own_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())
