"""Pass file descriptors between the ranks of a machine, so that they can share unnamed memory.

The descriptors pass over Unix sockets of datagrams that exist for the duration of the exchange,
each in a directory that only its user may enter. The process group's store tells each rank the
directories, and a token per rank that a sender must show. Other users cannot fill a socket's queue,
and a message that does not show the token is dropped. A message keeps its descriptors open until it
is received, so its sender may end the exchange before that. Nothing blocks, and all ends at the
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
from typing import NamedTuple

from interlace.comm.host.channel import HostChannel
from interlace.errors import BackendError, WorkspaceError

_TOKEN_BYTES = 16
_HEADER = struct.Struct(f"<I{_TOKEN_BYTES}s")  # the sender's rank, and the receiver's token
_RETRY_S = 0.005


@contextlib.contextmanager
def exchanged_descriptors(
    channel: HostChannel, label: str, fds: list[int], failure: Exception | None = None
) -> Iterator[list[list[int]]]:  # fmt: skip
    """Duplicate the descriptors of this node's ranks into this process. Collective.

    The context's value is the descriptors by rank; this rank's are ``fds``, and those of ranks of
    other nodes are empty. Every rank has equally many. All of them, ``fds`` too, are closed at the
    end of the ``with`` block, or if the exchange fails.

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
    descriptors: list[list[int]] = [[] for _ in range(channel.members.world_size)]
    descriptors[channel.members.rank] = fds
    try:
        _exchange(channel, label, descriptors, failure)
        yield descriptors
    finally:
        for fd in itertools.chain.from_iterable(descriptors):
            os.close(fd)


class Address(NamedTuple):
    """Locate a rank's mailbox.

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
    members = channel.members
    with contextlib.ExitStack() as resources:
        address, mailbox = None, None
        if failure is None:
            try:
                directory, mailbox = resources.enter_context(open_mailbox())
                address = Address(directory, new_token())
            except OSError as error:
                failure = BackendError(
                    f"a rank must be able to open a Unix socket in {tempfile.gettempdir()}; got "
                    f"{error}."
                )
        # Step 1: all ranks learn all addresses and failures. After it, every rank that has not
        # failed has a mailbox.
        answers = channel.exchange(label, [address, str(failure or "")])
        if failure is not None:
            raise failure
        for rank, (_, problem) in enumerate(answers):
            if problem:
                raise WorkspaceError(
                    f"{label}: every rank must have the memory; rank {rank} does not. {problem}"
                )
        assert mailbox is not None
        # Step 2: descriptors pass between all pairs of ranks of a node.
        addresses = [Address(*fields) for fields, _ in answers]
        peers = [peer for peer in members.local_ranks if peer != members.rank]
        end = time.monotonic() + channel.deadline_s
        late_peer = pass_descriptors(members.rank, peers, addresses, mailbox, descriptors, end)
        if late_peer is not None:
            raise channel.absence(label, late_peer, channel.deadline_s)


def pass_descriptors(
    rank: int,
    peers: Sequence[int],
    addresses: Sequence[Address],
    mailbox: socket.socket,
    descriptors: list[list[int]],
    end: float,
) -> int | None:
    """Send a rank's descriptors to its peers, and receive theirs.

    Args:
        rank: This rank.
        peers: The ranks to exchange with.
        addresses: Address of each rank's mailbox, by rank.
        mailbox: This rank's.
        descriptors: Each rank's descriptors, by rank; the peers' are filled in.
        end: Deadline in seconds of ``time.monotonic()``.

    Returns:
        None, or a peer that was late at the deadline.

    Raises:
        BackendError: A peer's directory does not exist in this process's view, or this process may
            not open as many files.
    """
    unsent = set(peers)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        connections = {
            peer: stack.enter_context(connect(addresses[peer].directory, peer)) for peer in peers
        }
        selector.register(mailbox, selectors.EVENT_READ, rank)
        for peer, connection in connections.items():
            selector.register(connection, selectors.EVENT_WRITE, peer)
        while True:
            missing = [peer for peer in peers if not descriptors[peer]]
            if not missing and not unsent:
                return None
            left_s = end - time.monotonic()
            if left_s <= 0:
                return min(missing or unsent)
            for key, _ in selector.select(left_s):
                peer = key.data
                if peer == rank:
                    _receive(mailbox, rank, peers, addresses[rank].token, descriptors)
                elif _send(connections[peer], rank, addresses[peer].token, descriptors[rank]):
                    unsent.remove(peer)
                    selector.unregister(connections[peer])


def _send(connection: socket.socket, rank: int, token: str, fds: list[int]) -> bool:
    """Send a rank's descriptors to a peer; return False if there is no room for them now."""
    try:
        socket.send_fds(connection, [header(rank, token)], fds)
    except ConnectionRefusedError:
        return True  # the peer has given up, and says why in an exchange on the host
    except BlockingIOError:  # a stranger's message has taken the room
        return False
    except OSError:  # too many descriptors are under way
        time.sleep(_RETRY_S)
        return False
    return True


def _receive(
    mailbox: socket.socket,
    rank: int,
    peers: Sequence[int],
    token: str,
    descriptors: list[list[int]],
) -> None:
    """Take a peer's descriptors, once; drop all other messages, and close what comes with them.

    Raises:
        BackendError: A peer's descriptors have come, and this process may not open as many files.
    """
    count = len(descriptors[rank])
    message, fds, _, _ = socket.recv_fds(mailbox, _HEADER.size, count, socket.MSG_CMSG_CLOEXEC)
    sender = _sender(message, token)
    if sender in peers and not descriptors[sender] and len(fds) == count:
        descriptors[sender] = list(fds)
        return
    for fd in fds:
        os.close(fd)
    if sender in peers and len(fds) < count:
        raise BackendError(
            f"a process must be able to open {count} more files for the memory of rank {sender}; "
            f"got {len(fds)}. Raise the limit (`ulimit -n`)."
        )


def _sender(message: bytes, token: str) -> int:
    """Return the rank that sent a message; -1 if it does not show this rank's token."""
    if len(message) != _HEADER.size:
        return -1
    rank, shown = _HEADER.unpack(message)
    return rank if secrets.compare_digest(shown, bytes.fromhex(token)) else -1


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


@contextlib.contextmanager
def open_mailbox() -> Iterator[tuple[str, socket.socket]]:
    """Receive on a non-blocking socket in a new directory that only this user may enter.

    The context's value is the directory and the socket.
    """
    with (
        tempfile.TemporaryDirectory(prefix="interlace-") as directory,  # of mode 0700
        _datagram_socket() as mailbox,
        _entered(directory) as path,
    ):
        mailbox.bind(path)
        yield directory, mailbox


def connect(directory: str, peer: int) -> socket.socket:
    """Return a non-blocking socket that sends to the mailbox in ``directory``.

    Args:
        directory: Directory of the mailbox of rank ``peer``.
        peer: Rank, for the error message.

    Raises:
        BackendError: The directory does not exist in this process's view.
    """
    connection = _datagram_socket()
    try:
        with _entered(directory) as path:
            connection.connect(path)
    except OSError as error:
        connection.close()
        raise BackendError(
            f"a rank must reach rank {peer} through a Unix socket in {directory} to share memory; "
            f"got {error.strerror}. Run all "
            "ranks on one machine, as one user, with the same directory for temporary files "
            "(TMPDIR)."
        ) from error
    return connection


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


@contextlib.contextmanager
def _entered(directory: str) -> Iterator[str]:
    """Give a path of the socket in ``directory`` that has less than a socket's limit, 107 bytes."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)
