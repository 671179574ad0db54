"""Let the ranks of a process group meet in its store, despite keys of earlier attempts."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import time
from collections.abc import Sequence
from typing import Any

from interlace.comm.runtime.deadlines import ANSWER_S, INTERRUPT_S, NAMING_S, pauses_of_a_wait
from interlace.errors import PeerTimeoutError


def meet(store: Any, label: str, rank: int, world_size: int, timeout_s: float) -> str:
    """Wait for all ranks, and return a name that was never used before. Collective.

    A store may outlive a process group, and hold keys that a group of equal name or a failed
    attempt has left. So no key is trusted that a rank could have written before: every rank says
    hello with a new random word, and rank 0 answers that word with the name, until all ranks have
    used it. Then rank 0 announces that all ranks are present, or which one is absent::

        hello/1           rank 1: "a71..."; words of earlier attempts are answered too, in vain
        welcome/a71...    rank 0: the name
        joined/<name>/1   rank 1
        verdict/<name>    rank 0: -1, or the first rank that is absent
        heard/<name>/1    rank 1, which knows who is absent

    Args:
        store: Store of the process group.
        label: Name of the occasion, for the error.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout_s: Seconds to wait for the other ranks. An error may take twice as long, since ranks
            do not arrive at the same time.

    Returns:
        The name, equal on all ranks.

    Raises:
        PeerTimeoutError: A rank did not come; raised on every rank that did, with its number.
        Exception: Any error of the store, which may be gone.
    """
    # Rank 0 decides alone, so all ranks get the same verdict.
    if rank == 0:
        name, absent = _receive_peers(store, world_size, timeout_s)
    else:
        name, absent = _report(store, rank, timeout_s)
    if absent >= 0:
        raise PeerTimeoutError(operator=label, rank=rank, peer=absent, deadline_s=timeout_s)
    return name


def _receive_peers(store: Any, world_size: int, timeout_s: float) -> tuple[str, int]:
    """Meet all other ranks as rank 0; return the name, and the first absent rank or -1."""
    name, end, pauses = secrets.token_hex(8), time.monotonic() + timeout_s, pauses_of_a_wait()
    waiting, answered = set(range(1, world_size)), dict[int, bytes]()
    while waiting:
        for peer in sorted(waiting):
            hello = f"hello/{peer}"
            # Step 3: the peer has read the name. Its keys go, so that the store does not grow.
            if store.check([f"joined/{name}/{peer}"]):
                waiting.remove(peer)
                store.delete_key(f"joined/{name}/{peer}")
                store.delete_key(hello)
            # Step 2: answer the peer's word.
            elif store.check([hello]):
                # The word may be that of an earlier attempt. Its answer is never read, and the peer
                # replaces the word when it comes.
                word = store.get(hello)
                if answered.get(peer) != word:
                    store.set(f"welcome/{word.decode()}", name)
                    answered[peer] = word
        if waiting and time.monotonic() >= end:
            break
        # The store's own wait returns when all keys exist, but here any key is an event.
        if waiting:
            time.sleep(next(pauses))
    # Step 4: tell all ranks at once whether the meeting took place.
    absent = min(waiting, default=-1)
    store.set(f"verdict/{name}", str(absent))
    if absent >= 0:
        # The process may end by its error, and the store with it, before the others have read.
        present = set(range(1, world_size)) - waiting
        wait_for_keys(store, [f"heard/{name}/{peer}" for peer in present], ANSWER_S)
    return name, absent


def _report(store: Any, rank: int, timeout_s: float) -> tuple[str, int]:
    """Meet rank 0 as another rank; return the name, and the first absent rank or -1."""
    # Step 1: say hello with a word that no earlier attempt can have used.
    word = secrets.token_hex(16)
    store.set(f"hello/{rank}", word)
    if not wait_for_keys(store, [f"welcome/{word}"], timeout_s):
        return "", 0
    name = store.get(f"welcome/{word}").decode()
    store.delete_key(f"welcome/{word}")
    store.set(f"joined/{name}/{rank}", "")
    if not wait_for_keys(store, [f"verdict/{name}"], timeout_s + NAMING_S):
        return name, 0
    absent = int(store.get(f"verdict/{name}"))
    if absent >= 0:
        store.set(f"heard/{name}/{rank}", "")
    return name, absent


def wait_for_keys(
    store: Any, keys: Sequence[str], timeout_s: float, unless: str | None = None
) -> bool:
    """Return whether all ``keys`` appear in the store within ``timeout_s`` seconds.

    Python handles no signal during the store's own wait, which therefore lasts for a moment only.
    After it, Ctrl-C ends the wait at once.

    Args:
        store: The store.
        keys: Keys; none are there at once.
        timeout_s: Seconds to wait.
        unless: Key that ends the wait when it appears before them.

    Raises:
        Exception: Any error of the store, which may be gone.
    """
    end = time.monotonic() + timeout_s
    # A store that is gone fails in the look below as well.
    with contextlib.suppress(RuntimeError, OSError):  # torch's DistStoreError is the former
        store.wait(keys, datetime.timedelta(seconds=min(timeout_s, INTERRUPT_S)))
        return True
    pauses = pauses_of_a_wait()
    while not store.check(keys):
        if time.monotonic() >= end or (unless is not None and store.check([unless])):
            return False
        time.sleep(next(pauses))
    return True
