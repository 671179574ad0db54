"""What a process shows others of the symmetric memory that it holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.cli import doctor
from interlace.comm.host import held_memory
from interlace.comm.host.held_memory import HeldMemory, running_programs
from interlace.comm.host.processes import Process, process_of


def _own() -> list[HeldMemory]:
    """What this process shows of groups of more than one rank."""
    programs = [each for each in running_programs() if each.number == os.getpid()]
    return [held for each in programs for held in each.held if held.world_size > 1]


def _held() -> list[tuple[dict[str, int], dict[str, int]]]:
    """What a rank holds, and what it shows: after two calls, an output, and a release."""
    members = dist.new_group()
    group, found = interlace.group_of(members), []

    def note() -> None:
        (shown,) = (
            held.nbytes for held in _own()
            if held.nbytes == group.workspace_bytes() and held.rank == dist.get_rank()
        )  # fmt: skip
        found.append((group.workspace_bytes(), dict(shown)))

    x, w = torch.randn(8, 32), torch.randn(16, 32)
    y = interlace.gemm_reduce_scatter(x, w, group=members, impl="fused")
    note()
    interlace.gemm_all_reduce(x, w, group=members, impl="chunked")
    note()
    del y
    group.release()
    note()
    return found


def test_it_is_what_operators_hold(ranks: Any) -> None:
    for first, second, last in ranks(2).run(_held):
        assert 0 < len(first[0]) < len(second[0])
        assert last[0] == {}


def test_a_file_that_is_closed_meanwhile_hides_no_record() -> None:
    """The file by which a process lists its own has the least number that is free."""
    low = os.open(os.devnull, os.O_RDONLY)
    holder = _Holder()
    record = held_memory._Record()
    record.write(holder)
    os.close(low)
    assert record._file > low
    programs = [each for each in running_programs() if each.number == os.getpid()]
    assert [holder.held()] in [program.held for program in programs]
    os.close(record._file)


class _Holder:
    """Holds nothing of a group that nobody else has."""

    def held(self) -> HeldMemory:
        return HeldMemory(3, 5, "alone", {})


def test_a_program_is_shown_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own, and one that it has forked; what is no record is passed over."""
    text = f"""
import os, sys, time
from interlace.comm.host import held_memory
class Holder:
    def held(self):
        return held_memory.HeldMemory(1, 2, "cuda:1", {{"gemm": 3 << 20, "outputs": 1 << 20}})
holder = Holder()
held_memory.record.write(holder)
other = os.memfd_create("{held_memory._NAME}")
os.write(other, b"not JSON")
if os.fork():
    print("ready", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", text]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        programs = [each for each in running_programs() if _words(text) in each.command]
        assert [each.number for each in programs] == [process.pid]
        (held,) = programs[0].held
        assert held == HeldMemory(1, 2, "cuda:1", {"gemm": 3 << 20, "outputs": 1 << 20})
        # It is the one that has started first, whatever the numbers are.
        with monkeypatch.context() as patch:
            patch.setattr(held_memory, "process_of", _later_first)
            (other,) = (each for each in running_programs() if _words(text) in each.command)
            assert other.number != process.pid
        monkeypatch.setattr(held_memory, "running_programs", lambda: iter(programs))
        (row,) = doctor.check_programs()
        process.communicate("")
    # The forked one may end a little later.
    until = time.monotonic() + 60
    while _is_shown(text) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _is_shown(text)
    assert row.check == f"program {process.pid}"
    assert row.meaning.endswith(
        "rank 1 of 2 on cuda:1 holds 4 MiB of symmetric memory (gemm 3 MiB, outputs 1 MiB)"
    )


def _later_first(number: int) -> Process | None:
    process = process_of(number)
    return None if process is None else process._replace(start=-process.start)


def _words(text: str) -> str:
    """A text as the command of a process shows it."""
    return text.strip().replace("\n", " ")


def _is_shown(text: str) -> bool:
    return any(_words(text) in each.command for each in running_programs())


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"rank": 0, "world_size": 2, "device": "cpu", "nbytes": {"gemm": "many"}},
        {"rank": "0", "world_size": 2, "device": "cpu", "nbytes": {}},
        {"rank": 0, "world_size": 2, "device": "cpu", "nbytes": [1]},
        {"rank": 0, "world_size": 2, "device": 1, "nbytes": {}},
        {"rank": 0, "world_size": 2, "device": "cpu", "nbytes": {}, "more": 0},
        "text",
        [[[]]],
    ],
)
def test_what_is_no_record_is_refused(entry: Any, tmp_path: Any) -> None:
    file = tmp_path / "record"
    file.write_text(json.dumps([entry]))
    assert held_memory._read(file) is None


def test_texts_of_a_record_are_shown_without_control_characters(tmp_path: Any) -> None:
    file = tmp_path / "record"
    entry = {"rank": 0, "world_size": 2, "device": "cpu\x1b[2J", "nbytes": {"a\nb": 2048}}
    file.write_text(json.dumps([entry]))
    (held,) = held_memory._read(file) or []
    assert str(held) == "rank 0 of 2 on cpu [2J holds 2 KiB of symmetric memory (a b 2 KiB)"
    file.write_text("[" * 100_000)
    assert held_memory._read(file) is None


def test_a_forked_process_has_a_record_of_its_own() -> None:
    class Holder:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

        def held(self) -> HeldMemory:
            return HeldMemory(0, 1, "cpu", {"gemm": self.nbytes})

    record, mine = held_memory._Record(), Holder(1)
    record.write(mine)
    child = os.fork()
    if child == 0:
        its = Holder(2)
        record.write(its)
        os._exit(0 if record._file >= 0 and os.pread(record._file, 200, 0).count(b": 2") else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert json.loads(os.pread(record._file, 200, 0)) == [mine.held()._asdict()]


def test_a_record_that_is_written_while_it_is_written() -> None:
    """As by a finalizer, which may run anywhere; and by other threads."""
    record, found = held_memory._Record(), []

    class Holder:
        nbytes = 0

        def held(self) -> HeldMemory:
            self.nbytes += 1
            if self.nbytes == 1:
                record.write()
            return HeldMemory(0, 1, "cpu", {"gemm": self.nbytes})

    holders = [Holder() for _ in range(4)]
    threads = [threading.Thread(target=record.write, args=(each,)) for each in holders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        found.append(thread.is_alive())
    assert found == [False] * 4
    shown = json.loads(os.pread(record._file, 4096, 0))
    assert sorted(each["nbytes"]["gemm"] for each in shown) == sorted(
        each.nbytes for each in holders
    )
