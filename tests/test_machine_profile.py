"""``interlace tune machine``: from measured times to a profile, and where it is kept. The times are
made up, since there is no GPU here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.bench import machine_profile
from interlace.cache_folder import cache_folder
from interlace.cli import bench
from interlace.cli.tune_machine import is_between_nodes
from interlace.comm.host import identity
from interlace.costs import known_profiles
from interlace.costs.known_profiles import cached_by_profiles, keep_profile, profile_of
from interlace.costs.product_fit import MeasuredRates, ProductTime, fit_rates
from interlace.costs.time import MachineProfile, SizedCall
from interlace.registry import operators
from interlace.tuning.gpu import Gpu
from tests.profiles import forget_profiles

H200 = profile_of("NVIDIA H200")
SLOW = dataclasses.replace(
    H200,
    product=dataclasses.replace(
        H200.product, flops_per_s=3e14, memory_bytes_per_s=1.5e12, launch_us=5.0
    ),
    link_bytes_per_s=1e11,
    corrections={},
)
"""A GPU with less than half of an H200's rates."""


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("INTERLACE_CACHE_DIR", str(tmp_path))
    profile_of.cache_clear()
    yield
    profile_of.cache_clear()


def _products(profile: MachineProfile) -> list[ProductTime]:
    chance, found = random.Random(1), []
    for _ in range(40):
        sizes = [2 ** chance.randint(low, 14) for low in (3, 9, 8)]
        us = profile.library_product_us(SizedCall(sizes[0], sizes[1], sizes[2], 2, 1))
        found.append(ProductTime(sizes[0], sizes[1], sizes[2], us))
    return found


def _result(profile: MachineProfile, rows: int, factor: float) -> dict[str, Any]:
    """Return a sweep's result in which implementations take ``factor`` times the prediction."""
    call = SizedCall(rows, 8192, 2048, 2, 2)
    times = {}
    for name, schedule in (("chunked", "by_rank"), ("unfused", "whole")):
        us = profile.predict_us("gemm_all_reduce", name, call, schedule, (128, 256))  # type: ignore[arg-type]
        assert us is not None
        role = "pair" if name == "unfused" else "ours"
        times[name] = {"role": role, "impl": name, "median_us": us * factor}
    return {
        "operator": "gemm_all_reduce", "dtype": "bfloat16", "world_size": 2, "rows": rows,
        "columns": 8192, "inner": 2048, "config": "block_m=128, block_n=256", "times": times,
    }  # fmt: skip


def test_rates_are_found() -> None:
    """The products' times are within 2 % of those that the rates were hidden in."""
    found = dataclasses.replace(H200, product=fit_rates(H200, _products(SLOW)))
    for each in _products(SLOW):
        us = found.library_product_us(SizedCall(each.rows, each.columns, each.inner, 2, 1))
        assert us == pytest.approx(each.us, rel=0.1)
    assert found.product.flops_per_s == pytest.approx(3e14, rel=0.05)
    assert found.product.float32_flops_per_s == pytest.approx(
        H200.product.float32_flops_per_s * found.product.flops_per_s / H200.product.flops_per_s,
        rel=1e-3,
    )


def test_noise_moves_no_rate_far() -> None:
    """A library that is good at some sizes and bad at others, as real ones are, changes no rate
    beyond reason, and no prediction by more than its noise.
    """
    chance = random.Random(2)
    noisy = [
        dataclasses.replace(each, us=each.us * chance.lognormvariate(0, 0.25))
        for each in _products(H200)
    ]
    found = dataclasses.replace(H200, product=fit_rates(H200, noisy))
    for field in dataclasses.fields(found.product):
        change = getattr(found.product, field.name) / getattr(H200.product, field.name)
        assert 0.5 < change < 2, field.name
    for each in _products(H200):
        us = found.library_product_us(SizedCall(each.rows, each.columns, each.inner, 2, 1))
        assert us == pytest.approx(each.us, rel=0.25)


def test_a_profile_of_another_gpu() -> None:
    """Implementations take 1.3 times what the H200's compositions say of this GPU's rates."""
    rates = MeasuredRates(_products(SLOW), 1e11, 2)
    results = [_result(SLOW, rows, 1.3) for rows in (256, 1024, 4096, 8192, 16384)]
    guess = profile_of("Another GPU", 80)
    profile = machine_profile.profile_from(guess, "Another GPU", 132, rates, results, "here")
    assert (profile.gpu, profile.processors, profile.is_guess) == ("Another GPU", 132, False)
    assert profile.link_bytes_per_s == 1e11
    for rows in (512, 2048, 12000):
        call = SizedCall(rows, 8192, 2048, 2, 2)
        for name, schedule in (("chunked", "by_rank"), ("unfused", "whole")):
            kind = "gemm_all_reduce", name, call, schedule, (128, 256)
            expected = SLOW.predict_us(*kind)  # type: ignore[arg-type]
            assert expected is not None
            assert profile.predict_us(*kind) == pytest.approx(1.3 * expected, rel=0.12)  # type: ignore[arg-type]
    unmeasured = profile.compositions["gemm_all_to_all"]["fused"]
    assert unmeasured == guess.compositions["gemm_all_to_all"]["fused"]


