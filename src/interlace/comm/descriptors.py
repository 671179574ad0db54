"""Passing file descriptors between the ranks of a machine: how processes come to share memory that
has no name.

Over Unix sockets, each in a directory that only its user may enter, for as long as the exchange
takes. Where the directory is, and a token that a sender must show, is told through the process
group's store. Nobody else can fill a socket's queue, and a connection that does not show the token
is closed. All of it is non-blocking and ends at the group's deadline.
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
from collections.abc import Iterator
from typing import Any, NamedTuple

from interlace.comm.channel import HostChannel
from interlace.errors import BackendError, PeerTimeoutError, WorkspaceError

_TOKEN_BYTES = 16
_HEADER = struct.Struct(f"<I{_TOKEN_BYTES}s")  # the sender's rank, and the receiver's token
_ACKNOWLEDGED = b"\1"
_BACKLOG = 128
_RETRY_S = 0.005
# Connections that have shown nothing yet; ranks send as soon as they have connected
_MOST_SILENT = 64


@contextlib.contextmanager
def exchanged_descriptors(
    channel: HostChannel, what: str, fds: list[int], failure: Exception | None = None
) -> Iterator[list[list[int]]]:  # fmt: skip
    """Every rank's descriptors, duplicated into this process, in rank order (this rank's own are
    ``fds``). Collective.

    Every rank has equally many. All of them, ``fds`` too, are closed at the end of the ``with``
    block, or if the exchange fails. Within the block every rank holds all of them, so each may
    close its own.

    Args:
        failure: why this rank has no descriptors, if it has none. It is raised here once the other
            ranks know of it.

    Raises:
        WorkspaceError: another rank has failed.
        PeerTimeoutError: a peer did not join before the group's deadline.
        BackendError: a peer cannot be reached; on another machine, or with other directories for
            temporary files.
    """
    descriptors: list[list[int]] = [[] for _ in range(channel.world_size)]
    descriptors[channel.rank] = fds
    try:
        _exchange(channel, what, descriptors, failure)
        yield descriptors
    finally:
        for held in itertools.chain.from_iterable(descriptors):
            os.close(held)


class Address(NamedTuple):
    """How a rank can be reached.

    Attributes:
        directory: where its socket lies.
        token: what a sender must show, in hexadecimal digits.
    """

    directory: str
    token: str


def _exchange(
    channel: HostChannel, what: str, descriptors: list[list[int]], failure: Exception | None
) -> None:
    """Send this rank's of ``descriptors`` to all peers, and fill in theirs, none so far."""
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
        answers = channel.exchange(
            what, [address, str(failure or "")]
        )  # from here on, everyone listens
        if failure is not None:
            raise failure
        for rank, (_, problem) in enumerate(answers):
            if problem:
                raise WorkspaceError(
                    f"{what}: every rank must have the memory; rank {rank} does not. {problem}"
                )
        assert address is not None
        assert listener is not None
        passing = Passing(
            channel.rank, [Address(*each) for each, _ in answers], listener, descriptors
        )
        missing = passing.run(time.monotonic() + channel.deadline_s)
        if missing is not None:
            raise PeerTimeoutError(
                operator=what, rank=channel.rank, peer=missing, deadline_s=channel.deadline_s
            )


def new_token() -> str:
    return secrets.token_hex(_TOKEN_BYTES)


def header(rank: int, token: str) -> bytes:
    """The message that goes with the descriptors of ``rank``, for the rank that has given
    ``token``.
    """
    return _HEADER.pack(rank, bytes.fromhex(token))


class Passing:
    """One exchange: this rank accepts while it connects, so no rank waits for another that waits
    for it.
    """

    def __init__(
        self, rank: int, addresses: list[Address], listener: socket.socket,
        descriptors: list[list[int]]
    ) -> None:  # fmt: skip
        self._rank, self._addresses, self._listener, self._descriptors = (
            rank,
            addresses,
            listener,
            descriptors,
        )
        self._unsent = {peer for peer in range(len(addresses)) if peer != rank}
        self._unacknowledged: dict[socket.socket, int] = {}
        self._silent: dict[socket.socket, None] = {}  # in the order in which they came
        self._selector = selectors.DefaultSelector()

    def run(self, end: float) -> int | None:
        """Until everybody has everything: None. At ``end``, of ``time.monotonic()``: a peer that is
        missing.
        """
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while self._unsent or self._unacknowledged or [] in self._descriptors:
                left = end - time.monotonic()
                if left <= 0:
                    waiting = self._unsent.union(self._unacknowledged.values())
                    return self._descriptors.index([]) if [] in self._descriptors else min(waiting)
                for peer in sorted(self._unsent):
                    self._send(peer)
                for key, _ in self._selector.select(min(left, _RETRY_S) if self._unsent else left):
                    self._serve(key.fileobj)
            return None
        finally:
            for connection in [*self._unacknowledged, *self._silent]:
                connection.close()
            self._selector.close()

    def _serve(self, ready: Any) -> None:
        if ready is self._listener:
            self._accept()
        elif ready in self._unacknowledged:
            peer = self._unacknowledged.pop(ready)
            if _read(ready) != _ACKNOWLEDGED:
                self._unsent.add(peer)  # closed for being silent too long, when many came at once
            self._close(ready)
        elif ready in self._silent:
            del self._silent[ready]
            self._receive(ready)
            self._close(ready)

    def _send(self, peer: int) -> None:
        """Connect to a peer and send it everything; nothing happens if it has no room for a
        connection now.
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
        with contextlib.suppress(OSError):  # gone again, or no descriptors left at the moment
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._silent[connection] = None
            self._selector.register(connection, selectors.EVENT_READ)
        if len(self._silent) > _MOST_SILENT:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            self._close(oldest)

    def _receive(self, connection: socket.socket) -> None:
        """Take a peer's descriptors, once, and acknowledge them; whatever else comes is dropped."""
        count = len(self._descriptors[self._rank])
        try:
            message, received, _, _ = socket.recv_fds(
                connection, _HEADER.size, count, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return
        sender = self._sender(message) if len(received) == count else None
        if sender is None or self._descriptors[sender]:
            for fd in received:
                os.close(fd)
        else:
            self._descriptors[sender] = list(received)
        if sender is not None:
            with contextlib.suppress(OSError):
                connection.send(_ACKNOWLEDGED)

    def _sender(self, message: bytes) -> int | None:
        """The rank that a message is from; None if it does not show this rank's token."""
        if len(message) != _HEADER.size:
            return None
        rank, token = _HEADER.unpack(message)
        if not secrets.compare_digest(token, bytes.fromhex(self._addresses[self._rank].token)):
            return None
        return int(rank) if rank < len(self._descriptors) and rank != self._rank else None

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


@contextlib.contextmanager
def listening() -> Iterator[tuple[str, socket.socket]]:
    """A directory that only this user may enter, and a non-blocking socket that listens in it."""
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
    """A non-blocking connection to the socket of rank ``peer`` in ``directory``; None if it takes
    none at the moment.

    Raises:
        BackendError: the directory is not there.
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
    """A path of the socket in ``directory`` that is short enough for any, since a socket's path has
    107 bytes.
    """
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def _read(connection: socket.socket) -> bytes:
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
