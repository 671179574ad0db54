"""The tuned tables that are shipped, and how a call finds its entry."""

import importlib.resources
import json

import pytest
import torch

from interlace import tuning
from interlace.operators.gemm_all_reduce.config import (
    GemvAllReduceConfig,
    block_tokens,
    default_config,
)
from interlace.registry import operator_named
from interlace.tuning.choice import by_table, configured

TABLES = sorted(
    file.name
    for file in (importlib.resources.files("interlace.tuning") / "tables").iterdir()
    if file.name.endswith(".json")
)
H200 = "NVIDIA H200"


def point(rows=1, columns=8192, inner=2048, world_size=4, dtype="bfloat16"):
    return tuning.Point(world_size, dtype, {"rows": rows, "columns": columns, "inner": inner})


def nearest(**sizes):
    return tuning.nearest("gemv_all_reduce", H200, point(**sizes))


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_of_a_table_can_be_run(name):
    """A configuration that does not parse would fail in the first call that finds it."""
    operator, _, gpu = name.removesuffix(".json").partition(".")
    table = json.loads(
        (importlib.resources.files("interlace.tuning") / "tables" / name).read_text(
            encoding="utf-8"
        )
    )
    assert table["operator"] == operator
    assert {device.lower().replace(" ", "_") for device in table["machine"]["gpus"]} == {gpu}
    declaration = operator_named(operator)
    for entry in table["entries"]:
        if entry["config"]:  # an operator without a kernel of its own has none
            kernel = configured(declaration, entry["config"])
            config_type = kernel.config_type or declaration.config_type
            assert entry["config"] == str(config_type.parse(entry["config"]))
        assert entry["impl"] in (*declaration.words, "unfused")
        place = tuning.Point(
            entry["world_size"], entry["dtype"], {name: entry[name] for name in declaration.sizes}
        )
        found = tuning.nearest(operator, table["machine"]["gpus"][0], place)
        assert (found.impl, found.config) == (entry["impl"], entry["config"])


def test_a_size_between_takes_the_nearer_entry():
    assert nearest(rows=3).config == nearest(rows=4).config  # log2(4/3) < log2(3/2)
    assert "rows 8" in nearest(rows=7).reason
    assert [nearest(rows=rows).is_exact for rows in (4, 7, 8)] == [True, False, True]


def test_a_configuration_for_one_token_is_none_for_several():
    sizes = {"columns": 16384, "inner": 26624}
    place = point(rows=3, **sizes)
    by_sizes = tuning.nearest("gemv_all_reduce", H200, place)
    assert "rows 1," in by_sizes.reason
    among_several = tuning.nearest("gemv_all_reduce", H200, place, GemvAllReduceConfig.regime)
    assert "rows 4," in among_several.reason
    chosen = by_table(
        "gemv_all_reduce", H200, place.sizes, torch.bfloat16, 4, GemvAllReduceConfig()
    )
    assert chosen.reason == among_several.reason
    place = point(rows=1, **sizes)
    alone = tuning.nearest("gemv_all_reduce", H200, place, GemvAllReduceConfig.regime)
    assert "rows 1," in alone.reason


def test_tokens_that_share_a_narrow_weight_find_no_configuration_for_a_wide_one():
    """Tiles of 64 of its 2048 rows would leave 100 of 132 processors without one."""
    default = default_config(rows=5, columns=2048, world_size=4, itemsize=2)
    sizes = {"rows": 5, "columns": 2048, "inner": 5504}
    chosen = by_table("gemv_all_reduce", H200, sizes, torch.bfloat16, 4, default)
    assert chosen.config == default
    assert chosen.config.block_n == 16
    chosen = by_table(
        "gemv_all_reduce", H200, sizes | {"columns": 8192}, torch.bfloat16, 4, default
    )
    assert "columns 8192" in chosen.reason


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [2, 8, 9, 16, 17, 32, 64, 1000])
@pytest.mark.parametrize("columns", [1, 2112, 2113, 1 << 20])
def test_default_configurations_fit_the_shared_memory_of_small_gpus(rows, columns, itemsize):
    config = default_config(rows=rows, columns=columns, world_size=2, itemsize=itemsize)
    loaded = (config.block_n + block_tokens(rows)) * config.block_k * itemsize
    assert loaded * config.num_stages <= 99 << 10


def test_other_regimes_find_nothing():
    """More than a factor of four away, another dtype width, or another GPU: a default is better
    than a wrong lesson.
    """
    assert nearest(columns=8192 * 64) is None
    assert nearest(dtype="float32") is None
    assert nearest(dtype="float8_e4m3fn") is None
    assert tuning.nearest("gemv_all_reduce", "Another GPU", point()) is None


def test_another_dtype_of_the_same_width_and_another_number_of_ranks_borrow():
    assert nearest(dtype="float16").config == nearest().config
    assert nearest(world_size=8).config == nearest().config
