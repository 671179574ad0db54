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
from typing import Any

import torch
import torch.distributed as dist

from interlace import environment
from interlace.costs.known_profiles import adopt, parse_profile, profile_of, text_of
from interlace.costs.network import NetworkRates, parse_network
from interlace.costs.time import MachineProfile

VARIABLE = "INTERLACE_MEASURE_MACHINE"

_settled: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = weakref.WeakKeyDictionary()
"""What this process knows to be settled, by the process group of all ranks."""


def is_asked_for() -> bool:
    """Return whether the environment lets groups measure machines that nobody has measured."""
    return bool(environment.switch(VARIABLE))


def known_profile(device: torch.device) -> MachineProfile:
    """Return the profile of a GPU by which this process chooses now."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return profile_of(torch.cuda.get_device_name(device), processors)


def settle_profile(device: torch.device, profile: MachineProfile | None = None) -> MachineProfile:
    """Choose by one profile of a GPU with all ranks of the program from here on; return it.

    It is the one that the first of them has brought here. Without process groups it is this
    process's own.

    Args:
        device: A GPU.
        profile: What this rank brings; default: what it knows.

    Raises:
        RuntimeError: The program's store cannot be reached.
    """
    known = known_profile(device)
    brought = text_of(known if profile is None else profile)
    settled = _settle(f"profile of {torch.cuda.get_device_name(device)}", brought)
    if settled is not None and settled != text_of(known):
        adopt(parse_profile(settled))
    return known_profile(device)


def settled_text(device: torch.device) -> str | None:
    """Return the profile of a GPU that the program has settled on, if it is not what this process
    knows already; else None.
    """
    text = published(f"profile of {torch.cuda.get_device_name(device)}")
    return None if text == text_of(known_profile(device)) else text


def settle_network(device: torch.device, network: NetworkRates | None = None) -> MachineProfile:
    """Choose by one network between nodes with all ranks of the program from here on; return the
    profile that has it.

    None may be settled, too: by a rank that has compiled a function before the network was
    measured, as a rank that compiles it later must decide alike.

    Args:
        device: A GPU.
        network: What this rank brings; default: what it knows.

    Raises:
        RuntimeError: The program's store cannot be reached.
    """
    profile = known_profile(device)
    brought = _text_of_network(network or profile.network)
    settled = _settle(f"network of {torch.cuda.get_device_name(device)}", brought)
    if settled is not None and settled != _text_of_network(profile.network):
        values = json.loads(settled)
        found = None if values is None else parse_network(values)
        adopt(dataclasses.replace(profile, network=found))
    return known_profile(device)


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


def _settle(name: str, brought: str) -> str | None:
    """Return what is settled under a name where this process asks for the first time, else None."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        return None
    known = _settled.setdefault(world, {})
    if name in known:
        return None
    known[name] = publish(name, brought)
    return known[name]


def _text_of_network(network: NetworkRates | None) -> str:
    return json.dumps(None if network is None else dataclasses.asdict(network))


def _programs_store() -> Any:
    """Return the store of all ranks of the program."""
    assert dist.group.WORLD is not None
    return dist.PrefixStore("interlace/machines", dist.group.WORLD.get_group_store())
