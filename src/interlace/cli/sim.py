"""``interlace sim ...``: commands and options; the simulator is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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

Nodes = Annotated[
    int,
    typer.Option(
        min=0, help="Nodes of the machine's GPUs. \\[default: the workload's]", show_default=False
    ),
]
Machine = Annotated[
    str,
    typer.Option(
        help="A machine preset or YAML file; see `interlace sim presets`.", show_default=False
    ),
]
Model = Annotated[
    str,
    typer.Option(
        help="A model preset or YAML file; see `interlace sim presets`.", show_default=False
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        "--topology",
        help="ring, torus2d, torus3d, torus:AxB, switch, full, fattree[:LEAVESxDOWN/UP]. \\[default: the machine's]",
    ),
]
Fused = Annotated[str, typer.Option(help="Passes with fused operators: none, forward or both.")]
AllToAll = Annotated[
    str, typer.Option(help="The unfused All-to-All: one_shot, direct, per_dimension or ring.")
]
AllReduce = Annotated[
    str, typer.Option(help="The AllReduce: ring, direct, halving_doubling or double_binary_tree.")
]
Slices = Annotated[
    int,
    typer.Option(
        min=0,
        help="Slices in which a fused kernel's output for a rank leaves. \\[default: the workload's]",
        show_default=False,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value, say model.tables=1024 or machine.network.latency_ns=500; several times.",
    ),
]
AllRanks = Annotated[
    bool, typer.Option("--all-ranks", help="Simulate every rank and link, not one of each kind.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything to FILE as JSON.")
]
CsvFile = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Write the tasks to FILE as CSV.")
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", help="Draw the timelines, and bars beside them (FILE-bars)."
    ),
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace for ui.perfetto.dev.")
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes. \\[default: all processors]", show_default=False),
]
CacheFolder = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        help="Where outcomes are remembered. \\[default: the user's cache]",
        show_default=False,
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Run everything again, and remember nothing.")
]
OutFolder = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="Where JSON, CSV and pictures go.")
]


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
    """A training step of a recommendation model: embedding + All-to-All, fused and not."""
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
        json_file,
        csv_file,
        plot,
        trace,
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
    """A training step of a Transformer with tensor, pipeline and data parallelism: GEMM +
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
        json_file,
        csv_file,
        plot,
        trace,
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
    """A training step of a mixture of experts with expert parallelism: GEMM + All-to-All, fused and
    not.
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
        json_file,
        csv_file,
        plot,
        trace,
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
    """One collective, by one algorithm or by all: time, bandwidth, and the physical bound."""
    from interlace.cli.sim_run import run_collective

    run_collective(
        kind,
        size,
        algorithm,
        {"nodes": nodes, "machine": machine, "topology": topology, "all_ranks": all_ranks},
        changes,
        json_file,
        plot,
        trace,
    )


T3Model = Annotated[
    str, typer.Option("--model", help="Mega-GPT-2, T-NLG, GPT-3, PALM, MT-NLG, or a YAML file.")
]
T3Degree = Annotated[int, typer.Option("--tp", min=2, help="GPUs of the tensor-parallel group.")]
T3SubLayer = Annotated[
    str, typer.Option("--sublayer", help="op, fc2 (forward), fc1 or ip (backward).")
]
T3Shape = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="ROWSxCOLUMNSxDEPTH",
        help="Any matrix product on each GPU, instead of a model's.",
    ),
]
T3Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a value of the machine, say tracker.sets=64."
    ),
]


@sim_app.command()
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
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw DRAM and link traffic over time, by cause."
        ),
    ] = None,
    trace: TraceFile = None,
) -> None:
    """A sub-layer whose memory system tracks the product and triggers its collective (T3), beside
    six other ways.
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
        json_file,
        plot,
        trace,
    )


@sim_app.command("t3-layer")
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
    """A whole layer with T3: training, a prompt, the generation of tokens."""
    from interlace.cli.sim_t3 import run_layer

    run_layer(model, tp, machine, changes, sequences, rest_share, json_file)


@sim_app.command("t3-sensitivity")
def t3_sensitivity(
    model: T3Model = "T-NLG",
    tp: T3Degree = 8,
    sublayer: T3SubLayer = "fc2",
    shape: T3Shape = None,
    machine: Machine = "t3-paper",
    changes: T3Set = None,
    json_file: JsonFile = None,
) -> None:
    """What T3's assumptions are worth: each is changed in turn. A minute or two."""
    from interlace.cli.sim_t3 import run_sensitivity

    run_sensitivity(model, tp, sublayer, shape, machine, changes, json_file)


@sim_app.command("t3-measured")
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
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw a bar for each shape.")
    ] = None,
) -> None:
    """What T3's hardware would still gain over software that was measured, shape by shape."""
    from interlace.cli.sim_t3 import run_measured

    run_measured(documents, machine, changes, json_file, plot)


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
    from interlace.cli.sim_run import run_astra

    run_astra(network, system, workload, groups, unaware, json_file, trace)


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
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the points to FILE as CSV.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw a heat map over the first two parameters."
        ),
    ] = None,
) -> None:
    """Every combination of some parameters, in parallel, each run once and remembered."""
    from interlace.cli.sim_run import run_sweep

    run_sweep(kind, parameters, changes, value, workers, cache, no_cache, json_file, csv_file, plot)


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
    """Run recorded ASTRA-sim runs and measured all-to-alls again; print and write the error of
    each.
    """
    from interlace.cli.sim_run import run_validate

    raise typer.Exit(run_validate(cases, out, brief))


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
    """Fit a machine file to measurements, and say how well it predicts points that it has not seen."""
    from interlace.cli.sim_run import run_calibrate

    run_calibrate(measurements, out, base, gpus, name, source)


@sim_app.command("presets")
def show_presets(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this preset, each value with its source and confidence."),
    ] = None,
) -> None:
    """List the presets, or show one."""
    from interlace.cli.sim_run import run_presets

    run_presets(name)


@reproduce_app.command("sc24")
def reproduce_sc24(
    out: OutFolder = Path("interlace-sim-sc24"),
    workers: Workers = None,
    cache: CacheFolder = None,
    no_cache: NoCache = False,
) -> None:
    """DLRM training on 128 nodes (Punniyamurthy et al., SC24): 21 %, and what it hangs on."""
    from interlace.cli.sim_run import run_sc24

    run_sc24(out, workers, cache, no_cache)


@reproduce_app.command("t3")
def reproduce_t3(out: OutFolder = Path("interlace-sim-t3"), workers: Workers = None) -> None:
    """Tracked and triggered communication (Pati et al., ASPLOS'24): its figures, ours, and every
    assumption.
    """
    from interlace.cli.sim_t3 import run_reproduce

    run_reproduce(out, workers)
