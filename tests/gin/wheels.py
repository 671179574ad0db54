"""NCCL's wheel for the tests of GPU-initiated puts, which nothing else needs."""

import os
from pathlib import Path

import pytest

from interlace.errors import BackendError
from interlace_gin import nccl


def nccl_folder() -> Path:
    """The folder of NCCL's wheel; the test is skipped if there is none.

    With ``INTERLACE_NCCL``, as ``make test-gin`` sets it, a wheel that does not fit is a failure.
    """
    try:
        return nccl.folder()
    except BackendError as error:
        if nccl.FOLDER_VARIABLE in os.environ:
            raise
        pytest.skip(f"make test-gin fetches NCCL's wheel: {error}")
