"""Fixtures for all tests. Nothing here starts a process or imports torch before a test asks
for it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import compilers
from tests.pool import Pool, pools

# Examples run in other processes and take a while; the same ones every time.
hypothesis.settings.register_profile(
    "interlace", deadline=None, derandomize=True, database=None, max_examples=25
)
hypothesis.settings.load_profile("interlace")


@pytest.fixture(scope="session")
def compiler(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[compilers.Compiler]:
    """The process that compiles every kernel that has changed: one, if tests run in several
    processes.
    """
    folder = tmp_path_factory.getbasetemp()
    several = "PYTEST_XDIST_WORKER" in os.environ
    started = compilers.start(
        (folder.parent if several else folder) / "compiler", pytestconfig.cache.mkdir("compiled")
    )
    yield started
    if started.process is not None:
        if not several:
            started.process.kill()
        started.process.wait()  # for tests in the other processes


@pytest.fixture(scope="session", autouse=True)
def _compile_meanwhile(request: pytest.FixtureRequest) -> None:
    """Start to compile before the first test: it takes a minute, and the other tests leave enough
    time.
    """
    if any(
        "compiler" in item.fixturenames
        for item in request.session.items
        if isinstance(item, pytest.Function)
    ):
        request.getfixturevalue("compiler")


@pytest.fixture
def quick_launches() -> Iterator[None]:
    """``interlace.launch`` forks its ranks from a process that has imported all they need."""
    from tests import programs

    with programs.quick_launches():
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no GPU tests for a run without a GPU: each of its processes would, for nothing.

    ``tests/test_imports.py`` does it once.
    """
    chosen = config.option.markexpr
    is_gpu_test = collection_path.parent.name == "gpu" and collection_path.match("test_*.py")
    return True if is_gpu_test and ("not gpu" in chosen or chosen == "quick") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark one case of every test file as quick: those that its author has marked, or else the
    first one; put the tests that wait for the compiler behind the others.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu") is None:
            files.setdefault(item.path, []).append(item)
    for cases in files.values():
        if not any(case.get_closest_marker("quick") for case in cases):
            cases[0].add_marker(pytest.mark.quick)
    # What waits until all is compiled comes last, when it has least to wait for.
    items.sort(key=lambda item: "compiler" in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected out of garbage collection; see
    ``tests/preloaded.py``.
    """
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks",
        type=int,
        help="ranks of a GPU test; default: one per GPU, at least two and at most four",
    )


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """``ranks(world_size).run(function, *args)``: every rank's result of a function.

    The processes are reused. Tests in ``tests/gpu`` get ranks on GPUs by the same name.
    """
    with pools("cpu") as pool:
        yield pool
