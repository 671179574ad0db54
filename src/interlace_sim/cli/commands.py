"""Commands of ``interlace sim``; the simulator is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from interlace.cli.outputs import Outputs
from interlace.errors import ConfigError
from interlace_sim.cli.options import Options, options
from interlace_sim.collectives import ALGORITHMS
from interlace_sim.defaults import DEFAULTS, Defaults

sim_app = typer.Typer(
    help="Simulate training steps and collectives on many nodes: what fusing buys.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

# The options that each kind of run takes, by command.
_COLLECTIVE = ("machine", "nodes", "topology", "changes", "all_ranks", "size", "algorithm")
_STEP = (
    *("model", "machine", "nodes", "topology", "changes", "all_ranks"),
    *("fused", "slices", "all_reduce"),
)
_SCENARIOS = {
    "dlrm": (*_STEP, "all_to_all"),
    "transformer": (*_STEP, "tensor", "pipeline"),
    "moe": (*_STEP, "all_to_all"),
    "collective": _COLLECTIVE,
}
_STEPS = ("dlrm", "transformer", "moe")
_WORKLOADS = (*_STEPS, *ALGORITHMS)
"""Workloads that can be swept, too."""

_T3 = ("model", "machine", "changes", "tensor")
_RUNS = {
    "dlrm": (*_SCENARIOS["dlrm"], "chakra", "json", "csv", "plot", "trace"),
    "transformer": (*_SCENARIOS["transformer"], "json", "csv", "plot", "trace"),
    "moe": (*_SCENARIOS["moe"], "json", "csv", "plot", "trace"),
    "collective": (*_COLLECTIVE, "json", "plot", "trace"),
    "t3": (
        *(*_T3, "topology", "sublayer", "shape", "tokens", "collective", "slowest"),
        *("json", "plot", "trace"),
    ),
    "chakra": (
        *("network_configuration", "system_configuration", "comm_group_configuration"),
        *("congestion_unaware", "json", "trace"),
    ),
}
_SWEEPS = {
    kind: (*names, "workers", "cache", "no_cache", "json", "csv", "plot")
    for kind, names in _SCENARIOS.items()
}
_COMPARISONS = {
    "between nodes": ("machine", "network", "changes", "json"),
    "bench": ("machine", "changes", "json", "plot"),
}
_STUDIES = {
    "sc24": ("workers", "cache", "no_cache"),
    "t3": ("changes", "workers", "every_case"),
    "t3-layer": (*_T3, "sequences", "rest_share"),
    "t3-sensitivity": (*_T3, "sublayer", "shape", "pairs"),
}
_T3_DEFAULTS = Defaults("T-NLG", "t3-paper")


def _workload(text: str) -> str:
    """Return a workload's name as it is spelled everywhere, and the prefix of files as it is."""
    name = text.replace("-", "_")
    return name if name in _WORKLOADS else text


_Workload = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="See above.", callback=_workload)
]


@sim_app.command()
@options(_RUNS, {**DEFAULTS, "t3": _T3_DEFAULTS})
def run(workload: _Workload, options: Options) -> None:
    """Simulate a workload once: its time, where it goes, and the physical bound.

    WORKLOAD is one of

      dlrm         training a recommendation model: embedding + All-to-All
      transformer  training a Transformer: GEMM + AllReduce
      moe          training a mixture of experts: GEMM + All-to-All
      all_to_all, all_reduce, reduce_scatter, all_gather
                   one collective, by every algorithm or by one
      t3           a sub-layer whose memory system tracks the product and
                   triggers its collective (T3), and six other configurations
      PREFIX       Chakra traces PREFIX.RANK.et, with ASTRA-sim's semantics

    Training steps run unfused, with the forward pass fused, and with both passes
    fused. --set model.KEY=VALUE changes their model, and --plot draws bars, too.

    [bold]Examples[/bold]

      interlace sim run dlrm --nodes 128 --plot step.png --trace step.json
      interlace sim run all_to_all --nodes 128 --size 16MiB
    """
    if workload in _STEPS:
        from interlace_sim.cli.run import run_step

        run_step(workload, **options.of(workload))
    elif workload in ALGORITHMS:
        from interlace_sim.cli.run import run_collective

        run_collective(workload, **options.of("collective"))
    elif workload == "t3":
        from interlace_sim.cli.t3 import run_t3

        run_t3(**options.of("t3"))
    elif options.are_given("network_configuration", "system_configuration"):
        from interlace_sim.cli.files import run_chakra

        run_chakra(workload, **options.of("chakra"))
    else:
        raise ConfigError(
            f"a workload must be one of {', '.join(_WORKLOADS)}, t3, or the prefix of Chakra "
            "traces with --network-configuration and --system-configuration; got "
            f"{workload!r}."
        )


