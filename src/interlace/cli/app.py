"""The commands and their options; each command's module is imported when it runs, and torch with
it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from interlace.cli.console import print_error
from interlace.cli.sim import sim_app
from interlace.errors import InterlaceError


class _Commands(TyperGroup):
    """Errors that Interlace raises on purpose end a command with one line, not with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InterlaceError as error:
            if ctx.params.get("debug") or os.environ.get("INTERLACE_DEBUG", "0") not in ("", "0"):
                raise
            print_error(error)
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
    help="Measure an operator on this machine's GPUs, or render measurements.", **_settings
)
tune_app = typer.Typer(
    help="Measure which implementation and configuration is fastest, and write the tuned table.",
    **_settings,
)
app.add_typer(bench_app, name="bench")
app.add_typer(tune_app, name="tune")
app.add_typer(sim_app, name="sim")

TableFile = Annotated[
    Path, typer.Option("--table", metavar="FILE", help="The tuned table: made, or extended.")
]
HalfDtype = Annotated[str, typer.Option(help="bfloat16 or float16.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything to FILE as JSON.")
]
Ranks = Annotated[
    int | None,
    typer.Option("--world-size", "-n", min=1, help="Ranks; default: all GPUs, at most 8."),
]
Tokens = Annotated[str, typer.Option(help="Tokens to measure at, separated by commas.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NxK",
        help="Rows and columns of one rank's weight, say 8192x2048; several times. \\[default: seven]",
    ),
]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]


def _show_version(wanted: bool) -> None:
    if wanted:
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
def doctor(json_file: JsonFile = None) -> None:
    """Say what this machine can do, what is missing, and what to do about it."""
    from interlace.cli.doctor import run

    raise typer.Exit(run(json_file))


@app.command()
def demo(
    world_size: Annotated[int, typer.Option("--world-size", "-n", min=1, max=8, help="Ranks.")] = 4,
    backend: Annotated[
        str, typer.Option(help="auto, cpu or cuda; auto is cuda where there are GPUs enough.")
    ] = "auto",
    tokens: Annotated[int, typer.Option(min=1, max=256, help="Tokens decoded at once.")] = 1,
    json_file: JsonFile = None,
    plot: Annotated[
        str, typer.Option(metavar="FILE", help="Where to draw the picture (PNG), or none.")
    ] = "demo-gemv_all_reduce.png",
) -> None:
    """Run a Transformer's down projection on several ranks and draw who sent what when; then train
    a recommendation model.
    """
    from interlace.cli.demo import run

    raise typer.Exit(
        run(world_size, backend, tokens, json_file, None if plot == "none" else Path(plot))
    )


@app.command()
def soak(
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="How long to make calls. \\[default: 60, without --calls]"),
    ] = None,
    calls: Annotated[int | None, typer.Option(min=1, help="How many calls to make, about.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=8, help="Ranks; default: all GPUs, or 2 on the cpu backend."),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="auto, cpu or cuda; auto is cuda where there are GPUs.")
    ] = "auto",
    seed: Annotated[
        int | None, typer.Option(help="Of all random choices. \\[default: another one each time]")
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
    """Make random calls of every operator on late ranks, check every result, and report what was
    wrong.
    """
    from interlace.cli.soak import run, run_add

    if add:
        raise typer.Exit(run_add(add, json_file))
    raise typer.Exit(
        run(seconds, calls, ranks, backend, seed, start, operators or (), deadline, json_file)
    )


@bench_app.command("gemv_all_reduce")
def bench_gemv_all_reduce(
    tokens: Tokens = "1",
    shape: Shapes = None,
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="First find the best configuration of each shape.")
    ] = False,
) -> None:
    """GEMV + AllReduce: fused, every unfused pair, compute alone, communication alone, and the
    physical floor.
    """
    from interlace.cli.bench import run

    run(tokens, shape, world_size, dtype, json_file, tune)


TableShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="TxNxD",
        help="Tables, rows and width of each rank, say 64x200000x256; several times.",
    ),
]
Lookups = Annotated[
    str, typer.Option(help="Lookups of a bag, separated by commas; 0-60 draws from 0 to 60.")
]
Batch = Annotated[int, typer.Option(min=1, help="Samples of all ranks together.")]


@bench_app.command("embedding_all_to_all")
def bench_embedding_all_to_all(
    shape: TableShapes = None,
    lookups: Lookups = "1,8,20,64,0-60",
    batch: Batch = 4096,
    world_size: Ranks = None,
    dtype: Dtype = "float32",
    json_file: JsonFile = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="The backward pass with row-wise Adagrad instead.")
    ] = False,
    study: Annotated[
        bool, typer.Option("--study", help="Time against occupancy and order instead.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --study: draw it as a PNG.")
    ] = None,
) -> None:
    """Embedding + All-to-All: fused, every unfused pair, pooling alone, communication alone, and
    the physical floor.

    Without --shape: 64 tables of 200,000 x 256 a rank, and 128 wide in float16 with 32 lookups.
    """
    from interlace.cli.bench_embedding import run

    run(shape, lookups, batch, world_size, dtype, json_file, backward, study, plot)


LayerShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="ExHxFxK",
        help="Experts of all ranks, hidden, FFN and experts a token; several times. \\[default: two]",
    ),
]


