"""The model of time: what it says of products and links, and how its compositions are fitted."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from benchmarks import profile_fit
from interlace.bench import machine_profile
from interlace.costs.known_profiles import parse_profile, profile_of
from interlace.costs.time import MachineProfile, SizedCall, place_of
from interlace.errors import ConfigError
from interlace.registry import operators

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
H200 = profile_of("NVIDIA H200")
SHIPPED = (H200, profile_of("NVIDIA H100 80GB HBM3"))


def test_a_wave_more_takes_a_wave_longer() -> None:
    """132 processors compute 12 x 11 tiles of 128 x 256 at a time."""
    one, two = (
        H200.library_product_us(SizedCall(rows, 11 * 256, 8192, 2, 2))
        for rows in (12 * 128, 24 * 128)
    )
    tile_us = H200.tile_us(128, 256, 8192, H200.product.flops_per_s)
    assert one == pytest.approx(H200.product.launch_us + tile_us, rel=0.02)
    assert two == pytest.approx(H200.product.launch_us + 2 * tile_us, rel=0.02)


def test_few_rows_take_as_long_as_reading_the_weight() -> None:
    weight_us = 2 * 16384 * 8192 / H200.product.memory_bytes_per_s * 1e6
    assert H200.library_product_us(SizedCall(1, 16384, 8192, 2, 2)) == pytest.approx(
        H200.product.launch_us + weight_us, rel=0.01
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_part_that_goes_to_all_goes_to_each_peer_whole(ranks: int) -> None:
    """Where a share of it goes to each, and then each one's sum to all, fewer bytes leave a rank of
    more than two.
    """
    call = SizedCall(64, 8192, 4096, 2, ranks)
    shared, to_all = (
        call.parts_us(H200, "gemm_all_reduce", schedule, (128, 128))["link"]
        for schedule in ("whole", "to_all")
    )
    part_bytes = 2 * 64 * 8192
    sent_in_shares = 2 * (ranks - 1) * part_bytes / ranks
    assert to_all / shared == pytest.approx((ranks - 1) * part_bytes / sent_in_shares)


def test_operands_of_8_bits_take_half_the_time() -> None:
    wide, narrow = (
        H200.library_product_us(SizedCall(8192, 8192, 8192, itemsize, 2)) for itemsize in (2, 1)
    )
    assert narrow == pytest.approx(wide / 2, rel=0.05)


def test_float32_takes_no_tensor_cores() -> None:
    """The library's kernels take an order of magnitude longer, and ours three."""
    half, single = (
        SizedCall.of_dtype(dtype, 8192, 8192, 8192, 2) for dtype in ("bfloat16", "float32")
    )
    assert H200.library_product_us(single) > 10 * H200.library_product_us(half)
    tiled = [
        call.parts_us(H200, "gemm_all_reduce", "tiled", (128, 128))["product"]
        for call in (half, single)
    ]
    assert tiled[1] > 1000 * tiled[0]


def test_float8_has_wider_results() -> None:
    call = SizedCall.of_dtype("float8_e4m3fn", 200, 4096, 2048, 4)
    assert (call.itemsize, call.output_itemsize, call.is_exact) == (1, 2, False)
    sums = H200.link_us("gemm_reduce_scatter", call)
    assert sums == H200.link_us("gemm_reduce_scatter", SizedCall(200, 4096, 2048, 2, 4))


def test_parts() -> None:
    """Four ranks, 200 rows: 50 rows of each rank in a tile of 128 leave some of it empty."""
    call = SizedCall(200, 4096, 2048, 2, 4)
    whole = call.parts_us(H200, "gemm_reduce_scatter", "whole", (128, 256))
    by_rank = call.parts_us(H200, "gemm_reduce_scatter", "by_rank", (128, 256))
    tiled = call.parts_us(H200, "gemm_reduce_scatter", "tiled", (128, 256))
    # Three of four ranks' rows leave this one.
    assert whole["link"] == pytest.approx(150 * 4096 * 2 / H200.link_bytes_per_s * 1e6)
    assert (whole["fixed"], whole["peers"]) == (1.0, 2.0)
    assert whole["longer"] == max(whole["product"], whole["link"])
    assert by_rank["product"] == pytest.approx(4 * H200.library_product_us(call, 50))
    tile_us = H200.tile_us(128, 256, 2048, H200.product.flops_per_s)
    assert tiled["product"] == pytest.approx(tile_us), "64 tiles"
    by_peer = call.parts_us(H200, "gemm_reduce_scatter", "by_peer", (128, 256))
    own = H200.own_rows_us(call, (128, 256))
    assert by_peer["product"] == 3 * H200.library_product_us(call, 50) + own["library"]
    assert whole["uneven"] == 0
    uneven = dataclasses.replace(call, rows=201)
    parts = uneven.parts_us(H200, "gemm_reduce_scatter", "whole", (128, 256))
    assert parts["uneven"] == parts["product"]
    assert whole["product"] < by_rank["product"], "one launch"
    filled = dataclasses.replace(call, rows=4 * 128)
    assert (
        filled.parts_us(H200, "gemm_reduce_scatter", "tiled", (128, 256))["product"]
        == (tiled["product"])
    )


