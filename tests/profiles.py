"""Machine profiles that a test has made a program know."""

from typing import Any
from unittest import mock

import torch.distributed as dist

from interlace.comm.host import common_profile
from interlace.costs import known_profiles


def forget_profiles() -> None:
    """Forget the profiles that this process has measured or settled on, and what follows from any
    profile.
    """
    known_profiles._versions.append({})
    common_profile._settled.clear()


def programs_store(program: str) -> Any:
    """Return a context in which ranks publish profiles as those of a program of this name do."""
    assert dist.group.WORLD is not None
    store = dist.PrefixStore(program, dist.group.WORLD.get_group_store())
    return mock.patch.object(common_profile, "_programs_store", return_value=store)