@bench_app.command("mixture_of_experts")
def bench_mixture_of_experts(
    shape: LayerShapes = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 4096,
    routing: Annotated[
        str, typer.Option(help="balanced, skewed, or both with a comma.")
    ] = "balanced,skewed",
    part: Annotated[str, typer.Option(help="combine, forward, backward, or all.")] = "all",
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
    config: Annotated[
        str, typer.Option(help="The fused kernels' configuration, as results show it.")
    ] = "",
) -> None:
    """Mixture of experts: second product and combine, the layer, its backward pass; fused, unfused,
    and the physical floor.

    Without --shape: Mixtral's 8 experts of 4096 x 14336, top 2, and 64 experts of 2048 x 1408, top
    6.
    """
    from interlace.cli.bench_experts import run

    run(shape, tokens, routing, part, world_size, dtype, json_file, config)


ProductShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="MxNxK",
        help="One rank's product, say 8192x8192x2048; several times. \\[default: eight]",
    ),
]
_PRODUCTS = {
    "gemm_all_to_all": "GEMM + All-to-All",
    "gemm_reduce_scatter": "GEMM + ReduceScatter",
    "gemm_all_reduce": "GEMM + AllReduce",
    "all_gather_gemm": "AllGather + GEMM",
}


def _add_product_commands(operator: str, title: str) -> None:
    @bench_app.command(
        operator,
        help=f"{title}: fused, every unfused pair, the product alone, communication alone, and the floor.",
    )
    def bench_product(
        shape: ProductShapes = None,
        world_size: Ranks = None,
        dtype: HalfDtype = "bfloat16",
        json_file: JsonFile = None,
        tune: Annotated[
            bool, typer.Option("--tune", help="First find a good configuration of each shape.")
        ] = False,
        transports: Annotated[
            bool,
            typer.Option(
                "--transports",
                help="Instead, compare what carries the product to its ranks: stores, copy engines, NCCL; and their kernels.",
            ),
        ] = False,
    ) -> None:
        from interlace.cli.bench_products import run

        run(operator, shape, world_size, dtype, json_file, tune, transports)

    @tune_app.command(
        operator,
        help=f"{title}: find good configurations and write each shape's to the tuned table.",
    )
    def tune_product(
        table: TableFile,
        shape: ProductShapes = None,
        world_size: Ranks = None,
        dtype: HalfDtype = "bfloat16",
        json_file: JsonFile = None,
    ) -> None:
        from interlace.cli.bench_products import run_tune

        run_tune(operator, shape, world_size, dtype, table, json_file)


for _operator, _title in _PRODUCTS.items():
    _add_product_commands(_operator, _title)


BatchShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="BxMxNxK",
        help="One rank's products, say 2x512x4096x1408; several times. \\[default: three]",
    ),
]
_BATCHES = {
    "bmm_all_to_all": "Batch of GEMMs + All-to-All",
    "all_to_all_bmm": "All-to-All + batch of GEMMs",
}


def _add_batch_commands(operator: str, title: str) -> None:
    @bench_app.command(
        operator,
        help=f"{title}, as of experts: fused, the unfused pair, each alone, and the floor.",
    )
    def bench_batch(
        shape: BatchShapes = None,
        world_size: Ranks = None,
        dtype: HalfDtype = "bfloat16",
        json_file: JsonFile = None,
    ) -> None:
        from interlace.cli.bench_batches import run

        run(operator, shape, world_size, dtype, json_file)

    @tune_app.command(
        operator,
        help=f"{title}: measure each shape and write to the tuned table which way is the fastest.",
    )
    def tune_batch(
        table: TableFile,
        shape: BatchShapes = None,
        world_size: Ranks = None,
        dtype: HalfDtype = "bfloat16",
        json_file: JsonFile = None,
    ) -> None:
        from interlace.cli.bench_batches import run_tune

        run_tune(operator, shape, world_size, dtype, table, json_file)


for _operator, _title in _BATCHES.items():
    _add_batch_commands(_operator, _title)


@bench_app.command("table")
def bench_table(
    files: Annotated[list[Path], typer.Argument(help="JSON files that `interlace bench` wrote.")],
) -> None:
    """Render measurements as a Markdown table."""
    from interlace.bench.report import markdown
    from interlace.cli.bench import read_document

    typer.echo(markdown([read_document(file) for file in files]), nl=False)


@tune_app.command("gemv_all_reduce")
def tune_gemv_all_reduce(
    table: TableFile,
    tokens: Tokens = "1,2,4,8,16,32,64",
    shape: Shapes = None,
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
) -> None:
    """GEMV + AllReduce: measure all configurations and write the best of each shape to the tuned
    table.
    """
    from interlace.cli.bench import run_tune

    run_tune(tokens, shape, world_size, dtype, table, json_file)


@tune_app.command("embedding_all_to_all")
def tune_embedding_all_to_all(
    table: TableFile,
    shape: TableShapes = None,
    lookups: Lookups = "1,8,20,64,0-60",
    batch: Batch = 4096,
    world_size: Ranks = None,
    dtype: Dtype = "float32",
    json_file: JsonFile = None,
) -> None:
    """Embedding + All-to-All: find good configurations, both directions, and write each shape's to
    the tuned table.
    """
    from interlace.cli.bench_embedding import run_tune

    run_tune(shape, lookups, batch, world_size, dtype, table, json_file)


@tune_app.command("mixture_of_experts")
def tune_mixture_of_experts(
    table: TableFile,
    shape: LayerShapes = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 4096,
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
) -> None:
    """Mixture of experts: find a good configuration of each layer, both directions, and write it to
    the tuned table.
    """
    from interlace.cli.bench_experts import run_tune

    run_tune(shape, tokens, world_size, dtype, table, json_file)
