"""Commands and options of ``interlace sim``; the simulator is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from interlace.cli.outputs import Outputs
from interlace_sim.cli import t3_commands
from interlace_sim.cli.options import options, underscored
from interlace_sim.defaults import DEFAULTS


class _SimCommands(TyperGroup):
    """The group of the simulator's commands, which also take ``--tp`` for ``--tensor``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # T3's papers say TP; the option has one name in help and documents all the same.
        spelled = [
            arg.replace("--tp", "--tensor", 1) if arg.partition("=")[0] == "--tp" else arg
            for arg in args
        ]
        return super().resolve_command(ctx, spelled)


sim_app = typer.Typer(
    cls=_SimCommands,
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

_FILES = ("json", "csv", "plot", "trace")
_STEP = ("nodes", "model", "machine", "topology", "fused", "all_reduce", "slices", "all_ranks")


def _run_workload(kind: str, **shared: Any) -> None:
    from interlace_sim.cli.run import run_workload

    run_workload(kind, **shared)


@sim_app.command()
@options(*_STEP, "all_to_all", "changes", files=_FILES, **DEFAULTS["dlrm"]._asdict())
def dlrm(
    chakra: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX", help="Write the unfused step as Chakra traces for ASTRA-sim."
        ),
    ] = None,
    **shared: Any,
) -> None:
    """Simulate a training step of a recommendation model: embedding + All-to-All, fused and not."""
    _run_workload("dlrm", chakra_prefix=chakra, **shared)


@sim_app.command()
@options(*_STEP, "tensor", "pipeline", "changes", files=_FILES, **DEFAULTS["transformer"]._asdict())
def transformer(**shared: Any) -> None:
    """Simulate a training step of a Transformer with tensor, pipeline and data parallelism: GEMM +
    AllReduce, fused and not.
    """
    _run_workload("transformer", **shared)


@sim_app.command()
@options(*_STEP, "all_to_all", "changes", files=_FILES, **DEFAULTS["moe"]._asdict())
def moe(**shared: Any) -> None:
    """Simulate a training step of a mixture of experts with expert parallelism: GEMM + All-to-All,
    fused and not.
    """
    _run_workload("moe", **shared)


@sim_app.command()
@options(
    "nodes",
    "topology",
    "all_ranks",
    "changes",
    files=("json", "plot", "trace"),
    machine=DEFAULTS["collective"].machine,
    nodes=DEFAULTS["collective"].nodes,
)
def collective(
    kind: Annotated[
        str,
        typer.Argument(
            help="all_to_all, all_reduce, reduce_scatter or all_gather.", callback=underscored
        ),
    ],
    size: Annotated[
        str, typer.Option(help="Bytes of each rank's whole buffer, say 16MiB or 1TB.")
    ] = "16MiB",
    algorithm: Annotated[
        str | None,
        typer.Option(help="One algorithm. \\[default: all of them]", callback=underscored),
    ] = None,
    **shared: Any,
) -> None:
    """Simulate one collective by one algorithm or by all: time, bandwidth, the physical bound."""
    from interlace_sim.cli.run import run_collective

    run_collective(kind, size, algorithm, **shared)


# T3's commands have their own file; this is their place in the list that --help shows.
sim_app.command()(t3_commands.t3)
sim_app.command("t3-layer")(t3_commands.t3_layer)
sim_app.command("t3-sensitivity")(t3_commands.t3_sensitivity)
sim_app.command("t3-measured")(t3_commands.t3_measured)


@sim_app.command("nodes")
@options(
    "machine",
    "changes",
    files=("json",),
    helps={"changes": "Change a value of the machine, say network.latency_ns=500; several times."},
    machine="h200-two-hosts",
)
def between_nodes(
    document: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="What benchmarks/between_nodes.py wrote with --json."),
    ],
    network: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The network, measured by interlace tune machine, in place of the machine's. "
            "\\[default: the one that FILE has, else two H200s over sockets]",
        ),
    ] = None,
    **shared: Any,
) -> None:
    """Put embeddings between two nodes side by side: measured, simulated, and as auto predicts."""
    from interlace_sim.cli.nodes import run_nodes

    run_nodes(document, network=network, **shared)


@sim_app.command()
@options(files=("json", "trace"))
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
    *,
    outputs: Outputs,
) -> None:
    """Run ASTRA-sim's own inputs with its own semantics."""
    from interlace_sim.cli.files import run_astra

    run_astra(network, system, workload, groups, unaware, outputs)


@sim_app.command()
@options(
    *_STEP,
    "all_to_all",
    "tensor",
    "pipeline",
    "changes",
    "workers",
    "cache",
    "no_cache",
    files=("json", "csv", "plot"),
    helps={
        "csv": "Write the points to FILE as CSV.",
        "plot": "Draw a heat map over the first two parameters.",
    },
    nodes=None,
    model=None,
    machine=None,
)
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
    value: Annotated[
        str,
        typer.Option(
            help="What the heat map shows: total_ns, exposed_ns, bound_ns or saved_percent."
        ),
    ] = "saved_percent",
    **shared: Any,
) -> None:
    """Run every combination of some parameters in parallel; each is run once and remembered.

    The other options hold for every combination; without them the kind's own defaults do.
    """
    from interlace_sim.cli.studies import run_sweep

    run_sweep(kind, parameters, value, **shared)


@sim_app.command()
@options(files=("folder",), folder=Path("interlace-sim-validate"))
def validate(
    cases: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded runs. \\[default: those of the package]"),
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Show a summary and what differs, not every case.")
    ] = False,
    *,
    outputs: Outputs,
) -> None:
    """Run recorded ASTRA-sim runs and measured all-to-alls again; print and write every error."""
    from interlace_sim.cli.files import run_validate

    raise typer.Exit(run_validate(cases, outputs, brief))


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
    from interlace_sim.cli.files import run_calibrate

    run_calibrate(measurements, out, base, gpus, name, source)


@sim_app.command("presets")
def show_presets(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this preset, each value with its source and confidence."),
    ] = None,
    yaml: Annotated[
        bool, typer.Option("--yaml", help="Show its file, to begin one of your own.")
    ] = False,
) -> None:
    """List the presets, or show one."""
    from interlace_sim.cli.files import run_presets

    run_presets(name, yaml)


@reproduce_app.command("sc24")
@options("workers", "cache", "no_cache", files=("folder",), folder=Path("interlace-sim-sc24"))
def reproduce_sc24(**shared: Any) -> None:
    """Compare the 21 % of DLRM training on 128 nodes (Punniyamurthy et al., SC24) with ours."""
    from interlace_sim.cli.studies import run_sc24

    run_sc24(**shared)


reproduce_app.command("t3")(t3_commands.reproduce_t3)
