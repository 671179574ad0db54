"""What we tell NCCL has the layout of its headers, and what is missing is said."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from interlace.errors import BackendError
from interlace_gin import nccl
from tests.gin.wheels import nccl_folder
from tests.programs import run_program

# All that NCCL's headers for the host want of CUDA's.
_CUDA = """
#pragma once
#include <stddef.h>
#include <stdint.h>
#define __host__
#define __device__
#define __forceinline__ inline
#define CUDART_VERSION 13000
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef int CUmemLocationType;
"""

# Digits of the sizes of a function's parameters, in base 1000 after a 1.
_SIZES_OF_PARAMETERS = """
template <typename... A> constexpr long long sizes(ncclResult_t (*)(A...)) {
  long long all = 1;
  for (long long size : {(long long)sizeof(A)...}) all = 1000 * all + size;
  return all;
}
"""

_STRUCTURES = {
    nccl.UniqueId: "ncclUniqueId",
    nccl.Config: "ncclConfig_t",
    nccl.Requirements: "ncclDevCommRequirements_t",
    nccl.Properties: "ncclCommProperties_t",
}

_CONSTANTS = {
    "NCCL_API_MAGIC": nccl.MAGIC,
    "NCCL_CONFIG_UNDEF_INT": nccl.UNDEFINED,
    "NCCL_UNIQUE_ID_BYTES": nccl.UNIQUE_ID_BYTES,
    "NCCL_WIN_COLL_SYMMETRIC": nccl.SYMMETRIC_WINDOW,
    "NCCL_WIN_REQUIRED_ALIGNMENT": nccl.ALIGNMENT_BYTES,
    "NCCL_GIN_TYPE_NONE": nccl.NO_GIN,
    "NCCL_GIN_CONNECTION_FULL": nccl.FULL_CONNECTION,
    "ncclSuccess": nccl.SUCCESS,
    "ncclInProgress": nccl.IN_PROGRESS,
    # Those of gin.ll.
    "ncclGinSignalInc": 0,
    "sizeof(ncclTeam)": 12,
    "offsetof(ncclTeam, nRanks)": 0,
    "offsetof(ncclTeam, rank)": 4,
    "offsetof(ncclTeam, stride)": 8,
}


def _printed(folder: Path, place: Path, expressions: list[str]) -> list[int]:
    """The values of constant expressions of C++ with NCCL's headers."""
    for name in ("cuda_runtime", "cuda", "cuda_fp16", "cuda_bf16", "cuda_fp8"):
        (place / f"{name}.h").write_text(_CUDA)
    lines = "\n".join(
        f'{{ constexpr auto value = (long long)({text}); printf("%lld\\n", value); }}'
        for text in expressions
    )
    source = place / "layout.cc"
    source.write_text(
        "#include <initializer_list>\n#include <stdio.h>\n#include <stddef.h>\n#include <nccl.h>\n"
        "#include <nccl_device/impl/comm__types.h>\n"
        "#if __has_include(<nccl_device/host.h>)\n#include <nccl_device/host.h>\n#endif\n"
        f"{_SIZES_OF_PARAMETERS}int main() {{\n{lines}\n}}\n"
    )
    program = place / "layout"
    include = ["-I", str(place), "-I", str(folder / "include")]
    subprocess.run(["g++", "-std=c++17", "-w", *include, source, "-o", program], check=True)
    done = subprocess.run([program], check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


def test_structures_and_constants_are_those_of_the_headers(tmp_path: Path) -> None:
    """A field that moves, or a constant that changes, would make NCCL read something else."""
    expected = dict(_CONSTANTS)
    for mirror, name in _STRUCTURES.items():
        for field, *_ in mirror._fields_:
            expected[f"offsetof({name}, {field})"] = getattr(mirror, field).offset
            expected[f"sizeof((({name}*)0)->{field})"] = getattr(mirror, field).size
    found = _printed(nccl_folder(), tmp_path, list(expected))
    assert dict(zip(expected, found, strict=True)) == expected


def test_functions_take_what_the_headers_say(tmp_path: Path) -> None:
    """A parameter too few, or of another size, would be a number from nowhere."""
    expected = {}
    for name, types in nccl.FUNCTIONS.items():
        digits = 1
        for kind in types:
            digits = 1000 * digits + ctypes.sizeof(kind)
        expected[f"sizes({name})"] = digits
    found = _printed(nccl_folder(), tmp_path, list(expected))
    assert dict(zip(expected, found, strict=True)) == expected


def test_there_is_room_for_a_device_communicator(tmp_path: Path) -> None:
    (size,) = _printed(nccl_folder(), tmp_path, ["sizeof(ncclDevComm)"])
    assert size <= nccl.DEVICE_COMMUNICATOR_BYTES


def test_the_library_has_every_function_that_is_called() -> None:
    """It loads without a GPU, and says what is wrong in its own words."""
    library = nccl.nccl.__wrapped__() if nccl_folder() else None
    assert library.version >= nccl.OLDEST
    with pytest.raises(BackendError, match=r"^ncclCommWindowRegister must succeed; got "):
        library.call("ncclCommWindowRegister", None, None, 0, ctypes.byref(ctypes.c_void_p()), 0)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "gin must have NCCL 2.30.7 or later, with its device code; got "),
        (["libnccl_device.bc"], "gin must load "),
    ],
)
def test_what_is_missing_is_said(tmp_path, monkeypatch, files, message):
    (tmp_path / "lib").mkdir()
    for name in files:
        (tmp_path / "lib" / name).touch()
    monkeypatch.setenv(nccl.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(BackendError) as caught:
        nccl.nccl.__wrapped__()
    assert str(caught.value).startswith(message)
    assert "pip install --no-deps 'nvidia-nccl-cu13>=2.30.7,<2.33'" in str(caught.value)


def _library(folder: Path, version: int) -> Path:
    """Make a folder with a library that says a version, by a function that others have, too."""
    lib = folder / "lib"
    lib.mkdir(parents=True)
    (lib / "libnccl_device.bc").touch()
    functions = "".join(f"int {name}() {{ return 0; }}" for name in nccl.FUNCTIONS if name != _SAYS)
    (lib / "nccl.c").write_text(
        f"int inner() {{ return {version}; }} int {_SAYS}(int* v) {{ *v = inner(); return 0; }}"
        f"{functions} int ncclGetErrorString; int ncclGetLastError;"
    )
    path = lib / "libnccl.so.2"
    subprocess.run(["gcc", "-shared", "-fPIC", lib / "nccl.c", "-o", path], check=True)
    return path


_SAYS = "ncclGetVersion"


@pytest.mark.parametrize("version", [22907, 23300])
def test_other_versions_are_refused(tmp_path: Path, monkeypatch, version: int) -> None:
    _library(tmp_path, version)
    monkeypatch.setenv(nccl.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(BackendError) as caught:
        nccl.nccl.__wrapped__()
    expected = f"gin must have NCCL 2.30.7 to 2.32; got {nccl.in_words(version)} at {tmp_path}."
    assert str(caught.value).startswith(expected)


def test_a_version_that_torch_has_loaded_is_left_alone(tmp_path: Path) -> None:
    """Names that both libraries have lead each into itself; in a process that loads both."""
    others = _library(tmp_path / "torch", 22809)
    _library(tmp_path / "ours", 23007)
    program = tmp_path / "program.py"
    program.write_text(
        "import ctypes, os; from interlace_gin import nccl\n"
        f"os.environ[nccl.FOLDER_VARIABLE] = {str(tmp_path / 'ours')!r}\n"
        f"ctypes.CDLL({str(others)!r}, mode=os.RTLD_NOW | os.RTLD_GLOBAL)\n"
        "print(nccl.nccl().version)"
    )
    assert run_program(program, folder=tmp_path).stdout == "23007\n"
