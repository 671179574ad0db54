"""Account for one rank's time: the product, and all that made the call longer than it.

Every nanosecond from the first event of all ranks to the last one belongs to one *phase*. So the
phases of two timelines of one call, a measured and a simulated one, can be compared line by line.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from interlace.tracing.libraries import Activity
from interlace.tracing.work import Flow, Place, Span, Work, causes_of
from interlace.units import format_count, format_ns

PHASES = ("launch", "compute", "copy", "put", "wait", "sum", "tail", "idle")
"""``launch``: until the rank's first tile. ``compute``: a tile, or a library's product. ``copy``:
copy engines, and libraries' collectives, while nothing is multiplied. ``put``: from the end of a
tile to its store and its signals. ``wait``: for a peer. ``sum``: sums, stores of results, the way
to the next tile. ``tail``: tiles of other programs, once the program with the most work has ended.
``idle``: none of these.
"""

_Key = tuple[str, int, bool]
"""A phase, the rank that is waited for (-1 if unknown), and whether it has not sent yet."""

# Of what happens at the same time, the phase that comes first here is the reason to be there.
_ORDER = ("compute", "tail", "sum", "put", "copy", "wait", "launch")
_PHASE_OF_KIND = {"product": "compute", "copy": "copy", "collective": "copy", "other": "sum"}


@dataclasses.dataclass(frozen=True)
class Waiting:
    """The waits for one rank.

    Attributes:
        rank: The rank; -1 if it is unknown which one, as behind a copy.
        unsent_ns: Time until that rank had sent what was awaited.
        flight_ns: Time from then on, and all of a wait for what had been sent before.
    """

    rank: int
    unsent_ns: float
    flight_ns: float

    @property
    def duration_ns(self) -> float:
        """Return the time of all waits for the rank."""
        return self.unsent_ns + self.flight_ns


@dataclasses.dataclass(frozen=True)
class Account:
    """The time of the rank that ends last.

    Attributes:
        rank: The rank.
        total_ns: Time from the first event of all ranks to the last one.
        phases: Time of each of :data:`PHASES`; their sum is the total.
        waits: The waits for each rank, the longest first.
        programs: The program that computes longest; or several that ran one after another on one
            SM, where there are more than fit at once. Empty if only libraries compute.
        tiles: Number of tiles that they compute, one after another.
        products: Number of products that libraries make on this rank.
    """

    rank: int
    total_ns: float
    phases: dict[str, float]
    waits: tuple[Waiting, ...]
    programs: tuple[int, ...]
    tiles: int
    products: int

    @property
    def product_ns(self) -> float:
        """Return the time of the product by itself: that of the programs with the most work."""
        return self.phases["compute"]

    @property
    def excess(self) -> float:
        """Return the share of the product's time that the call takes longer than it."""
        return self.total_ns / self.product_ns - 1 if self.product_ns else 0.0

    def finding(self) -> str:
        """Return, in one line, how much longer than its product the call takes, and why."""
        if not self.product_ns:
            return f"{format_ns(self.total_ns)}, of which no tile's computation was recorded"
        reasons = list(self.reasons())
        because = f": {reasons[0][1]}, {format_ns(reasons[0][0])}" if reasons else ""
        return (
            f"{format_ns(self.total_ns)}, {self.excess:.0%} above the product's "
            f"{format_ns(self.product_ns)}{because}"
        )

    def reasons(self) -> Iterator[tuple[float, str]]:
        """Yield what the call takes beyond its product (ns, and words), the longest first."""
        words = {
            "launch": f"before the first tile of rank {self.rank}",
            "copy": "copies and collectives while nothing is multiplied",
            "put": "puts and signals between tiles",
            "sum": "sums, stores, and the way to the next tile",
            "tail": "tiles of other programs after its last one",
            "idle": "nothing runs",
        }
        reasons = [(self.phases[phase], text) for phase, text in words.items()]
        for waiting in self.waits:
            whom = "for a peer" if waiting.rank < 0 else f"for rank {waiting.rank}"
            unsent = f" ({format_ns(waiting.unsent_ns)} until it had sent)"
            text = f"waits {whom}" + (unsent if waiting.unsent_ns else "")
            reasons.append((waiting.duration_ns, text))
        yield from sorted((reason for reason in reasons if reason[0] > 0), key=lambda x: -x[0])

    def lines(self) -> Iterator[str]:
        """Yield the account in words: the total, the product, and the reasons above 1 %."""
        made = [f"{format_count(self.products, 'product')} of libraries"] if self.products else []
        if self.programs:
            numbers = ", ".join(map(str, self.programs))
            noun = "program" if len(self.programs) == 1 else "programs"
            made.append(f"{format_count(self.tiles, 'tile')} of {noun} {numbers}")
        if not self.product_ns:
            yield f"total: {format_ns(self.total_ns)} (rank {self.rank} ends last). Of it"
        else:
            yield (
                f"total: {format_ns(self.total_ns)}, {self.excess:.0%} above the product alone, "
                f"{format_ns(self.product_ns)} (rank {self.rank} ends last: {' and '.join(made)}). "
                "Beside the product"
            )
        for duration_ns, text in self.reasons():
            if duration_ns >= 0.01 * self.total_ns:
                yield f"  {format_ns(duration_ns)}: {text}"


