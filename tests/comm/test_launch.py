"""``interlace.launch``: results in order, failures with their traceback, and nothing left
behind.
"""

import datetime
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import interlace
from interlace import ArgumentError, BackendError, LaunchError
from interlace.comm.groups import launcher
from tests.pool import fork_server
from tests.programs import run_program


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where the ranks' temporary files go; at the end of the test there must be none, and no child
    process.
    """
    fork_server()  # it has a temporary folder, too
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(multiprocessing.active_children())
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    assert set(multiprocessing.active_children()) <= before


def _describe(factor):
    return (
        dist.get_rank(),
        dist.get_world_size(),
        factor * torch.ones(2) * dist.get_rank(),
        os.getpid(),
        os.environ["TRITON_INTERPRET"],
    )


def _multiply(rows):
    x, w = torch.ones(16), torch.ones(rows, 16)
    return interlace.gemv_all_reduce(x, w).tolist()


def _alive(pid):
    """Whether a process runs. One that has ended may stay until its parent has asked for it."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("quick_launches")
@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_in_rank_order(temporary, world_size):
    results = interlace.launch(_describe, world_size, 10.0, backend="cpu")
    for rank, (seen_rank, seen_size, tensor, pid, interpret) in enumerate(results):
        assert (seen_rank, seen_size, interpret) == (rank, world_size, "1")
        assert tensor.tolist() == [10.0 * rank] * 2
        assert not _alive(pid)
    assert "TRITON_INTERPRET" not in os.environ


def test_ranks_can_multiply_at_once(temporary):
    """Ranks that are started as by a program, in new processes."""
    assert interlace.launch(_multiply, 2, 3, backend="cpu") == [[32.0] * 3] * 2


def _fail_on_rank_1(folder):
    with open(os.path.join(folder, str(dist.get_rank())), "w") as file:
        file.write(str(os.getpid()))
    if dist.get_rank() == 1:
        raise ValueError(
            "a very particular failure\n\nfrom user code:\n   File nowhere\nand what to do about it"
        )
    time.sleep(120)


@pytest.mark.usefixtures("quick_launches")
def test_the_failing_ranks_traceback_arrives_and_the_others_end(temporary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pids")
    with pytest.raises(
        LaunchError,
        match=r"(?s)^launch: rank 1 failed: ValueError: a very particular failure.*_fail_on_rank_1",
    ) as caught:
        interlace.launch(_fail_on_rank_1, 2, str(folder), backend="cpu", timeout_s=100)
    assert caught.value.rank == 1
    assert caught.value.line == "launch: rank 1 failed: ValueError: a very particular failure"
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__).startswith("a very particular failure\n\nfrom user code")
    assert not any(_alive(file.read_text()) for file in folder.iterdir())


_NESTED = 'Caught KeyError in a process.\nTraceback:\n  File "x.py", line 1, in f\nKeyError: 1'


class _Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError


def _raise_unpicklable():
    raise _Unpicklable(_NESTED)


def _raise_group():
    raise ExceptionGroup("two", [KeyError(1), ValueError("b")])


def _load_another_size():
    torch.nn.Linear(2, 3).load_state_dict(torch.nn.Linear(2, 4, bias=False).state_dict())


@pytest.mark.usefixtures("quick_launches")
@pytest.mark.parametrize(
    ("worker", "line", "cause"),
    [
        (
            _load_another_size,
            "RuntimeError: Error(s) in loading state_dict for Linear: Missing key(s) in "
            'state_dict: "bias". size mismatch for weight: copying a param with shape '
            "torch.Size([4, 2]) from checkpoint, the shape in current model is torch.Size([3, 2]).",
            RuntimeError,
        ),
        (_raise_unpicklable, "Unpicklable: Caught KeyError in a process.", None),
        (_raise_group, "ExceptionGroup: two (2 sub-exceptions)", ExceptionGroup),
    ],
)
def test_the_first_line_names_the_class_of_a_ranks_error(temporary, worker, line, cause):
    with pytest.raises(LaunchError) as caught:
        interlace.launch(worker, 1, backend="cpu")
    assert caught.value.line.endswith(line)
    assert type(caught.value.__cause__) is (cause or type(None))


