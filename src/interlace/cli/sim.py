"""Commands and options of ``interlace sim``; the simulator is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from interlace.cli import sim_t3_commands
from interlace.cli.outputs import Outputs
from interlace.cli.sim_options import (
    AllRanks,
    AllReduce,
    AllToAll,
    CacheFolder,
    CsvFile,
    Fused,
    HeatMapFile,
    JsonFile,
    Machine,
    Model,
    Network,
    NoCache,
    Nodes,
    OutFolder,
    PlotFile,
    PointsFile,
    Set,
    Slices,
    TraceFile,
    Workers,
)

sim_app = typer.Typer(
    help="Simulate training steps and collectives on many nodes: what fusing buys.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
reproduce_app = typer.Typer(
    help="Run a published study again: its figure, ours, and the assumptions between.",
    no_args_is_help=True,
)
sim_app.add_typer(reproduce_app, name="reproduce")


@sim_app.command()
def dlrm(
    nodes: Nodes = 0,
    model: Model = "",
    machine: Machine = "",
    topology: Network = None,
    fused: Fused = "both",
    all_to_all: AllToAll = "one_shot",
    all_reduce: AllReduce = "ring",
    slices: Slices = 0,
    changes: Set = None,
    all_ranks: AllRanks = False,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    plot: PlotFile = None,
    trace: TraceFile = None,
    chakra: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX", help="Write the unfused step as Chakra traces for ASTRA-sim."
        ),
    ] = None,
) -> None:
    """Simulate a training step of a recommendation model: embedding + All-to-All, fused and not."""
    from interlace.cli.sim_run import run_workload

    run_workload(
        "dlrm",
        {
            "nodes": nodes,
            "model": model,
            "machine": machine,
            "topology": topology,
            "fused": fused,
            "all_to_all": all_to_all,
            "all_reduce": all_reduce,
            "slices": slices,
            "all_ranks": all_ranks,
        },
        changes,
        Outputs(json=json_file, csv=csv_file, plot=plot, trace=trace),
        chakra,
    )


@sim_app.command()
def transformer(
    nodes: Nodes = 0,
    model: Model = "",
    machine: Machine = "",
    topology: Network = None,
    fused: Fused = "both",
    tensor: Annotated[int, typer.Option(min=1, help="GPUs of a tensor-parallel group.")] = 8,
    pipeline: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 8,
    all_reduce: AllReduce = "ring",
    slices: Slices = 0,
    changes: Set = None,
    all_ranks: AllRanks = False,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    plot: PlotFile = None,
    trace: TraceFile = None,
) -> None:
    """Simulate a training step of a Transformer with tensor, pipeline and data parallelism: GEMM +
    AllReduce, fused and not.
    """
    from interlace.cli.sim_run import run_workload

    run_workload(
        "transformer",
        {
            "nodes": nodes,
            "model": model,
            "machine": machine,
            "topology": topology,
            "fused": fused,
            "tensor": tensor,
            "pipeline": pipeline,
            "all_reduce": all_reduce,
            "slices": slices,
            "all_ranks": all_ranks,
        },
        changes,
        Outputs(json=json_file, csv=csv_file, plot=plot, trace=trace),
    )


@sim_app.command()
def moe(
    nodes: Nodes = 0,
    model: Model = "",
    machine: Machine = "",
    topology: Network = None,
    fused: Fused = "both",
    all_to_all: AllToAll = "one_shot",
    all_reduce: AllReduce = "ring",
    slices: Slices = 0,
    changes: Set = None,
    all_ranks: AllRanks = False,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    plot: PlotFile = None,
    trace: TraceFile = None,
) -> None:
    """Simulate a training step of a mixture of experts with expert parallelism: GEMM + All-to-All,
    fused and not.
    """
    from interlace.cli.sim_run import run_workload

    run_workload(
        "moe",
        {
            "nodes": nodes,
            "model": model,
            "machine": machine,
            "topology": topology,
            "fused": fused,
            "all_to_all": all_to_all,
            "all_reduce": all_reduce,
            "slices": slices,
            "all_ranks": all_ranks,
        },
        changes,
        Outputs(json=json_file, csv=csv_file, plot=plot, trace=trace),
    )


@sim_app.command()
def collective(
    kind: Annotated[
        str, typer.Argument(help="all_to_all, all_reduce, reduce_scatter or all_gather.")
    ],
    size: Annotated[
        str, typer.Option(help="Bytes of each rank's whole buffer, say 16MiB.")
    ] = "16MiB",
    algorithm: Annotated[
        str | None, typer.Option(help="One algorithm. \\[default: all of them]")
    ] = None,
    nodes: Nodes = 0,
    machine: Machine = "",
    topology: Network = None,
    changes: Set = None,
    all_ranks: AllRanks = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    trace: TraceFile = None,
) -> None:
    """Simulate one collective by one algorithm or by all: time, bandwidth, the physical bound."""
    from interlace.cli.sim_run import run_collective

    run_collective(
        kind,
        size,
        algorithm,
        {"nodes": nodes, "machine": machine, "topology": topology, "all_ranks": all_ranks},
        changes,
        Outputs(json=json_file, plot=plot, trace=trace),
    )


# T3's commands have their own file; this is their place in the list that --help shows.
sim_app.command()(sim_t3_commands.t3)
sim_app.command("t3-layer")(sim_t3_commands.t3_layer)
sim_app.command("t3-sensitivity")(sim_t3_commands.t3_sensitivity)
sim_app.command("t3-measured")(sim_t3_commands.t3_measured)


@sim_app.command()
def astra(
    network: Annotated[Path, typer.Option(help="ASTRA-sim's network YAML.", metavar="FILE")],
    system: Annotated[Path, typer.Option(help="ASTRA-sim's system JSON.", metavar="FILE")],
    workload: Annotated[
        str, typer.Option(help="Prefix of Chakra traces: PREFIX.RANK.et.", metavar="PREFIX")
    ],
    groups: Annotated[
        Path | None, typer.Option(help="Communicator groups, JSON.", metavar="FILE")
    ] = None,
    unaware: Annotated[
        bool,
        typer.Option(
            "--congestion-unaware", help="Every message has the network to itself: not physical."
        ),
    ] = False,
    json_file: JsonFile = None,
    trace: TraceFile = None,
) -> None:
    """Run ASTRA-sim's own inputs with its own semantics."""
    from interlace.cli.sim_files import run_astra

    run_astra(network, system, workload, groups, unaware, Outputs(json=json_file, trace=trace))