def account(work: Work, others: Sequence[Sequence[Activity]] = ()) -> Account | None:
    """Return where the time of the rank that ends last went; None if nothing was recorded.

    Of each launch it follows the programs of one SM, one after another, that compute longest, and
    behind them the program that ends last. What a library computes meanwhile on the same GPU comes
    before what those programs do.

    Args:
        work: What the programs of all ranks did.
        others: What ran beside them, for each rank.
    """
    intervals: dict[int, list[tuple[float, float, _Key]]] = defaultdict(list)
    longest: dict[int, list[_Chosen]] = defaultdict(list)
    causes = causes_of(work)
    for (rank, _), spans in sorted(_by_launch(work).items()):
        programs, chosen = _followed(spans)
        longest[rank].append(chosen)
        for interval in _intervals(programs, causes):
            intervals[rank].append(interval)
    for rank, activities in enumerate(others):
        for activity in activities:
            key = (_PHASE_OF_KIND[activity.kind], -1, False)
            end_ns = activity.start_ns + activity.duration_ns
            intervals[rank].append((activity.start_ns, end_ns, key))
    if not intervals:
        return None
    # The programs that are followed may have begun after others.
    start_ns = min(
        [span.start_ns for span in work.spans]
        + [activity.start_ns for of_rank in others for activity in of_rank]
    )
    rank = max(intervals, key=lambda rank: max(end for _, end, _ in intervals[rank]))
    times = _sweep(intervals[rank], start_ns)
    computing = [chosen for chosen in longest[rank] if chosen.tiles]
    tiles = sum(chosen.tiles for chosen in computing)
    busiest = max(computing, key=lambda chosen: chosen.computed_ns, default=_Chosen((), 0, 0.0))
    activities = others[rank] if rank < len(others) else ()
    products = sum(activity.kind == "product" for activity in activities)
    waits: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    phases = dict.fromkeys(PHASES, 0.0)
    for (phase, peer, is_unsent), duration_ns in times.items():
        phases[phase] += duration_ns
        if phase == "wait":
            waits[peer][0 if is_unsent else 1] += duration_ns
    waiting = [Waiting(peer, *durations) for peer, durations in waits.items()]
    waiting.sort(key=lambda wait: -wait.duration_ns)
    return Account(
        rank, sum(phases.values()), phases, tuple(waiting), busiest.programs, tiles, products
    )


