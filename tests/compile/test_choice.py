"""The choice on GPUs, made from predicted times and tuned tables: here as on an H200."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Graph

import interlace
from interlace.compile import choice
from interlace.compile.findings import LeftAlone
from interlace.compile.producers import Product
from interlace.gemm import choice as products
from interlace.gemm import invariance
from interlace.gemm.choice import Choice
from interlace.operators.gemm_all_reduce import GemmAllReduce, GemmAllReduceConfig
from interlace.operators.gemm_reduce_scatter import GemmReduceScatter, GemmReduceScatterConfig
from interlace.registry import operator_named


def choose(operator: str, product: Product, rows: int, ranks: int) -> str:
    return choice.choose(operator_named(operator), product, rows, ranks)


def choose_sum(operator: str, products: list[Product], rows: int, ranks: int) -> tuple[bool, str]:
    return choice.choose_sum(operator_named(operator), products, rows, ranks)


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    properties = SimpleNamespace(
        multi_processor_count=132,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_block=0,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    products.choose_product.cache_clear()
    yield
    products.choose_product.cache_clear()


class _OnGpu(Product):
    device = torch.device("cuda", 0)  # type: ignore[assignment]


def _product(rows: int, columns: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> Product:
    graph = Graph()
    nodes = [graph.placeholder(name) for name in ("y", "x", "w")]
    for node, shape in zip(nodes, ((rows, columns), (rows, inner), (columns, inner)), strict=True):
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return _OnGpu(*nodes, by_columns=False, bias=None)


def _auto(operator: str, rows: int, columns: int, inner: int, ranks: int, **options: Any) -> Choice:
    sizes = {"rows": rows, "columns": columns, "inner": inner, "world_size": ranks}
    call = {"dtype": torch.bfloat16, "device": torch.device("cuda", 0), **sizes, **options}
    return operator_named(operator).choose(**call)


def test_a_wider_result_takes_longer_to_send() -> None:
    """What cannot return another dtype than its operands' is no candidate then."""
    sizes = ("gemm_reduce_scatter", 8192, 8192, 8192, 4)
    same, also_same = _auto(*sizes), _auto(*sizes, out_dtype=torch.bfloat16)
    wider = _auto(*sizes, out_dtype=torch.float32)
    assert same == also_same
    assert same.times_us["unfused"] < 0.9 * wider.times_us["unfused"]
    assert {"chunked", "async_tp"} <= same.times_us.keys() - wider.times_us.keys()


def test_a_product_that_is_cast_before_the_sum() -> None:
    """The choice is among those that return another dtype, and operands side by side are one of
    these; products in parts are not.
    """
    operator, product = operator_named("gemm_reduce_scatter"), _product(8192, 8192, 8192)
    reason = choice.choose(operator, product, 8192, 4, out_dtype=torch.float32)
    assert "predicted for NVIDIA H200: fused" in reason
    assert "chunked" not in reason
    small = _product(256, 512, 256)
    with pytest.raises(LeftAlone, match=r"not faster with a result of .*float32, to"):
        choice.choose(operator, small, 256, 4, out_dtype=torch.float32)
    side_by_side, reason = choice.choose_sum(
        operator, [_product(8192, 8192, 512)] * 3, 8192, 4, torch.float32
    )
    assert side_by_side
    assert "chunked" not in reason
    with pytest.raises(LeftAlone, match="too large to be put side by side, and is cast to"):
        choice.choose_sum(operator, [product] * 2, 8192, 4, torch.float32)


@pytest.mark.parametrize(
    ("operator", "fastest"),
    [
        ("gemm_all_reduce", "fused"),
        ("gemm_reduce_scatter", "chunked"),
        ("gemm_all_to_all", "fused"),
        ("all_gather_gemm", "chunked"),
    ],
)
def test_rows_that_do_not_fill_tiles(operator: str, fastest: str) -> None:
    """Fused kernels take little longer there than for the next multiple of a tile."""
    choice = _auto(operator, 6000, 5120, 2560, 2)
    assert choice.impl == fastest
    assert choice.reason.startswith(f"predicted for NVIDIA H200: {fastest} ")


