"""The time of messages between nodes, and of a computation whose results leave in slices.

A :class:`NetworkRates` holds what was measured of one network. From it, and from the traffic that
an implementation declares (:class:`interlace.costs.registry.NetworkCost`), follows the time of any
implementation; none needs a formula of its own. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from interlace.costs.registry import NetworkCost
from interlace.documents import read_json
from interlace.errors import ConfigError
from interlace.units import shortened

Times = Sequence[tuple[int, float]]
"""Measured times: bytes that each rank sends and receives, and microseconds; bytes ascending."""

MOST_SLICES = 16
"""Largest number of slices that is tried."""

STEP_US = 50.0
"""Microseconds by which an exchange takes longer that begins beside a computation.

Its kernel waits for room between the programs of the computation, and more exchanges at a time keep
the host's processors busy. See decision 0023 for what it was fitted to.
"""

_NEAR = 0.02
"""The fraction of a time that more slices must save: no measurement is as exact as that."""


_NO_LONGER_READ = ("beside_product", "product_beside")
"""Fields of files that were written until 2026-11-26 (decision 0023)."""

_LARGEST_MARGIN = 0.5
"""The largest fraction that is asked for, however much times vary."""


@dataclasses.dataclass(frozen=True)
class NetworkRates:
    """Measured times of exchanges between nodes, while all ranks exchange at once.

    Attributes:
        network: The network, such as ``"NCCL over NET/Socket"``.
        source: Where and when it was measured.
        ranks, nodes: The group that it was measured on.
        slice_us: Times of one exchange by the carrier of slices: one message to a rank of another
            node and one from it.
        collective_us: Times of torch's all-to-all, by the bytes for ranks of other nodes.
        collective_factors: Names of torch's other collectives, and by which factor they take longer
            than an all-to-all of as many bytes for other nodes; 1 for those that are missing.
        further_message_us: Time of each further message of an exchange, beside its bytes.
        spread: By how much the ratio of the two kinds of times varied between samples, as a
            fraction: slices that are predicted to gain less than that may gain nothing.
    """

    network: str
    source: str
    ranks: int
    nodes: int
    slice_us: Times
    collective_us: Times
    further_message_us: float = 0.0
    spread: float = 0.0
    collective_factors: Sequence[tuple[str, float]] = ()

    def __post_init__(self) -> None:
        """Check the figures.

        Raises:
            ConfigError: times are not positive and ascending in bytes, or a factor is below 1.
        """
        for name in ("slice_us", "collective_us"):
            times = [(int(nbytes), float(us)) for nbytes, us in getattr(self, name)]
            sizes = [nbytes for nbytes, _ in times]
            if (
                not times
                or sizes != sorted(set(sizes))
                or sizes[0] < 0
                or not all(0 < us < math.inf for _, us in times)
            ):
                raise ConfigError(
                    f"a network's {name} must be pairs of bytes, ascending, and microseconds above "
                    f"0; got {getattr(self, name)!r}."
                )
            # JSON has lists, which are neither hashable nor equal to tuples.
            object.__setattr__(self, name, tuple(times))
        for name in ("further_message_us", "spread"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"a network's {name} must be at least 0; got {getattr(self, name)!r}."
                )
        factors = tuple((str(name), float(factor)) for name, factor in self.collective_factors)
        if not all(0 < factor < math.inf for _, factor in factors):
            raise ConfigError(
                "a network's collective_factors must be names and factors above 0; got "
                f"{self.collective_factors!r}."
            )
        object.__setattr__(self, "collective_factors", factors)

    def margin(self, least: float) -> float:
        """Return the fraction by which slices must be predicted to be faster than a stock pair.

        Args:
            least: The margin of predictions over a network whose times do not vary.
        """
        return min(max(least, self.spread), _LARGEST_MARGIN)

    @functools.cached_property
    def _slice_us(self) -> Times:
        return _undisturbed(self.slice_us)

    @functools.cached_property
    def _collective_us(self) -> Times:
        return _undisturbed(self.collective_us)

    def exchange_us(self, nbytes: float, messages: float = 1.0) -> float:
        """Return the time of one exchange of slices.

        Args:
            nbytes: Bytes that a rank sends to other nodes, in all messages together.
            messages: Number of these messages.
        """
        return _interpolated(self._slice_us, nbytes) + self.further_message_us * max(
            0, messages - 1
        )

    def following_us(self, nbytes: float, messages: float = 1.0) -> float:
        """Return the time from the end of an exchange to that of the next one, which was under way
        meanwhile: it has begun, and its bytes take the rate of the largest message.

        Args:
            nbytes, messages: Those of the next one, as for :meth:`exchange_us`.
        """
        largest, us = self._slice_us[-1]
        return nbytes * us / largest + self.further_message_us * max(0, messages - 1)

    def collective_time_us(self, collective: str, nbytes: float) -> float:
        """Return the time of one of torch's collectives that sends ``nbytes`` to other nodes.

        Args:
            collective: Its name, as for :func:`collective_bytes`.
        """
        return self.all_to_all_us(nbytes) * dict(self.collective_factors).get(collective, 1.0)

    def all_to_all_us(self, nbytes: float) -> float:
        """Return the time of torch's all-to-all that sends ``nbytes`` to other nodes.

        Between measured sizes, and beyond them, it keeps its ratio to the time of slices.
        """
        ratios = [(size, us / self.exchange_us(size)) for size, us in self._collective_us]
        (smallest, _), (largest, _) = ratios[0], ratios[-1]
        within = min(max(nbytes, smallest), largest)
        return self.exchange_us(nbytes) * _interpolated(ratios, within)


def _undisturbed(points: Times) -> Times:
    """Return measured times without those of messages that met other work on the machine.

    A network is busy with larger messages at least as well as with smaller ones, one after another,
    so a message takes no longer than these; nor longer than the smallest one, and then its bytes
    at the rate of the largest one.
    """
    times: list[tuple[int, float]] = []
    least = float("inf")
    for nbytes, us in points:
        least = min(least, us / nbytes)
        times.append((nbytes, least * nbytes))
    (_, begin_us), (largest, largest_us) = times[0], times[-1]
    return [(nbytes, min(us, begin_us + nbytes * largest_us / largest)) for nbytes, us in times]


def _interpolated(points: Times, x: float) -> float:
    """Return the value at ``x``: linear between points, constant below and in proportion above."""
    (first, value), (last, largest) = points[0], points[-1]
    if x <= first:
        return value
    if x > last:
        return largest * x / last
    for (low, below), (high, above) in itertools.pairwise(points):
        if x <= high:
            return below + (above - below) * (x - low) / (high - low)
    return largest


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted time of an implementation between nodes.

    Attributes:
        us: The time in microseconds.
        slices: Number of slices; 0 for a computation and a collective one after the other.
        shares: Relative sizes of the slices; empty if they are equal.
    """

    us: float
    slices: int = 0
    shares: tuple[int, ...] = ()

    @property
    def cut(self) -> str:
        """The slices in words, such as ``"4"`` or ``"1/4 + 3/4"``; empty if there are none."""
        return cut_in_words(self.shares) if self.shares else str(self.slices or "")


