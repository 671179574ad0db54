"""Pass file descriptors between the ranks of a machine, so that they can share unnamed memory.

The descriptors pass over Unix sockets that exist for the duration of the exchange, each in a
directory that only its user may enter. The process group's store tells each rank the directories,
and a token per rank that a sender must show. Other users cannot fill a socket's queue, and a
connection that does not show the token is closed. All operations are non-blocking and end at the
group's deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import selectors
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from interlace.comm.host.channel import HostChannel
from interlace.errors import BackendError, WorkspaceError

_TOKEN_BYTES = 16
_HEADER = struct.Struct(f"<I{_TOKEN_BYTES}s")  # the sender's rank, and the receiver's token
_ACKNOWLEDGED = b"\1"
_BACKLOG = 128
_RETRY_S = 0.005
# Connections that have not sent a message yet. Ranks send as soon as they have connected.
_MAX_SILENT = 64


@contextlib.contextmanager
def exchanged_descriptors(
    channel: HostChannel, label: str, fds: list[int], failure: Exception | None = None
) -> Iterator[list[list[int]]]:  # fmt: skip
    """Duplicate the descriptors of this node's ranks into this process. Collective.

    The context's value is the descriptors by rank; this rank's are ``fds``, and those of ranks of
    other nodes are empty. Every rank has equally many. All of them, ``fds`` too, are closed at the
    end of the ``with`` block, or if the exchange fails. Within the block every rank of the node
    holds all of them, so each may close its own.

    Args:
        channel: The group's exchange on the host.
        label: Name of the exchange, for errors; equal on all ranks.
        fds: Descriptors of this rank.
        failure: Reason for which this rank has no descriptors, or None. It is raised here once the
            other ranks know of it.

    Raises:
        WorkspaceError: Another rank has failed.
        PeerTimeoutError: A peer did not join before the group's deadline; the group is broken then.
        BackendError: A peer cannot be reached, as it is on another machine, or has another
            directory for temporary files.
    """
    descriptors: list[list[int]] = [[] for _ in range(channel.world_size)]
    descriptors[channel.rank] = fds
    try:
        _exchange(channel, label, descriptors, failure)
        yield descriptors
    finally:
        for fd in itertools.chain.from_iterable(descriptors):
            os.close(fd)


class Address(NamedTuple):
    """Locate a rank's socket.

    Attributes:
        directory: Directory of the socket.
        token: Secret that a sender must show, in hexadecimal digits.
    """

    directory: str
    token: str


def _exchange(
    channel: HostChannel, label: str, descriptors: list[list[int]], failure: Exception | None
) -> None:
    """Send this rank's entry of ``descriptors`` to all peers, and fill in the peers' entries."""
    with contextlib.ExitStack() as resources:
        address, listener = None, None
        if failure is None:
            try:
                directory, listener = resources.enter_context(listening())
                address = Address(directory, new_token())
            except OSError as error:
                failure = BackendError(
                    f"a rank must be able to open a Unix socket in {tempfile.gettempdir()}; got "
                    f"{error}."
                )
        # Step 1: all ranks learn all addresses and failures. After it, every rank that has not
        # failed listens.
        answers = channel.exchange(label, [address, str(failure or "")])
        if failure is not None:
            raise failure
        for rank, (_, problem) in enumerate(answers):
            if problem:
                raise WorkspaceError(
                    f"{label}: every rank must have the memory; rank {rank} does not. {problem}"
                )
        assert address is not None
        assert listener is not None
        # Step 2: descriptors pass between all pairs of ranks of a node.
        addresses = [Address(*fields) for fields, _ in answers]
        passing = Passing(channel.rank, addresses, listener, descriptors, channel.local_ranks)
        late_peer = passing.run(time.monotonic() + channel.deadline_s)
        if late_peer is not None:
            raise channel.absence(label, late_peer, channel.deadline_s)


def new_token() -> str:
    """Return a new random token."""
    return secrets.token_hex(_TOKEN_BYTES)


def header(rank: int, token: str) -> bytes:
    """Return the message that goes with the descriptors of a sender.

    Args:
        rank: Rank of the sender.
        token: Token of the receiver.
    """
    return _HEADER.pack(rank, bytes.fromhex(token))


class Passing:
    """Exchange descriptors once between this rank and all its peers.

    The rank accepts connections while it connects, so no two ranks wait for each other.
    """

    def __init__(
        self, rank: int, addresses: list[Address], listener: socket.socket,
        descriptors: list[list[int]], ranks: Sequence[int] | None = None
    ) -> None:  # fmt: skip
        """Exchange ``descriptors`` between ``ranks``; default: all ranks that have an address."""
        self._rank, self._addresses, self._listener, self._descriptors = (
            rank,
            addresses,
            listener,
            descriptors,
        )
        self._peers = [
            peer for peer in (range(len(addresses)) if ranks is None else ranks) if peer != rank
        ]
        self._unsent = set(self._peers)
        self._unacknowledged: dict[socket.socket, int] = {}
        self._silent: dict[socket.socket, None] = {}  # in the order of their arrival
        self._selector = selectors.DefaultSelector()

    def run(self, end: float) -> int | None:
        """Send and receive until every rank has all descriptors.

        Args:
            end: Deadline in seconds of ``time.monotonic()``.

        Returns:
            None, or a peer that was late at the deadline.
        """
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while self._unsent or self._unacknowledged or self._missing():
                left = end - time.monotonic()
                if left <= 0:
                    waiting = self._unsent.union(self._unacknowledged.values())
                    return min(self._missing() or waiting)
                for peer in sorted(self._unsent):
                    self._send(peer)
                for key, _ in self._selector.select(min(left, _RETRY_S) if self._unsent else left):
                    self._serve(key.fileobj)
            return None
        finally:
            for connection in [*self._unacknowledged, *self._silent]:
                connection.close()
            self._selector.close()

    def _missing(self) -> list[int]:
        """Return the peers whose descriptors have not come."""
        return [peer for peer in self._peers if not self._descriptors[peer]]

    def _serve(self, ready: Any) -> None:
        """Handle a socket that can be read."""
        if ready is self._listener:
            self._accept()
        elif ready in self._unacknowledged:
            peer = self._unacknowledged.pop(ready)
            if _read(ready) != _ACKNOWLEDGED:
                # The peer has closed the connection as too many were silent. Send again.
                self._unsent.add(peer)
            self._close(ready)
        elif ready in self._silent:
            del self._silent[ready]
            self._receive(ready)
            self._close(ready)

    def _send(self, peer: int) -> None:
        """Connect to a peer and send it this rank's descriptors.

        If the peer has no room for a connection now, it stays in the set of unsent peers.
        """
        connection = connect(self._addresses[peer].directory, peer)
        if connection is None:
            return
        message = header(self._rank, self._addresses[peer].token)
        try:
            socket.send_fds(connection, [message], self._descriptors[self._rank])
        except OSError:
            connection.close()
            return
        self._unsent.discard(peer)
        self._unacknowledged[connection] = peer
        self._selector.register(connection, selectors.EVENT_READ)

    def _accept(self) -> None:
        """Accept a connection, and close the oldest silent one if there are too many."""
        # The sender may have closed the connection again, or this process may have no descriptors
        # left at the moment.
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._silent[connection] = None
            self._selector.register(connection, selectors.EVENT_READ)
        if len(self._silent) > _MAX_SILENT:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            self._close(oldest)

    def _receive(self, connection: socket.socket) -> None:
        """Take a peer's descriptors once and acknowledge them; drop all other messages."""
        count = len(self._descriptors[self._rank])
        try:
            message, received, _, _ = socket.recv_fds(
                connection, _HEADER.size, count, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return
        sender = self._sender(message) if len(received) == count else None
        # A stranger's descriptors are closed, and so are those of a peer that sends them again as
        # it has missed the acknowledgement.
        if sender is None or self._descriptors[sender]:
            for fd in received:
                os.close(fd)
        else:
            self._descriptors[sender] = list(received)
        if sender is not None:
            with contextlib.suppress(OSError):
                connection.send(_ACKNOWLEDGED)

    def _sender(self, message: bytes) -> int | None:
        """Return the rank that sent a message, or None if it does not show this rank's token."""
        if len(message) != _HEADER.size:
            return None
        rank, token = _HEADER.unpack(message)
        if not secrets.compare_digest(token, bytes.fromhex(self._addresses[self._rank].token)):
            return None
        return int(rank) if rank in self._peers else None

    def _close(self, connection: socket.socket) -> None:
        """Close a connection and no longer listen to it."""
        self._selector.unregister(connection)
        connection.close()


@contextlib.contextmanager
def listening() -> Iterator[tuple[str, socket.socket]]:
    """Listen on a non-blocking socket in a new directory that only this user may enter.

    The context's value is the directory and the socket.
    """
    with (
        tempfile.TemporaryDirectory(prefix="interlace-") as directory,  # of mode 0700
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        _entered(directory) as path,
    ):
        listener.bind(path)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        yield directory, listener


def connect(directory: str, peer: int) -> socket.socket | None:
    """Return a non-blocking connection to the socket in ``directory``.

    Args:
        directory: Directory of the socket of rank ``peer``.
        peer: Rank, for the error message.

    Returns:
        The connection, or None if the socket accepts no connection at the moment.

    Raises:
        BackendError: The directory does not exist in this process's view.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        with _entered(directory) as path:
            connection.connect(path)
    except (BlockingIOError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise BackendError(
            f"a rank must reach rank {peer} through a Unix socket in {directory} to share memory; "
            f"got {error.strerror}. Run all "
            "ranks on one machine, as one user, with the same directory for temporary files "
            "(TMPDIR)."
        ) from error
    return connection


@contextlib.contextmanager
def _entered(directory: str) -> Iterator[str]:
    """Give a path of the socket in ``directory`` that has less than a socket's limit, 107 bytes."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def _read(connection: socket.socket) -> bytes:
    """Return the peer's acknowledgement, or ``b""`` if it has closed the connection."""
    try:
        return connection.recv(len(_ACKNOWLEDGED))
    except OSError:
        return b""


__all__ = [
    "Address",
    "Passing",
    "connect",
    "exchanged_descriptors",
    "header",
    "listening",
    "new_token",
]