def test_stock_pairs_are_chosen_where_they_are_the_fastest() -> None:
    few = _auto("gemm_all_reduce", 250, 8192, 7168, 4)
    assert few.candidates[0] == "symm_mem"
    assert few.faster == ()
    assert few.is_known


@pytest.mark.parametrize("rows", [1, 7, 16])
def test_a_kernel_that_would_copy_the_weight_is_not_taken(rows: int) -> None:
    """The kernels for few rows read w along K, and would copy another one in each call."""
    for operator, name in (("gemm_all_reduce", "gemv"), ("gemm_all_reduce_norm", "fused")):
        along_k = _auto(operator, rows, 8192, 4096, 2)
        along_n = _auto(operator, rows, 8192, 4096, 2, w_along_k=False)
        assert name in along_k.times_us or along_k.impl == name
        assert name not in along_n.candidates


def test_an_eager_call_takes_no_less_than_the_host() -> None:
    """PyTorch's asynchronous tensor parallelism, without which a GPU would wait for its host."""
    implementation = operator_named("all_gather_gemm").implementation("async_tp")
    short = _auto("all_gather_gemm", 2560, 1152, 4096, 2)
    assert short.times_us["async_tp"] == implementation.host_us
    assert list(short.times_us)[-1] == "async_tp"
    assert short.impl == "pushed"
    long = _auto("all_gather_gemm", 16384, 8192, 8192, 2)
    assert long.times_us["async_tp"] > implementation.host_us


def test_the_same_implementations_are_the_fastest_at_eight_ranks() -> None:
    """No result is of eight ranks; the profile says what they cost."""
    assert _auto("gemm_reduce_scatter", 8192, 8192, 2048, 8).impl == "fused"


