"""Let all ranks of a program choose by one machine profile, whatever each of them knows.

Ranks may know different profiles: nodes without a common home directory have different files, and a
group may measure while others compile. So the first rank of the program that needs the profile of a
GPU settles it, through the program's store, and no rank chooses by another one until the program
ends. This is no exchange: a rank asks alone, whenever it wants, and nobody waits.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from interlace import environment
from interlace.costs.known_profiles import adopt, parse_profile, profile_of, text_of
from interlace.costs.network import NetworkRates, parse_network
from interlace.costs.time import MachineProfile

VARIABLE = "INTERLACE_MEASURE_MACHINE"

_settled: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, torch.device]]] = (
    weakref.WeakKeyDictionary()
)
"""What this process knows to be settled, of which GPU, by the process group of all ranks."""


def is_asked_for() -> bool:
    """Return whether the environment lets groups measure machines that nobody has measured."""
    return bool(environment.switch(VARIABLE))


def known_profile(device: torch.device) -> MachineProfile:
    """Return the profile of a GPU by which this process chooses now."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return profile_of(torch.cuda.get_device_name(device), processors)


def settle_profile(device: torch.device, profile: MachineProfile | None = None) -> None:
    """Choose by one profile of a GPU with all ranks of the program from here on.

    It is the one that the first of them has brought here. Without process groups it is this
    process's own.

    Args:
        device: A GPU.
        profile: What this rank brings; default: what it knows.

    Raises:
        RuntimeError: The program's store cannot be reached.
    """

    def settle(name: str) -> None:
        known = known_profile(device)
        settled = publish(name, text_of(known if profile is None else profile))
        if settled != text_of(known):
            adopt(parse_profile(settled))

    _once("profile", device, settle)


def settled_text(device: torch.device) -> str | None:
    """Return the profile of a GPU that the program has settled on, if it is not what this process
    knows already; else None.
    """
    text = published(f"profile of {torch.cuda.get_device_name(device)}")
    return None if text == text_of(known_profile(device)) else text


def settle_network(device: torch.device, network: NetworkRates | None = None) -> None:
    """Choose by one network between nodes with all ranks of the program from here on.

    None may be settled, too: by a rank that has compiled a function before the network was
    measured, as a rank that compiles it later must decide alike.

    Args:
        device: A GPU.
        network: What this rank brings; default: what it knows.

    Raises:
        RuntimeError: The program's store cannot be reached.
    """

    def settle(name: str) -> None:
        known = known_profile(device)
        settled = publish(name, _text_of_network(network or known.network))
        if settled != _text_of_network(known.network):
            values = json.loads(settled)
            found = None if values is None else parse_network(values)
            adopt(dataclasses.replace(known, network=found))

    _once("network", device, settle)


def published(name: str) -> str | None:
    """Return what a rank of this program has published under a name; None if none has.

    Raises:
        RuntimeError: The program's store cannot be reached.
    """
    store = _programs_store()
    return str(store.get(name).decode()) if store.check([name]) else None


def publish(name: str, text: str) -> str:
    """Publish a text, if no rank has published another one before; return the first one.

    Raises:
        RuntimeError: The program's store cannot be reached.
    """
    return str(_programs_store().compare_set(name, "", text).decode())


def _once(kind: str, device: torch.device, settle: Callable[[str], None]) -> None:
    """Settle what a GPU has, the first time that this process asks.

    Plug-ins ask in every call of a layer, and to write a profile as text takes 40 ms.

    Args:
        kind: What is settled: ``"profile"`` or ``"network"``.
        device: The GPU.
        settle: Settles it, given the name under which ranks publish it.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        return
    known = _settled.setdefault(world, set())
    if (kind, device) not in known:
        settle(f"{kind} of {torch.cuda.get_device_name(device)}")
        known.add((kind, device))


def _text_of_network(network: NetworkRates | None) -> str:
    return json.dumps(None if network is None else dataclasses.asdict(network))


def _programs_store() -> Any:
    """Return the store of all ranks of the program."""
    assert dist.group.WORLD is not None
    return dist.PrefixStore("interlace/machines", dist.group.WORLD.get_group_store())
