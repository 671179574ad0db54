"""What ranks and caches compare before they rely on each other's decisions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import interlace
from interlace.comm.groups import group as group_module
from interlace.comm.host import identity
from tests.errors import error_of

# Modules that decide how a call or a pair runs, in every layer, and a table that they read.
DECIDING = [
    "gemm/choice.py",
    "gemm/operands.py",
    "operators/gemm_all_reduce/fused.py",
    "operators/gemm_all_reduce/config.py",
    "compile/sent.py",
    "comm/groups/group.py",
    "tuning/__init__.py",
    "tuning/tables/gemm_all_reduce.nvidia_h200.json",
]


def test_every_module_and_table_that_decides_is_in_the_digest(tmp_path: Path) -> None:
    copy = tmp_path / "interlace"
    shutil.copytree(
        identity.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.py[co]")
    )
    digest = identity.digest_of.__wrapped__
    before = digest(copy)
    assert before == digest(identity.PACKAGE)
    seen = {before}
    for name in DECIDING:
        file = copy / name
        file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        seen.add(digest(copy))
    (copy / "gemm" / "more.py").write_text("", encoding="utf-8")
    seen.add(digest(copy))
    assert len(seen) == 2 + len(DECIDING)


def _other_tables() -> Any:
    mine = {"the_tuned_tables": f"those of rank {dist.get_rank()}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "identity", lambda _: mine)
        return error_of(interlace.group_of, dist.new_group())[:2]


def test_ranks_with_other_tuned_tables_do_not_form_a_group(ranks: Any) -> None:
    """Each would choose its own implementation, and wait for peers that run another one."""
    message = (
        "joining a group: the tuned tables must be the same on every rank; "
        "got 'those of rank 0' on rank 0, 'those of rank 1' on rank 1. Nothing was computed."
    )
    assert ranks(2).run(_other_tables) == [("RankMismatchError", message)] * 2


def _other_settings() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTERLACE_AUTOTUNE", str(dist.get_rank()))
        return error_of(interlace.group_of, dist.new_group())[:2]


def test_ranks_with_other_settings_do_not_form_a_group(ranks: Any) -> None:
    """One would measure, and wait for peers that do not."""
    message = (
        "joining a group: the environment's setting of autotuning must be the same on every rank; "
        "got 'False' on rank 0, 'True' on rank 1. Nothing was computed."
    )
    assert ranks(2).run(_other_settings) == [("RankMismatchError", message)] * 2
