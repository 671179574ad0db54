"""What is asked of NCCL, and in which order: a library in its place says so, and needs no GPU. What
NCCL does with it is not shown here.
"""

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from interlace.errors import BackendError, WorkspaceError
from interlace_gin import nccl
from interlace_gin.engine_nccl import _Communicator, _NcclMemory

_SOURCE = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static char log_text[4096];
static int looks, patience = 2, refusal = 0, gin = 3;
const char* calls() { return log_text; }
void set(int looks_until_complete, int refused, int gin_type) {
  patience = looks_until_complete; refusal = refused; gin = gin_type; log_text[0] = 0;
}
static int say(const char* text) {
  strcat(log_text, text); strcat(log_text, " "); looks = 0; return 7;  // ncclInProgress
}
struct id { char internal[128]; };
int ncclGetVersion(int* v) { *v = 23007; return 0; }
int ncclGetUniqueId(struct id* i) { memset(i, 42, 128); return 0; }
int ncclCommInitRankConfig(void** c, int n, struct id i, int r, int* config) {
  *c = (void*)0x1000;
  if (config[4] != 0) return 5;  // it must not block
  char text[64]; snprintf(text, 64, "init(%d/%d,%d)", r, n, i.internal[127]); return say(text);
}
int ncclCommGetAsyncError(void* c, int* state) {
  *state = ++looks < patience ? 7 : refusal; return 0;
}
int ncclCommQueryProperties(void* c, char* p) { p[32] = 1; *(int*)(p + 36) = gin; return 0; }
int ncclDevCommCreate(void* c, int* needs, char* out) {
  char text[64]; snprintf(text, 64, "create(%d,%d)", needs[16], needs[17]); strcpy(out, "filled");
  return say(text);
}
int ncclDevCommDestroy(void* c, const char* d) {
  say(strcmp(d, "filled") ? "destroy?" : "destroy"); return 0;
}
int ncclMemAlloc(void** p, size_t n) {
  if (n > 1 << 20) return 1;
  *p = aligned_alloc(4096, n); say("alloc"); return 0;
}
int ncclMemFree(void* p) { free(p); say("free"); return 0; }
int ncclCommWindowRegister(void* c, void* p, size_t n, void** w, int f) {
  *w = (void*)0x2000; char text[64]; snprintf(text, 64, "register(%zu,%d)", n, f); return say(text);
}
int ncclCommWindowDeregister(void* c, void* w) { say("deregister"); return 0; }
int ncclCommAbort(void* c) { return say("abort"); }
const char* ncclGetErrorString(int r) { return "words"; }
const char* ncclGetLastError(void* c) { return "more"; }
"""

_GROUP = SimpleNamespace(rank=1, world_size=4, deadline_s=1.0)
_OPENED = "init(1/4,42) create(8,2) alloc register(8192,1) "


@pytest.fixture
def library(tmp_path: Path, monkeypatch):
    """A library in place of NCCL; ``library.calls()`` are those that it has had."""
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "libnccl_device.bc").touch()
    (tmp_path / "nccl.c").write_text(_SOURCE)
    command = ["gcc", "-w", "-shared", "-fPIC", tmp_path / "nccl.c", "-o", lib / "libnccl.so.2"]
    subprocess.run(command, check=True)
    monkeypatch.setenv(nccl.FOLDER_VARIABLE, str(tmp_path))
    found = nccl.nccl.__wrapped__()
    found.library.calls.restype = ctypes.c_char_p
    return found


def _opened(library):
    identifier = nccl.UniqueId()
    library.call("ncclGetUniqueId", ctypes.byref(identifier))
    return _Communicator(library, _GROUP, identifier)


def test_everything_is_undone_before_the_abort(library):
    """Memory is freed once it is not registered any more, and no tensor is over it."""
    communicator = _opened(library)
    content = communicator.connect(8, 2)
    assert content.startswith(b"filled")
    assert len(content) == nccl.DEVICE_COMMUNICATOR_BYTES
    memory = _NcclMemory(library, torch.device("cpu"), 8192)
    assert communicator.register(memory) == 0x2000
    assert library.library.calls().decode() == _OPENED
    del memory
    assert library.library.calls().decode() == _OPENED
    communicator.close()
    communicator.close()
    assert library.library.calls().decode() == f"{_OPENED}destroy deregister free abort "
    assert communicator.back_end == "GDAKI"


@pytest.mark.parametrize(
    ("looks", "refused", "message"),
    [
        (10**9, 0, "ncclCommInitRankConfig must be complete on all ranks in half of the group's"),
        (2, 6, "ncclCommInitRankConfig must succeed; got words (more)."),
    ],
)
def test_a_communicator_that_is_late_or_fails_is_aborted(library, looks, refused, message):
    library.library.set(looks, refused, 3)
    with pytest.raises(BackendError) as caught:
        _opened(library)
    assert str(caught.value).startswith(message)
    assert library.library.calls().decode() == "init(1/4,42) abort "


def test_memory_of_a_registration_that_is_late_is_never_freed(library):
    """NCCL's thread may register it later."""
    communicator = _opened(library)
    library.library.set(10**9, 0, 3)
    with pytest.raises(BackendError, match=r"^ncclCommWindowRegister must be complete"):
        communicator.register(_NcclMemory(library, torch.device("cpu"), 8192))
    communicator.close()
    assert library.library.calls().decode() == "alloc register(8192,1) abort "


def test_a_machine_without_a_back_end_is_told_so(library):
    library.library.set(2, 0, nccl.NO_GIN)
    with pytest.raises(BackendError, match=r"NCCL 2\.30\.7 finds no back end of GIN that connects"):
        _opened(library).connect(1, 0)
    with pytest.raises(WorkspaceError, match=r"a window of .* must fit in the GPU's memory"):
        _NcclMemory(library, torch.device("cpu"), 2**30)