def test_errors_can_be_pickled():
    """As from rank to launcher, and in pools of processes; some have several required arguments."""
    timeout = interlace.PeerTimeoutError(operator="mm", rank=1, peer=2, wanted=3, deadline_s=4.0)
    miscount = interlace.MiscountError(rank=1, piece=2, wanted=3, seen=4)
    refusal = ArgumentError("x must be a tensor; got 1.")
    for error in (LaunchError("text", 3), timeout, miscount, refusal):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))


def _leave_on(leaving, end):
    if dist.get_rank() in leaving:
        end(0)
    _never()


def _interrupt(_):
    raise KeyboardInterrupt


@pytest.mark.usefixtures("quick_launches")
@pytest.mark.parametrize("end", [sys.exit, os._exit, _interrupt])
@pytest.mark.parametrize("leaving", [(1,), (0, 1)])
def test_a_rank_that_ends_its_process_has_no_result(temporary, leaving, end):
    """Its peers wait for it, or lose their connection to it; the error names the rank that left."""
    with pytest.raises(LaunchError, match="ended without a result: its process ended") as caught:
        interlace.launch(_leave_on, 2, leaving, end, backend="cpu", timeout_s=100)
    assert caught.value.rank in leaving


class _Unreadable:
    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.usefixtures("quick_launches")
def test_a_result_that_cannot_be_unpickled(temporary):
    with pytest.raises(LaunchError, match=r"the result of rank 0 must be picklable; .*'no number'"):
        interlace.launch(_Unreadable, 2, backend="cpu")


def _multiply_and_destroy(destroying):
    result = _multiply(3)
    if dist.get_rank() in destroying:
        dist.destroy_process_group()
    return result


@pytest.mark.usefixtures("quick_launches")
@pytest.mark.parametrize("destroying", [(0, 1), (0,)])
def test_a_worker_may_destroy_its_process_group(temporary, destroying):
    """As programs of torchrun do at their end."""
    results = interlace.launch(_multiply_and_destroy, 2, destroying, backend="cpu")
    assert results == [[32.0] * 3] * 2


_LIMIT = datetime.timedelta(seconds=1)


def _last_long_on_rank_0():
    distributed_c10d._set_pg_timeout(_LIMIT, dist.group.WORLD)
    if dist.get_rank() == 0:
        time.sleep(2.5)
    return dist.get_rank()


@pytest.mark.usefixtures("quick_launches")
def test_workers_that_end_at_other_times(temporary):
    """Later than torch waits: as when one rank alone evaluates the model, for an hour."""
    assert interlace.launch(_last_long_on_rank_0, 2, backend="cpu") == [0, 1]


def _last_long_within():
    results = interlace.launch(_last_long_on_rank_0, 2)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    limit = backend.options._timeout
    backend._set_default_timeout(datetime.timedelta(minutes=30))
    return results, limit


def test_workers_that_end_at_other_times_under_a_process_group(ranks):
    assert ranks(2).run(_last_long_within) == [([0, 1], _LIMIT)] * 2


