"""Commands and options of T3 under ``interlace sim``; the simulator is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from interlace_sim.cli.options import options, underscored

_PRODUCT = ("model", "tensor", "sublayer", "shape", "machine", "changes")
_CHANGES = {"changes": "Change a value of the machine, say gpu.efficiency=0.9; several times."}
_SHARED: dict[str, Any] = {"model": "T-NLG", "machine": "t3-paper"}


@options(
    *_PRODUCT,
    files=("json", "plot", "trace"),
    helps={
        **_CHANGES,
        "plot": "Draw where the time goes, and DRAM and link traffic over time, by cause.",
    },
    **_SHARED,
)
def t3(
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the product, instead of the model's. Few: generation."),
    ] = None,
    collective: Annotated[
        str,
        typer.Option(
            help="reduce_scatter (and all_gather), all_to_all, or all_gather (before the product).",
            callback=underscored,
        ),
    ] = "reduce_scatter",
    network: Annotated[
        str | None, typer.Option(help="ring, full or switch; the machine's by default.")
    ] = None,
    slowest: Annotated[
        float | None,
        typer.Option(
            min=1, help="Simulate every GPU, and let the first one compute this many times as long."
        ),
    ] = None,
    **shared: Any,
) -> None:
    """Simulate a sub-layer whose memory system tracks the product and triggers its collective
    (T3), next to six other configurations.
    """
    from interlace_sim.cli.t3 import run_t3

    run_t3(tokens=tokens, collective=collective, network=network, slowest=slowest, **shared)


@options("model", "tensor", "machine", "changes", files=("json",), helps=_CHANGES, **_SHARED)
def t3_layer(
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that generate tokens.")] = 8,
    rest_share: Annotated[
        float,
        typer.Option(min=0, max=0.99, help="Share of the time in operators that are not sliced."),
    ] = 0.425,
    **shared: Any,
) -> None:
    """Estimate a layer with T3: in training, for a prompt, and in the generation of tokens."""
    from interlace_sim.cli.t3 import run_layer

    run_layer(sequences=sequences, rest_share=rest_share, **shared)


@options(*_PRODUCT, files=("json",), helps=_CHANGES, **_SHARED)
def t3_sensitivity(
    pairs: Annotated[
        bool,
        typer.Option("--pairs", help="Change assumed values two at a time. Several minutes."),
    ] = False,
    **shared: Any,
) -> None:
    """Change each of T3's assumptions in turn, and show the speed-ups. A minute or two."""
    from interlace_sim.cli.t3_studies import run_sensitivity

    run_sensitivity(pairs=pairs, **shared)


@options(
    "changes",
    files=("json", "plot"),
    helps={**_CHANGES, "plot": "Draw a bar for each shape."},
    machine="t3-h200",
)
def t3_measured(
    documents: Annotated[
        list[Path],
        typer.Argument(
            help="What `interlace bench gemm_reduce_scatter` or `gemm_all_to_all` wrote.",
            metavar="FILE...",
        ),
    ],
    **shared: Any,
) -> None:
    """Compare T3's hardware with software that was measured, shape by shape."""
    from interlace_sim.cli.t3 import run_measured

    run_measured(documents, **shared)


@options("changes", "workers", files=("folder",), helps=_CHANGES, folder=Path("interlace-sim-t3"))
def reproduce_t3(
    every_case: Annotated[
        bool,
        typer.Option(
            "--every-case",
            help="Simulate and write cases that no figure needs, too; twice as long.",
        ),
    ] = False,
    **shared: Any,
) -> None:
    """Compare the figures of tracked and triggered communication (Pati et al., ASPLOS'24) with
    ours, and list every assumption.
    """
    from interlace_sim.cli.t3_studies import run_reproduce

    run_reproduce(every_case=every_case, **shared)