def test_own_rows() -> None:
    """The kernel where its tiles are large and full, as the library's product is followed by a
    kernel that reads every rank's part and writes the sum.
    """
    full = SizedCall(8192, 8192, 2048, 2, 4)
    own = H200.own_rows_us(full, (128, 256))
    assert own["kernel"] == H200.own_product_us(full, (128, 256), ranks=1) < own["library"]
    adding_us = H200.product.launch_us + 5 * 2048 * 8192 * 2 / H200.product.memory_bytes_per_s * 1e6
    assert own["library"] == pytest.approx(H200.library_product_us(full, 2048) + adding_us)
    smaller = H200.own_rows_us(full, (128, 128))
    assert smaller["kernel"] > 1.3 * own["kernel"]
    few = H200.own_rows_us(dataclasses.replace(full, rows=64), (128, 256))
    assert few["library"] < few["kernel"], "an eighth of a tile has rows"


def test_rows_in_place_save_the_copy_and_its_start() -> None:
    call = SizedCall(8192, 4096, 2048, 2, 4)
    copied_us = 2 * 2048 * 2048 * 2 / H200.product.memory_bytes_per_s * 1e6
    assert H200.staging_us(call) == pytest.approx(5 + copied_us)


def test_few_columns_are_read_by_few_programs() -> None:
    """A program reads its 16 columns' rows of w at 21 GB/s, however fast the memory is."""

    def narrow_us(columns: int, rows: int = 8) -> float:
        call = SizedCall(rows, columns, 24192, 2, 2)
        return call.parts_us(H200, "gemm_all_reduce", "whole", (128, 256))["narrow"]

    read_us = 2 * (576 + 8) * 24192 / H200.product.memory_bytes_per_s * 1e6
    assert narrow_us(576) == pytest.approx(16 * 24192 * 2 / 21e3 - read_us)
    assert narrow_us(576) > narrow_us(1024) > narrow_us(2048) > narrow_us(8192) == 0
    assert narrow_us(576, rows=4096) == 0, "what all rows take is longer"


def test_rows_that_do_not_begin_at_sectors() -> None:
    """A row of 5400 elements of 2 bytes is 337.5 sectors; w's rows are N long if w is along N."""
    aligned, along_k, along_n, whole_n = (
        H200.own_product_us(SizedCall(8192, n, k, 2, 2, w_along_k=w_along_k), (128, 256))
        for n, k, w_along_k in (
            (5400, 5376, True), (5400, 5400, True), (5400, 5376, False), (5376, 5376, False),
        )
    )  # fmt: skip
    assert along_k == pytest.approx(1.5 * aligned, rel=0.02)
    assert along_n == pytest.approx(1.5 * aligned, rel=0.02)
    assert whole_n == pytest.approx(aligned, rel=0.05)
    halves, other_halves = (
        H200.library_product_us(SizedCall(8192, 8192, k, 2, 2), 4096) for k in (5376, 5400)
    )
    assert other_halves == pytest.approx(1.15 * halves, rel=0.02)
    wholes = [H200.library_product_us(SizedCall(8192, 8192, k, 2, 2)) for k in (5376, 5400)]
    assert wholes[1] == pytest.approx(wholes[0], rel=0.02)


def test_what_a_profile_does_not_know() -> None:
    call = SizedCall(200, 4096, 2048, 2, 4)
    assert H200.predict_us("gemm_reduce_scatter", "nobody's", call, "whole", (128, 256)) is None
    assert H200.predict_us("nobody's", "fused", call, "whole", (128, 256)) is None