@pytest.mark.usefixtures("own_cache")
def test_the_users_own_profile_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Another GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    digest = identity.profile_digest.__wrapped__  # type: ignore[attr-defined]
    guessed = digest(gpu)
    assert profile_of("Another GPU", 132).is_guess
    keep_profile(dataclasses.replace(SLOW, gpu="Another GPU"))
    profile_of.cache_clear()
    assert profile_of("Another GPU", 132) == dataclasses.replace(SLOW, gpu="Another GPU")
    assert known_profiles.own_gpus() == ["Another GPU"], "which interlace explain --gpu takes"
    assert known_profiles.own_file("Another GPU").parent.stat().st_mode & 0o077 == 0
    assert digest(gpu) != guessed, "ranks that have different profiles must not be a group"


def _choices(device: torch.device) -> dict[tuple[object, ...], tuple[str, object]]:
    found = {}
    for name, operator in operators().items():
        if getattr(operator, "computation", "") != "gemm":
            continue
        for sizes in itertools.product((1, 32), (1024, 8192), (1024, 14336)):
            call = dict(zip(operator.sizes, sizes, strict=True))
            choice = operator.choose(**call, dtype=torch.bfloat16, world_size=2, device=device)
            found[name, *sizes] = choice.impl, choice.config
    return found


@pytest.mark.usefixtures("own_cache")
def test_nothing_remembered_follows_from_an_earlier_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that has asked for choices before its program settles a profile chooses like one that
    has not.
    """
    device, gpu = torch.device("cuda", 0), Gpu("NVIDIA A100-SXM4-80GB", 108, 166912)
    monkeypatch.setattr(Gpu, "of", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu.name)
    guess = profile_of(gpu.name, gpu.processors)
    before = _choices(device)
    product = dataclasses.replace(guess.product, launch_us=3 * guess.product.launch_us)
    slower = guess.link_bytes_per_s / 8
    try:
        known_profiles.adopt(dataclasses.replace(guess, link_bytes_per_s=slower, product=product))
        asked_before = _choices(device)
        modules = [module for name, module in sys.modules.items() if name.startswith("interlace")]
        for value in [value for module in modules for value in vars(module).values()]:
            if isinstance(value, (functools._lru_cache_wrapper, cached_by_profiles)):
                value.cache_clear()
        assert _choices(device) == asked_before != before
    finally:
        forget_profiles()


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        ("{", 0o600, "a machine profile must be JSON with all its fields"),
        ("[" * 100_000, 0o600, "a machine profile must be JSON with all its fields"),
        ("\udcff", 0o600, "'utf-8' codec can't decode"),
        (json.dumps(dataclasses.asdict(SLOW)), 0o666, "others than this user may write to it"),
    ],
)
@pytest.mark.usefixtures("own_cache")
def test_a_profile_that_cannot_be_trusted(text: str, mode: int, reason: str) -> None:
    file = known_profiles.own_file("NVIDIA H200")
    file.parent.mkdir(mode=0o700)
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    os.chmod(file, mode)
    with pytest.warns(RuntimeWarning, match=f"is ignored: {reason}"):
        profile = profile_of("NVIDIA H200")
    assert profile == H200


@pytest.mark.usefixtures("own_cache")
def test_only_measured_times_are_forgotten(tmp_path: Path) -> None:
    """Ranks of a sweep find this user's profile, and no times of programs before."""
    keep_profile(dataclasses.replace(SLOW, gpu="Another GPU"))
    (tmp_path / "measured").mkdir()
    with bench.nothing_measured():
        profile_of.cache_clear()
        assert not profile_of("Another GPU").is_guess
        assert not cache_folder("measured").exists()
    assert cache_folder("measured") == tmp_path / "measured"


@pytest.mark.parametrize(
    ("nodes", "environment", "expected"),
    [
        (None, {}, False),
        (1, {}, False),
        (2, {}, True),
        (None, {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, False),
        (None, {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),
    ],
)
def test_ranks_on_several_nodes_measure_the_network(
    monkeypatch: pytest.MonkeyPatch, nodes: int | None, environment: dict[str, str], expected: bool
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_between_nodes(nodes) is expected