@sim_app.command()
def sweep(
    kind: Annotated[str, typer.Argument(help="dlrm, transformer, moe or collective.")],
    parameters: Annotated[
        list[str],
        typer.Option(
            "--param",
            metavar="NAME=A,B,...",
            help="Values of a parameter; every combination is run.",
        ),
    ],
    changes: Set = None,
    value: Annotated[
        str,
        typer.Option(
            help="What the heat map shows: total_ns, exposed_ns, bound_ns or saved_percent."
        ),
    ] = "saved_percent",
    workers: Workers = None,
    cache: CacheFolder = None,
    no_cache: NoCache = False,
    json_file: JsonFile = None,
    csv_file: PointsFile = None,
    plot: HeatMapFile = None,
) -> None:
    """Run every combination of some parameters in parallel; each is run once and remembered."""
    from interlace.cli.sim_studies import run_sweep

    run_sweep(
        kind,
        parameters,
        changes,
        value,
        workers,
        cache,
        no_cache,
        Outputs(json=json_file, csv=csv_file, plot=plot),
    )


@sim_app.command()
def validate(
    cases: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded runs. \\[default: those of the package]"),
    ] = None,
    out: OutFolder = Path("interlace-sim-validate"),
    brief: Annotated[
        bool, typer.Option("--brief", help="Show a summary and what differs, not every case.")
    ] = False,
) -> None:
    """Run recorded ASTRA-sim runs and measured all-to-alls again; print and write every error."""
    from interlace.cli.sim_files import run_validate

    raise typer.Exit(run_validate(cases, Outputs(folder=out), brief))


@sim_app.command()
def calibrate(
    measurements: Annotated[
        list[Path],
        typer.Argument(help="JSON files with measured products, collectives, or bench documents."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The machine file to write.")],
    base: Annotated[str, typer.Option(help="Machine whose other values are kept.")] = "h200-node",
    gpus: Annotated[
        int | None, typer.Option(help="Use collectives of this many GPUs only.")
    ] = None,
    name: Annotated[str, typer.Option(help="The machine's name.")] = "calibrated",
    source: Annotated[
        str,
        typer.Option(
            help="Where the measurements come from. \\[default: the files' names]",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Fit a machine file to measurements, and show its errors on points held out of the fit."""
    from interlace.cli.sim_files import run_calibrate

    run_calibrate(measurements, out, base, gpus, name, source)


@sim_app.command("presets")
def show_presets(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this preset, each value with its source and confidence."),
    ] = None,
) -> None:
    """List the presets, or show one."""
    from interlace.cli.sim_files import run_presets

    run_presets(name)


@reproduce_app.command("sc24")
def reproduce_sc24(
    out: OutFolder = Path("interlace-sim-sc24"),
    workers: Workers = None,
    cache: CacheFolder = None,
    no_cache: NoCache = False,
) -> None:
    """Compare the 21 % of DLRM training on 128 nodes (Punniyamurthy et al., SC24) with ours."""
    from interlace.cli.sim_studies import run_sc24

    run_sc24(Outputs(folder=out), workers, cache, no_cache)


reproduce_app.command("t3")(sim_t3_commands.reproduce_t3)
