"""The simulated timeline of a call that ``interlace trace`` traces, and where the two part."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from interlace.cli.console import make_table
from interlace.cli.gpus import choice_on
from interlace.comm import MAX_PROGRAMS
from interlace.costs.time import SizedCall
from interlace.errors import ArgumentError
from interlace.operators.gemm_all_reduce.config import default_config
from interlace.testing.cases import Case
from interlace.testing.cases.base import DTYPES
from interlace.testing.cases.products import GemvCase, ProductCase
from interlace.tracing import PHASES, Account, Activity, Event, Launch, Trace
from interlace.tuning.choice import by_table
from interlace.tuning.gpu import Gpu
from interlace.units import format_ns
from interlace_sim import call as simulated
from interlace_sim import operators as simulated_operators

_MUCH = 0.1
"""The share of a measured phase by which the simulation parts from it, if it is marked."""

_LITTLE = 0.01
"""The share of the whole call below which a difference is not marked."""


def simulate(case: Case, ranks: int, gpu: Gpu) -> Trace:
    """Return the timeline of a call on GPUs that need not be here.

    The call has the implementation of the case, and the configuration that its kernel would have.

    Raises:
        ArgumentError: The simulator has no such call.
        ConfigError: The simulator has no machine of these GPUs.
    """
    machine = simulated.machine_with(gpu.name)
    if isinstance(case, GemvCase):
        if case.variant or case.impl_name == "unfused":
            return _as_trace(_gemv(case, ranks, gpu), gpu.processors)
    elif isinstance(case, ProductCase) and case.splits is None:
        rows = case.rows * ranks if case.collective == "all_gather" else case.rows
        name = {"float8": "float8_e4m3fn"}.get(case.dtype, case.dtype)
        sizes = SizedCall.of_dtype(name, rows, case.columns, case.inner, ranks)
        tiling = _tiling(case, sizes, gpu)
        return _as_trace(
            simulated.simulate_product(machine, case.operator, case.impl, sizes, tiling),
            gpu.processors,
        )
    raise ArgumentError(
        f"--simulated and --gpu must be given for an operator around one product, in one of the "
        f"implementations {', '.join(simulated.IMPLEMENTATIONS)}, or for a GEMV's kernels; got "
        f"{case.operator} {case.impl}. Leave them out."
    )


def _tiling(case: ProductCase, sizes: SizedCall, gpu: Gpu) -> simulated.Tiling:
    """Return how the case's kernel cuts its product on a GPU."""
    config = choice_on(gpu, case.declaration, sizes, DTYPES[case.dtype]).config
    # A gather's kernel leaves an SM to the kernels around its copies.
    spared = 1 if case.collective == "all_gather" else 0
    return simulated.Tiling(
        config.block_m,
        config.block_n,
        config.block_k,
        config.num_stages,
        min(config.max_programs or gpu.processors, gpu.processors) - spared,
        config.group_m,
        config.interleave,
        config.stagger,
    )


def _gemv(case: GemvCase, ranks: int, gpu: Gpu) -> simulated.SimulatedCall:
    machine, dtype = simulated.machine_with(gpu.name), DTYPES[case.dtype]
    tokens = case.rows or 1
    sizes = {"tokens": tokens, "rows": case.columns, "columns": case.inner}
    shape: dict[str, Any] = {**sizes, "itemsize": dtype.itemsize, "world_size": ranks}
    if not case.variant:
        pair = simulated_operators.gemv_all_reduce(**shape)
        return simulated.simulate_pair(machine, pair, ranks)
    product = {"rows": tokens, "columns": case.columns, "inner": case.inner}
    start = default_config(
        rows=tokens, columns=case.columns, world_size=ranks, itemsize=dtype.itemsize
    )
    config = by_table(case.operator, gpu.name, product, dtype, ranks, start).config
    return simulated.simulate_words(
        machine,
        f"{case.operator}_{case.variant}",
        **shape,
        block_n=config.block_n,
        programs=min(config.max_programs or MAX_PROGRAMS, MAX_PROGRAMS),
        two_phase=case.variant == "two_phase",
    )


def _as_trace(call: simulated.SimulatedCall, processors: int) -> Trace:
    """Return a simulated call as a trace, whose times count from its first event, as others' do."""
    first_ns = min(
        [
            *(
                events[0].time_ns
                for of_rank in call.launches
                for launch in of_rank
                for events in launch.programs.values()
            ),
            *(activity.start_ns for of_rank in call.activities for activity in of_rank),
        ]
    )

    def programs(launch: simulated.Launch) -> dict[int, list[Event]]:
        return {
            number: [
                Event(
                    float(event.time_ns - first_ns),
                    event.kind,
                    event.number,
                    event.peer,
                    has_several=False,
                    sm=number % processors,
                    lane=event.lane,
                )
                for event in events
            ]
            for number, events in launch.programs.items()
        }

    launches = [
        [Launch(launch.name, programs(launch), 0) for launch in of_rank]
        for of_rank in call.launches
    ]
    others = [
        [
            Activity(
                activity.name,
                activity.stream,
                float(activity.start_ns - first_ns),
                activity.duration_ns,
            )
            for activity in of_rank
        ]
        for of_rank in call.activities
    ]
    return Trace(launches, others)


def comparison(measured: Account, simulated_one: Account) -> Table:
    """Return the table of both timelines' phases, in which those that part are marked.

    A phase parts if the simulation is off by more than 10 % of it, and by 1 % of the call.
    """
    table = make_table("phase", "measured", "simulated", "difference", "")
    rows = [
        (phase, measured.phases[phase], simulated_one.phases[phase])
        for phase in PHASES
        if measured.phases[phase] or simulated_one.phases[phase]
    ]
    rows.append(("total", measured.total_ns, simulated_one.total_ns))
    for phase, ours_ns, theirs_ns in rows:
        difference_ns = theirs_ns - ours_ns
        parts = abs(difference_ns) > max(_MUCH * ours_ns, _LITTLE * measured.total_ns)
        sign = "-" if difference_ns < 0 else "+"
        share = f" ({difference_ns / ours_ns:+.0%})" if ours_ns else ""
        table.add_row(
            phase,
            format_ns(ours_ns),
            format_ns(theirs_ns),
            f"{sign}{format_ns(abs(difference_ns))}{share}",
            "parts" if parts else "",
        )
    return table