def test_an_unknown_gpu_has_to_gain_more(monkeypatch: pytest.MonkeyPatch) -> None:
    known = _auto("gemm_all_reduce", 4096, 8192, 14336, 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Another GPU")
    guessed = _auto("gemm_all_reduce", 4096, 8192, 14336, 4, device=torch.device("cuda", 1))
    assert guessed.reason.startswith(
        "predicted for Another GPU, by a guess: NVIDIA H200's, with 132 of 132 processors: "
    )
    assert "chunked" in known.faster, "by ten percent"
    assert guessed.faster == ()


def test_float32_is_multiplied_by_the_library() -> None:
    """Our kernels multiply it without tensor cores, a hundred times slower than cuBLAS."""
    for operator in ("gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_to_all"):
        times = _auto(operator, 8192, 8192, 7168, 2, dtype=torch.float32).times_us
        assert times["fused"] > 50 * times["unfused"]
    scatter = _auto("gemm_reduce_scatter", 8192, 8192, 7168, 2, dtype=torch.float32)
    assert scatter.times_us.keys() >= {"chunked", "async_tp"}
    assert "pushed" not in scatter.times_us, "it is for results of 16 MiB at most"
    assert scatter.times_us["chunked"] < 1.1 * scatter.times_us["unfused"], (
        "the library multiplies a rank's own rows, too"
    )


def test_float8_goes_by_what_takes_it() -> None:
    """What is predicted knows that float8 is multiplied faster, and its result is no smaller."""
    choice = _auto("gemm_all_to_all", 8192, 8192, 7168, 2, dtype=torch.float8_e4m3fn)
    assert choice.impl == "fused"
    assert choice.times_us.keys() == {"fused", "chunked", "unfused"}
    wide = _auto("gemm_all_to_all", 8192, 8192, 7168, 2)
    assert choice.times_us["fused"] < 0.7 * wide.times_us["fused"]


def test_what_is_known_to_be_faster() -> None:
    assert choose("gemm_all_reduce", _product(8192, 8192, 2048), 8192, 4).startswith(
        "predicted for NVIDIA H200: fused "
    )
    assert choose("gemm_all_reduce", _product(1, 8192, 2048), 1, 4).startswith(
        "measured on NVIDIA H200"
    )


def test_what_is_not_faster_or_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    product = _product(250, 8192, 7168)
    with pytest.raises(
        LeftAlone, match=r"^gemm_all_reduce is not faster: predicted for NVIDIA H200: "
    ):
        choose("gemm_all_reduce", product, 250, 4)
    unknown = Choice("fused", GemmReduceScatterConfig(), "a default")
    monkeypatch.setattr(GemmReduceScatter, "choose", lambda *_, **__: unknown)
    with pytest.raises(
        LeftAlone, match=r"^nothing is known on this GPU of the sizes of gemm_reduce_scatter$"
    ):
        choose("gemm_reduce_scatter", product, 250, 4)


def test_mapped_outputs_are_taken_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    product = _product(680, 7168, 3584)
    assert " remote_stores " in choose("gemm_all_reduce", product, 680, 2)
    with_bias = dataclasses.replace(product, bias=product.x)
    only = Choice("remote_stores", GemmAllReduceConfig(), "", {}, True, ("remote_stores",))
    monkeypatch.setattr(GemmAllReduce, "choose", lambda *_, **__: only)
    with pytest.raises(
        LeftAlone,
        match=r"^gemm_all_reduce would be faster by impl='remote_stores', which must have no bias$",
    ):
        choose("gemm_all_reduce", with_bias, 680, 2)


def test_rows_that_are_not_split_evenly() -> None:
    uneven = _auto("gemm_all_reduce", 251, 8192, 7168, 2)
    assert "remote_stores" in uneven.times_us, "nobody minds who sums which rows"
    uneven = _auto("gemm_reduce_scatter", 251, 8192, 7168, 2)
    assert "pushed" not in uneven.times_us, "rows are not split evenly"


def test_a_sum_is_added_up_in_parts_or_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = functools.partial(choose_sum, "gemm_reduce_scatter")
    side_by_side, reason = scatter([_product(8192, 8192, 4096)] * 2, 8192, 4)
    assert not side_by_side
    assert reason.startswith("a sum of 2 products, in parts: predicted for NVIDIA H200: ")
    # The library multiplies all of it, so float32 is no slower than by the pair.
    assert not scatter([_product(8192, 8192, 2048, torch.float32)] * 3, 8192, 4)[0]
    unknown = Choice("fused", GemmReduceScatterConfig(), "a default")
    monkeypatch.setattr(GemmReduceScatter, "choose", lambda *_, **__: unknown)
    with pytest.raises(
        LeftAlone,
        match=r"^nothing is known on this GPU of the sizes of gemm_reduce_scatter, of a sum",
    ):
        scatter([_product(256, 8192, 2048)] * 3, 256, 4)
    pair = Choice("unfused", GemmReduceScatterConfig(), "measured", is_known=True)
    monkeypatch.setattr(GemmReduceScatter, "choose", lambda *_, **__: pair)
    with pytest.raises(
        LeftAlone,
        match=r"^it is a sum of products, and gemm_reduce_scatter of them is not faster: measured",
    ):
        scatter([_product(256, 8192, 2048)] * 3, 256, 4)
    fused = Choice("fused", GemmReduceScatterConfig(), "measured", is_known=True)
    monkeypatch.setattr(GemmReduceScatter, "choose", lambda *_, **__: fused)
    assert scatter([_product(4096, 8192, 1280)] * 2, 4096, 4) == (
        True,
        "a sum of 2 products, side by side: measured",
    )
    with pytest.raises(
        LeftAlone,
        match=r"^it is a sum of products whose operands are too large to be put side by side$",
    ):
        scatter([_product(4096, 8192, 7168)] * 2, 4096, 4)


def test_a_sum_is_all_reduced_side_by_side() -> None:
    reduce = functools.partial(choose_sum, "gemm_all_reduce")
    # Llama 3 70B's queries, keys and values
    products = [_product(4096, 8192, inner) for inner in (2048, 256, 256)]
    side_by_side, reason = reduce(products, 4096, 4)
    assert side_by_side
    assert reason.startswith("a sum of 3 products, side by side: predicted for NVIDIA H200: fused ")
    with pytest.raises(LeftAlone, match=r"^it is a sum of products"):  # its MLP
        reduce([_product(4096, 8192, 7168)] * 2, 4096, 4)
    with pytest.raises(
        LeftAlone, match=r"^it is a sum of products, and gemm_all_reduce of them is not faster: "
    ):
        reduce([_product(256, 8192, 3584)] * 2, 256, 4)


def test_nothing_goes_by_rows_where_calls_must_be_batch_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator with an invariant implementation takes the pair's place for any rows; the same
    one.
    """
    with interlace.batch_invariant():
        for rows in (1, 16, 4096):
            reason = choose("gemm_all_reduce", _product(rows, 8192, 2048), rows, 4)
            assert reason == "calls must be batch-invariant"
        product = _product(512, 512, 512)
        assert choose("gemm_all_to_all", product, 512, 4) == "calls must be batch-invariant"
        monkeypatch.setattr(invariance, "invariant_implementations", lambda _: ())
        with pytest.raises(LeftAlone, match="gemm_all_to_all has no batch-invariant implementa"):
            choose("gemm_all_to_all", product, 512, 4)
        with pytest.raises(LeftAlone, match="gemm_reduce_scatter is not batch-invariant"):
            choose_sum("gemm_reduce_scatter", [_product(512, 512, 512)] * 2, 512, 4)


def test_products_of_the_program_are_left_alone() -> None:
    """Programs that promise the same bits in every batch register such a product for their GPUs."""
    gpu = torch.device("cuda")
    choice.require_runnable(gpu)
    library = torch.library.Library("aten", "IMPL")
    library.impl("aten::addmm", lambda *arguments: None, "CUDA")
    with pytest.raises(LeftAlone, match="a product of its own in the place of aten::addmm"):
        choice.require_runnable(gpu)
    library._destroy()
    choice.require_runnable(gpu)


@pytest.mark.parametrize(("known", "expected"), [(None, 2), (1, 1), (4, 4)])
def test_a_group_that_has_been_used_knows_its_nodes(
    monkeypatch: pytest.MonkeyPatch, known: int | None, expected: int
) -> None:
    """Of another group, four ranks are on two nodes if each node has two."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(choice, "process_group_named", lambda _: None)
    monkeypatch.setattr(choice.dist, "get_process_group_ranks", lambda _: [0, 1, 2, 3])
    monkeypatch.setattr(choice, "known_nodes", lambda _: known)
    assert choice.nodes_of("", torch.device("cuda", 0)) == expected


@pytest.mark.parametrize(
    ("gpus", "variables", "expected"),
    [
        (4, {}, 1),
        (2, {}, 2),
        (0, {}, 4),
        (4, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}, 2),
        (4, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, 1),
        (4, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "INTERLACE_NODES": "4"}, 4),
    ],
)
def test_nodes_of_ranks_that_see_one_gpu_each(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpus: int,
    variables: dict[str, str],
    expected: int,
) -> None:
    """Four ranks, of a group that is not known yet; the machine's GPUs count, not the visible."""
    for gpu in range(gpus):
        (tmp_path / str(gpu)).mkdir()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(choice, "_GPUS", tmp_path)
    monkeypatch.setattr(choice.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(choice, "process_group_named", lambda _: None)
    monkeypatch.setattr(choice, "known_nodes", lambda _: None)
    monkeypatch.setattr(choice.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(choice.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(choice.dist, "get_process_group_ranks", lambda _: [0, 1, 2, 3])
    assert choice.nodes_of("", torch.device("cuda", 0)) == expected
