"""Descriptors that pass between ranks while strangers get in the way."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm.host import descriptors
from tests.errors import error_of

_ALLOCATIONS = 3


def _flood(folder: str, user: int | None, ready: Connection) -> None:
    """Send nonsense to every socket in a folder, as often as it takes it."""
    if user is not None:
        os.setgid(user)
        os.setuid(user)
    taken = 0
    ready.send(os.getuid())
    while not ready.poll():
        for path in _sockets(folder):
            for message in (b"", b"nonsense", bytes(20), bytes(1000)):
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
                    stranger.setblocking(False)
                    with contextlib.suppress(OSError):
                        stranger.connect(path)
                        socket.send_fds(stranger, [message], [0, 1] if message else [])
                        taken += 1
    ready.send(taken)


def _sockets(folder: str) -> list[str]:
    return [os.path.join(directory.path, "socket") for directory in os.scandir(folder)]


def _allocate(folder: str) -> tuple[str, int]:
    """Several allocations with a deadline; the error, and how many descriptors are left over."""
    process_group = dist.new_group()
    interlace.set_deadline(90.0, process_group)
    before, ordinary = len(os.listdir("/proc/self/fd")), tempfile.tempdir
    tempfile.tempdir = folder
    try:
        for _ in range(_ALLOCATIONS):
            interlace.empty_symmetric((8,), dtype=torch.float32, group=process_group)
    except interlace.InterlaceError as error:
        return str(error), 0
    finally:
        tempfile.tempdir = ordinary
    return "", len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize(
    "user",
    [
        pytest.param(None, id="same user"),
        pytest.param(
            65534,
            id="other user",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user"),
        ),
    ],
)
def test_strangers_hold_up_nobody(ranks, user):
    """Messages of a stranger of the same user are dropped; one of another user can send none."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # as /tmp, where anybody may look
        taken = _allocations_in_a_flood(ranks, folder, user)
    assert (taken > 0) == (user is None)


def _allocations_in_a_flood(ranks, folder, user):
    assert ranks(2).run(_allocate, folder) == [("", 0)] * 2
    here, there = multiprocessing.Pipe()
    stranger = multiprocessing.get_context("spawn").Process(
        target=_flood, args=(folder, user, there), daemon=True
    )
    stranger.start()
    try:
        assert here.recv() == (os.getuid() if user is None else user)
        assert ranks(2).run(_allocate, folder) == [("", 0)] * 2
        here.send("enough")
        taken = here.recv()
    finally:
        stranger.kill()
        stranger.join()
    return taken


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.quick
def test_only_one_message_of_each_peer_counts():
    """Rank 0 in a thread; rank 1 by hand, which says it twice, after messages that are no peer's;
    then rank 2.
    """
    before = _open_descriptors()
    with (
        descriptors.open_mailbox() as (here, mailbox),
        descriptors.open_mailbox() as (there, other),
        ThreadPoolExecutor(1) as thread,
    ):
        tokens = [descriptors.new_token() for _ in range(2)]
        of_others = descriptors.Address(there, tokens[1])
        addresses = [descriptors.Address(here, tokens[0]), of_others, of_others]
        held: list[list[int]] = [[os.memfd_create("of rank 0")], [], []]
        end = time.monotonic() + 30.0
        result = thread.submit(
            descriptors.pass_descriptors, 0, (1, 2), addresses, mailbox, held, end
        )
        with descriptors.connect(here, 0) as sender:
            sender.setblocking(True)
            for rank, token in [(0, 0), (3, 0), (1, 1), (1, 0), (1, 0), (2, 0)]:
                fd = os.memfd_create(f"of rank {rank}")
                socket.send_fds(sender, [descriptors.header(rank, tokens[token])], [fd])
                os.close(fd)
        assert result.result() is None
        assert [len(fds) for fds in held] == [1, 1, 1]
        other.setblocking(True)
        for _ in range(2):
            message, received, _, _ = socket.recv_fds(other, 100, 1)
            assert message == descriptors.header(0, tokens[1])
            os.close(received[0])
        for (fd,) in held:
            os.close(fd)
    assert _open_descriptors() == before


def test_a_process_that_may_open_no_more_files():
    """Its peer's descriptors are lost with the message that brings them, so it says so at once."""
    token = descriptors.new_token()
    with (
        descriptors.open_mailbox() as (here, mailbox),
        descriptors.open_mailbox() as (there, _),
        descriptors.connect(here, 0) as sender,
    ):
        addresses = [descriptors.Address(here, token), descriptors.Address(there, token)]
        sender.send(descriptors.header(1, token))
        with pytest.raises(interlace.BackendError, match=r"rank 1; got 0\. .*ulimit -n"):
            descriptors.pass_descriptors(
                0, (1,), addresses, mailbox, [[0], []], time.monotonic() + 30.0
            )


def _absent() -> tuple[object, float]:
    """Rank 1 tells the others where it listens, and then does not."""
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    interlace.set_deadline(1.0, process_group)
    start, found = time.monotonic(), None
    if group.rank == 1:
        with descriptors.open_mailbox() as (directory, _):
            group.exchange("empty_symmetric", {"shape": [4], "dtype": "torch.float32"})
            group.exchange("empty_symmetric", [[directory, "00" * 16], ""])
            time.sleep(3.0)
    else:
        error = error_of(interlace.empty_symmetric, (4,), dtype=torch.float32, group=process_group)
        found = error[0], error[2]["peer"], group.broken
    dist.barrier()
    return found, time.monotonic() - start


def test_a_rank_that_takes_no_descriptors_is_named_at_the_deadline(ranks):
    (first, _), _, (third, _) = ranks(3).run(_absent)
    assert first == third == ("PeerTimeoutError", 1, True)


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(
        interlace.BackendError,
        match=r"must reach rank 3 through a Unix socket in .*nowhere.*\(TMPDIR\)",
    ):
        descriptors.connect(str(tmp_path / "nowhere"), 3)


def test_the_socket_of_a_long_directory(tmp_path, monkeypatch):
    """The path of a socket has 107 bytes; the directory for temporary files may be deeper than
    that.
    """
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with (
        descriptors.open_mailbox() as (directory, mailbox),
        descriptors.connect(directory, 0) as sender,
    ):
        assert os.stat(directory).st_mode & 0o777 == 0o700
        sender.send(b"hello")
        assert mailbox.recv(5) == b"hello"
    assert list(deep.iterdir()) == []