@sim_app.command()
@options(_SWEEPS, DEFAULTS)
def sweep(
    workload: _Workload,
    parameters: Annotated[
        list[str],
        typer.Option(
            "--param",
            metavar="NAME=A,B,...",
            help="Values of a parameter: an option of run, or a key of --set; several times.",
        ),
    ],
    options: Options,
    value: Annotated[
        str,
        typer.Option(help="What --plot shows: total_ns, exposed_ns, bound_ns or saved_percent."),
    ] = "saved_percent",
) -> None:
    """Simulate a workload with every combination of some parameters' values, in parallel.

    WORKLOAD is dlrm, transformer, moe, all_to_all, all_reduce, reduce_scatter or
    all_gather. The other options hold for every combination. Each combination is
    simulated once and remembered. --plot draws a heat map over the first two
    parameters.

    [bold]Example[/bold]

      interlace sim sweep dlrm --param nodes=32,64,128 --param fused=forward,both
    """
    if workload not in _WORKLOADS:
        raise ConfigError(
            f"the workload of a sweep must be one of {', '.join(_WORKLOADS)}; got {workload!r}."
        )
    from interlace_sim.cli.sweep import run_sweep

    kind = workload if workload in _STEPS else "collective"
    run_sweep(workload, parameters, value, **options.of(kind))


@sim_app.command()
@options(
    _COMPARISONS,
    {"between nodes": Defaults(machine="h200-two-hosts"), "bench": Defaults(machine="t3-h200")},
)
def compare(
    documents: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Documents of measurements.")
    ],
    options: Options,
) -> None:
    """Compare measured times with simulated ones.

    Between nodes: a FILE that benchmarks/between_nodes.py wrote. Each time is put
    beside the simulated one and the one that impl="auto" predicts.

    Bench: FILEs that `interlace bench` of gemm_reduce_scatter or gemm_all_to_all
    wrote. The software is put beside hardware with T3, shape by shape.

    [bold]Examples[/bold]

      interlace sim compare between-nodes.json --machine h100-node
      interlace sim compare gemm_reduce_scatter-4xH200.json --plot t3.png
    """
    from interlace_sim.cli.compare import are_of_bench, run_bench, run_between_nodes

    if are_of_bench(documents):
        run_bench(documents, **options.of("bench"))
    else:
        run_between_nodes(documents, **options.of("between nodes"))


@sim_app.command()
def validate(
    cases: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded runs. \\[default: those of the package]"),
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Show a summary and what differs, not every case.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Where JSON, CSV and pictures go.")
    ] = Path("interlace-sim-validate"),
) -> None:
    """Simulate recorded ASTRA-sim runs and measured All-to-Alls again, and show every error.

    The exit status is 0 if every figure is within its tolerance, else 1.

    [bold]Example[/bold]

      interlace sim validate --brief
    """
    from interlace_sim.cli.files import run_validate

    raise typer.Exit(run_validate(cases, Outputs(folder=out), brief))


@sim_app.command()
def calibrate(
    measurements: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="JSON files with measured products, collectives, or bench documents.",
        ),
    ],
    yaml: Annotated[
        Path, typer.Option("--yaml", metavar="FILE", help="Write the machine to FILE as YAML.")
    ],
    machine: Annotated[
        str, typer.Option(help="The machine preset or YAML file whose other values are kept.")
    ] = "h200-node",
    gpus: Annotated[
        int | None, typer.Option(help="Use collectives of this many GPUs only.")
    ] = None,
    name: Annotated[str, typer.Option(help="The new machine's name.")] = "calibrated",
    source: Annotated[
        str,
        typer.Option(
            help="Where the measurements come from. \\[default: the files' names]",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Fit a machine to measurements, and show its errors on points held out of the fit.

    [bold]Example[/bold]

      interlace sim calibrate measurements.json --yaml mine.yaml
    """
    from interlace_sim.cli.files import run_calibrate

    run_calibrate(measurements, yaml, machine, gpus, name, source)


@sim_app.command()
@options(_STUDIES, {"t3-layer": _T3_DEFAULTS, "t3-sensitivity": _T3_DEFAULTS})
def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help="See above.")],
    options: Options,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FOLDER",
            help="Where JSON and pictures go. \\[default: interlace-sim-NAME]",
        ),
    ] = None,
) -> None:
    """Repeat a published study: its figures beside ours, and the assumptions between them.

    NAME is one of

      sc24            the 21 % of DLRM training on 128 nodes (Punniyamurthy et
                      al., SC24)
      t3              the figures of tracked and triggered communication (T3;
                      Pati et al., ASPLOS'24), and every assumption
      t3-layer        a layer with T3: training, a prompt, generated tokens
      t3-sensitivity  T3's speed-ups with each assumption changed in turn

    [bold]Examples[/bold]

      interlace sim study sc24
      interlace sim study t3-sensitivity --model T-NLG --sublayer op
    """
    if name not in _STUDIES:
        raise ConfigError(f"a study must be one of {', '.join(_STUDIES)}; got {name!r}.")
    from interlace_sim.cli.studies import STUDIES

    values = options.of(name)
    STUDIES[name](**values, outputs=Outputs(folder=out or Path(f"interlace-sim-{name}")))


@sim_app.command("presets")
def show_presets(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this preset, each value with its source and confidence."),
    ] = None,
    yaml: Annotated[
        Path | None,
        typer.Option(
            "--yaml", metavar="FILE", help="Write the preset to FILE, to begin one of your own."
        ),
    ] = None,
) -> None:
    """List the presets of machines and models, or show one.

    [bold]Examples[/bold]

      interlace sim presets sc24-torus
      interlace sim presets h200-cluster --yaml mine.yaml
    """
    from interlace_sim.cli.files import run_presets

    run_presets(name, yaml)
