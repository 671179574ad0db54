"""Make a machine's profile of what was measured on it.

``interlace tune machine`` measures rates (:mod:`interlace.comm.groups.machine_rates`) and calls of
every operator. What the short stay cannot tell, how an implementation composes its time, is taken
from the profile that is known, and scaled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from interlace.bench import profile_fit
from interlace.costs.product_fit import MeasuredRates, with_rates
from interlace.costs.time import MachineProfile

_TRUSTED = 12
"""How many calls the known compositions count as much as. The H200's choose well on H100s as they
are (decision 0019), better than with the ratios of five calls of each implementation.
"""


def profile_from(
    start: MachineProfile,
    gpu: str,
    processors: int,
    rates: MeasuredRates,
    results: Sequence[Mapping[str, Any]],
    source: str,
) -> MachineProfile:
    """Return the profile that measurements show.

    Args:
        start: What is known before: the GPU's own profile, or a guess.
        gpu: The GPU's name, as ``torch.cuda.get_device_name`` has it.
        processors: Its number of streaming multiprocessors.
        rates: Rates of products and links.
        results: Results of calls, as those of :func:`interlace.bench.sweep.bench`.
        source: Where and when it was measured.
    """
    machine = with_rates(start, gpu, processors, rates, source)
    machine = dataclasses.replace(machine, is_guess=False)
    points = profile_fit.points_of([{"results": results}])
    scaled = profile_fit.scaled(machine, points, _TRUSTED)
    compositions = profile_fit.merged(machine.compositions, scaled)
    composed = dataclasses.replace(machine, compositions=compositions)
    return dataclasses.replace(composed, corrections=profile_fit.corrections_of(composed, points))
