"""Run a command, and say how much processor time it took with everything that it started:
``python -m tests.processor_time pytest ...``.

The time on the clock depends on what else the machine does, and processor time less so. Processes
that the command leaves behind, as ranks of tests do that a server of processes has forked, become
children of this one, which waits for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

_SUBREAPER = 36  # of prctl(2), on Linux only
_PATIENCE_S = 20.0


def main(command: list[str]) -> int:
    """Return the command's exit status."""
    signal.signal(signal.SIGINT, lambda *_: None)  # it reaches the command, which ends then
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    status = subprocess.run(command).returncode
    end = time.monotonic() + _PATIENCE_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes, seconds = divmod(round(used.ru_utime + used.ru_stime), 60)
    print(f"Processor time: {minutes} min {seconds} s.", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