def _start_late(rank, folder, fn, args):
    """Call what a rank calls first, but only when a file says so, as if its imports took long."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torch's, of a rank that has imported torch
    (folder / "pid").write_text(str(os.getpid()))
    while not (folder / "go").exists():
        time.sleep(0.01)
    fn(rank, *args)


def _touch(folder):
    (folder / "ran").touch()


def _launch_slowly(folder, temporary):
    start, tempfile.tempdir = torch.multiprocessing.start_processes, str(temporary)
    torch.multiprocessing.start_processes = lambda fn, args, **options: start(
        _start_late, (folder, fn, args), **options | {"start_method": "fork"}
    )
    interlace.launch(_touch, 1, folder, backend="cpu")


def test_a_rank_whose_launcher_is_killed_while_it_starts(tmp_path, tmp_path_factory):
    """It would run the whole worker, and nobody would end it."""
    launcher = fork_server().Process(
        target=_launch_slowly, args=(tmp_path, tmp_path_factory.mktemp("temporary"))
    )
    launcher.start()
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    launcher.kill()
    launcher.join()
    (tmp_path / "go").touch()
    while _alive(pid.read_text()):
        time.sleep(0.01)
    assert not (tmp_path / "ran").exists()


def _never():
    time.sleep(120)


@pytest.mark.usefixtures("quick_launches")
def test_a_launch_ends_after_its_time(temporary):
    start = time.monotonic()
    with pytest.raises(LaunchError, match="did not finish in time and were ended"):
        interlace.launch(_never, 2, backend="cpu", timeout_s=1.0)
    assert time.monotonic() - start < 100


_SECONDS = "must be above 0 and below a million seconds"


@pytest.mark.parametrize(
    ("worker", "options", "message"),
    [
        (None, {}, "worker must be a function; got None."),
        (_never, {"nodes": 1.0}, "nodes must be a number that divides the 2 ranks; got 1.0."),
        (_never, {"nodes": "2"}, "nodes must be a number that divides the 2 ranks; got '2'."),
        (_never, {"timeout_s": "9"}, f"timeout_s {_SECONDS}; got '9'."),
        (_never, {"timeout_s": math.nan}, f"timeout_s {_SECONDS}; got nan."),
        (_never, {"join_timeout_s": 0}, f"join_timeout_s {_SECONDS}; got 0."),
        (_never, {"join_timeout_s": math.inf}, f"join_timeout_s {_SECONDS}; got inf."),
    ],
)
def test_arguments_of_a_wrong_type_are_named(worker, options, message):
    with pytest.raises(ArgumentError) as caught:
        interlace.launch(worker, 2, backend="cpu", **options)
    assert str(caught.value) == f"launch: {message}"


def test_an_argument_that_cannot_be_pickled_is_an_error_before_any_rank_starts():
    with pytest.raises(
        ArgumentError, match=r"^launch: arguments of the worker must be picklable; "
    ):
        interlace.launch(_never, 2, threading.Lock(), backend="cpu")


@pytest.mark.parametrize(
    ("world_size", "backend", "error", "message"),
    [
        (
            0,
            "cpu",
            ArgumentError,
            "launch: world_size must be a whole number, at least 1; got 0.",
        ),
        (
            True,
            "cpu",
            ArgumentError,
            "launch: world_size must be a whole number, at least 1; got True.",
        ),
        (
            "2",
            "cpu",
            ArgumentError,
            "launch: world_size must be a whole number, at least 1; got '2'.",
        ),
        (2, "tpu", ArgumentError, "launch: backend must be auto, cuda or cpu; got 'tpu'."),
        (
            99,
            "cuda",
            BackendError,
            "launch: backend cuda must have a GPU; got none. Use backend='cpu'.",
        ),
    ],
)
def test_launches_that_cannot_be(monkeypatch, world_size, backend, error, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(error) as caught:
        interlace.launch(_never, world_size, backend=backend)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("variable", "value"),
    [("RANK", "x"), ("WORLD_SIZE", ""), ("LOCAL_RANK", "-1"), ("LOCAL_WORLD_SIZE", "2 ")],
)
def test_a_launchers_variable_that_is_no_number(monkeypatch, variable, value):
    for name, given in {"RANK": "0", "WORLD_SIZE": "1", variable: value}.items():
        monkeypatch.setenv(name, given)
    with pytest.raises(ArgumentError) as caught:
        interlace.launch(_never, 1, backend="cpu")
    assert str(caught.value).startswith(f"{variable} must be a whole number; got {value!r}. ")


def _launch_within(world_size):
    try:
        return interlace.launch(_own_pid, world_size)
    except ArgumentError as error:
        return str(error)


def _own_pid():
    return os.getpid()


def test_under_a_process_group_nothing_is_started(ranks):
    pids = ranks(2).run(_own_pid)
    assert ranks(2).run(_launch_within, 2) == [pids] * 2


def test_ranks_meet_though_an_earlier_launch_failed_on_one_of_them(monkeypatch):
    """Under another launcher, whose store keeps what the attempt has left."""
    shared = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(shared, 0, 2)]))
    with pytest.raises(interlace.PeerTimeoutError):
        launcher._store_of_a_launch(0, 2, 0.2)
    with ThreadPoolExecutor(2) as threads:
        stores = list(
            threads.map(lambda rank: launcher._store_of_a_launch(rank, 2, 20.0), range(2))
        )
    stores[0].set("address", "here")
    assert stores[1].check(["address"])


def test_a_world_size_that_is_not_the_groups(ranks):
    message = "launch: world_size must be the existing group's; got 3 for a group of 2."
    assert ranks(2).run(_launch_within, 3) == [message] * 2


_PROGRAMS = {
    "lambda": (
        (
            "import interlace\nif __name__ == '__main__':\n    interlace.launch(lambda: 1, 1, "
            "backend='cpu')\n"
        ),
        (
            "LaunchError: launch: worker must be a function that a new process can import; got "
            "<lambda>, which cannot be pickled"
        ),
    ),
    "local": (
        (
            "import interlace\ndef main():\n    def worker():\n        pass\n    "
            "interlace.launch(worker, 1, backend='cpu')\nmain()\n"
        ),
        (
            "LaunchError: launch: worker must be a function that a new process can import; got "
            "main.<locals>.worker, which cannot"
        ),
    ),
}


@pytest.mark.parametrize("program", _PROGRAMS)
def test_programs_whose_worker_no_rank_can_import(tmp_path, program):
    source, message = _PROGRAMS[program]
    path = tmp_path / "program.py"
    path.write_text(source)
    _check_failed(run_program(path, folder=tmp_path), message)


def test_a_program_whose_start_is_not_guarded(tmp_path):
    """In processes as users start them: the new one imports the program, which launches again."""
    path = tmp_path / "program.py"
    path.write_text(
        "import interlace\ndef worker():\n    return 1\n"
        "interlace.launch(worker, 1, backend='cpu')\n"
    )
    ended = run_program(path, folder=tmp_path, forked=False)
    message = (
        "LaunchError: launch: rank 0 ended without a result: it could not import the worker. "
        "The start of a program must be"
    )
    _check_failed(ended, message)


def _check_failed(ended, message):
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"interlace.errors.{message}")
    assert ended.stderr.count("Traceback") == 1, "only the process that called launch has frames"


def test_a_worker_of_standard_input(monkeypatch):
    """As of a notebook: there is no file that a new process could import."""
    program = types.ModuleType("__main__")
    program.__spec__ = None
    exec("def worker():\n    return 1\n", vars(program))
    monkeypatch.setitem(sys.modules, "__main__", program)
    expected = (
        "got worker of a notebook, an interactive session or standard input. Put it into a file"
    )
    with pytest.raises(LaunchError, match=expected):
        interlace.launch(program.worker, 1, backend="cpu")


@pytest.mark.parametrize(
    ("gpus", "local_rank", "ranks_here", "device", "host"),
    [
        (2, 1, 2, 1, None),
        (1, 3, 4, 0, "interlace-3"),
        (2, 1, 4, 1, "interlace-3"),
        (8, 3, None, 3, None),
    ],
)
def test_gpus_are_dealt_out_round_robin(monkeypatch, gpus, local_rank, ranks_here, device, host):
    """NCCL takes two ranks on one GPU for those of two hosts, and begins when it is first used."""
    from interlace.comm import init_process_group

    started = {}
    monkeypatch.setenv("INTERLACE_NODES", "")  # as if it were not set
    monkeypatch.setenv("NCCL_HOSTID", "as it was")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda chosen: started.update(current=chosen.index)
    )
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **settings: started.update(settings)
    )
    init_process_group(
        "cuda",
        rank=3,
        world_size=8 if ranks_here is None else ranks_here,
        init_method="file:///nowhere",
        local_rank=local_rank,
        ranks_here=ranks_here,
    )
    assert started["current"] == device
    assert (started["device_id"] is None) == (host is not None)
    assert os.environ["NCCL_HOSTID"] == (host or "as it was")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
