"""The commands and their options.

Each command's module is imported when it runs, and torch with it.
"""

from __future__ import annotations

import errno
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from interlace import environment
from interlace.cli import scripts
from interlace.cli.console import print_error
from interlace.cli.operator_commands import OperatorCommands
from interlace.cli.options import Backend, Dtype, JsonFile, Nodes, PlotFile, Ranks
from interlace.cli.outputs import Outputs
from interlace.errors import ArgumentError, BackendError, InterlaceError
from interlace.extras import needing

ENTRY_POINTS = "interlace.commands"
"""Entry points of this group are Typer applications, each a group of commands of ``interlace``."""


class _Commands(TyperGroup):
    """The group of all commands, of this package and of installed ones that add to it.

    Errors that Interlace raises on purpose end a command with one line, not with a traceback.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(entry_points(group=ENTRY_POINTS).names)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None:
            for entry_point in entry_points(group=ENTRY_POINTS, name=cmd_name):
                command = typer.main.get_command(entry_point.load())
                command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        is_debugging = False
        try:
            is_debugging = bool(ctx.params.get("debug") or environment.switch("INTERLACE_DEBUG"))
            with needing("This command"):
                return super().invoke(ctx)
        except InterlaceError as error:
            if is_debugging:
                raise
            print_error(error)
            raise typer.Exit(1) from None
        except OSError as error:
            # What a command prints may go to a disk that is full.
            if is_debugging or error.errno != errno.ENOSPC:
                raise
            print_error(BackendError("nothing more can be written; no space is left on the disk."))
            raise typer.Exit(1) from None


_settings: dict[str, Any] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich",
}
app = typer.Typer(
    cls=_Commands,
    help="GPU kernels that compute and communicate at once.",
    add_completion=False,
    **_settings,
)
bench_app = typer.Typer(
    cls=OperatorCommands,
    help="Measure an operator on this machine's GPUs, or render measurements.",
    **_settings,
)
tune_app = typer.Typer(
    cls=OperatorCommands,
    help="Measure which implementation and configuration is fastest, and write the tuned table.",
    **_settings,
)
app.add_typer(bench_app, name="bench")
app.add_typer(tune_app, name="tune")


@tune_app.command("machine")
def tune_machine(
    budget: Annotated[
        float, typer.Option(min=1, help="Seconds after which no further call is measured.")
    ] = 20,
    world_size: Ranks = None,
    nodes: Nodes = None,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds that each step between nodes may last.")
    ] = 60.0,
    json_file: JsonFile = None,
) -> None:
    """Measure this machine's profile, by which impl="auto" predicts times, and keep it for you; on
    several nodes, under torchrun or Slurm, measure the network between them.
    """
    from interlace.cli import tune_machine

    outputs = Outputs(json=json_file)
    if tune_machine.is_between_nodes(nodes):
        tune_machine.run_network(world_size, nodes, deadline, outputs)
    else:
        tune_machine.run_machine(budget, world_size, outputs)


def _show_version(is_asked_for: bool) -> None:
    if is_asked_for:
        from interlace import __version__

        typer.echo(f"interlace {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (also INTERLACE_DEBUG=1).")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """GPU kernels that compute and communicate at once, for PyTorch and Triton."""


@app.command()
def doctor(
    network: Annotated[
        bool,
        typer.Option(
            "--network",
            help="Measure the network between nodes instead: on the ranks of torchrun or Slurm, or "
            "on ranks that are started here.",
        ),
    ] = False,
    client: Annotated[
        str,
        typer.Option(
            help="Say instead whether Interlace works in a program that is installed here: vllm, "
            "sglang, transformers, torchtitan or torchrec."
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(help="With --client: a transformer, as of explain; how much memory it takes."),
    ] = "",
    tokens: Annotated[
        int, typer.Option(help="With --model: tokens of the largest step, of all ranks.")
    ] = 8192,
    gpu: Annotated[
        str, typer.Option(help="With --model: a GPU whose profile is shipped.")
    ] = "h200",
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            "-n",
            min=1,
            help="Ranks; default: all GPUs, at most 8; with --client, 2.",
        ),
    ] = None,
    nodes: Nodes = None,
    backend: Backend = "auto",
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds that each step with --network may last.")
    ] = 60.0,
    json_file: JsonFile = None,
) -> None:
    """Say what this machine can do, what is missing, and what to do about it.

    With --network, say what the network between nodes does. With --client, say which version of a
    program is installed, whether Interlace is on in it, and what will be fused.
    """
    outputs = Outputs(json=json_file)
    if client and not (network or nodes is not None or backend != "auto"):
        from interlace.cli import doctor_client

        raise typer.Exit(doctor_client.run(client, model, tokens, world_size or 2, gpu, outputs))
    if client or model:
        raise ArgumentError(
            "doctor: --client must come without --network, --nodes and --backend, and --model with "
            "--client. Leave out what does not fit."
        )
    if network:
        from interlace.cli import doctor_network

        raise typer.Exit(doctor_network.run(world_size, nodes, backend, deadline, outputs))
    if world_size is not None or nodes is not None or backend != "auto":
        raise ArgumentError(
            "doctor: --world-size, --nodes and --backend must come with --network; it is not "
            "given. Leave them out, or add it."
        )
    from interlace.cli.doctor import run

    raise typer.Exit(run(outputs))


@app.command()
def explain(
    operator: Annotated[
        str, typer.Argument(metavar="OPERATOR", help="Such as gemm_reduce_scatter.")
    ] = "",
    shapes: Annotated[
        list[str] | None,
        typer.Argument(metavar="MxNxK", help="One rank's product: 8192x8192x2048."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Instead of an operator: llama3-70b and others, a config.json of transformers, or "
            "sizes: hidden=4096,heads=32,inner=14336,layers=32."
        ),
    ] = "",
    tokens: Annotated[
        str, typer.Option(help="With --model: tokens of a step, or samples: 1,8,64,4096.")
    ] = "1,8,64,4096",
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="With --model: shard tokens in between.")
    ] = False,
    gpu: Annotated[str, typer.Option(help="A GPU whose profile is shipped.")] = "h200",
    world_size: Annotated[
        int, typer.Option("--world-size", "--tensor", "-n", min=2, max=8, help="Ranks.")
    ] = 4,
    dtype: Dtype = "bfloat16",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the ranks are on.")] = 1,
    network: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The network between nodes: a profile that has one. \\[default: the GPU's]",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Say what impl="auto" takes, and the predicted time of every implementation. Needs no GPU.

    With --model, say it of each call of a model's layer, and what a step takes without and with.
    """
    outputs = Outputs(json=json_file)
    if model:
        if operator or nodes > 1 or network is not None:
            raise ArgumentError(
                "explain: --model must come without an operator, --nodes and --network; got both."
            )
        from interlace.cli.explain_model import run_explain_model

        run_explain_model(
            model, tokens, gpu, world_size, dtype, outputs, sequence_parallel=sequence_parallel
        )
        return
    if not (operator and shapes):
        raise ArgumentError(
            "explain must have an operator and shapes, gemm_reduce_scatter 8192x8192x2048, or "
            "--model llama3-70b; got neither."
        )
    from interlace.cli.explain import run_explain

    run_explain(operator, shapes, gpu, world_size, dtype, nodes, network, outputs)


