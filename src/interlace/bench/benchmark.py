"""The parts that all benchmarks share: ways to compute a shape, their check, timing and tuning."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from interlace.bench.report import Role
from interlace.bench.timing import Timing, host_us, measure
from interlace.comm import group_of
from interlace.costs.machine import H200_NODE
from interlace.errors import BackendError, InterlaceError
from interlace.registry import Operator

Step = Callable[[int], object]
"""One call of a way; its argument chooses among operands, so that none stays in the cache."""

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run an operator, or a part of it, that a benchmark times.

    Attributes:
        name: The name that tables show.
        role: The claims that the time counts for.
        call: Enqueues the i-th call.
        impl: The value of ``impl`` by which the operator runs it; empty if there is none.
    """

    name: str
    role: Role
    call: Step
    impl: str = ""

    def entry(self, timing: Timing) -> dict[str, Any]:
        """Return the way's entry in a result's ``times``."""
        labels = {"role": self.role, **({"impl": self.impl} if self.impl else {})}
        return {**labels, **dataclasses.asdict(timing)}


@dataclasses.dataclass(frozen=True)
class LeastWork:
    """The least work that any execution must do on the rank that has most of it."""

    memory_bytes: int
    link_bytes: int
    flops: int | None = None

    def entries(self) -> dict[str, Any]:
        """Return the entries of a result, with the time of ``Machine.floor_ns`` in microseconds."""
        floor_ns = H200_NODE.floor_ns(self.memory_bytes, self.link_bytes, self.flops or 0)
        entries = {"floor_us": round(floor_ns / 1e3, 2), **dataclasses.asdict(self)}
        if self.flops is None:
            del entries["flops"]
        return entries


