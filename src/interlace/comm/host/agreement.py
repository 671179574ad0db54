"""Let ranks agree on the host: compare arguments, gather values, and decide together.

An exchange is collective, so whether one takes place must not depend on what only this rank knows.
Every answer is remembered under a key that is equal on all ranks of a correct program, and is
forgotten by ``Group.release`` and ``Group.recover`` alone, which are collective.
docs/architecture.md lists every cache with its key.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from interlace.comm.host.cache import Answers, CallCache
from interlace.comm.host.channel import GivenUpError
from interlace.comm.host.health import Health
from interlace.comm.host.members import Exchange, Members, by_rank
from interlace.comm.runtime import context as ctx
from interlace.comm.runtime.driver import is_out_of_memory
from interlace.costs.known_profiles import version
from interlace.errors import (
    ArgumentError,
    BackendError,
    InterlaceError,
    PeerTimeoutError,
    RankMismatchError,
    WorkspaceError,
)

T = TypeVar("T")

_CHOICE = "the choice of rank 0"

_KNOWLEDGE = "what a rank chooses by"

_MARKS = 127  # distinct marks of calls; 0 is no mark, and an int32 has 7 bits above the epoch
# Of a family's calls: the remainders of sizes by 125 differ where those by 127 do not, as powers of
# two have but seven of these and a hundred of those. 77 sets families that follow one another far
# apart.
_MARKS_OF_SIZES, _BETWEEN_FAMILIES = 125, 77


@dataclasses.dataclass(frozen=True)
class Family:
    """Calls that differ in one size alone, which ranks have agreed on once for all sizes.

    Attributes:
        number: The family's number, the same on all ranks.
        is_alike: Whether all ranks choose by the same knowledge, and so alike without a word.
        profiles: The profiles that this rank knew then, for ``known_profiles.as_of``.
        met: The sizes for which ranks have met on their GPUs, the same on all ranks.
    """

    number: int
    is_alike: bool
    profiles: int
    met: set[int] = dataclasses.field(default_factory=set)

    def mark(self, size: int) -> int:
        """Return the mark of the call of a size, for ``interlace.language.mark``: the same on all
        ranks, and another one for 124 of 125 other sizes.
        """
        remainder = (self.number * _BETWEEN_FAMILIES + size) % _MARKS_OF_SIZES
        return (1 + remainder) << ctx.EPOCH_BITS


class Agreement:
    """Let the ranks of a group agree, and remember the outcome in the group's call cache."""

    def __init__(
        self, members: Members, cache: CallCache, health: Health, exchange: Exchange
    ) -> None:
        """Agree by ``exchange``.

        Args:
            members: The group.
            cache: Remembers answers.
            health: Is told when an agreement is interrupted on this rank.
            exchange: The collective exchange of one value per rank.
        """
        self._members, self._cache = members, cache
        self._health, self._exchange = health, exchange

    def _ask(self, label: str, value: object) -> list[Any]:
        """Exchange a value as a call's first step, which a broken group refuses.

        Without that, each call would wait for a rank that is gone, and a rank that is late would
        find answers of other calls than its own.
        """
        self._health.check()
        return self._exchange(label, value)

    def agree(
        self,
        operator: str,
        arguments: Mapping[str, Hashable],
        choose: Callable[[], Any] = lambda: None,
    ) -> tuple[int, Any]:
        """Check once per distinct ``arguments`` that all ranks call ``operator`` with equal ones,
        and make rank 0's choice every rank's.

        The first call with new arguments exchanges them on the host; later calls cost a dictionary
        look-up. Arguments are equal on all ranks by contract, so in a correct program every rank
        knows them or none does. Ranks that make different calls, all of them agreed on before, find
        out by the deadline: their epochs carry different marks.

        Args:
            operator: Name of the calling operator.
            arguments: What must be equal on all ranks.
            choose: Returns the choice as JSON can hold it, or None. It is called on rank 0, with
                the first call, before ranks have compared anything; so it exchanges nothing, and
                leaves it to the ranks together to refuse the arguments.

        Returns:
            The mark for ``interlace.language.mark``: equal on all ranks, and different from the
            marks of the previous 126 calls that were agreed on. And rank 0's choice at the first
            call, whatever a rank would choose now.

        Raises:
            RankMismatchError: Arguments differ; raised on every rank, with their values.
        """

        def settle() -> tuple[int, Any]:
            chosen = choose() if self._members.rank == 0 else None
            number, answers = self._compare_and_count(operator, arguments, {_CHOICE: chosen})
            return (1 + number % _MARKS) << ctx.EPOCH_BITS, answers[0][_CHOICE]

        return self._once(self._cache.agreed, operator, arguments, settle)

    def family(
        self,
        operator: str,
        arguments: Mapping[str, Hashable],
        first: Mapping[str, Hashable],
        knowledge: str,
    ) -> Family:
        """Check once per distinct ``arguments`` that all ranks call ``operator`` with equal ones,
        for all calls that have these in common and differ in a size.

        The first call exchanges them on the host, and so no later one, of whatever size. Ranks that
        later make calls of different sizes find out by the deadline, by :meth:`Family.mark`.

        Args:
            operator: Name of the calling operator.
            arguments: What the calls have in common; equal on all ranks by contract.
            first: What the first call has beside them, its size above all; compared with it, and
                in the place of arguments of the same names.
            knowledge: What this rank chooses by; it may differ from rank to rank.

        Raises:
            RankMismatchError: Arguments differ; raised on every rank, with their values.
        """

        def settle() -> Family:
            compared, own = _with_first(arguments, first), {_KNOWLEDGE: knowledge}
            number, answers = self._compare_and_count(operator, compared, own)
            is_alike = all(answer[_KNOWLEDGE] == knowledge for answer in answers)
            return Family(number, is_alike, version())

        family: Family = self._once(self._cache.families, operator, arguments, settle)
        return family

    def agree_on_sizes(
        self,
        operator: str,
        arguments: Mapping[str, Hashable],
        first: Mapping[str, Hashable],
        size: int,
    ) -> tuple[int, Family | None]:
        """Agree on a call that ranks choose for by what all of them know: within a node as
        :meth:`family` does, once for all sizes; between nodes on this size.

        Args:
            operator, arguments, first: As of :meth:`family`.
            size: The size by which calls differ.

        Returns:
            The call's mark, and the family if there is one.

        Raises:
            RankMismatchError: Arguments differ; raised on every rank, with their values.
        """
        if self._members.spans_nodes:
            return self.agree(operator, _with_first(arguments, first))[0], None
        family = self.family(operator, arguments, first, "")
        return family.mark(size), family

    def _once(
        self,
        known: dict[tuple[Hashable, ...], T],
        operator: str,
        arguments: Mapping[str, Hashable],
        settle: Callable[[], T],
    ) -> T:
        """Return what is ``known`` of an operator's calls with these arguments: in the first call
        what ``settle`` returns, with which ranks exchange it.
        """
        key = (operator, *arguments.items())
        result = known.get(key)
        if result is None:
            with self._health.indivisible(operator):
                result = known[key] = settle()
        return result

    def _compare_and_count(
        self, operator: str, arguments: Mapping[str, object], others: Mapping[str, object]
    ) -> tuple[int, Answers]:
        """Return the number of agreements before this one, and what :meth:`compare` returns."""
        answers = self.compare(operator, arguments, others)
        # All ranks have agreed on the same calls in the same order, so they count alike, and forget
        # them in the same call.
        return self._cache.count_agreement(), answers

    def gather(
        self,
        operator: str,
        name: str,
        shared: Mapping[str, Hashable],
        local: Mapping[str, Any],
        check: Callable[[Answers], None] | None = None,
    ) -> Answers:
        """Return every rank's ``local`` values (JSON), in rank order.

        With a name, the values are exchanged once per ``operator``, ``name`` and ``shared``, which
        are equal on all ranks by contract, and are remembered. The local values are not part of the
        key: they may equal those of another call on one rank but not on the next, and then some
        ranks would exchange and others would not. Without a name, the values are exchanged in every
        call, which takes the host a fraction of a millisecond.

        Args:
            operator: Name of the calling operator, for errors.
            name: Distinguishes calls; equal on all ranks. ``""``: exchange in every call.
            shared: Values that must be equal on all ranks.
            local: Values of this rank. Under one name they must not change.
            check: Inspects the answers before they are remembered. An exception that it raises must
                depend on the answers alone.

        Raises:
            RankMismatchError: ``name`` or ``shared`` differ; raised on every rank.
            ArgumentError: ``local`` has changed under this name; raised on this rank only. Nothing
                was sent.
        """
        key = (operator, name, *shared.items())
        cached = self._cache.gathered.get(key) if name else None
        if cached is not None:
            previous, answers = cached
            for field, value in local.items():
                if previous[field] != value:
                    raise ArgumentError(
                        f"{operator}: calls named {name!r} must always have the same "
                        f"{field.replace('_', ' ')} on this rank; "
                        f"got {value!r}, and {previous[field]!r} before. Give other tables another "
                        "name, on every rank."
                    )
            return answers
        with self._health.indivisible(operator):
            answers = self._ask(
                f"{operator} (getting to know the ranks)", {"name": name, **shared, **local}
            )
            # One by one, so that the error names what differs.
            for field in ("name", *shared):
                _require_equal(operator, field, [answer[field] for answer in answers])
            if check is not None:
                check(answers)
            if name:
                self._cache.gathered[key] = dict(local), answers
        return answers

    def any_rank(self, question: str, answer: bool, *, final: bool = False) -> bool:
        """Return whether ``answer`` is True on any rank, now or in an earlier call.

        Earlier calls count if they had the same ``question``. True is remembered, by all ranks at
        once. As long as the result is False, every call exchanges again on every rank: if a rank
        asked only when its own answer changes, it would be alone in the exchange.

        Args:
            question: The question as text; equal on all ranks.
            answer: This rank's answer.
            final: Remember the result also if it is False. Whether a call is final must be equal on
                all ranks.
        """
        settled = self._cache.settled.get(question)
        if settled is None:
            with self._health.indivisible(question):
                settled = any(self._ask(question, answer))
                if settled or final:
                    self._cache.settled[question] = settled
        return settled

    def any_rank_now(self, question: str, answer: bool) -> bool:
        """Return whether ``answer`` is True on any rank in this call. Collective; nothing is kept.

        Args:
            question: The question as text; equal on all ranks.
            answer: This rank's answer.
        """
        return any(self._ask(question, answer))

    def largest(
        self, operator: str, key: tuple[Hashable, ...], values: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the largest of all ranks' values, one by one, in the first call with this key.

        Later calls with the key get the same result, whatever their values, and exchange nothing.

        Args:
            operator: Name of the calling operator, for errors.
            key: Equal on all ranks by contract.
            values: This rank's values, equally many on every rank.
        """
        known = self._cache.largest.get(key)
        if known is None:
            with self._health.indivisible(operator):
                answers = self._ask(f"{operator} (sizes)", list(values))
            known = tuple(map(max, zip(*answers, strict=True)))
            self._cache.keep_largest(key, known)
        return known

    def compare(
        self,
        operator: str,
        arguments: Mapping[str, object],
        others: Mapping[str, object] | None = None,
    ) -> Answers:
        """Exchange both on the host, check that ``arguments`` are equal on all ranks, and return
        every rank's.

        Raises:
            RankMismatchError: Arguments differ; raised on every rank, with their values.
        """
        answers: Answers = self._ask(operator, {**arguments, **(others or {})})
        for name in arguments:
            _require_equal(operator, name, [answer.get(name) for answer in answers])
        return answers

    @contextlib.contextmanager
    def together(self, step: str) -> Iterator[None]:
        """Make a local step of a collective call fail on every rank if it fails on one. Collective.

        Without it, a rank that runs out of memory would leave its peers waiting, or let them go on
        with another implementation than its own. A failure between two exchanges of the body must
        be settled within the body.

        An interrupt (Ctrl-C) of the step breaks the group: this rank does not tell the others.

        Args:
            step: Name of the step, for errors; equal on all ranks.

        Raises:
            ArgumentError, WorkspaceError, BackendError: Error of the first rank that failed, raised
                on every rank; on the other ranks, the message names that rank. Running out of
                memory is a WorkspaceError; all other foreign errors are BackendErrors.
        """
        self._health.check()
        failure: InterlaceError | None = None
        try:
            yield
        # An exchange in the body raises these on every rank, so no rank goes on to the exchange of
        # outcomes below.
        except (PeerTimeoutError, RankMismatchError, GivenUpError):
            raise
        except InterlaceError as error:
            failure = error
        except Exception as error:
            kind = WorkspaceError if is_out_of_memory(error) else BackendError
            failure = kind(f"{step} must succeed; got {type(error).__name__}: {error}")
            failure.__cause__ = error
        except BaseException as error:
            self._health.declare_interrupted(step, error)
            raise
        # Also after a failure: the peers are on their way to this exchange.
        outcome = None if failure is None else [type(failure).__name__, str(failure)]
        try:
            outcomes = self._exchange(f"{step} (outcome)", outcome)
        except PeerTimeoutError as late:
            # A peer that waits for this rank within the step gives up, and does not come here.
            raise late from failure or late.__cause__
        if failure is not None:
            raise failure
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                name, message = outcome
                kinds = {"ArgumentError": ArgumentError, "WorkspaceError": WorkspaceError}
                raise kinds.get(name, BackendError)(
                    f"{step} must succeed on every rank; got on rank {rank}: {message}"
                )


def _with_first(
    arguments: Mapping[str, Hashable], first: Mapping[str, Hashable]
) -> dict[str, Hashable]:
    """Return what a first call compares: its size ahead of all else, as that differs soonest."""
    return {**first, **arguments, **first}


def _require_equal(operator: str, name: str, values: list[Any]) -> None:
    """Raise RankMismatchError unless all ranks' values of the argument ``name`` are equal."""
    if any(value != values[0] for value in values):
        raise RankMismatchError(
            f"{operator}: {name.replace('_', ' ')} must be the same on every rank; got "
            f"{by_rank(values)}. Nothing was computed."
        )
