"""What ``make package`` checks of a wheel, on wheels that are made here; none is built."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tests.package import faults_of, files_of_package, places_of_this_machine

_METADATA = ("licenses/LICENSE", "entry_points.txt", "METADATA")


def _wheel(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "some-1.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def _complete() -> dict[str, str]:
    return {"some/a.py": "", "some/b.json": ""} | {f"some-1.dist-info/{n}": "" for n in _METADATA}


def test_a_complete_wheel(tmp_path: Path) -> None:
    assert faults_of(_wheel(tmp_path, _complete()), ["some/a.py", "some/b.json"], ["/here/"]) == []


def test_what_is_wrong_with_a_wheel(tmp_path: Path) -> None:
    files = _complete() | {"some/a.py": "path = '/here/work'", "some/c.py": ""}
    del files["some/b.json"], files["some-1.dist-info/entry_points.txt"]
    assert faults_of(_wheel(tmp_path, files), ["some/a.py", "some/b.json"], ["/here/"]) == [
        "some/b.json is missing",
        "some/c.py does not belong there",
        "entry_points.txt is missing from the metadata",
        "some/a.py names /here/",
    ]


def test_what_a_wheel_must_have() -> None:
    assert {
        "interlace/demos/down_projection.py",
        "interlace/py.typed",
        "interlace/costs/models.json",
        "interlace/costs/profiles/nvidia_h100_80gb_hbm3.json",
        "interlace/costs/profiles/nvidia_h200.json",
        "interlace/language/README.md",
        "interlace_dlrm/py.typed",
        "interlace_explorer/py.typed",
        "interlace_gin/gin.ll",
        "interlace_gin/py.typed",
        "interlace_sim/presets/machines/h200-node.yaml",
        "interlace/tuning/tables/gemm_reduce_scatter.nvidia_h200.json",
    } <= files_of_package().keys()


def test_no_file_of_the_package_names_this_machine() -> None:
    for name, file in files_of_package().items():
        content = file.read_bytes()
        assert not [place for place in places_of_this_machine() if place.encode() in content], name