@pytest.mark.parametrize("sizes", [(0, 4096, 4096), (64, 0, 4096), (64, 4096, 0)])
def test_products_without_elements_take_some_time(sizes: tuple[int, int, int]) -> None:
    """An operator is called with them where a rank has no rows, or to time its exchange alone."""
    call = SizedCall(*sizes, 2, 2)
    for operator, implementations in H200.compositions.items():
        if operator == "mixture_of_experts":
            continue
        for each in operators()[operator].implementations:
            if each.name in implementations:
                us = H200.predict_us(operator, each.name, call, each.schedule, (128, 128))
                assert us is not None, (operator, each.name)
                assert 0 < us < 1e5, (operator, each.name)


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda profile: profile.gpu)
def test_shipped_profiles_are_of_implementations_that_exist(shipped: MachineProfile) -> None:
    assert not shipped.is_guess
    for operator, compositions in shipped.compositions.items():
        names = {each.name for each in operators()[operator].implementations}
        assert compositions.keys() <= names
        assert {"fused", "unfused"} <= compositions.keys()
        for composition in compositions.values():
            assert min(composition.values()) > 0


def test_a_guess() -> None:
    half = profile_of("A smaller GPU", 66)
    assert half.is_guess
    assert not H200.is_guess
    assert half.product.flops_per_s == H200.product.flops_per_s / 2
    assert half.tile_us(128, 256, 4096, half.product.flops_per_s) == H200.tile_us(
        128, 256, 4096, H200.product.flops_per_s
    )
    assert not half.corrections
    assert half.margin > H200.margin
    assert half.link_bytes_per_s == H200.link_bytes_per_s
    assert "66 of 132 processors" in half.source


def test_a_guess_by_data_sheets() -> None:
    """An A100 is more like an H100 than like an H200: their memories differ less."""
    h100, a100 = SHIPPED[1], profile_of("NVIDIA A100-SXM4-80GB", 1)
    assert a100.is_guess
    assert a100.processors == 108
    assert a100.product.flops_per_s == pytest.approx(h100.product.flops_per_s * 312 / 989)
    assert a100.product.memory_bytes_per_s == pytest.approx(
        h100.product.memory_bytes_per_s * 2039 / 3350
    )
    assert a100.link_bytes_per_s == pytest.approx(h100.link_bytes_per_s * 300 / 450)
    # A tile takes a processor longer, as each is slower.
    assert a100.tile_us(128, 256, 4096, a100.product.flops_per_s) > h100.tile_us(
        128, 256, 4096, h100.product.flops_per_s
    )
    assert "NVIDIA H100 80GB HBM3's, scaled by both data sheets" in a100.source
    assert not profile_of("NVIDIA H200").is_guess, "which was measured"


def test_a_guess_from_the_same_architecture_is_trusted_more() -> None:
    h800, b200, a100 = map(profile_of, ("NVIDIA H800", "NVIDIA B200", "NVIDIA A100-SXM4-80GB"))
    assert "NVIDIA H100 80GB HBM3's" in h800.source
    assert "NVIDIA H200's" in b200.source
    assert H200.margin < h800.margin < b200.margin == a100.margin
    pcie = profile_of("NVIDIA H100 PCIe")
    assert pcie.margin == b200.margin, "its links are PCIe's"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"gpu": 1}'])
def test_a_text_that_is_no_profile(text: str) -> None:
    with pytest.raises(ConfigError, match="a machine profile must be JSON with all its fields"):
        parse_profile(text)


def test_least_squares_are_not_negative() -> None:
    generator = np.random.default_rng(1)
    matrix = generator.random((50, 4))
    expected = np.array([0.5, 0.0, 2.0, 0.1])
    assert profile_fit.least_squares(matrix, matrix @ expected) == pytest.approx(expected)
    # Without the constraint, the last factor would be -1.
    factors = profile_fit.least_squares(matrix, matrix @ np.array([1.0, 1.0, 1.0, -1.0]))
    assert factors.min() >= 0
    assert factors[3] == 0


def test_least_squares_do_not_share_out_what_columns_have_in_common() -> None:
    column = np.random.default_rng(2).random((50, 1))
    alike = np.hstack((column, column, column * (1 + 1e-15)))
    factors = profile_fit.least_squares(alike, 0.9 * column[:, 0])
    assert sorted(factors) == pytest.approx([0, 0, 0.9])


