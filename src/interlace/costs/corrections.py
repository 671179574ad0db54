"""Calls whose times a machine profile predicts, and what measured ones say of their neighbours."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from interlace.costs.time import MachineProfile

Schedule = Literal["whole", "batch", "by_rank", "by_peer", "tiled", "by_slot", "by_token", "to_all"]
"""How an implementation computes its product: one product of the library; one batch of the
library's products, a product for each rank's rows; one product of the library after another, for
each rank's rows; the same for the peers' rows, and tiles of its own kernel for the rank's own; or
tiles of its own kernel, none of which covers two ranks' rows. The last three are of layers of
experts and say which rows travel (:mod:`interlace.costs.expert_time`).
"""

Place = tuple[float, ...]
"""The coordinates of a call, between which distances are measured."""


class TimedCall(Protocol):
    """The sizes of a call whose time is composed of parts."""

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element of the operands."""

    @property
    def size(self) -> tuple[int, ...]:
        """Return the sizes by which measured calls are known; the number of ranks comes last."""

    def parts_us(
        self, profile: MachineProfile, operator: str, schedule: Schedule, tile: tuple[int, int]
    ) -> dict[str, float]:
        """Return the parts of an implementation's time, in microseconds.

        Args:
            schedule: How the implementation computes its product, or what it sends.
            tile: Rows and columns of the tiles of its kernel.
        """


@functools.lru_cache(maxsize=4096)
def place_of(size: Sequence[int]) -> Place:
    """Return the coordinates of a call: doubling a size is a distance of 1, and doubling the ranks,
    which come last, of 2. A size of 0 counts as 1.
    """
    *sizes, world_size = size
    return (*(math.log2(max(each, 1)) for each in sizes), 2 * math.log2(world_size))


def nearness(first: Place, second: Place) -> float:
    """Return how much one call says of another: 1 if they are the same, 0 if they are far apart."""
    return math.exp(-(math.dist(first, second) ** 2) / 2)


@dataclasses.dataclass(frozen=True)
class Corrections:
    """Correct one operator's composed times by those of measured calls of similar sizes.

    The logarithm of measured / composed has two parts. One is common to calls of similar sizes: the
    nearer a measured call is, the more it counts. The other is a call's own, and is known only for
    calls that were measured, which are predicted to take the time that they took.

    Attributes:
        calls: The sizes of the measured calls; of a product, rows, columns, inner and ranks.
        weights: For each implementation, the weight of each of these calls; 0 where it was not
            measured. A call's weight times its :func:`nearness` to another one is what it says of
            the common part there, and the weight itself is the call's own part.
    """

    calls: Sequence[Sequence[int]]
    weights: Mapping[str, Sequence[float]]

    def factor(self, implementation: str, call: TimedCall) -> float:
        """Return the factor by which a composed time is to be multiplied."""
        weights = self.weights.get(implementation)
        if weights is None:
            return 1.0
        index = self._indices.get(tuple(call.size))
        own = 0.0 if index is None else weights[index]
        return math.exp(own) * self.common_factor(implementation, call)

    def common_factor(self, implementation: str, call: TimedCall) -> float:
        """Return the factor without the call's own part, as if the call had not been measured
        itself.
        """
        weights = self.weights.get(implementation)
        if weights is None:
            return 1.0
        return math.exp(math.fsum(map(operator.mul, weights, self._nearness_to(tuple(call.size)))))

    def _nearness_to(self, size: tuple[int, ...]) -> list[float]:
        """Return the nearness of each measured call to a call of this size."""
        # The implementations of a call are predicted one after another.
        found = self._last.get(size)
        if found is None:
            place = place_of(size)
            found = [nearness(place, known) for known in self._places]
            self._last.clear()
            self._last[size] = found
        return found

    @functools.cached_property
    def _last(self) -> dict[tuple[int, ...], list[float]]:
        return {}

    @functools.cached_property
    def _places(self) -> list[Place]:
        return [place_of(tuple(known)) for known in self.calls]

    @functools.cached_property
    def _indices(self) -> dict[tuple[int, ...], int]:
        return {tuple(known): index for index, known in enumerate(self.calls)}
