"""How the ranks of a process group find one another in its store, whatever earlier groups and
attempts have left there.
"""

from __future__ import annotations

import datetime
import secrets
import time
from typing import Any

from interlace.errors import PeerTimeoutError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_MARGIN_S = 5.0  # for rank 0 to say who is missing, on a busy machine


def meet(store: Any, what: str, rank: int, world_size: int, timeout_s: float) -> str:
    """Wait for all ranks; a name for what they do next that was never used before, the same on
    every rank. Collective.

    A store may outlive a process group, and hold what a group of the same name or an attempt that
    failed has left. So no key is trusted that a rank could have written before: every rank says
    hello with a new random word, and rank 0 answers that word with the name, until everybody has
    used it. Then rank 0 says that all are there, or who is not::

        hello/1           rank 1: "a71..."; what an earlier attempt wrote there is answered too, in vain
        welcome/a71...    rank 0: the name
        joined/<name>/1   rank 1
        verdict/<name>    rank 0: -1, or the first rank that is missing

    Args:
        store: of the process group.
        what: for the error.
        timeout_s: to wait for the others; an error may take twice as long, since ranks do not come
            at the same time.

    Raises:
        PeerTimeoutError: naming a rank that did not come; on every rank that did.
    """
    if rank == 0:
        name, missing = _receive_all(store, world_size, timeout_s)
    else:
        name, missing = _report(store, rank, timeout_s)
    if missing >= 0:
        raise PeerTimeoutError(operator=what, rank=rank, peer=missing, deadline_s=timeout_s)
    return name


def _receive_all(store: Any, world_size: int, timeout_s: float) -> tuple[str, int]:
    """Of rank 0: the name, and the first rank that is missing or -1."""
    name, end, pause_s = secrets.token_hex(8), time.monotonic() + timeout_s, _FIRST_PAUSE_S
    waiting, answered = set(range(1, world_size)), dict[int, bytes]()
    while waiting:
        for peer in sorted(waiting):
            hello = f"hello/{peer}"
            if store.check([f"joined/{name}/{peer}"]):
                waiting.remove(peer)
                store.delete_key(f"joined/{name}/{peer}")
                store.delete_key(hello)
            elif store.check([hello]):
                word = store.get(hello)
                if answered.get(peer) != word:
                    store.set(f"welcome/{word.decode()}", name)
                    answered[peer] = word
        if waiting and time.monotonic() >= end:
            break
        if waiting:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
    missing = min(waiting, default=-1)
    store.set(f"verdict/{name}", str(missing))
    return name, missing


def _report(store: Any, rank: int, timeout_s: float) -> tuple[str, int]:
    """Of the other ranks."""
    word = secrets.token_hex(16)
    store.set(f"hello/{rank}", word)
    if not _wait(store, f"welcome/{word}", timeout_s):
        return "", 0
    name = store.get(f"welcome/{word}").decode()
    store.delete_key(f"welcome/{word}")
    store.set(f"joined/{name}/{rank}", "")
    if not _wait(store, f"verdict/{name}", timeout_s + _MARGIN_S):
        return name, 0
    return name, int(store.get(f"verdict/{name}"))


def _wait(store: Any, key: str, timeout_s: float) -> bool:
    try:
        store.wait([key], datetime.timedelta(seconds=timeout_s))
    except (RuntimeError, TimeoutError):  # torch's DistStoreError is a RuntimeError
        return False
    return True