def test_a_fit_finds_the_compositions_that_made_the_times() -> None:
    made = {"fixed": 10.0, "product": 0.9, "link": 0.5}
    profile = dataclasses.replace(
        H200, compositions={"gemm_all_reduce": {"chunked": made}}, corrections={}
    )
    points = []
    for rows in (64, 512, 4096, 16384):
        for inner in (512, 4096, 16384):
            call = SizedCall(rows, 8192, inner, 2, 2)
            us = profile.predict_us("gemm_all_reduce", "chunked", call, "by_rank", (0, 0))
            assert us is not None
            kind = "gemm_all_reduce", "chunked", call
            points.append(machine_profile.MeasuredPoint(*kind, "by_rank", (0, 0), us))
    found = profile_fit.fit(profile, points)
    assert found == {"gemm_all_reduce": {"chunked": pytest.approx(made, rel=0.01)}}
    assert profile_fit.fit(profile, points[:5]) == {}, "too few"


def test_points_of_results() -> None:
    """Names that no implementation has are passed over; a pair is known by its display name too."""
    result = {
        "operator": "all_gather_gemm", "dtype": "bfloat16", "world_size": 4, "rows": 256,
        "columns": 512, "inner": 64, "config": "block_m=64, block_n=128, block_k=32",
        "times": {
            "pushed": {"role": "ours", "impl": "pushed", "median_us": 7.0},
            "pushed_with_signals": {
                "role": "ours", "impl": "pushed_with_signals", "median_us": 5.0,
            },
            "torch async-TP": {"role": "pair", "median_us": 9.0},
            "NCCL alone": {"role": "communication", "median_us": 3.0},
        },
    }  # fmt: skip
    call = SizedCall(256, 512, 64, 2, 4)
    exact = dataclasses.replace(call, itemsize=4, is_exact=True)
    found = machine_profile.points_of([{"results": [result, {**result, "dtype": "float32"}]}])
    assert found == [
        machine_profile.MeasuredPoint("all_gather_gemm", impl, each, schedule, (64, 128), us)
        for each in (call, exact)
        for impl, schedule, us in (("pushed", "whole", 7.0), ("async_tp", "by_rank", 9.0))
    ]
    along_n = machine_profile.points_of([{"results": [{**result, "w_along_k": False}]}])
    assert [each.call for each in along_n] == 2 * [dataclasses.replace(call, w_along_k=False)]


def test_a_pair_comes_before_what_is_hardly_shorter() -> None:
    times = {"fused": 98.0, "chunked": 99.0, "unfused": 100.0, "pushed": 120.0}
    assert H200.in_order(times, {"unfused"}) == ["unfused", "fused", "chunked", "pushed"]
    assert H200.in_order(times | {"fused": 96.0}, {"unfused"})[:2] == ["fused", "unfused"]


def test_corrections_count_near_measured_calls() -> None:
    """One call took twice the composed time, and is predicted to. At nearly the same sizes half of
    the difference is taken for that call's own; far away nothing of it is left.
    """
    made = {"fixed": 10.0, "product": 1.0}
    profile = dataclasses.replace(
        H200, compositions={"gemm_all_reduce": {"chunked": made}}, corrections={}
    )

    def composed_us(call: SizedCall) -> float:
        us = profile.predict_us("gemm_all_reduce", "chunked", call, "by_rank", (0, 0))
        assert us is not None
        return us

    call, far = SizedCall(512, 4096, 4096, 2, 2), SizedCall(16384, 512, 512, 2, 2)
    points = [
        machine_profile.MeasuredPoint(
            "gemm_all_reduce", "chunked", each, "by_rank", (0, 0), factor * composed_us(each)
        )
        for each, factor in ((call, 2.0), (far, 1.0))
    ]
    corrections = machine_profile.corrections_of(profile, points)["gemm_all_reduce"]
    corrected = dataclasses.replace(profile, corrections={"gemm_all_reduce": corrections})
    expected = (
        (call, 2.0),
        (dataclasses.replace(call, rows=513), math.sqrt(2)),
        (dataclasses.replace(call, rows=1024), 1.23),
        (far, 1.0),
    )
    for each, factor in expected:
        us = corrected.predict_us("gemm_all_reduce", "chunked", each, "by_rank", (0, 0))
        assert us == pytest.approx(factor * composed_us(each), rel=0.01)
    assert corrections.factor("fused", call) == 1.0, "it was not measured"


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda profile: profile.gpu)
@pytest.mark.parametrize("rows", [1, 2, 7, 48, 1000, 1848, 5376, 40000])
def test_corrections_of_any_rows_are_those_of_all_measured_calls(
    shipped: MachineProfile, rows: int
) -> None:
    """Cubics through points along the rows take the place of sums over hundreds of calls."""
    corrections = shipped.corrections["gemm_reduce_scatter"]
    call = SizedCall(rows, 8192, 3584, 2, 2)
    here = place_of(call.size)
    distances = [math.dist(here, place_of(tuple(size))) for size in corrections.calls]
    nearness = np.exp(-np.square(distances) / 2)
    for name, weights in corrections.weights.items():
        expected = math.exp(nearness @ np.array(weights))
        assert corrections.common_factor(name, call) == pytest.approx(expected, rel=2e-4)
    assert len(corrections.weights) > 3


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda profile: profile.gpu)
def test_shipped_profiles_are_what_the_results_say(shipped: MachineProfile) -> None:
    """Of each implementation, half of its times within 6 % and nine of ten within 20 %."""
    documents = [json.loads((RESULTS / name).read_text()) for name in shipped.results]
    points = machine_profile.points_of(documents)
    assert len(points) > 3000
    refitted = profile_fit.fitted(shipped, points)
    for operator, compositions in shipped.compositions.items():
        for name in compositions:
            own = [
                each
                for each in points
                if (each.operator, each.implementation) == (operator, name)
                and each.call.itemsize == 2
            ]
            if not own:
                assert shipped is not H200, "what other GPUs' results lack is the H200's"
                assert compositions[name] == H200.compositions[operator][name]
                continue
            wrong = sorted(abs(ratio - 1) for ratio in machine_profile.errors(shipped, own))
            assert statistics.median(wrong) < 0.06, (operator, name)
            assert wrong[int(0.9 * len(wrong))] < 0.2, (operator, name)
            # Where two parts of a time say the same, machines round them into one or the other.
            for point in own[::10]:
                expected = point.predicted_us(shipped)
                assert point.predicted_us(refitted) == pytest.approx(expected, rel=0.02)
    assert refitted.other_compositions.keys() == shipped.other_compositions.keys()
    call = next(each.call for each in reversed(points) if each.operator == "gemm_all_reduce")
    factors = [
        profile.corrections["gemm_all_reduce"].factor("symm_mem", call)
        for profile in (shipped, refitted)
    ]
    assert factors[0] == pytest.approx(factors[1], rel=0.02)


