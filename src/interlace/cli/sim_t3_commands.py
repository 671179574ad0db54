"""Commands and options of T3 under ``interlace sim``; the simulator is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from interlace.cli.outputs import Outputs
from interlace.cli.sim_options import (
    BarsFile,
    JsonFile,
    Machine,
    OutFolder,
    T3Degree,
    T3Model,
    T3PlotFile,
    T3Set,
    T3Shape,
    T3SubLayer,
    TraceFile,
    Workers,
)


def t3(
    model: T3Model = "T-NLG",
    tp: T3Degree = 8,
    sublayer: T3SubLayer = "fc2",
    shape: T3Shape = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the product, instead of the model's. Few: generation."),
    ] = None,
    collective: Annotated[
        str,
        typer.Option(
            help="reduce-scatter (and all-gather), all-to-all, or all-gather (before the product)."
        ),
    ] = "reduce-scatter",
    network: Annotated[
        str | None, typer.Option(help="ring, full or switch; the machine's by default.")
    ] = None,
    slowest: Annotated[
        float | None,
        typer.Option(
            min=1, help="Simulate every GPU, and let the first one compute this many times as long."
        ),
    ] = None,
    machine: Machine = "t3-paper",
    changes: T3Set = None,
    json_file: JsonFile = None,
    plot: T3PlotFile = None,
    trace: TraceFile = None,
) -> None:
    """Simulate a sub-layer whose memory system tracks the product and triggers its collective
    (T3), next to six other configurations.
    """
    from interlace.cli.sim_t3 import run_t3

    run_t3(
        model,
        tp,
        sublayer,
        shape,
        tokens,
        collective,
        network,
        slowest,
        machine,
        changes,
        Outputs(json=json_file, plot=plot, trace=trace),
    )


def t3_layer(
    model: T3Model = "T-NLG",
    tp: T3Degree = 8,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that generate tokens.")] = 8,
    rest_share: Annotated[
        float,
        typer.Option(min=0, max=0.99, help="Share of the time in operators that are not sliced."),
    ] = 0.425,
    machine: Machine = "t3-paper",
    changes: T3Set = None,
    json_file: JsonFile = None,
) -> None:
    """Estimate a layer with T3: in training, for a prompt, and in the generation of tokens."""
    from interlace.cli.sim_t3 import run_layer

    run_layer(model, tp, machine, changes, sequences, rest_share, Outputs(json=json_file))


def t3_sensitivity(
    model: T3Model = "T-NLG",
    tp: T3Degree = 8,
    sublayer: T3SubLayer = "fc2",
    shape: T3Shape = None,
    machine: Machine = "t3-paper",
    changes: T3Set = None,
    json_file: JsonFile = None,
) -> None:
    """Change each of T3's assumptions in turn, and show the speed-ups. A minute or two."""
    from interlace.cli.sim_t3 import run_sensitivity

    run_sensitivity(model, tp, sublayer, shape, machine, changes, Outputs(json=json_file))


def t3_measured(
    documents: Annotated[
        list[Path],
        typer.Argument(
            help="What `interlace bench gemm_reduce_scatter` or `gemm_all_to_all` wrote.",
            metavar="FILE...",
        ),
    ],
    machine: Machine = "t3-h200",
    changes: T3Set = None,
    json_file: JsonFile = None,
    plot: BarsFile = None,
) -> None:
    """Compare T3's hardware with software that was measured, shape by shape."""
    from interlace.cli.sim_t3 import run_measured

    run_measured(documents, machine, changes, Outputs(json=json_file, plot=plot))


def reproduce_t3(out: OutFolder = Path("interlace-sim-t3"), workers: Workers = None) -> None:
    """Compare the figures of tracked and triggered communication (Pati et al., ASPLOS'24) with
    ours, and list every assumption.
    """
    from interlace.cli.sim_t3 import run_reproduce

    run_reproduce(Outputs(folder=out), workers)
