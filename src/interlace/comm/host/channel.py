"""Exchange small values between the ranks of a group on the host, through its store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch.distributed as dist

from interlace.comm.host import flight_recorder
from interlace.comm.host.health import Health
from interlace.comm.host.members import Members, by_rank
from interlace.comm.host.rendezvous import meet, wait_for_keys
from interlace.comm.runtime.deadlines import ANSWER_S, accusation_s, giving_up_s
from interlace.errors import InterlaceError, PeerTimeoutError, RankMismatchError, WorkspaceError

_GIVEN_UP = "call given up"  # instead of the label of the exchange that the others come to


class GivenUpError(WorkspaceError):
    """Say that a rank has no memory for the call that all ranks make; raised on every rank."""


class HostChannel:
    """Exchange JSON values between all ranks of a group, one numbered exchange after another.

    Every exchange is collective. Whether it takes place must not depend on a value that only this
    rank knows, or ranks would wait for an exchange that a peer never joins.

    A rank that gives up an exchange says in the store for whom it has waited, and the ranks that
    still wait follow it, so all name the same rank. The store itself goes with the process that has
    it, for which no rank can be asked. Every use of it here ends with the error that names the rank
    of that process then (:attr:`Members.store_rank`), or goes without an answer.
    """

    def __init__(self, members: Members, health: Health, store: dist.Store | None) -> None:
        """Meet the other ranks in ``store``. Collective.

        Args:
            members: The group.
            health: Is told when a rank does not come, and gives the deadline.
            store: The process group's store; None for a process on its own.

        Raises:
            PeerTimeoutError: A rank did not come before the deadline.
        """
        self.members, self._health = members, health
        self._sequence = 0
        if store is not None:
            prefix = f"interlace/{members.name}/{members.world_size}/{members.backend}"
            self._meeting_store = dist.PrefixStore(prefix, store)
            self.meet("joining a group", health.deadline_s)

    @property
    def deadline_s(self) -> float:
        """Return the number of seconds that an exchange may last by default."""
        return self._health.deadline_s

    def meet(self, label: str, timeout_s: float) -> None:
        """Wait for all ranks and number exchanges from 0 again, under keys that are unused.

        Args:
            label: Name of the occasion, for the error message.
            timeout_s: Seconds to wait for the other ranks.

        Raises:
            PeerTimeoutError: A rank did not come.
        """
        rank, ranks = self.members.rank, self.members.world_size
        with self.reaching_store(label):
            name = meet(self._meeting_store, label, rank, ranks, timeout_s)
        self._store: Any = dist.PrefixStore(name, self._meeting_store)
        self._sequence = 0

    def new_store(self, purpose: str) -> dist.Store:
        """Return the group's store under keys that are unused, the same ones on every rank.

        An exchange must come between two calls for a purpose: the number of the next one is part
        of the keys. A rank that fails before its call does not fall behind the others by that.
        """
        return dist.PrefixStore(f"{purpose}/{self._sequence}", self._store)

    @contextlib.contextmanager
    def reaching_store(self, label: str) -> Iterator[None]:
        """Name the rank that had the store if that is gone.

        Raises:
            PeerTimeoutError: Anything else than an error of Interlace was raised.
        """
        try:
            yield
        except InterlaceError:
            raise
        except Exception as error:  # stores of others may raise any
            self._health.lost_store = True
            raise self.absence(label, self.members.store_rank, self.deadline_s) from error

    def absence(self, label: str, peer: int, deadline_s: float) -> PeerTimeoutError:
        """Break the group, as a peer has not come to an exchange on the host; return the error.

        Args:
            label: Name of the exchange.
            peer: Rank that did not come; -1 if that is not known.
            deadline_s: Seconds that this rank has waited.
        """
        self._health.declare_broken(label, peer)
        error = PeerTimeoutError(
            operator=label, rank=self.members.rank, peer=peer, deadline_s=deadline_s,
            node=self.members.node_of(peer), lost_store=self._health.lost_store_of(peer),
        )  # fmt: skip
        flight_recorder.add(error)
        return error

    def declare_late(self, operator: str, peer: int, slice: int) -> None:
        """Break the group on account of the rank that was late first, after ``peer`` failed this
        rank, whether over the network or within the node.

        A rank that gives up closes its connections, so its peers' transfers fail as well. Each says
        in the store on whom it gave up, and this rank follows what they say.

        Args:
            operator: Name of the operator.
            peer: Rank that did not send in time.
            slice: Number of what did not come.
        """

        def follow() -> int:
            chain, accused = [self.members.rank], peer
            while accused >= 0 and accused not in chain:
                chain.append(accused)
                key = f"late/{accused}"
                if not wait_for_keys(self._store, [key], accusation_s(self.deadline_s)):
                    return accused
                said = int(self._store.get(key))
                if said < 0:
                    return accused
                accused = said
            # Ranks that accuse each other made different calls: the first that failed this one.
            return chain[1] if accused == self.members.rank else accused

        first = self._find_late(follow, accused=peer)
        # A kernel that has recorded this very rank knows more of it.
        if first != peer or not self._health.broken:
            self._health.declare_broken(operator, first, slice)

    def first_late(self, peer: int) -> int:
        """Return the rank that was late first, after a kernel has waited for ``peer`` in vain.

        A peer may itself wait, for another rank. It gives up at about the same time, and says so;
        then the rank that does not is the late one.
        """

        def find() -> int:
            is_waiting = wait_for_keys(
                self._store, [f"waiting/{peer}"], giving_up_s(self.deadline_s)
            )
            return self._first_absent() if is_waiting else peer

        return self._find_late(find, accused=peer)

    def first_not_waiting(self) -> int:
        """Return the first rank that does not come here soon; -1 if all do.

        For ranks that have given up waiting, without knowing for whom: the late rank is not there.
        If the store is gone, it is the rank that had it.
        """
        return self._find_late(self._first_absent)

    def _first_absent(self) -> int:
        """Return the first rank that does not say within seconds that it waits; -1 if all do."""
        keys = [f"waiting/{rank}" for rank in range(self.members.world_size)]
        wait_for_keys(self._store, keys, giving_up_s(self.deadline_s))
        return self._first_without(keys)

    def _find_late(self, find: Callable[[], int], accused: int | None = None) -> int:
        """Return the rank of this machine whose process has ended, or else the rank that ``find``
        finds among those that live; if the store is gone, the rank that had it.

        Args:
            find: Returns the late rank by what ranks say in the store; -1 if it is none.
            accused: The rank that has failed this one, if that is known; others ask for it. It is
                the late one if nobody knows better.
        """
        try:
            if accused is not None:
                self._store.set(f"late/{self.members.rank}", str(accused))
            self._store.set(f"waiting/{self.members.rank}", "")
            late = self._first_ended()
            if late < 0:
                late = find()
            self._store.set(f"named/{self.members.rank}", "")
            if self.members.rank == self.members.store_rank:
                # This process may end by its error, and the store with it, before the others have
                # asked, whose deadlines may be later by one.
                gone = {*self.members.ended_ranks(), late}
                candidates = [rank for rank in range(self.members.world_size) if rank not in gone]
                wait_for_keys(
                    self._store, [f"named/{rank}" for rank in candidates], self.deadline_s
                )
        except Exception:  # the store is gone, with the rank that had it
            self._health.lost_store = True
            late = self.members.store_rank
        return accused if late < 0 and accused is not None else late

    def _first_ended(self, among: list[str] | None = None) -> int:
        """Return the first rank of this machine whose process has ended; -1 if none has.

        Ranks that had given up waiting before do not count: their end was no cause.

        Args:
            among: Each rank's key in an exchange; only ranks without it count.
        """
        for rank in self.members.ended_ranks():
            keys = [f"waiting/{rank}", *([] if among is None else among[rank : rank + 1])]
            if not any(self._store.check([key]) for key in keys):
                return rank
        return -1

    def _first_without(self, keys: list[str]) -> int:
        """Return the first rank whose key is not in the store; -1 if all are."""
        return next((rank for rank, key in enumerate(keys) if not self._store.check([key])), -1)

    def exchange(self, label: str, value: object, *, deadline_s: float | None = None) -> list[Any]:
        """Return the ``value`` (JSON) of every rank, in rank order. Collective, on the host.

        Args:
            label: Name of the exchange, for errors; it must be the same on every rank.
            value: This rank's contribution.
            deadline_s: Seconds to wait for the slowest rank. Default: the group's deadline. Where
                ranks do work of unbounded length before they meet, such as writing files, give a
                deadline that allows for it.

        Raises:
            PeerTimeoutError: A peer did not join in time; the group is broken then.
            RankMismatchError: Ranks came to different exchanges; raised on every rank.
            GivenUpError: A rank has given up the call; raised on every rank.
        """
        if self.members.world_size == 1:
            return [value]
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        # The label travels with the value, so that ranks at different exchanges notice.
        text = json.dumps([label, value])
        with self._health.indivisible(label):
            answers = self._exchange(label, text, deadline_s)
        labels = [answer_label for answer_label, _ in answers]
        if _GIVEN_UP in labels:
            raise _given_up(answers)
        if len(set(labels)) != 1:
            raise RankMismatchError(
                f"ranks must make the same calls in the same order; got {by_rank(labels)}. "
                f"Look for a call that depends on the rank."
            )
        return [answer for _, answer in answers]

    def give_up(self, operator: str, error: Exception) -> NoReturn:
        """Tell the ranks that come to an exchange of this call that it failed here before it.

        Ranks whose call has no more exchanges do not learn of it: their kernels wait for this
        rank's, and name it at their deadline.

        Args:
            operator: Name of the operator.
            error: Says what has failed, such as memory.

        Raises:
            GivenUpError: All other ranks came to an exchange, and raise the same.
            Exception: ``error``, as they did not; the group is broken.
        """
        text = json.dumps([_GIVEN_UP, f"{operator}: {error}"])
        keys = [f"{self._sequence}/{rank}" for rank in range(self.members.world_size)]
        with self.reaching_store(operator):
            self._store.set(keys[self.members.rank], text)
            have_come = wait_for_keys(self._store, keys, giving_up_s(self.deadline_s))
        if not have_come:
            self._health.declare_interrupted(operator, error)
            raise error
        raise _given_up(self._exchange(operator, text, self.deadline_s)) from error

    def _exchange(self, label: str, text: str, deadline_s: float) -> list[Any]:
        """Return the parsed JSON text of every rank."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        keys = [f"{sequence}/{rank}" for rank in range(self.members.world_size)]
        with self.reaching_store(label):
            self._store.set(keys[self.members.rank], text)
            given_up = f"{sequence}/given up"
            if not wait_for_keys(self._store, keys, deadline_s, unless=given_up):
                raise self.absence(label, self._absent(sequence, keys), deadline_s)
            texts = self._texts(keys)
            # All ranks have come to this exchange, so all of them have read the previous one, whose
            # key can go.
            if sequence > 0:
                self._store.delete_key(f"{sequence - 1}/{self.members.rank}")
        return [json.loads(answer) for answer in texts]

    def _texts(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that are in the store, in one trip to it if it can do that."""
        if self._store.has_extended_api():
            values: list[bytes] = self._store.multi_get(keys)
            return values
        return [self._store.get(key) for key in keys]

    def _absent(self, sequence: int, keys: list[str]) -> int:
        """Give up an exchange; return the rank that did not come, the same on all that wait.

        Args:
            sequence: Number of the exchange.
            keys: Each rank's key in it.
        """
        given_up = f"{sequence}/given up"
        if self._store.check([given_up]):
            late = int(self._store.get(given_up))
        else:
            # A rank may be late because it still lets go of what it had with one that has ended.
            late = self._first_ended(among=keys)
            if late < 0:
                late = self._first_without(keys)
            self._store.set(given_up, str(late))
        self._store.set(f"waiting/{self.members.rank}", "")
        heard = [f"{sequence}/heard/{rank}" for rank in range(self.members.world_size)]
        self._store.set(heard[self.members.rank], "")
        if self.members.rank == self.members.store_rank:
            # This process may end by its error, and the store with it, before the others have read.
            present = [heard[rank] for rank, key in enumerate(keys) if self._store.check([key])]
            wait_for_keys(self._store, present, ANSWER_S)
        return late


def _given_up(answers: list[Any]) -> GivenUpError:
    """Return the error of the first rank that has given up the call."""
    rank, message = next(
        (rank, message) for rank, (label, message) in enumerate(answers) if label == _GIVEN_UP
    )
    return GivenUpError(f"every rank must have memory for a call; rank {rank} has not. {message}")