@app.command()
def trace(
    operator: Annotated[str, typer.Argument(help="Such as gemm_reduce_scatter.")],
    shape: Annotated[
        str, typer.Argument(metavar="[SHAPE]", help="The case's sizes: 8192x8192x2048.")
    ] = "",
    impl: Annotated[str, typer.Option(help="The implementation. \\[default: the first one]")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "",
    world_size: Ranks = None,
    backend: Backend = "auto",
    calls: Annotated[int, typer.Option(min=1, help="Calls in the trace.")] = 1,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Draw the simulated timeline under the measured.")
    ] = False,
    gpu: Annotated[
        str, typer.Option(help="Simulate only, without a GPU: one whose profile is shipped, h200.")
    ] = "",
    trace_file: Annotated[
        Path, typer.Option("--trace", metavar="FILE", help="The file for Perfetto.")
    ] = Path("trace.json"),
    plot: PlotFile = None,
) -> None:
    """Record when each program of a call computes, puts and waits, for Perfetto and in words."""
    from interlace.cli.trace import Request, run_trace

    request = Request(operator, shape, impl, dtype, world_size, backend, calls, simulated, gpu)
    run_trace(request, Outputs(trace=trace_file, plot=plot))


@app.command()
def picture(
    trace_file: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A file that `interlace trace` wrote.")
    ],
    plot: Annotated[
        Path, typer.Option("--plot", metavar="FILE", help="The picture: PNG, SVG or PDF.")
    ] = Path("trace.png"),
    rows: Annotated[
        int, typer.Option(min=1, help="Programs of each rank; of more, some are drawn.")
    ] = 12,
    width: Annotated[float, typer.Option(min=4, max=200, help="Inches.")] = 12,
) -> None:
    """Draw a trace: what programs, copies and links do, and who waits for whom."""
    from interlace.cli.trace import run_picture

    run_picture(trace_file, rows, width, Outputs(plot=plot))


@app.command()
def demo(
    world_size: Annotated[int, typer.Option("--world-size", "-n", min=1, max=8, help="Ranks.")] = 4,
    backend: Annotated[
        str, typer.Option(help="auto, cpu or cuda; auto is cuda where there are GPUs enough.")
    ] = "auto",
    tokens: Annotated[int, typer.Option(min=1, max=256, help="Tokens decoded at once.")] = 1,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Show slices between so many nodes instead, say 2.")
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[
        str, typer.Option(metavar="FILE", help="Where to draw the picture (PNG), or none.")
    ] = "demo-gemv_all_reduce.png",
) -> None:
    """Run a Transformer's down projection on several ranks, and draw who sends what in which order.

    Then train a recommendation model. With --nodes, send slices between nodes.
    """
    picture = None if plot == "none" else Path(plot)
    raise typer.Exit(scripts.run_demos(world_size, backend, tokens, nodes, picture, json_file))


@app.command()
def soak(
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="How long to make calls. \\[default: 60, without --calls]"),
    ] = None,
    calls: Annotated[int | None, typer.Option(min=1, help="How many calls to make, about.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            "-n",
            "--ranks",
            min=1,
            max=8,
            help="Ranks; default: all GPUs, or 2 on the cpu backend.",
        ),
    ] = None,
    nodes: Nodes = None,
    backend: Backend = "auto",
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of all random choices. \\[default: another one each time]"),
    ] = None,
    start: Annotated[
        int,
        typer.Option(min=0, help="The number of the first call, as a failure's report says it."),
    ] = 0,
    operators: Annotated[
        list[str] | None, typer.Option(help="An operator to call; several times. \\[default: all]")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds that a wait may last. \\[default: 60]")
    ] = None,
    add: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Make no calls, add up what soaks wrote with --json; several times.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Make random calls of every operator on late ranks, and check every result."""
    from interlace.cli.soak import run, run_add

    outputs = Outputs(json=json_file)
    if add:
        raise typer.Exit(run_add(add, outputs))
    raise typer.Exit(
        run(seconds, calls, ranks, nodes, backend, seed, start, operators or (), deadline, outputs)
    )