def _by_launch(work: Work) -> dict[tuple[int, int], dict[Place, list[Span]]]:
    """Return the spans of each program, by rank and launch."""
    launches: dict[tuple[int, int], dict[Place, list[Span]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for span in work.spans:
        launches[span.place.rank, span.place.launch][span.place].append(span)
    return launches


class _Chosen(NamedTuple):
    """The programs of one launch that are followed, their tiles, and the time of these."""

    programs: tuple[int, ...]
    tiles: int
    computed_ns: float


def _followed(spans: dict[Place, list[Span]]) -> tuple[list[tuple[Span, str]], _Chosen]:
    """Return the spans of one launch that are followed, each with its phase; and whose they are."""

    def computed(chain: Sequence[Place]) -> float:
        computing = (span for place in chain for span in spans[place])
        return sum(span.duration_ns for span in computing if span.activity == "compute")

    def end(place: Place) -> float:
        return spans[place][-1].end_ns

    busiest = max(_chains(spans), key=lambda chain: (computed(chain), end(chain[-1])))
    last = max(spans, key=end)
    followed: list[tuple[Span, str]] = []
    begun = False
    for span in (span for place in busiest for span in spans[place]):
        begun = begun or span.activity == "compute"
        idle = "sum" if begun or not computed(busiest) else "launch"
        followed.append((span, idle if span.activity == "other" else span.activity))
    end_ns = end(busiest[-1])
    for span in spans[last]:
        if span.end_ns > end_ns:
            clipped = dataclasses.replace(span, start_ns=max(span.start_ns, end_ns))
            phase = {"compute": "tail", "other": "sum"}.get(span.activity, span.activity)
            followed.append((clipped, phase))
    tiles = sum(span.activity == "compute" for place in busiest for span in spans[place])
    return followed, _Chosen(tuple(place.program for place in busiest), tiles, computed(busiest))


def _chains(spans: dict[Place, list[Span]]) -> list[list[Place]]:
    """Return the programs in chains: each has begun on the SM of the one before, after its end.

    A grid of more programs than fit at once runs in such chains; of the programs that have ended on
    an SM, the one that ended last has made room for the next.
    """
    chains: list[list[Place]] = []
    ended: dict[int, list[tuple[float, int]]] = defaultdict(list)  # of an SM: the end of a chain
    for place, of_place in sorted(spans.items(), key=lambda item: item[1][0].start_ns):
        of_sm, start_ns = ended[of_place[0].sm], of_place[0].start_ns
        before = bisect.bisect_right(of_sm, (start_ns, len(spans)))
        number = of_sm.pop(before - 1)[1] if before else len(chains)
        if not before:
            chains.append([])
        chains[number].append(place)
        bisect.insort(of_sm, (of_place[-1].end_ns, number))
    return chains


def _intervals(
    spans: Sequence[tuple[Span, str]], causes: dict[tuple[Place, float], Flow]
) -> Iterator[tuple[float, float, _Key]]:
    """Yield the stretches of time of some spans; a wait is cut where its cause was sent."""
    for span, phase in spans:
        cause = causes.get((span.place, span.end_ns)) if phase == "wait" else None
        if cause is None:
            yield span.start_ns, span.end_ns, (phase, -1, False)
            continue
        sent_ns = min(max(cause.departure_ns, span.start_ns), span.end_ns)
        yield span.start_ns, sent_ns, (phase, cause.source.rank, True)
        yield sent_ns, span.end_ns, (phase, cause.source.rank, False)


def _sweep(intervals: Sequence[tuple[float, float, _Key]], start_ns: float) -> dict[_Key, float]:
    """Return how long each key counts: of those at the same time, the first by ``_ORDER``.

    Before the first interval it is a launch, and in gaps nothing.
    """
    changes: list[tuple[float, int, _Key]] = []
    for start, end, key in intervals:
        if end > start:
            changes += [(start, 1, key), (end, -1, key)]
    changes.sort()
    times: dict[_Key, float] = defaultdict(float)
    active: Counter[_Key] = Counter()
    current: _Key = ("launch", -1, False)
    now = start_ns
    for time_ns, change, changed in changes:
        if time_ns > now:
            times[current] += time_ns - now
        now = time_ns
        active[changed] += change
        if not active[changed]:
            del active[changed]
        current = min(active, key=lambda key: _ORDER.index(key[0]), default=("idle", -1, False))
    return times