@pytest.mark.parametrize(
    ("inner", "itemsize", "more"),
    [(4096, 2, 0.0), (4080, 2, 0.15), (4112, 2, 0.15), (4072, 2, 0.45), (4120, 4, 0.15)],
)
def test_rows_that_do_not_begin_at_lines_are_read_more_slowly(
    inner: int, itemsize: int, more: float
) -> None:
    """By a kernel that reads them by their addresses, and by no other."""
    call = SizedCall(8, 8192, inner, itemsize, 2)
    whole, read = (
        call.parts_us(H200, "gemm_all_reduce", schedule, (128, 256))
        for schedule in ("whole", "by_address")
    )
    longer = more * whole["memory"]
    assert read["memory"] == pytest.approx(whole["memory"] + longer)
    assert read["product"] == pytest.approx(whole["product"] + longer)
    assert read["longer"] == max(read["product"], read["link"])
    assert read["link"] == whole["link"]


def test_calls_of_two_ranks_say_nothing_of_further_peers() -> None:
    """What a further peer costs stays as it is known where no call shows it."""
    documents = [json.loads((RESULTS / name).read_text()) for name in SHIPPED[1].results]
    points = machine_profile.points_of(documents)
    assert {point.call.size[-1] for point in points} == {2}
    known = H200.compositions["gemm_all_reduce"]["fused"]["peers"]
    fitted = profile_fit.fit(H200, points)["gemm_all_reduce"]["fused"]
    assert fitted["peers"] == known > 1
    assert fitted["fixed"] != H200.compositions["gemm_all_reduce"]["fused"]["fixed"]


def test_parsing_is_the_inverse_of_writing() -> None:
    profile = parse_profile(json.dumps(dataclasses.asdict(H200)))
    assert isinstance(profile, MachineProfile)
    assert profile == H200


def test_a_sum_before_a_norm_sends_what_the_sum_sends() -> None:
    """With two ranks that is a part for the other one; with eight, far less than one for each."""
    machine = profile_of("NVIDIA H200")

    def us(operator: str, implementation: str, ranks: int) -> float:
        call = SizedCall.of_dtype("bfloat16", 256, 8192, 3584, ranks)
        found = machine.predict_us(operator, implementation, call, "whole", (128, 256))
        assert found is not None
        return found

    pairs = [us("gemm_all_reduce_norm", "unfused", ranks) for ranks in (2, 8)]
    assert pairs[1] < 2 * pairs[0]
    parts = [us("gemm_all_reduce_norm", "pushed", ranks) for ranks in (2, 8)]
    assert parts[1] > 3 * parts[0]
