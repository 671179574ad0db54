"""What ``make release`` checks of a tree and of built files, on small ones that are made here, and
what the package page has.
"""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import hatch_build
from tests.pythons import interpreter_of
from tests.release import (
    faults_of_files,
    faults_of_html,
    faults_of_metadata,
    faults_of_tree,
    steps_of_a_person,
    write_checksums,
)

ROOT = Path(__file__).parents[1]
_ADDRESS = "https://example.org/someone/interlace"
_PAGE = """Metadata-Version: 2.4
Name: interlace
Version: 1.2.3
Author: The Interlace developers
Description-Content-Type: text/markdown

"""
_WITH_URL = _PAGE.replace("Author", f"Project-URL: Source, {_ADDRESS}\nAuthor")


def _git(folder: Path, *words: str) -> None:
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a small repository that can be released as 1.2.3."""
    files = {
        "src/interlace/__init__.py": '__version__ = "1.2.3"\n',
        "CITATION.cff": "version: 1.2.3\n",
        "CHANGELOG.md": "## [Unreleased]\n\n## [1.2.3] - 2026-12-01\n\n- Something.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "--quiet", "--message", "All.")
    return tmp_path


def test_a_tree_that_can_be_released(tree: Path) -> None:
    assert faults_of_tree(tree, "1.2.3") == []


def test_a_tree_of_another_version(tree: Path) -> None:
    assert faults_of_tree(tree, "1.2.4") == [
        "src/interlace/__init__.py must say 1.2.4; it says 1.2.3",
        "CITATION.cff must say 1.2.4; it says 1.2.3",
        "CHANGELOG.md must have a section '## [1.2.4] - YYYY-MM-DD' that says something",
    ]
    assert "a version must be three numbers, such as 0.3.0; got v1" in faults_of_tree(tree, "v1")


def test_a_tree_that_is_not_committed(tree: Path) -> None:
    (tree / "new.py").write_text("")
    (tree / "CITATION.cff").write_text("version: 1.2.3\n\n")
    assert faults_of_tree(tree, "1.2.3") == [
        "the tree must be committed; git status says:\n M CITATION.cff\n?? new.py"
    ]


def test_a_version_that_was_released(tree: Path) -> None:
    _git(tree, "tag", "v1.2.3")
    assert faults_of_tree(tree, "1.2.3") == ["the tag v1.2.3 exists: this version was released"]


@pytest.mark.parametrize(
    ("changelog", "section", "unreleased"),
    [
        ("## [Unreleased]\n\n- Something.\n", True, True),
        ("## [Unreleased]\n\n## [1.2.3] - 2026-12-01\n", True, False),
        ("## [Unreleased]\n\n## [1.2.3]\n\n- Something.\n", True, False),
        ("## [1.2.3] - 2026-12-01\n\n- Something.\n", False, True),
    ],
    ids=["not named", "empty", "without a date", "without unreleased"],
)
def test_a_changelog_that_is_not_ready(
    tree: Path, changelog: str, section: bool, unreleased: bool
) -> None:
    (tree / "CHANGELOG.md").write_text(changelog)
    _git(tree, "commit", "--all", "--quiet", "--message", "The changelog.")
    faults = "\n".join(faults_of_tree(tree, "1.2.3"))
    assert (
        "must have a section '## [1.2.3] - YYYY-MM-DD' that says something" in faults
    ) == section
    assert ("must have an empty section '## [Unreleased]'" in faults) == unreleased
    assert faults.count("\n") == section + unreleased - 1


def test_the_package_page() -> None:
    links = '<a href="a.md">a</a><a href="https://example.org">b</a><img src="c.svg"><a href="#d">'
    assert faults_of_html(links) == ["the link a.md leads nowhere", "the link c.svg leads nowhere"]
    assert faults_of_html(None) == ["the README cannot be rendered"]
    assert faults_of_metadata(_PAGE, "1.2.3") == []
    anonymous = _PAGE.replace("Author: The Interlace developers\n", "")
    assert faults_of_metadata(anonymous, "1.2.4") == [
        "Version must be '1.2.4'; got '1.2.3'",
        "Author is missing",
    ]


def _build(folder: Path, in_archive: str = _PAGE) -> None:
    with zipfile.ZipFile(folder / "interlace-1.2.3-py3-none-any.whl", "w") as wheel:
        wheel.writestr("interlace-1.2.3.dist-info/METADATA", _PAGE)
    with tarfile.open(folder / "interlace-1.2.3.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("interlace-1.2.3/PKG-INFO")
        info.size = len(in_archive.encode())
        archive.addfile(info, io.BytesIO(in_archive.encode()))


def test_built_files_and_their_checksums(tmp_path: Path) -> None:
    _build(tmp_path)
    assert faults_of_files(tmp_path, "1.2.3") == []
    sums = write_checksums(tmp_path)
    subprocess.run(["sha256sum", "--check", "--strict", sums.name], cwd=tmp_path, check=True)
    assert write_checksums(tmp_path).read_text().count("\n") == 2  # without a sum of itself
    assert faults_of_files(tmp_path, "1.2.3") == []


def test_what_is_wrong_with_built_files(tmp_path: Path) -> None:
    _build(tmp_path, in_archive=_WITH_URL)
    assert faults_of_files(tmp_path, "1.2.3") == [
        "the archive of the sources must have the wheel's metadata; they differ"
    ]
    (tmp_path / "interlace-1.2.2.tar.gz").touch()
    (fault,) = faults_of_files(tmp_path, "1.2.3")
    assert fault.startswith(f"{tmp_path.name} must have ['interlace-1.2.3-py3-none-any.whl', ")


def test_steps_that_are_left_to_a_person() -> None:
    steps = steps_of_a_person((ROOT / "docs/releasing.md").read_text(encoding="utf-8"), "1.2.3")
    for command in ("git tag --sign v1.2.3 ", "gpg ", "twine upload dist/interlace-1.2.3*"):
        assert f"`{command}" in steps
    assert "VERSION" not in steps


def _metadata(config: dict[str, str]) -> dict[str, object]:
    metadata: dict[str, object] = {"version": "1.2.3"}
    hatch_build.PackagePage(str(ROOT), config).update(metadata)
    return metadata


def test_the_hook_invents_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INTERLACE_REPOSITORY", raising=False)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = {"content-type": "text/markdown", "text": text}
    assert _metadata({"repository": ""}) == {"version": "1.2.3", "readme": readme, "urls": {}}


def test_the_hook_fills_urls_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INTERLACE_REPOSITORY", raising=False)
    stated = _metadata({"repository": _ADDRESS})
    monkeypatch.setenv("INTERLACE_REPOSITORY", f"{_ADDRESS}/")
    assert _metadata({"repository": "https://example.org/before"}) == stated
    assert stated["urls"]["Changelog"] == f"{_ADDRESS}/blob/v1.2.3/CHANGELOG.md"
    text = stated["readme"]["text"]
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    files = f"{_ADDRESS}/blob/v1.2.3"
    for relative, absolute in (
        ("[a\nb](docs/a.md#b)", f"[a\nb]({files}/docs/a.md#b)"),
        ("[a](#b)", f"[a]({files}/README.md#b)"),
        ("![a](docs/a.svg)", f"![a]({_ADDRESS}/raw/v1.2.3/docs/a.svg)"),
    ):
        assert hatch_build.with_absolute_links(relative, _ADDRESS, "1.2.3") == absolute
    # Code and links to other places stay as they are.
    code = "[a](https://example.org/a)\n```python\nx[0](y)\n```\n"
    assert hatch_build.with_absolute_links(code, _ADDRESS, "1.2.3") == code


def test_interpreters_of_other_pythons() -> None:
    python = interpreter_of("3.11")
    assert python is not None
    assert Path(python).is_file()
    assert interpreter_of("3.99") is None
