"""``interlace doctor --client``: whether Interlace works in a program that is installed here."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from interlace.cli import client_memory, doctor_client
from interlace.cli.app import app
from interlace.cli.gpus import gpu_named
from interlace.clients import CLIENTS, VersionThatRan
from interlace.comm.groups.reservation import Reservation
from interlace.costs.models import LayerProduct, Model, find_model
from interlace.errors import ArgumentError
from interlace.gemm.implementations import outputs

LIMIT = "INTERLACE_MAX_WORKSPACE"


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ["COLUMNS", LIMIT]
    for client in CLIENTS.values():
        variables += [client.variable, client.plugins, client.promise]
    for variable in filter(None, variables):
        monkeypatch.delenv(variable, raising=False)


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def checks_of(folder: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    """Return the exit status, and the checks by their names."""
    file = folder / "doctor.json"
    done = doctor(*arguments, "--json", file)
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["works"] == (done.exit_code == 0)
    return done.exit_code, {row["check"]: row for row in written["checks"]}


def _install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(doctor_client, "package_version", lambda _: version)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_that_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """The version was run, what the client calls can be loaded, and Interlace is on."""
    client = CLIENTS[name]
    _install(monkeypatch, f"{client.runs[0].version}")
    if client.variable:
        monkeypatch.setenv(client.variable, "1")
    status, checks = checks_of(tmp_path, "--client", name)
    assert status == 0
    assert client.runs[0].ran_on in checks["versions that were run"]["meaning"]
    assert {row["status"] for row in checks.values()} == {"ok"}
    assert checks["fused"]["meaning"] == client.fused
    assert client.off in checks["switch"]["meaning"]


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INTERLACE_VLLM", "1")
    _install(monkeypatch, "")
    status, checks = checks_of(tmp_path, "--client", "vllm")
    assert status == 1
    assert checks["vLLM"]["status"] == "missing"
    assert "0.26.0" in checks["versions that were run"]["meaning"]


def test_a_version_that_was_not_run_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _install(monkeypatch, "6.0.1")
    status, checks = checks_of(tmp_path, "--client", "transformers")
    assert status == 0
    row = checks["versions that were run"]
    assert row["status"] == "not here"
    assert row["meaning"].startswith("not 6.0.1, but 5.17: ")


@pytest.mark.parametrize(
    ("variables", "is_on", "meaning"),
    [
        ({}, False, "do not choose it"),
        ({"VLLM_PLUGINS": "other,interlace"}, True, "on in this environment"),
        ({"VLLM_PLUGINS": "interlace", "INTERLACE_VLLM": "0"}, False, "do not choose it"),
        ({"INTERLACE_VLLM": "maybe"}, False, "must be 1 or 0"),
        ({"INTERLACE_VLLM": "1", "VLLM_BATCH_INVARIANT": "1"}, False, "the same bits"),
    ],
)
def test_the_switch(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    is_on: bool,
    meaning: str,
) -> None:
    """The exit status is 0 only where the client would use Interlace."""
    _install(monkeypatch, "0.26.0")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    status, checks = checks_of(tmp_path, "--client", "vllm")
    assert (status == 0) == is_on
    assert meaning in checks["switch"]["meaning"]
    assert is_on or checks["switch"]["action"]


def test_a_plug_in_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> list[object]:
        class Entry:
            value = "interlace.integrations.vllm:plugin"

            def load(self) -> None:
                raise RuntimeError("no torch\nmore")

        return [Entry()]

    monkeypatch.setattr(doctor_client, "entry_points", refuse)
    row = doctor_client._entry(CLIENTS["vllm"])
    assert row.status == "missing"
    assert row.meaning.endswith("cannot be loaded: no torch")
    monkeypatch.setattr(doctor_client, "entry_points", lambda **_: [])
    assert doctor_client._entry(CLIENTS["vllm"]).status == "missing"


def test_entry_points_are_those_of_the_package() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {group for group, found in project["entry-points"].items() if "interlace" in found}
    assert {
        client.entry for client in CLIENTS.values() if not client.entry.startswith("interlace.")
    } == declared


def test_the_memory_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is what the operators reserve; the limit of the plug-in, or of the user, bounds it."""
    arguments = ("--client", "vllm", "--model", "llama3-70b", "--tokens", 8192, "-n", 2)
    _, checks = checks_of(tmp_path, *arguments)
    assert checks["limit of workspaces"]["meaning"].startswith("2G per rank")
    row = checks["memory"]
    assert row["meaning"].startswith("1.19 GiB per rank by a step of 8192 tokens, at most 2 GiB")
    monkeypatch.setenv(LIMIT, "")
    _, checks = checks_of(tmp_path, *arguments)
    assert checks["memory"]["meaning"].startswith("1.19 GiB per rank")
    assert not checks["memory"]["action"]