def cut_in_words(shares: Sequence[int]) -> str:
    """Return the number of slices, or their sizes if they differ, such as ``"1/4 + 3/4"``; nothing
    if there are none.
    """
    if len(set(shares)) == 1:
        return str(len(shares))
    return " + ".join(f"{share}/{sum(shares)}" for share in shares)


def one_after_the_other(
    network: NetworkRates,
    compute_us: float,
    cost: NetworkCost,
    memory_bytes_per_s: float,
    collective: str = "all_to_all",
) -> Prediction:
    """Return the time of a stock pair: the computation, the collective, what orders its result."""
    sent, exchange_us = cost.network_bytes, 0.0
    if sent:
        exchange_us = network.collective_time_us(collective, sent)
    return Prediction(compute_us + exchange_us + 1e6 * cost.landing_bytes / memory_bytes_per_s)


def in_slices(
    network: NetworkRates,
    compute_us: float,
    cost: NetworkCost,
    memory_bytes_per_s: float,
) -> Prediction:
    """Return the time of a computation whose results leave in slices.

    The slices of all destinations with one number leave together, when the computation has got
    that far. Two such exchanges are under way at a time: one begins while the other ends. What
    stays in the node is computed last, beside the last exchanges.

    Args:
        network: The network.
        compute_us: Time of the computation alone.
        cost: The traffic of one call.
        memory_bytes_per_s: Rate at which what has arrived is copied to its place.
    """
    shares = cost.shares or (1,) * cost.slices
    messages = cost.network_messages / len(shares)
    before_last, last = 0.0, 0.0  # the ends of the two exchanges before
    for number, share in enumerate(shares if cost.network_bytes else ()):
        nbytes = cost.network_bytes * share / sum(shares)
        # The fraction of the computation after which the slice is complete.
        complete = cost.remote_share * sum(shares[: number + 1]) / sum(shares)
        start = max(before_last, compute_us * complete)
        end = start + network.exchange_us(nbytes, messages)
        if number:
            end = max(end, last + network.following_us(nbytes, messages))
        if start < compute_us:
            end += STEP_US
        before_last, last = last, end
    landing_us = 1e6 * cost.landing_bytes / memory_bytes_per_s
    return Prediction(max(compute_us, last) + landing_us, len(shares), cost.shares)


def there_and_back(
    network: NetworkRates,
    own_us: float,
    slice_us: float,
    there: NetworkCost,
    back: NetworkCost,
    memory_bytes_per_s: float,
) -> Prediction:
    """Return the time of a computation on slices that arrive, whose results go back in slices.

    All slices leave at once, one exchange after another. Meanwhile each rank computes what it has
    itself, and then slice by slice what has arrived; the results of a slice leave while the next
    one is computed.

    Args:
        network: The network.
        own_us: Time of the computation on what this rank has itself.
        slice_us: Time of the computation on one slice of all others.
        there: The traffic of the slices.
        back: The traffic of their results, in as many slices; after the last of them, memory reads
            and writes ``landing_bytes``.
        memory_bytes_per_s: Rate at which it does.
    """
    slices = there.slices
    out_us, back_us = (
        network.exchange_us(cost.network_bytes / slices, cost.network_messages / slices)
        for cost in (there, back)
    )
    computed, end = own_us, slices * out_us
    for number in range(slices):
        computed = max(computed, (number + 1) * out_us) + slice_us
        end = max(end, computed) + back_us
    return Prediction(end + 1e6 * back.landing_bytes / memory_bytes_per_s, slices)


