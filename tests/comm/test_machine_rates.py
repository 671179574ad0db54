"""``INTERLACE_MEASURE_MACHINE=1``: all ranks of a program agree on one profile, measured when their
first group is made. The times are made up, since there is no GPU here.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from interlace.comm import group_of
from interlace.comm.groups import machine_rates
from interlace.comm.groups.group import Group
from interlace.comm.host import common_profile
from interlace.compile import choice
from interlace.costs import known_profiles
from interlace.costs.known_profiles import profile_of
from interlace.costs.product_fit import MeasuredRates, ProductTime
from interlace.costs.time import SizedCall
from interlace.errors import WorkspaceError
from tests.errors import error_of
from tests.profiles import forget_profiles, programs_store

_GPU = "NVIDIA Unheard-of"


def _rates(link: float) -> MeasuredRates:
    """Return rates of a GPU that takes three times as long as the guess for every product."""
    guess = profile_of(_GPU)
    sizes = [(64 << i % 5, 4096, 2048 << i % 3) for i in range(20)]
    products = [
        ProductTime(*size, us=3 * guess.library_product_us(SizedCall(*size, 2, 1)))
        for size in sizes
    ]
    return MeasuredRates(products, link, 2)


def _on_gpu(group: Group) -> Any:
    """Return a group of the CPU backend as one whose ranks have a GPU each."""
    members = SimpleNamespace(
        backend="cuda",
        world_size=group.world_size,
        ranks_per_gpu=1,
        local_ranks=group.members.local_ranks,
        device=torch.device("cuda", 0),
    )
    return SimpleNamespace(
        members=members,
        rank=group.rank,
        device=members.device,
        channel=group.channel,
        exchange=group.exchange,
    )


def _join(group: Any, measure: mock.Mock, program: str) -> list[str]:
    """Do what joining a group of a program does; return the warnings.

    Args:
        program: What ranks publish is kept under this name, as the ranks outlive a test.
    """
    properties = SimpleNamespace(multi_processor_count=100)
    with (
        mock.patch.dict(os.environ, {common_profile.VARIABLE: "1"}),
        mock.patch("torch.cuda.get_device_name", return_value=_GPU),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch.object(machine_rates, "measure_rates", measure),
        programs_store(program),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        machine_rates.share_profile(group.members, group.exchange)
        machine_rates.measure_unknown(group)
    return [str(warning.message) for warning in caught]


def _two_groups(folder: str) -> tuple[str, float, int, bool, float]:
    """Join a group of half of the ranks, and then one of all; each half has measured another rate
    of links. Return what this rank knows then.
    """
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    measure = mock.Mock(return_value=_rates(1e11 * (1 + rank // 2)))
    product = SizedCall(1024, 4096, 4096, 2, 1)
    with mock.patch.dict(os.environ, {"INTERLACE_CACHE_DIR": folder}):
        try:
            guessed_us = profile_of(_GPU).library_product_us(product)
            assert _join(_on_gpu(group_of(halves[rank // 2])), measure, folder) == []
            assert _join(_on_gpu(group_of()), measure, folder) == []
            profile = profile_of(_GPU, 100)
            kept = known_profiles.own_file(_GPU).is_file()
            slower = profile.library_product_us(product) / guessed_us
            return profile.source, profile.link_bytes_per_s, measure.call_count, kept, slower
        finally:
            forget_profiles()
            for half in halves:
                if half is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(half)


def test_all_ranks_know_one_profile(ranks: Any, tmp_path: Path) -> None:
    """Groups that measure at the same time take what the first one has found."""
    found = ranks(4).run(_two_groups, str(tmp_path))
    (source, link, _, kept, slower) = found[0]
    assert source.startswith("a guess: NVIDIA H200's, with 100 of 132 processors; products and")
    assert link in (1e11, 2e11)
    assert kept
    assert slower == pytest.approx(3, rel=0.1)
    for other_source, other_link, measured, *_ in found:
        assert (other_source, other_link) == (source, link)
        assert measured <= 1, "a group whose ranks know a profile measures nothing"
    assert sum(measured for _, _, measured, *_ in found) >= 2


def _one_knows(folder: str) -> tuple[float, int]:
    """Join a group of which only the last rank has a profile in its cache."""
    rank = dist.get_rank()
    measure = mock.Mock(return_value=_rates(1e11))
    with mock.patch.dict(os.environ, {"INTERLACE_CACHE_DIR": f"{folder}/{rank}"}):
        try:
            if rank == 1:
                known = machine_rates.with_rates(profile_of(_GPU), _GPU, 100, _rates(3e11), "here")
                known_profiles.keep_profile(known)
            known_profiles.profile_of.cache_clear()
            _join(_on_gpu(group_of()), measure, folder)
            return profile_of(_GPU, 100).link_bytes_per_s, measure.call_count
        finally:
            forget_profiles()


def test_what_one_rank_knows_counts(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(_one_knows, str(tmp_path)) == [(3e11, 0), (3e11, 0)]


def _no_memory(folder: str) -> tuple[list[str], bool]:
    measure = mock.Mock(side_effect=WorkspaceError("no memory"))
    # A folder that is a file cannot be written to either.
    with mock.patch.dict(os.environ, {"INTERLACE_CACHE_DIR": folder}):
        try:
            return _join(_on_gpu(group_of()), measure, folder), profile_of(_GPU, 100).is_guess
        finally:
            forget_profiles()


def test_a_machine_that_cannot_be_measured(ranks: Any, tmp_path: Path) -> None:
    for said, is_guess in ranks(2).run(_no_memory, str(tmp_path)):
        assert is_guess
        assert any("was not measured, and predictions for it are guesses" in text for text in said)


def _not_kept(file: str) -> tuple[list[str], float]:
    measure = mock.Mock(return_value=_rates(1e11))
    with mock.patch.dict(os.environ, {"INTERLACE_CACHE_DIR": file}):
        try:
            said = _join(_on_gpu(group_of()), measure, file)
            return said, profile_of(_GPU, 100).link_bytes_per_s
        finally:
            forget_profiles()


def test_a_profile_that_cannot_be_kept(ranks: Any, tmp_path: Path) -> None:
    """All ranks use it nevertheless; the one that writes for its node warns."""
    file = tmp_path / "file"
    file.touch()
    (said, link), (other_said, other_link) = ranks(2).run(_not_kept, str(file))
    assert any(f"the measured profile of {_GPU} is not kept" in text for text in said)
    assert not any("is not kept" in text for text in other_said)
    assert link == other_link == 1e11


def _settled(folder: str, first: str) -> list[tuple[float, bool, int]]:
    """Two halves of a program of which the second alone has a profile on its disk, made in turn;
    the ranks of one half compile a function before, if they are to be first.

    Returns:
        The rate of links by which this rank chooses after its half was made, and after a group of
        ranks 0 and 2 was, and how often it has measured.
    """
    rank = dist.get_rank()
    halves, across = [dist.new_group([0, 1]), dist.new_group([2, 3])], dist.new_group([0, 2])
    measure = mock.Mock(return_value=_rates(1e11))
    found: list[Any] = []
    environment = {"INTERLACE_CACHE_DIR": f"{folder}/{rank // 2}"}
    properties = SimpleNamespace(multi_processor_count=100)
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch("torch.cuda.get_device_name", return_value=_GPU),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        programs_store(folder),
    ):
        try:
            if rank == 2:
                known = machine_rates.with_rates(profile_of(_GPU), _GPU, 100, _rates(3e11), "here")
                known_profiles.keep_profile(known)
            known_profiles.profile_of.cache_clear()
            dist.barrier()
            if first == "compiled" and rank == 1:
                choice.require_common_profile(torch.device("cuda", 0))
            dist.barrier()
            for half in (0, 1) if first == "measured" else (1, 0):
                if rank // 2 == half:
                    assert _join(_on_gpu(group_of(halves[half])), measure, folder) == []
                dist.barrier()
            found.append(profile_of(_GPU, 100).link_bytes_per_s)
            if rank % 2 == 0:
                assert _join(_on_gpu(group_of(across)), measure, folder) == []
            dist.barrier()
            found.append(profile_of(_GPU, 100).link_bytes_per_s)
        finally:
            forget_profiles()
            for group in (*halves, across):
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(group)
    return [*found, measure.call_count]


@pytest.mark.parametrize("first", ["measured", "on disk", "compiled"])
def test_ranks_choose_by_one_profile_from_their_first_choice_on(
    ranks: Any, tmp_path: Path, first: str
) -> None:
    """Whichever half settles it, and whoever joins another group later."""
    link = {"measured": 1e11, "on disk": 3e11, "compiled": profile_of(_GPU, 100).link_bytes_per_s}
    found = ranks(4).run(_settled, str(tmp_path), first)
    assert [links for *links, _ in found] == [[link[first]] * 2] * 4
    measured = [count for *_, count in found]
    assert measured[2:] == [0, 0]
    assert set(measured[:2]) == ({0} if first == "on disk" else {1})


def _asked_again(folder: str) -> list[int]:
    """How often a profile was written as text, by how often a layer has asked."""
    counts = []
    properties = SimpleNamespace(multi_processor_count=100)
    with (
        mock.patch("torch.cuda.get_device_name", return_value=_GPU),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        programs_store(folder),
        mock.patch.object(common_profile, "text_of", wraps=common_profile.text_of) as written,
    ):
        try:
            for _ in range(3):
                choice.require_common_profile(torch.device("cuda", 0))
                counts.append(written.call_count)
        finally:
            forget_profiles()
    return counts


def test_a_profile_is_settled_once(ranks: Any, tmp_path: Path) -> None:
    """Plug-ins of engines ask in every call of a layer."""
    for first, *others in ranks(2).run(_asked_again, str(tmp_path)):
        assert first > 0
        assert others == [first, first]


def _incomplete(folder: str) -> tuple[float, bool]:
    """Join a group whose GPUs have had no memory for some of the products."""
    rates = dataclasses.replace(_rates(1e11), is_complete=False)
    with mock.patch.dict(os.environ, {"INTERLACE_CACHE_DIR": folder}):
        try:
            assert _join(_on_gpu(group_of()), mock.Mock(return_value=rates), folder) == []
            kept = known_profiles.own_file(_GPU).is_file()
            return profile_of(_GPU, 100).link_bytes_per_s, kept
        finally:
            forget_profiles()


def test_an_incomplete_measurement_is_this_programs_alone(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(_incomplete, str(tmp_path)) == [(1e11, False)] * 2


def _fails_to_measure(step: str) -> list[str]:
    """Measure where rank 1 alone cannot."""
    group = group_of(dist.new_group())

    def fail(*_: Any) -> None:
        if dist.get_rank():
            raise RuntimeError("the driver refuses")

    fails = {name: mock.Mock(return_value=1.0) for name in ("_product_us", "_elapsed_us")}
    fails[step].side_effect = fail if dist.get_rank() else None
    with (
        mock.patch.object(machine_rates, "_product_us", fails["_product_us"]),
        mock.patch.object(machine_rates, "_elapsed_us", fails["_elapsed_us"]),
        mock.patch.object(machine_rates, "_LINK_BYTES", 4096),
    ):
        return error_of(machine_rates.measure_rates, group)[:2]


@pytest.mark.parametrize("step", ["_product_us", "_elapsed_us"])
def test_a_measurement_fails_on_all_ranks(ranks: Any, step: str) -> None:
    for kind, message in ranks(2).run(_fails_to_measure, step):
        assert kind == "BackendError"
        assert "the driver refuses" in message


def _different_settings() -> BaseException | None:
    with mock.patch.dict(os.environ, {common_profile.VARIABLE: str(dist.get_rank())}):
        return error_of(group_of, dist.new_group())


def test_ranks_must_agree_on_the_setting(ranks: Any) -> None:
    for error in ranks(2).run(_different_settings):
        assert "setting of measuring machines" in str(error)


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_measured_unasked(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(common_profile.VARIABLE, value)
    assert not common_profile.is_asked_for()
