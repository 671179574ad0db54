"""Start ranks as processes, group them, and give each group its memory and its deadlines."""

from interlace.comm.cpu.cpu_faults import Faults, Traffic, inject
from interlace.comm.groups.group import (
    MAX_PROGRAMS,
    Group,
    Workspace,
    group_named,
    group_of,
    recover,
    set_deadline,
    synchronize,
)
from interlace.comm.groups.launcher import init_process_group, launch
from interlace.comm.groups.process_groups import (
    default_device_type,
    default_name,
    process_group_named,
    rank_and_size,
    require_same_ranks,
)
from interlace.comm.groups.symmetric import SymmetricTensor, empty_symmetric

__all__ = [
    "MAX_PROGRAMS",
    "Faults",
    "Group",
    "SymmetricTensor",
    "Traffic",
    "Workspace",
    "default_device_type",
    "default_name",
    "empty_symmetric",
    "group_named",
    "group_of",
    "init_process_group",
    "inject",
    "launch",
    "process_group_named",
    "rank_and_size",
    "recover",
    "require_same_ranks",
    "set_deadline",
    "synchronize",
]