class Benchmark(Generic[Config]):
    """The operands of a shape on this rank, and every way to compute it.

    A subclass makes the operands and states the ways and their check. Results are checked before
    anything is timed.

    Attributes:
        operand_sets: The number of sets of operands, among which a call's argument chooses.
        releases: Whether a measurement ends with ``Group.release``, so that the buffers that its
            graph took may be used again. Not if a later way uses launches prepared earlier.

    Args:
        operator: The operator's declaration.
        shape: The sizes of one call, a dataclass; ``str(shape)`` is its name. It has the operands'
            ``dtype``, and the ``tolerance`` of the relative error that roundings explain.
        group: The ranks; None for the default process group.
    """

    operand_sets = 1
    releases = True

    def __init__(
        self, operator: Operator, shape: Any, group: dist.ProcessGroup | None = None
    ) -> None:
        self.operator, self.shape, self.group = operator, shape, group
        self.owner = group_of(group)
        self.device = self.owner.device

    # What a subclass states

    def tuned_call(self, config: Config) -> Callable[[int], Any]:
        """Return the call whose time the tuner minimises."""
        raise NotImplementedError

    def expected(self, i: int) -> torch.Tensor:
        """Return what the i-th tuned call must return."""
        raise NotImplementedError

    def compile(self, config: Config) -> None:
        """Compile the kernels of a configuration without running them."""

    # Right before fast

    def check(self, config: Config) -> float:
        """Return the largest relative error of three calls on any rank.

        Raises:
            InterlaceError: The error is above the tolerance.
        """
        call = self.tuned_call(config)
        # Three calls use both halves of the workspace, and the first half again.
        return self.accept([relative_error(call(i), self.expected(i)) for i in range(3)], config)

    def accept(self, errors: Iterable[float], *details: object) -> float:
        """Return the largest of all ranks' errors.

        Args:
            errors: This rank's relative errors.
            details: What was checked, for the message.

        Raises:
            InterlaceError: The error is above the tolerance; on every rank.
        """
        self.owner.synchronize()
        # A NaN would be lost in a maximum, and must not pass.
        worst_here = max(math.inf if math.isnan(error) else error for error in errors)
        (worst,) = self.maxima([worst_here], torch.float64)
        if worst > self.shape.tolerance:
            names = ", ".join(map(str, (self.shape, *details)))
            raise InterlaceError(
                f"{self.operator.name} {names}: relative error {worst:.1e} is above "
                f"{self.shape.tolerance:.1e}; not timed."
            )
        return float(worst)

    def maxima(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> list[Any]:
        """Return the largest value of any rank at each position."""
        largest = torch.tensor(values, dtype=dtype, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest.tolist()

    # Timing

    def measure(self, step: Step, samples: int = 15) -> Timing:
        """Time a call on all ranks at once."""
        timing = measure(step, period=self.operand_sets, samples=samples, group=self.group)
        if self.releases:
            self.owner.release()
        return timing

    def host_times(self, ways: Iterable[Way]) -> dict[str, float]:
        """Return the microseconds that the host takes to enqueue each way."""
        return {way.name: host_us(way.call, device=self.device, group=self.group) for way in ways}

    def time(self, ways: Iterable[Way]) -> dict[str, dict[str, Any]]:
        """Time ways one after the other; return a result's ``times``."""
        return {way.name: way.entry(self.measure(way.call)) for way in ways}

    def header(self, config: object, auto: str, error: float) -> dict[str, Any]:
        """Return the entries of a result that do not depend on times."""
        return {
            "operator": self.operator.name,
            **dataclasses.asdict(self.shape),
            "dtype": str(self.shape.dtype).removeprefix("torch."),
            "world_size": self.owner.world_size,
            "config": str(config),
            "auto": auto,
            "relative_error": error,
        }

    # Tuning

    def tune(self, changes: Iterable[Callable[[Config], Config]]) -> dict[Config, float]:
        """Time configurations that run and are right, each a change of the best one so far.

        Args:
            changes: Functions of the best configuration so far. The first one's argument is of no
                meaning: it returns the start.

        Returns:
            The median time in microseconds of every configuration that was tried, in order;
            infinite if it does not compile on some rank, or is wrong. Of configurations that are
            as fast, :func:`best_of` takes the first.
        """
        times: dict[Config, float] = {}
        for change in changes:
            candidate = change(best_of(times)) if times else change(None)  # type: ignore[arg-type]
            if candidate not in times and (not times or self.is_candidate(candidate)):
                times[candidate] = self.candidate_us(candidate)
        return times

    def fastest(self, times: Mapping[Config, float]) -> Config:
        """Return the fastest configuration of those that were tuned.

        Raises:
            BackendError: None runs and is right.
        """
        best = best_of(times) if times else None
        if best is None or math.isinf(times[best]):
            raise BackendError(
                f"{self.operator.name} {self.shape}: some configuration must run and be right; "
                "none did on this GPU."
            )
        return best

    def is_candidate(self, config: Config) -> bool:
        """Return whether a configuration is possible at all."""
        return True

    def candidate_us(self, config: Config) -> float:
        """Return a configuration's median time in microseconds; infinite if it cannot be used.

        The result is the same on every rank.
        """
        from triton.runtime.errors import OutOfResources

        if not self.all_compile([functools.partial(self.compile, config)], [config])[0]:
            return math.inf
        try:
            self.check(config)
        # Every rank refuses alike; a lack of resources is found before anything is launched.
        except (InterlaceError, OutOfResources) as error:
            self.leave_out(config, error)
            return math.inf
        return self.measure(self.tuned_call(config), samples=7).median_us

    def all_compile(
        self, compilations: Sequence[Callable[[], object] | None], configs: Sequence[Config]
    ) -> list[bool]:
        """Compile configurations on this rank; return which of them compile on every rank.

        Args:
            compilations: One per configuration; None if another rank compiles it.
            configs: The configurations, for messages.
        """
        works = []
        for compilation, config in zip(compilations, configs, strict=True):
            works.append(True)
            try:
                if compilation is not None:
                    compilation()
            # The compiler's errors have no common base: too many registers, say.
            except Exception as error:
                works[-1] = False
                self.leave_out(config, error)
        return [not fails for fails in self.maxima([not compiles for compiles in works])]

    def leave_out(self, config: Config, error: Exception) -> None:
        """Print why a configuration is not a candidate."""
        reason = str(error).splitlines()[0][:100]
        print(f"{self.operator.name} {self.shape}, {config}: left out: {reason}", flush=True)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over that of ``expected``, in float64.

    It is 0 for a rank without rows.
    """
    exact = expected.double()
    # The bound keeps a result of zeros from being divided by zero.
    return float((result.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def best_of(times: Mapping[Config, float]) -> Config:
    """Return the fastest configuration; of several that are as fast, the first."""
    return min(times, key=times.__getitem__)


def constant(config: Config) -> Callable[[Config], Config]:
    """Return a change that takes a configuration as it is, whatever was best before."""
    return lambda _: config


def changes_along(axes: Mapping[str, Sequence[Any]]) -> list[Callable[[Any], Any]]:
    """Return the changes of one field after the other to each of its values."""
    return [
        functools.partial(dataclasses.replace, **{name: value})
        for name, values in axes.items()
        for value in values
    ]
