"""What mkdocs builds the site from: the repository's Markdown files where they lie.

Every page is named by its path from the root of the repository, so links between the files lead to
pages as they lead to files elsewhere. Beside them the site has pages that are made here:

- one for each other file that a page links to, such as an example: its text;
- one for each table of names in ``docs/reference.md``: the docstrings, by mkdocstrings;
- one for each file of measurements, and one for each notebook.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from measurements import index_of, page_of
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from notebooks import Notebook

ROOT = Path(__file__).parents[2]
REFERENCE = "docs/reference.md"
# Any of mkdocs's loggers: a warning ends a strict build.
_LOG = logging.getLogger("mkdocs.hooks")

_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_EXECUTED = ROOT / "build" / "notebooks"
# Pages that are neither named by a path nor by a table of the reference.
_MORE_API = {
    "errors": ("Errors", ["interlace.errors"]),
    "language": ("Primitives for kernels", ["interlace.language"]),
    "explorer": ("Explorer of interleavings", ["interlace_explorer"]),
    "dlrm": ("DLRM", ["interlace_dlrm"]),
    "simulator": ("Simulator", ["interlace_sim"]),
    "gin": ("GPU-initiated puts", ["interlace_gin", "interlace_gin.language"]),
}

# How much a page counts in the search, by the first heading of the navigation that it is under; 1 for
# other pages. A reader asks how something is done, or what a name means, more often than why it was
# decided, or when it changed.
_BOOSTS = {"How to": 5.0, "Start here": 5.0, "Reference": 3.0, "Decisions": 0.25, "Project": 0.5}

# Pages whose addresses do not say in which folder of the sources they are.
_NAMED_PAGES = {
    "src/interlace/language/README.md": "memory-model.html",
    "src/interlace_gin/README.md": "gpu-initiated-puts.html",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the parts of the navigation that follow from the repository's contents, and say which
    version the site is of, and where the sources are.
    """
    config.site_name = f"{config.site_name} {_version()}"
    config.repo_url = _address_of_sources()
    config.repo_name = "Sources"
    decisions = sorted(_names("docs/decisions/*.md"), key=_readme_first)
    contents: dict[str, list[Any]] = {
        "API": [f"docs/api/{page}.md" for page in _api_pages()],
        "Decisions": [{"Overview": decisions[0]}, *decisions[1:]],
        "Operators": _names("src/interlace/operators/*/README.md"),
    }
    _fill(config.nav, contents)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return all files of the site: the theme's own, and those of the repository."""
    docs = Path(config.docs_dir)
    others = [file for file in files if file.src_dir is None or Path(file.src_dir) != docs]
    makers = (_repository_files, _source_pages, _api_files, _measurements, _notebooks)
    return Files([*others, *(file for make in makers for file in make(config))])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's text with the links that the site alone has."""
    name = page.file.src_uri
    if page.ancestors:
        page.meta["search"] = {"boost": _BOOSTS.get(page.ancestors[-1].title, 1.0)}
    if page.file.inclusion.is_not_in_nav():
        page.meta["hide"] = ["navigation", "toc"]  # the width is for tables and code
        page.meta["search"] = {"exclude": True}  # numbers, which nobody looks up
    if not (ROOT / name).is_file():
        return markdown  # made here
    if re.search(r"^ {2,3}(?:[-*]|\d+\.) ", _without_code(markdown), flags=re.MULTILINE):
        _LOG.warning("%s: the items of a list in a list must begin with four spaces", name)
    linked = _linked_files(name)

    def to_page(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        is_page = target.endswith(".ipynb") or _resolved(name, target) in linked
        return f"{before}{target}.md{after}" if is_page else match[0]

    markdown = _LINK.sub(to_page, markdown)
    if name == REFERENCE:
        markdown = re.sub(r"^\| `(\w+)` \|", _to_docstring, markdown, flags=re.MULTILINE)
    if name == "docs/results.md":
        markdown = re.sub(r"<!-- interlace bench table\s+([^>]*?)\s*-->", _sources, markdown)
    if name == "benchmarks/results/README.md":
        markdown += index_of(ROOT / file for file in _names("benchmarks/results/*.json"))
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's HTML with a link from each picture to the picture in full size."""
    return re.sub(r'(?<!">)(<img [^>]*\bsrc="([^"]+)"[^>]*>)', r'<a href="\2">\1</a>', html)


def _version() -> str:
    text = (ROOT / "src/interlace/__init__.py").read_text(encoding="utf-8")
    return text.split('__version__ = "')[1].split('"')[0]


def _address_of_sources() -> str:
    """Return the address of the repository, or nothing: the one that the package page has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    stated = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    return os.environ.get("INTERLACE_REPOSITORY", stated)


def _fill(items: list[Any], contents: dict[str, list[Any]]) -> None:
    """Put the contents into the empty sections of their names."""
    for entry in items:
        for name, inner in entry.items() if isinstance(entry, dict) else ():
            if inner == []:
                inner += contents[name]
            elif isinstance(inner, list):
                _fill(inner, contents)


def _names(pattern: str) -> list[str]:
    """Return the files of the repository that match a pattern, by their paths from its root.

    They are those that git has or would take, so what lies in ignored folders is none of them.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", pattern]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return sorted(name for name in set(listed.stdout.splitlines()) if (ROOT / name).is_file())


def _repository_files(config: MkDocsConfig) -> Iterator[File]:
    """Yield the files that are shown as they are: pages, pictures, and what the theme lacks."""
    for pattern in ("*.md", "docs/pictures/*.svg", "docs/pictures/*.png", "docs/site/assets/*"):
        for name in _names(pattern):
            yield _file(config, name, _target(name), abs_src_path=str(ROOT / name))


def _source_pages(config: MkDocsConfig) -> Iterator[File]:
    """Yield a page for each file of code that a page links to."""
    for name in sorted({link for page in _names("*.md") for link in _linked_files(page)}):
        yield _hidden(config, f"{name}.md", f"source/{name}.html", _source_page(name))


def _api_files(config: MkDocsConfig) -> Iterator[File]:
    """Yield the pages of the API; mkdocstrings puts the docstrings in place of ``:::``."""
    for page, (title, names) in _api_pages().items():
        text = f"# {title}\n\n" + "\n\n".join(f"::: {name}" for name in names)
        if len(names) == 1:  # a module, whose name is the title or nearly so
            text += "\n    options:\n      show_root_heading: false\n"
        yield _file(config, f"docs/api/{page}.md", f"api/{page}.html", content=text)


def _measurements(config: MkDocsConfig) -> Iterator[File]:
    """Yield the files of measurements, and a page for each."""
    for name in _names("benchmarks/results/*.json"):
        target = _target(name)
        yield _file(config, name, target, abs_src_path=str(ROOT / name))
        yield _hidden(config, f"{name}.md", f"{target}.html", page_of(ROOT / name))


def _notebooks(config: MkDocsConfig) -> Iterator[File]:
    """Yield a page for each notebook, and the pictures that it has drawn."""
    for name in _names("examples/notebooks/*.ipynb"):
        notebook = Notebook(ROOT / name, executed=_EXECUTED / Path(name).name)
        folder = f"notebooks/{Path(name).stem}"
        content = notebook.markdown(folder)
        yield _file(config, f"{name}.md", f"{folder}.html", content=content)
        for picture, data in notebook.pictures().items():
            yield _file(config, f"examples/{folder}/{picture}", f"{folder}/{picture}", content=data)


def _target(name: str) -> str:
    """Return where the site has a file of the repository: a page, a picture, or measurements."""
    if name in _NAMED_PAGES:
        return _NAMED_PAGES[name]
    name = name.removeprefix("docs/site/")
    name = re.sub(r"^src/interlace/operators/(\w+)/README\.md$", r"operators/\1.md", name)
    name = name.removeprefix("docs/").replace("benchmarks/results/", "measurements/")
    path = PurePosixPath(name)
    if path.suffix != ".md":
        return name
    stem = "index" if path.stem == "README" else path.stem.lower()
    return str(path.with_name(f"{stem}.html"))


def _file(config: MkDocsConfig, name: str, target: str, **source: Any) -> File:
    file = File.generated(config, name, **source)
    file.dest_uri = target
    return file


def _hidden(config: MkDocsConfig, name: str, target: str, content: str) -> File:
    """Return a page that is reached by links only: the navigation does not name it."""
    return _file(config, name, target, content=content, inclusion=InclusionLevel.NOT_IN_NAV)


def _readme_first(name: str) -> tuple[bool, str]:
    return not name.endswith("README.md"), name


def _without_code(markdown: str) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", markdown, flags=re.MULTILINE | re.DOTALL)


def _resolved(page: str, target: str) -> str:
    """Return the path from the root of what a page links to."""
    path = (ROOT / page).parent / target
    return path.resolve().relative_to(ROOT).as_posix() if ":" not in target else target


def _linked_files(page: str) -> set[str]:
    """Return the files of text, other than Markdown, that a page links to."""
    text = _without_code((ROOT / page).read_text(encoding="utf-8"))
    targets = {_resolved(page, match[1]) for match in _LINK.findall(text) if ":" not in match[1]}
    others = (".md", ".svg", ".png", ".json", ".ipynb")
    return {name for name in targets if (ROOT / name).is_file() and not name.endswith(others)}


def _source_page(name: str) -> str:
    """Return a page with the text of a file."""
    text = (ROOT / name).read_text(encoding="utf-8")
    language = {".py": "python", ".toml": "toml"}.get(Path(name).suffix, "text")
    return f"# `{name}`\n\n````{language}\n{text}````\n"


def _api_pages() -> dict[str, tuple[str, list[str]]]:
    """Return the pages of the API: the name, the title and the documented objects of each.

    A table of names in the reference is a page, and so is each module that it lists.
    """
    pages: dict[str, tuple[str, list[str]]] = {}
    for title, names in _tables_of_names():
        if title == "module":
            pages |= {name: (f"interlace.{name}", [f"interlace.{name}"]) for name in names}
        else:
            title = title if " " in title else f"{title}s"
            page = title.replace(" ", "-")
            pages[page] = (title.capitalize(), [f"interlace.{name}" for name in names])
    return pages | _MORE_API


def _tables_of_names() -> Iterable[tuple[str, list[str]]]:
    """Yield the heading and the names of each table of public names in the reference."""
    text = (ROOT / REFERENCE).read_text(encoding="utf-8")
    section = text.split("## Public names\n")[1].split("\n## ")[0]
    for table in re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE):
        heading, _, *rows = table.splitlines()
        yield heading.split("|")[1].strip(), [row.split("`")[1] for row in rows]


def _sources(match: re.Match[str]) -> str:
    """Return a line with links to the files of a table of results."""
    files = match[1].split()
    links = (f"[{file.removesuffix('.json')}](../benchmarks/results/{file}.md)" for file in files)
    return f"All times of these calls: {', '.join(links)}."


def _to_docstring(match: re.Match[str]) -> str:
    """Return the first cell of a row of the reference, with a link if the API has the name."""
    public = {name for _, names in _tables_of_names() for name in names}
    return f"| [`{match[1]}`][interlace.{match[1]}] |" if match[1] in public else match[0]
