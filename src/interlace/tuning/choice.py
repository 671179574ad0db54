"""Describe what ``impl="auto"`` chose for a call, and choose by a tuned table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from interlace import tuning
from interlace.costs.network import Prediction
from interlace.costs.time import in_order
from interlace.registry import Implementation, Operator
from interlace.tuning.configuration import Configuration
from interlace.tuning.gpu import Gpu

Config = TypeVar("Config", bound=Configuration)


class NetworkTimes(NamedTuple):
    """The predicted times of one call between nodes.

    Attributes:
        network: Name of the measured network.
        predictions: Predicted time of each implementation of which one is known.
        margin: The fraction by which slices must be below every stock pair.
    """

    network: str
    predictions: Mapping[str, Prediction]
    margin: float

    def order(self, operator: Operator) -> list[str]:
        """Return the implementations by their times, a pair before what is hardly shorter."""
        times_us = {name: prediction.us for name, prediction in self.predictions.items()}
        return in_order(times_us, operator.preferred_among(times_us), self.margin)

    def slices_of(self, implementation: str) -> int | None:
        """Return the number of slices that an implementation takes; None if it is unknown."""
        prediction = self.predictions.get(implementation)
        return None if prediction is None else prediction.slices

    def __str__(self) -> str:
        """Return the times in words, the shortest first."""
        by_time = sorted(self.predictions.items(), key=lambda item: item[1].us)
        return ", ".join(
            f"{name} {prediction.us:.0f} us"
            + (f" in {_slices(prediction)}" if prediction.slices > 1 else "")
            for name, prediction in by_time
        )


def _slices(prediction: Prediction) -> str:
    """Return the slices in words, such as ``"2 slices (1/4 + 3/4)"``."""
    is_even = prediction.cut == str(prediction.slices)
    return f"{prediction.slices} slices" + ("" if is_even else f" ({prediction.cut})")


@dataclasses.dataclass(frozen=True)
class Choice(Generic[Config]):
    """The implementation that ``impl="auto"`` chose, its configuration, and the reason.

    Attributes:
        impl: The implementation.
        config: The fused kernel's configuration.
        reason: Why, for :func:`interlace.explain`.
        times_us: Predicted times in microseconds by implementation, in the order in which a call
            tries them: the shortest first, with a pair before what is hardly shorter.
        worst_error: The factor by which these times may be wrong.
        is_known: Whether times are known by a table or a profile; else it is a default.
        faster: All implementations that take less time than the fastest stock pair.
        is_exact: Whether a table has the very sizes of the call.
        table_us: Microseconds that the table's entry was measured to take; None without one.
        table_ranks: The number of ranks with which it was measured.
        configs: The configurations of implementations that have one of their own, by name.
    """

    impl: str
    config: Config
    reason: str
    times_us: Mapping[str, float] = dataclasses.field(default_factory=dict)
    worst_error: float = 1.0
    is_known: bool = False
    faster: tuple[str, ...] = ()
    is_exact: bool = False
    table_us: float | None = None
    table_ranks: int | None = None
    configs: Mapping[str, Configuration] = dataclasses.field(default_factory=dict)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Return the implementations in the order in which a call tries them; the last one can run
        any call.
        """
        return tuple(dict.fromkeys((self.impl, *self.times_us, "unfused")))

    def between(self, operator: Operator, nodes: int, times: NetworkTimes | None) -> Choice[Config]:
        """Return this choice, or what is predicted to be the fastest if there are several nodes.

        Times that were measured or predicted within a node say nothing about several. The stock
        pair runs unless a measured network says that slices take less time (decision 0023).

        Args:
            operator: The operator's declaration.
            nodes: Number of nodes that the ranks are on.
            times: Predicted times between the nodes; None if no network was measured.
        """
        if nodes == 1:
            return self
        between = dataclasses.replace(
            self,
            impl="unfused",
            times_us={},
            is_known=False,
            faster=(),
            is_exact=False,
        )
        if times is None:
            reason = (
                f"no network between the {nodes} nodes was measured, which "
                "INTERLACE_MEASURE_MACHINE=1 or `interlace tune machine` on them does"
            )
            return dataclasses.replace(between, reason=reason)
        if all(map(operator.is_pair, times.predictions)):
            reason = f"no time in slices is predicted between the {nodes} nodes"
            return dataclasses.replace(between, reason=reason)
        order = times.order(operator)
        reason = f"predicted between {nodes} nodes over {times.network}: {times}"
        if times.predictions[order[0]].us > min(
            prediction.us for prediction in times.predictions.values()
        ):
            reason += f"; slices would run if they were {times.margin:.0%} faster than every pair"
        return dataclasses.replace(
            between,
            impl=order[0],
            reason=reason,
            times_us={name: times.predictions[name].us for name in order},
        )

    def packed(self) -> list[Any]:
        """Return what ranks must have in common of it, as JSON can hold it."""
        return [
            self.impl, str(self.config), self.reason, dict(self.times_us), self.worst_error,
            self.is_exact, {name: str(config) for name, config in self.configs.items()},
        ]  # fmt: skip

    @staticmethod
    def unpacked(operator: Operator, packed: Sequence[Any]) -> Choice[Any]:
        """Return the choice of an operator that another rank has packed."""
        impl, config, reason, times_us, worst_error, is_exact, configs = packed
        kind: Any = operator.config_type
        kinds: dict[str, Any] = {
            implementation.name: implementation.config_type
            for implementation in operator.implementations
        }
        return Choice(
            impl,
            kind.parse(config),
            reason,
            times_us,
            worst_error,
            is_exact=is_exact,
            configs={name: kinds[name].parse(text) for name, text in configs.items()},
        )

    def with_text(self, operator: Operator, text: str) -> Choice[Config]:
        """Return this choice with a caller's configuration, given as its text.

        Raises:
            ArgumentError: It is not the text of a configuration of the operator.
        """
        implementation = configured(operator, text)
        if implementation.config_type is None:
            return dataclasses.replace(self, config=type(self.config).parse(text))
        kind: Any = implementation.config_type
        parsed = {implementation.name: kind.parse(text)}
        return dataclasses.replace(self, configs={**self.configs, **parsed})

    def accepted(
        self, operator: Operator, terms: Any, lacking: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[str, dict[str, str]]:
        """Return the first candidate that does not refuse a call, and what the ones before it must
        have and have not, by name.

        Args:
            operator: The operator's declaration.
            terms: The properties of the call by which its implementations may refuse it.
            lacking: What further implementations must have and have not, by name.
        """
        unmet: dict[str, str] = {}
        for name in self.candidates:
            refusal = operator.refusal(name, terms) or lacking.get(name)
            if refusal is None:
                return name, unmet
            unmet[name] = refusal
        raise AssertionError("the unfused pair refuses no call")


def configured(operator: Operator, text: str) -> Implementation:
    """Return the implementation whose configuration a text is: one with a configuration of its own
    that has these fields, or else the operator's own kernel.
    """
    first, *later = operator.implementations
    kinds: list[tuple[Implementation, Any]] = [
        (implementation, implementation.config_type) for implementation in later
    ]
    return next(
        (implementation for implementation, kind in kinds if kind and kind.has_fields_of(text)),
        first,
    )


def on_cpu(config: Config, impl: str = "fused") -> Choice[Config]:
    """Return the choice on the CPU backend, with a configuration that suits the interpreter."""
    return Choice(
        impl,
        config,
        "the cpu backend exists to run the kernels; no time measured on it means anything "
        "(`interlace explain` predicts a GPU's)",
    )


def by_device(
    operator: str,
    sizes: dict[str, int],
    default: Config,
    on_interpreter: Mapping[str, Any],
    impl: str = "fused",
    *,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device | Gpu,
) -> Choice[Config]:
    """Return what a GPU's tuned table says; on the CPU backend, the kernel.

    Args:
        sizes: The operator's sizes by name.
        default: The configuration where nothing was measured.
        on_interpreter: The fields of ``default`` that are too large for Triton's interpreter, and
            their values there.
        impl: The kernel, which runs where nothing was measured.
    """
    if device.type == "cpu":
        return on_cpu(dataclasses.replace(default, **on_interpreter), impl)
    gpu = device.name if isinstance(device, Gpu) else torch.cuda.get_device_name(device)
    return by_table(operator, gpu, sizes, dtype, world_size, default, impl)


def by_table(
    operator: str,
    gpu: str,
    sizes: dict[str, int],
    dtype: torch.dtype,
    world_size: int,
    default: Config,
    impl: str = "fused",
) -> Choice[Config]:
    """Return what the nearest entry of an operator's tuned table says, or a default without one.

    Args:
        gpu: The GPU's name, as ``torch.cuda.get_device_name`` has it.
        sizes: The operator's sizes by name.
        default: The configuration where nothing was measured.
        impl: The implementation where nothing was measured.
    """
    point = tuning.Point(world_size, str(dtype).removeprefix("torch."), sizes)
    entry = tuning.nearest(operator, gpu, point, type(default).regime)
    if entry is None:
        return Choice(
            impl,
            default,
            "nothing was measured on this GPU near these sizes; the default configuration",
        )
    # An operator without a kernel of its own has no configuration.
    config = type(default).parse(entry.config) if entry.config else default
    return Choice(
        entry.impl,
        config,
        entry.reason,
        is_known=True,
        faster=entry.faster,
        is_exact=entry.is_exact,
        table_us=entry.us,
        table_ranks=entry.world_size,
    )
