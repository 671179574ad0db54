"""The machine profiles that are known: those that are shipped, and what this user has measured.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from interlace.cache_folder import cache_folder, is_own, write_whole
from interlace.costs.datasheets import DATASHEETS, Datasheet
from interlace.costs.network import parse_network
from interlace.costs.time import Corrections, MachineProfile, ProductRates
from interlace.documents import DAMAGE, to_json
from interlace.errors import ConfigError

T = TypeVar("T")

_versions: list[dict[str, MachineProfile]] = [{}]
"""The profiles that all ranks of this program go by, where it is not this user's file, by GPU: at
first none, and what has been added by each :func:`adopt`. The last one counts.
"""

_asked: int | None = None
"""The version that the innermost :func:`as_of` asks for; None outside of any."""

_MOST_CALLS = 4096


def version() -> int:
    """Return the number of the profiles that count now: how many this process has adopted, or had
    at the time that :func:`as_of` says.
    """
    return len(_versions) - 1 if _asked is None else _asked


@contextlib.contextmanager
def as_of(version: int) -> Iterator[None]:
    """Go by the profiles that counted at an earlier :func:`version` within the context."""
    global _asked
    before, _asked = _asked, version
    try:
        yield
    finally:
        _asked = before


class cached_by_profiles(Generic[T]):
    """Decorate a function as ``functools.lru_cache``, whose results are those of its arguments and
    of the profiles that count.
    """

    def __init__(self, function: Callable[..., T]) -> None:
        functools.update_wrapper(self, function)

        @functools.lru_cache(maxsize=_MOST_CALLS)
        def cached(version: int, *args: Any, **named: Any) -> T:
            return function(*args, **named)

        self._cached, self.cache_clear = cached, cached.cache_clear

    def __call__(self, *args: Any, **named: Any) -> T:
        """Return the function's result."""
        # The cache takes named arguments in another order for other ones.
        return self._cached(version(), *args, **dict(sorted(named.items())))


@cached_by_profiles
def profile_of(gpu: str, processors: int = 132) -> MachineProfile:
    """Return the profile of a GPU: what ``interlace tune machine`` has measured for this user, else
    the one that is shipped, else a guess.

    The guess is the profile of the measured GPU that is most alike by the makers' data sheets,
    whose rates of products, memory and links are scaled as the data sheets are to one another; for
    a GPU whose data sheet is not known it is the NVIDIA H200's, and products alone are scaled, by
    the number of processors. Times that are no rates stay as they are, so a guess ranks
    implementations rather than times them.

    Args:
        gpu: The GPU's name, as ``torch.cuda.get_device_name`` has it.
        processors: Its number of streaming multiprocessors, for a guess without a data sheet.
    """
    measured = own_profile(gpu)
    if measured is not None:
        return measured
    shipped = shipped_profile(gpu)
    if shipped is not None:
        return shipped
    return _guess(gpu, processors)


def _guess(gpu: str, processors: int) -> MachineProfile:
    """Return the profile of a measured GPU, scaled to another one."""
    datasheet = DATASHEETS.get(gpu)
    name = _MODEL if datasheet is None else _most_alike(datasheet)
    model, known = shipped_profile(name), DATASHEETS[name]
    assert model is not None
    flops = float32_flops = processors / model.processors
    memory = links = 1.0
    basis = f"with {processors} of {model.processors} processors"
    if datasheet is not None:
        basis = "scaled by both data sheets"
        processors = datasheet.processors
        flops = datasheet.tera_flops / known.tera_flops
        float32_flops = datasheet.float32_tera_flops / known.float32_tera_flops
        memory = datasheet.memory_gigabytes / known.memory_gigabytes
        links = datasheet.link_gigabytes / known.link_gigabytes
    rates = model.product
    return dataclasses.replace(
        model,
        gpu=gpu,
        source=f"a guess: {model.gpu}'s, {basis}",
        processors=processors,
        product=dataclasses.replace(
            rates,
            flops_per_s=rates.flops_per_s * flops,
            memory_bytes_per_s=rates.memory_bytes_per_s * memory,
            float32_flops_per_s=rates.float32_flops_per_s * float32_flops,
            own_float32_flops_per_s=rates.own_float32_flops_per_s * float32_flops,
        ),
        link_bytes_per_s=model.link_bytes_per_s * links,
        corrections={},
        is_guess=True,
        # Cards that PCIe links are of the same architecture, and send in other ways.
        is_alike=datasheet is not None
        and datasheet.architecture == known.architecture
        and 1 / _ALIKE_LINKS < links < _ALIKE_LINKS,
    )