def test_more_tokens_take_no_less_memory() -> None:
    for name in ("vllm", "sglang", "transformers"):
        found = [
            client_memory.memory_of(CLIENTS[name], "llama3-8b", tokens, 2, "h200", torch.bfloat16)
            for tokens in (1, 100, 512, 4096)
        ]
        assert [each.most for each in found] == sorted(each.most for each in found)
        assert all(0 < each.first <= each.most for each in found)


def test_a_sum_without_a_norm_takes_what_a_sum_takes() -> None:
    """That of shared experts, as of DeepSeek V3; SGLang has no operator with a norm."""
    model = find_model("deepseek-v3")
    assert isinstance(model, Model)
    (down,) = (each for each in model.layer_products(8) if each.part == "shared down")

    def reserved(client: str, product: LayerProduct) -> Reservation:
        where = (8, 8, gpu_named("h200"), torch.bfloat16)
        return client_memory._reservation(CLIENTS[client], product, *where)

    assert reserved("vllm", down) == reserved("sglang", down)
    assert reserved("vllm", down) != reserved("vllm", down._replace(is_normed=True))


@pytest.mark.parametrize("ranks", [1, 16])
def test_groups_that_no_operator_takes_have_no_memory_of_a_model(ranks: int) -> None:
    """A rank alone was said to hold 82 MiB, and each of sixteen 2.65 GiB."""
    with pytest.raises(ArgumentError, match=f"must be from 2 to 8 ranks; got {ranks}"):
        client_memory.memory_of(CLIENTS["vllm"], "llama3-70b", 8192, ranks, "h200", torch.bfloat16)


def test_a_group_keeps_as_many_mapped_outputs_as_are_counted() -> None:
    assert client_memory.MOST_OUTPUTS == outputs.MOST_OUTPUTS


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--client", "vlm"), "Did you mean vllm?"),
        (("--model", "llama3-8b"), "--model with --client"),
        (("--client", "vllm", "--network"), "must come without --network"),
        (("--client", "vllm", "--model", "llama3-8b", "--tokens", "0"), "from 1 to 2^30; got '0'"),
        (("--client", "vllm", "--model", "llama3-8b", "--tokens", f"{2**31}"), "from 1 to 2^30"),
        (("--client", "torchrec", "--model", "llama3-8b"), "must be a transformer"),
        (("--client", "vllm", "--model", "llama3-8b", "-n", "7"), "got 7"),
        (("--client", "torchtitan", "--model", "deepseek-v3"), "--model must have attention whose"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], says: str) -> None:
    done = doctor(*arguments)
    assert done.exit_code == 1
    assert says in done.output


def test_a_version_stands_for_those_that_begin_with_it() -> None:
    assert VersionThatRan("5.23", "").is_of("5.23.1")
    assert VersionThatRan("0.26.0", "").is_of("0.26.0+cu130")
    assert not VersionThatRan("0.26.0", "").is_of("0.26.1")
    assert not VersionThatRan("5.2", "").is_of("5.23.0")
