"""The choice on GPUs, which the tuned tables make: here with what the table of another machine
says.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch.fx import Graph

from interlace.compile import choice
from interlace.compile.findings import LeftAlone
from interlace.compile.producers import Product
from interlace.gemm import choice as products
from interlace.gemm.choice import Choice
from interlace.operators.gemm_reduce_scatter import GemmReduceScatter, GemmReduceScatterConfig
from interlace.operators.gemv_all_reduce import launch as gemv
from interlace.registry import operator_named


def choose(operator: str, product: Product, rows: int, ranks: int) -> str:
    return choice.choose(operator_named(operator), product, rows, ranks)


def choose_sum(operator: str, products: list[Product], rows: int, ranks: int) -> tuple[bool, str]:
    return choice.choose_sum(operator_named(operator), products, rows, ranks)


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(products, "_shared_bytes", lambda _: 227 << 10)
    for cached in (products.choose_product, gemv.choose):
        cached.cache_clear()
    yield
    for cached in (products.choose_product, gemv.choose):
        cached.cache_clear()


class _OnGpu(Product):
    device = torch.device("cuda", 0)  # type: ignore[assignment]


def _product(
    rows: int, columns: int, inner: int, dtype: torch.dtype = torch.bfloat16, batch: int = 0
) -> Product:
    graph = Graph()
    nodes = [graph.placeholder(name) for name in ("y", "x", "w")]
    leading = (batch,) if batch else ()
    for node, shape in zip(nodes, ((rows, columns), (rows, inner), (columns, inner)), strict=True):
        node.meta["val"] = torch.empty(leading + shape, dtype=dtype, device="meta")
    return _OnGpu(*nodes, by_columns=False, bias=None)


@pytest.mark.parametrize(
    ("operator", "impl"),
    [
        ("gemm_all_reduce", "chunked"),
        ("gemm_reduce_scatter", "chunked"),
        ("gemm_all_to_all", "chunked"),
        ("all_gather_gemm", "chunked"),
    ],
)
def test_fused_kernels_are_left_out_where_rows_do_not_fill_their_tiles(
    operator: str, impl: str
) -> None:
    """They were measured to take 280 to 1600 us there, chunked ones 247 to 331."""

    def chosen(rows: int) -> Any:
        return operator_named(operator).choose(
            rows=rows,
            columns=5120,
            inner=2560,
            dtype=torch.bfloat16,
            world_size=2,
            device=torch.device("cuda", 0),
        )

    whole, ragged = chosen(48 * 128), chosen(6000)
    assert "left out" not in whole.reason
    assert ragged.reason.endswith(
        "; fused is left out: a rank's rows are no multiple of its tiles' 128"
    )
    assert ragged.impl == (whole.impl if whole.impl != "fused" else impl)
    assert "fused" not in (ragged.impl, ragged.fallback, *ragged.faster)


def test_what_was_measured_to_be_faster() -> None:
    reason = choose("gemm_all_reduce", _product(8192, 8192, 2048), 8192, 4)
    assert reason.startswith(
        "measured on NVIDIA H200 at 4 ranks, bfloat16, rows 8192, columns 8192, inner 2048: fused "
    )
    assert choose("gemv_all_reduce", _product(1, 8192, 2048), 1, 4).startswith(
        "measured on NVIDIA H200"
    )


@pytest.mark.parametrize(
    ("operator", "rows", "dtype", "reason"),
    [
        (
            "all_gather_gemm",
            256,
            torch.bfloat16,
            "all_gather_gemm is not faster: measured on NVIDIA H200 at 4 ranks, bfloat16, rows 256",
        ),
        (
            "gemm_reduce_scatter",
            8,
            torch.bfloat16,
            "nothing was measured on this GPU near the sizes of gemm_reduce_scatter",
        ),
        (
            "gemm_reduce_scatter",
            8192,
            torch.float32,
            "nothing was measured on this GPU near the sizes of gemm_reduce_scatter",
        ),
    ],
)
def test_what_was_not(operator: str, rows: int, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(LeftAlone) as refusal:
        choose(operator, _product(rows, 8192, 7168, dtype), rows, 4)
    assert str(refusal.value).startswith(reason)


def test_mapped_outputs_are_taken_where_they_can_be() -> None:
    product = _product(256, 8192, 7168)
    assert " remote_stores " in choose("gemm_reduce_scatter", product, 256, 4)
    with pytest.raises(
        LeftAlone,
        match=r"^gemm_reduce_scatter would be faster by impl='remote_stores', which must have "
        r"no bias$",
    ):
        choose("gemm_reduce_scatter", dataclasses.replace(product, bias=product.x), 256, 4)
    with pytest.raises(
        LeftAlone,
        match=r"^gemm_all_reduce would be faster by impl='remote_stores', which must have rows "
        r"that are split evenly$",
    ):
        choose("gemm_all_reduce", _product(250, 8192, 7168), 250, 4)


def test_a_sum_is_added_up_in_parts_or_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = functools.partial(choose_sum, "gemm_reduce_scatter")
    side_by_side, reason = scatter([_product(8192, 8192, 4096)] * 2, 8192, 4)
    assert not side_by_side
    assert reason.startswith(
        "a sum of 2 products, in parts: measured on NVIDIA H200 at 4 ranks, bfloat16, rows 8192, "
        "columns 8192"
    )
    with pytest.raises(
        LeftAlone,
        match=r"^it is a sum of products, and gemm_reduce_scatter of them is not faster: "
        r"measured on",
    ):
        scatter([_product(256, 8192, 2048)] * 3, 256, 4)
    with pytest.raises(
        LeftAlone,
        match=r"^nothing was measured on this GPU near the sizes of gemm_reduce_scatter, of a sum",
    ):
        scatter([_product(8, 8192, 2048)] * 3, 8, 4)
    fused = Choice("fused", GemmReduceScatterConfig(), "measured", measured=True)
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
    assert reason.startswith(
        "a sum of 3 products, side by side: measured on NVIDIA H200 at 4 ranks, bfloat16, rows 4096"
    )
    with pytest.raises(
        LeftAlone, match=r"^it is a sum of products whose operands are too large"
    ):  # its MLP
        reduce([_product(4096, 8192, 7168)] * 2, 4096, 4)
    with pytest.raises(
        LeftAlone, match=r"^it is a sum of products, and gemm_all_reduce of them is not faster: "
    ):
        reduce([_product(256, 8192, 3584)] * 2, 256, 4)


def test_batches_have_tables_of_their_own() -> None:
    """Rows are those of all products."""
    assert ": fused " in choose(
        "bmm_all_to_all", _product(5120, 4096, 14336, batch=2), 10240, 2
    )  # Mixtral's, capacity factor 1.25
    assert ": chunked " in choose("all_to_all_bmm", _product(5120, 28672, 4096, batch=2), 10240, 2)
    assert " pushed " in choose("all_to_all_bmm", _product(120, 2816, 2048, batch=32), 32 * 120, 2)
    with pytest.raises(LeftAlone, match=r"^bmm_all_to_all is not faster: "):
        choose("bmm_all_to_all", _product(320, 4096, 14336, batch=4), 4 * 320, 2)


def test_a_sum_of_batches_goes_by_what_is_faster_in_parts() -> None:
    """Whatever the fused kernel takes, which has one product for each tile."""
    total = functools.partial(choose_sum, "bmm_all_to_all")
    halves = [_product(2560, 4096, 14336, batch=4)] * 2
    side_by_side, reason = total(halves, 10240, 2)
    assert not side_by_side
    assert reason.startswith(
        "a sum of 2 products, in parts: measured on NVIDIA H200 at 2 ranks, bfloat16, rows 10240"
    )
    with pytest.raises(
        LeftAlone, match="it is a sum of products, and bmm_all_to_all of them is not faster: "
    ):
        total([_product(120, 2048, 704, batch=32)] * 2, 32 * 120, 2)
