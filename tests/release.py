"""Check a release before it is given away; ``make release VERSION=0.3.0`` calls it twice.

``python -m tests.release VERSION`` looks at the tree: one version everywhere, nothing uncommitted,
a section of the changelog, no such tag. With ``--built`` it looks at the files in ``dist``, writes
their checksums, and prints what ``docs/releasing.md`` leaves to a person.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
_CHECKSUMS = "SHA256SUMS"


def faults_of_tree(root: Path, version: str) -> list[str]:
    """Return why a tree cannot be released as a version, one line each.

    Args:
        root: The repository's work tree.
        version: The version, such as ``0.3.0``.
    """
    return [
        *_faults_of_versions(root, version),
        *_faults_of_changelog((root / "CHANGELOG.md").read_text(encoding="utf-8"), version),
        *_faults_of_git(root, version),
    ]


def _faults_of_versions(root: Path, version: str) -> Iterator[str]:
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"a version must be three numbers, such as 0.3.0; got {version}"
    for name, pattern in (
        ("src/interlace/__init__.py", r'^__version__ = "(.*)"$'),
        ("CITATION.cff", r"^version: (.*)$"),
    ):
        text = (root / name).read_text(encoding="utf-8")
        found = re.findall(pattern, text, flags=re.MULTILINE)
        if found != [version]:
            yield f"{name} must say {version}; it says {', '.join(found) or 'no version'}"


def _faults_of_changelog(text: str, version: str) -> Iterator[str]:
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    contents = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
    sections = dict(zip(headings, map(str.strip, contents), strict=True))
    dated = [name for name in headings if re.fullmatch(rf"\[{version}\] - \d{{4}}-\d\d-\d\d", name)]
    if len(dated) != 1 or not sections[dated[0]]:
        yield f"CHANGELOG.md must have a section '## [{version}] - YYYY-MM-DD' that says something"
    if sections.get("[Unreleased]") != "":
        yield "CHANGELOG.md must have an empty section '## [Unreleased]' for the next version"


def _faults_of_git(root: Path, version: str) -> Iterator[str]:
    changed = _git(root, "status", "--porcelain")
    if changed:
        yield "the tree must be committed; git status says:\n" + changed
    if _git(root, "tag", "--list", f"v{version}"):
        yield f"the tag v{version} exists: this version was released"


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.rstrip()


def faults_of_metadata(metadata: str, version: str) -> list[str]:
    """Return what is wrong with the metadata of a package.

    Args:
        metadata: The text of ``METADATA`` of a wheel, or ``PKG-INFO`` of the sources' archive.
        version: The version that it must have.
    """
    headers = HeaderParser().parsestr(metadata)
    faults = [
        f"{name} must be {value!r}; got {headers[name]!r}"
        for name, value in (("Version", version), ("Description-Content-Type", "text/markdown"))
        if headers[name] != value
    ]
    if not headers["Author"]:
        faults.append("Author is missing")
    return faults


def faults_of_html(html: str | None) -> list[str]:
    """Return what is wrong with the README as an index shows it.

    Args:
        html: The rendered text, or None if it cannot be rendered. Links that begin with ``#`` are
            those that a renderer gives to headings.
    """
    if html is None:
        return ["the README cannot be rendered"]
    targets = re.findall(r'\b(?:href|src)="([^"#][^"]*)"', html)
    return [f"the link {target} leads nowhere" for target in targets if ":" not in target]


def faults_of_files(folder: Path, version: str) -> list[str]:
    """Return what is wrong with the built files of a version, one line each.

    Args:
        folder: Where the files are: one wheel, and one archive of the sources.
        version: The version.
    """
    stem = f"interlace-{version}"
    expected = [f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"]
    found = sorted(file.name for file in folder.iterdir() if file.name != _CHECKSUMS)
    if found != expected:
        return [f"{folder.name} must have {expected} and nothing else; it has {found}"]
    in_wheel = _metadata_of(folder / expected[0])
    with tarfile.open(folder / expected[1]) as archive:
        member = archive.extractfile(f"{stem}/PKG-INFO")
        assert member is not None
        in_archive = member.read().decode()
    faults = faults_of_metadata(in_wheel, version)
    if in_archive != in_wheel:
        faults.append("the archive of the sources must have the wheel's metadata; they differ")
    return faults


def _metadata_of(wheel: Path) -> str:
    stem = "-".join(wheel.name.split("-")[:2])
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{stem}.dist-info/METADATA").decode()


def write_checksums(folder: Path) -> Path:
    """Write the SHA-256 sums of a folder's files, as ``sha256sum --check`` reads them."""
    files = sorted(file for file in folder.iterdir() if file.name != _CHECKSUMS)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    path = folder / _CHECKSUMS
    path.write_text("".join(sums), encoding="utf-8")
    return path


def steps_of_a_person(page: str, version: str) -> str:
    """Return the steps that the page on releases leaves to a person, with the version in them."""
    section = page.split("## After the command\n")[1].split("\n## ")[0]
    return section.strip().replace("VERSION", version)


def main() -> None:
    """Check the tree or the files, and end with 1 if there is a fault."""
    parser = argparse.ArgumentParser(description="Checks of a release: see docs/releasing.md.")
    parser.add_argument("version", help="such as 0.3.0")
    parser.add_argument("--built", action="store_true", help="check the files in dist")
    arguments = parser.parse_args()
    version, folder = arguments.version, ROOT / "dist"
    if not arguments.built:
        _exit_if(faults_of_tree(ROOT, version), version)
        print(f"{version}: the versions agree, the changelog has it, and the tree is committed")
        return
    _exit_if(faults_of_files(folder, version), version)
    # make release installs it.
    from readme_renderer import markdown

    (wheel,) = folder.glob("*.whl")
    page = HeaderParser().parsestr(_metadata_of(wheel))
    html = markdown.render(page.get_payload())
    if html is None or "Project-URL" in page:
        _exit_if(faults_of_html(html), version)
    else:
        print(
            "The address of the sources is not known, so the package page has no project URLs, and "
            f"{len(faults_of_html(html))} of its links lead nowhere: set INTERLACE_REPOSITORY and "
            "run it again.\n"
        )
    print(write_checksums(folder).read_text(encoding="utf-8"))
    print(f"Commit {_git(ROOT, 'rev-parse', 'HEAD')} is ready. What a person does:\n")
    print(steps_of_a_person((ROOT / "docs/releasing.md").read_text(encoding="utf-8"), version))


def _exit_if(faults: list[str], version: str) -> None:
    if faults:
        sys.exit(f"{version} cannot be released:\n" + "\n".join(faults))


if __name__ == "__main__":
    main()
