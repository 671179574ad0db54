"""Measured times of implementations, as multiples of the predicted ones, kept on disk for the
user's next programs.

A kind of call has a file of its own, which is replaced as a whole. So programs that measure at the
same time need no lock: the last one to finish is remembered, and no reader sees half of a file.
Whatever is wrong with the folder or a file, the caller is warned and goes on as if nothing had been
measured; what is read is data, and never executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlace.cache_folder import is_own, write_whole
from interlace.documents import DAMAGE, to_json

MOST_FILES = 4096
"""Kinds of calls that are remembered; a file has some hundred bytes."""


class MeasuredTimes:
    """Multiples of the predicted times by kind of call and implementation, in files of one folder.

    A kind of call is a dictionary that JSON can hold: operator, sizes, dtype, ranks, and the
    versions, the GPU and the profile that times and predictions depend on. Calls of a kind may
    differ in their rows by up to a factor of two, so what is kept are multiples.
    """

    def __init__(self, folder: Path) -> None:
        """Use a folder, which is made when something is written."""
        self._folder = folder
        self._has_warned = False

    def read(self, kind: Mapping[str, Any]) -> dict[str, float] | None:
        """Return the multiples of a kind of call; None if it was not measured or cannot be read."""
        file = self._file(kind)
        try:
            if not self._is_own():
                return None
            document = json.loads(file.read_text(encoding="utf-8"))
            multiples = {
                str(name): float(multiple) for name, multiple in document["multiples"].items()
            }
            # A hash may collide, and a file may have been edited.
            if document["kind"] == json.loads(json.dumps(kind)) and all(
                math.isfinite(multiple) and multiple > 0 for multiple in multiples.values()
            ):
                return multiples
            raise ValueError("it is of another kind of call")
        except FileNotFoundError:
            return None
        except (OSError, *DAMAGE) as error:
            self._warn(f"{file} is ignored: {error!r}")
            return None

    def write(self, kind: Mapping[str, Any], multiples: Mapping[str, float]) -> None:
        """Remember the multiples of a kind of call, and forget the oldest beyond the limit."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_own():
                return
            content = to_json({"kind": dict(kind), "multiples": dict(multiples)})
            write_whole(self._file(kind), content)
            self._forget_oldest()
        except OSError as error:
            self._warn(f"measured times are not kept in {self._folder}: {error!r}")

    def _file(self, kind: Mapping[str, Any]) -> Path:
        text = json.dumps(kind, sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def _is_own(self) -> bool:
        """Return whether the folder is the user's; another user's files are not trusted."""
        if is_own(self._folder):
            return True
        self._warn(f"{self._folder} is ignored: others than this user may write to it")
        return False

    def _forget_oldest(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=_age)
        for file in files[: max(0, len(files) - MOST_FILES)]:
            # Another process may have removed it.
            file.unlink(missing_ok=True)

    def _warn(self, text: str) -> None:
        # Once is enough: the program goes on, by predictions.
        if not self._has_warned:
            warnings.warn(f"interlace: {text}", RuntimeWarning, stacklevel=3)
            self._has_warned = True


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