def _most_alike(datasheet: Datasheet) -> str:
    """Return the name of the measured GPU whose data sheet is most like another one's: of the same
    architecture if there is one, and with the nearest rates.
    """

    def unlikeness(name: str) -> tuple[bool, float]:
        other = DATASHEETS[name]
        rates = (
            (datasheet.tera_flops, other.tera_flops),
            (datasheet.memory_gigabytes, other.memory_gigabytes),
            (datasheet.link_gigabytes, other.link_gigabytes),
        )
        distance = math.fsum(abs(math.log(one / another)) for one, another in rates)
        return datasheet.architecture != other.architecture, distance

    return min((name for name in profiled_gpus() if name in DATASHEETS), key=unlikeness)


@functools.cache
def shipped_profile(gpu: str) -> MachineProfile | None:
    """Return the profile of a GPU that is shipped; None without one."""
    file = importlib.resources.files("interlace.costs") / "profiles" / _file_name(gpu)
    return parse_profile(file.read_text(encoding="utf-8")) if file.is_file() else None


_ALIKE_LINKS = 4.0
"""The factor that the links of GPUs that are alike differ by at most."""

_MODEL = "NVIDIA H200"
"""The GPU after whose profile those of GPUs without a data sheet are guessed."""


def adopt(profile: MachineProfile) -> None:
    """Make a profile the user's own one, until the program ends.

    All ranks of the program must do so (:mod:`interlace.comm.host.common_profile`).
    """
    _versions.append({**_versions[-1], profile.gpu: profile})


def keep_profile(profile: MachineProfile) -> Path:
    """Write a profile where this user's later programs look for it; return the file.

    Raises:
        OSError: It cannot be written.
    """
    file = own_file(profile.gpu)
    write_whole(file, text_of(profile))
    return file


def own_file(gpu: str) -> Path:
    """Return the file of the user's own profile of a GPU, which need not exist."""
    return cache_folder("profiles") / _file_name(gpu)


def own_profile(gpu: str) -> MachineProfile | None:
    """Return the profile that this user has measured; None without one.

    A file that is no profile, or that others may write to, is ignored with a warning.
    """
    adopted = _versions[version()]
    if gpu in adopted:
        return adopted[gpu]
    file = own_file(gpu)
    try:
        if not (is_own(file) and is_own(file.parent)):
            raise ConfigError("others than this user may write to it")
        return parse_profile(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError, ConfigError) as error:
        warnings.warn(f"interlace: {file} is ignored: {error}", RuntimeWarning, stacklevel=2)
        return None


def _file_name(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json"


def profiled_gpus() -> list[str]:
    """Return the names of the GPUs whose profiles are shipped."""
    folder = importlib.resources.files("interlace.costs") / "profiles"
    files = (file for file in folder.iterdir() if file.name.endswith(".json"))
    return sorted(parse_profile(file.read_text(encoding="utf-8")).gpu for file in files)


@functools.cache
def most_measured_ranks() -> int:
    """Return the largest number of ranks with which calls were measured on any of these GPUs."""
    profiles = (profile for gpu in profiled_gpus() if (profile := shipped_profile(gpu)))
    return max(ranks for profile in profiles for ranks in profile.measured_ranks)


def own_gpus() -> list[str]:
    """Return the names of the GPUs whose profiles this user has measured."""
    names = []
    for file in sorted(cache_folder("profiles").glob("*.json")):
        try:
            names.append(parse_profile(file.read_text(encoding="utf-8")).gpu)
        except (OSError, UnicodeError, ConfigError):
            continue  # own_profile says what is wrong with it, to those who need it
    return [name for name in names if own_profile(name) is not None]


def text_of(profile: MachineProfile) -> str:
    """Return the JSON text from which :func:`parse_profile` makes an equal profile."""
    return to_json(dataclasses.asdict(profile))


def parse_profile(text: str) -> MachineProfile:
    """Return the profile that a JSON text describes.

    Raises:
        ConfigError: it is not a profile.
    """
    try:
        values = json.loads(text)
        corrections = {
            operator: Corrections(**fields) for operator, fields in values["corrections"].items()
        }
        product = ProductRates(**values["product"])
        # Profiles of one node have none.
        network = values.get("network")
        parsed = {
            "product": product,
            "corrections": corrections,
            "network": None if network is None else parse_network(network),
        }
        return MachineProfile(**values | parsed)
    except ConfigError:
        raise
    except DAMAGE as error:
        raise ConfigError(
            f"a machine profile must be JSON with all its fields; {error}."
        ) from error
