"""``interlace doctor --client``: whether Interlace works in a program that is installed here."""

from __future__ import annotations

import dataclasses
import importlib
import os
from importlib.metadata import entry_points

import torch

from interlace.cli.client_memory import memory_of
from interlace.cli.console import make_console
from interlace.cli.doctor import ABSENT, MISSING, OK, Row, check_limit, first_line, print_rows
from interlace.cli.machine import header, package_version
from interlace.cli.outputs import Outputs
from interlace.clients import CLIENTS, Client, is_on
from interlace.environment import LIMIT_VARIABLE, byte_count
from interlace.errors import ArgumentError, did_you_mean
from interlace.units import MOST_COUNT, format_memory, shortened


def run(name: str, model: str, tokens: int, ranks: int, gpu: str, outputs: Outputs) -> int:
    """Print all checks of a client; return the exit code: 0 if Interlace would work in it.

    Args:
        name: The client's name.
        model: A transformer whose memory is asked for, or empty.
        tokens: Number of tokens of its largest step.
        ranks: Number of its tensor parallel ranks.
        gpu: A GPU whose profile is shipped.
        outputs: The files to write.

    Raises:
        ArgumentError: There is no such client, model or GPU.
    """
    client = CLIENTS.get(name)
    if client is None:
        hint = did_you_mean(name, list(CLIENTS))
        raise ArgumentError(f"--client must be one of {', '.join(CLIENTS)}; got {name!r}.{hint}")
    # The client is not imported.
    rows = [
        *_versions(client),
        _entry(client),
        _switch(client),
        Row("fused", OK, client.fused),
        Row("left alone", OK, client.left),
        _limit(client),
    ]
    if model:
        rows.append(check_memory(client, model, tokens, ranks, gpu))
    works = not any(row.status == MISSING for row in rows)
    console = make_console()
    print_rows(console, rows)
    if works:
        console.print(f"Interlace works in {client.title} here.", style="green")
    else:
        console.print(
            f"Interlace does nothing in {client.title} here; the rows marked missing say what to "
            "do.", style="bold red",
        )  # fmt: skip
    outputs.write_json(
        lambda: {
            **header(),
            "client": client.name,
            "works": works,
            "checks": [dataclasses.asdict(row) for row in rows],
        }
    )
    return 0 if works else 1


def _versions(client: Client) -> list[Row]:
    """Return which version is installed, and where which versions were run."""
    installed = package_version(client.package)
    ran = "; ".join(f"{run.version}: {run.ran_on}" for run in client.runs)
    if not installed:
        action = f"install {client.package} in this environment"
        return [
            Row(client.title, MISSING, "not installed here", action),
            Row("versions that were run", ABSENT, ran),
        ]
    runs = [run for run in client.runs if run.is_of(installed)]
    if runs:
        environments = "; ".join(run.ran_on for run in runs)
        return [
            Row(client.title, OK, installed),
            Row("versions that were run", OK, f"{installed}: {environments}"),
        ]
    return [
        Row(client.title, OK, installed),
        Row(
            "versions that were run", ABSENT, f"not {installed}, but {ran}", "compare results once"
        ),
    ]


def _entry(client: Client) -> Row:
    """Return whether what the client calls, or the user's program imports, can be loaded."""
    is_module, check = client.entry.startswith("interlace."), "plug-in"
    try:
        if is_module:
            importlib.import_module(client.entry)
            return Row(check, OK, f"{client.entry} can be imported")
        plugins = [*entry_points(group=client.entry, name=client.plugin)]
        if not plugins:
            meaning = f"no entry point {client.plugin} of {client.entry}"
            return Row(check, MISSING, meaning, "pip install interlace again, as a wheel")
        plugins[0].load()
    # A broken installation fails in many ways.
    except Exception as error:
        action = "interlace doctor says which packages are missing"
        return Row(check, MISSING, f"{client.entry} cannot be loaded: {first_line(error)}", action)
    return Row(check, OK, f"{client.entry} has {plugins[0].value}, which can be loaded")


def _switch(client: Client) -> Row:
    """Return whether Interlace is on, and how to switch it on and off."""
    check = "switch"
    try:
        is_asked = client.is_asked()
    except ArgumentError as error:
        return Row(check, MISSING, str(error), f"unset {client.variable}, or correct it")
    if client.promise and is_on(client.promise):
        meaning = f"off: {client.promise} promises the same bits in every batch"
        return Row(check, MISSING, meaning, f"unset {client.promise}, or do without Interlace")
    if not client.variable:
        return Row(check, OK, f"on by a line of the program, {client.line}; off: {client.off}")
    if is_asked:
        return Row(check, OK, f"on in this environment; off: {client.off}")
    meaning = f"off in this environment: {client.variable} and {client.plugins} do not choose it"
    return Row(check, MISSING, meaning, client.line)


def _limit(client: Client) -> Row:
    """Return the limit of symmetric memory, which the plug-in sets if the user does not."""
    row = check_limit()
    if not client.limit or LIMIT_VARIABLE in os.environ:
        return row
    meaning = (
        f"{client.limit} per rank and group, which the plug-in sets if {LIMIT_VARIABLE} is not"
    )
    return dataclasses.replace(row, meaning=f"{meaning}; an empty {LIMIT_VARIABLE} lifts it")


def check_memory(client: Client, model: str, tokens: int, ranks: int, gpu: str) -> Row:
    """Return the symmetric memory of a model's layers, beside the client's own budget.

    Raises:
        ArgumentError: There is no such model or GPU, or it is no transformer.
    """
    if not 1 <= tokens <= MOST_COUNT:
        raise ArgumentError(f"--tokens must be from 1 to 2^30; got {shortened(str(tokens))}.")
    memory = memory_of(client, model, tokens, ranks, gpu, torch.bfloat16)
    limit = byte_count(LIMIT_VARIABLE, client.limit)
    first, last = (
        nbytes if limit is None else min(nbytes, limit) for nbytes in (memory.first, memory.most)
    )
    meaning = (
        f"{format_memory(first)} per rank by a step of {tokens} tokens, at most "
        f"{format_memory(last)} after steps of other sizes, predicted for {model}, "
        f"{ranks} ranks, {gpu}: {client.budget}"
    )
    action = ""
    if limit is not None and memory.most > limit:
        meaning += f". Without the limit of {format_memory(limit)}: {format_memory(memory.most)}"
        action = f"{LIMIT_VARIABLE}= (empty) lifts the limit"
    return Row("memory", OK, meaning, action)