def best_in_slices(
    network: NetworkRates,
    compute_us: Callable[[int], float],
    cost_of: Callable[[int], NetworkCost],
    memory_bytes_per_s: float,
) -> Prediction:
    """Return the prediction with the number of slices, a power of two, that takes least time, or
    hardly more with fewer slices.

    Args:
        compute_us: Function from a number of slices to the time of the computation alone, in
            microseconds.
        cost_of: Function from a number of slices to the traffic of a call.
    """

    def predict(slices: int) -> Prediction:
        prediction = in_slices(network, compute_us(slices), cost_of(slices), memory_bytes_per_s)
        # A call may have several exchanges of as many slices.
        return dataclasses.replace(prediction, slices=slices)

    return best_number_of_slices(predict)


def best_number_of_slices(
    predict: Callable[[int], Prediction], most_slices: int = MOST_SLICES
) -> Prediction:
    """Return the prediction with the number of slices, a power of two, that takes least time, or
    hardly more with fewer slices.

    Args:
        predict: Function from a number of slices to the prediction.
        most_slices: Largest number of slices.
    """
    numbers = itertools.takewhile(
        lambda slices: slices <= min(most_slices, MOST_SLICES),
        (1 << power for power in itertools.count()),
    )
    return first_of_the_best([predict(slices) for slices in numbers])


def first_of_the_best(predictions: Sequence[Prediction]) -> Prediction:
    """Return the first prediction that takes least time, or hardly more."""
    limit_us = (1 + _NEAR) * min(prediction.us for prediction in predictions)
    return next(prediction for prediction in predictions if prediction.us <= limit_us)


def collective_bytes(collective: str, size: int, rank: int, node_of_rank: tuple[int, ...]) -> int:
    """Return the bytes that a rank sends to other nodes in a library's collective.

    Reductions and gathers are taken for rings through every node's ranks at once, which is the
    least that they send.

    Args:
        collective: ``"all_to_all"``, ``"reduce_scatter"``, ``"all_gather"`` or ``"all_reduce"``.
        size: Bytes of the rank's buffer that the collective exchanges.
        rank: The rank.
        node_of_rank: Number of each rank's node.
    """
    ranks, near = len(node_of_rank), node_of_rank.count(node_of_rank[rank])
    if collective == "all_to_all":
        return size * (ranks - near) // ranks
    nodes = len(set(node_of_rank))
    passes = 2 if collective == "all_reduce" else 1
    return passes * size * (nodes - 1) // nodes // near


def even_nodes(ranks: int, nodes: int) -> tuple[int, ...]:
    """Return the number of each rank's node where equally many consecutive ranks are on each."""
    return tuple(rank * nodes // ranks for rank in range(ranks))


@functools.cache
def guessed_network() -> NetworkRates:
    """Return the network that is taken where none was measured: sockets between two H200s.

    It is the only one that was measured, and a slow one. It asks for few slices, and only where the
    computation is long; over a network that is ten times as fast, these hide less, but cost little
    of such a computation.
    """
    folder = importlib.resources.files("interlace.costs") / "networks"
    values = json.loads((folder / "two_h200_over_sockets.json").read_text(encoding="utf-8"))
    return parse_network(values)


def parse_network(values: dict[str, Any]) -> NetworkRates:
    """Return the network that the fields of a JSON object describe.

    Raises:
        ConfigError: they are not those of a network.
    """
    if not isinstance(values, dict):
        raise ConfigError(
            f"a network must have the fields of NetworkRates; got {str(values)[:60]}."
        )
    try:
        known = {name: values[name] for name in values if name not in _NO_LONGER_READ}
        fields = [field.name for field in dataclasses.fields(NetworkRates)]
        if not set(fields[:-3]) <= known.keys() <= set(fields):
            raise ConfigError(
                f"a network must have the fields {', '.join(fields)}, of which the last three may "
                f"be missing; got {shortened(', '.join(known))}."
            )
        return NetworkRates(**known)
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"a network must have the fields of NetworkRates; {error}.") from error


def read_network(file: Path) -> NetworkRates:
    """Return the network of a JSON file: a network by itself, or a machine profile with one.

    Raises:
        ConfigError: it cannot be read, or holds no network.
    """
    values = read_json(file, "a JSON file with a network")
    if isinstance(values, dict) and "compositions" in values:
        values = values.get("network")
    if not isinstance(values, dict):
        raise ConfigError(
            f"{file} must hold a network; it has none. `interlace tune machine` on several nodes "
            "measures one."
        )
    try:
        return parse_network(values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
