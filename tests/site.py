"""Check a built documentation site: ``python -m tests.site build/site``.

Every link inside of it leads to a page and an anchor that exist, and nothing is fetched from
another host when a page is opened. Pages say the version, and the search ranks how-to pages and the
API before decisions.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import interlace


class _Page(HTMLParser):
    """The anchors of a page, its links, and what a browser fetches to show it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and "href" in values:
            self.fetched.append(values["href"])
        elif "src" in values:
            self.fetched.append(values["src"])


@cache
def _page(path: Path) -> _Page:
    return _Page(path.read_text(encoding="utf-8"))


def faults_of(site: Path) -> list[str]:
    """Return what is wrong with a site, one line each.

    Args:
        site: The folder of the site.
    """
    faults = []
    for path in sorted(site.rglob("*.html")):
        # The page of an unknown address has links from the root, as it may be shown anywhere.
        if path.name != "404.html":
            faults += [f"{path.relative_to(site)}: {fault}" for fault in _faults_of_page(path)]
    for path in sorted(site.rglob("*.css")):
        for target in _fetched_by_style(path.read_text(encoding="utf-8")):
            fault = _fault_of_fetched(path, target)
            faults += [f"{path.relative_to(site)}: {fault}"] if fault else []
    return [*faults, *_faults_of_front_page(site), *_faults_of_search(site)]


def _faults_of_front_page(site: Path) -> Iterator[str]:
    name = f"Interlace {interlace.__version__}"
    if f"{name}</title>" not in (site / "index.html").read_text(encoding="utf-8"):
        yield f"index.html: the title must end with {name}"


def _faults_of_search(site: Path) -> Iterator[str]:
    """Look at what a page counts, in an order that readers expect."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    boosts = {page["location"]: page.get("boost", 1.0) for page in index["docs"]}
    order = ["compile.html", "api/operators.html", "architecture.html", "decisions/index.html"]
    found = [boosts.get(page, 0.0) for page in order]
    if sorted(set(found), reverse=True) != found:
        yield f"search: {', '.join(order)} must count for less and less; they count {found}"


def _faults_of_page(path: Path) -> Iterator[str]:
    page = _page(path)
    for target in page.fetched:
        fault = _fault_of_fetched(path, target)
        if fault:
            yield fault
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not file.is_file():
            yield f"the link {link} leads to no file"
        elif parts.fragment and file.suffix == ".html":
            anchors = _page(file).anchors
            # Browsers go to the top of a page without such an anchor.
            if unquote(parts.fragment) not in {*anchors, "top"}:
                yield f"the link {link} leads to no anchor"


def _fetched_by_style(text: str) -> Iterable[str]:
    return [target for target in re.findall(r"url\([\"']?([^\"')]+)", text) if target[0] != "#"]


def _fault_of_fetched(path: Path, target: str) -> str | None:
    parts = urlsplit(target)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        return f"{target} is fetched from another host"
    exists = (path.parent / unquote(parts.path)).exists()
    return None if exists else f"{target} is fetched and does not exist"


def main() -> None:
    """Check the site of the command line, and end with 1 if it has a fault."""
    site = Path(sys.argv[1]).resolve()
    faults = faults_of(site)
    if faults:
        sys.exit("\n".join(faults))
    pages = list(site.rglob("*.html"))
    if not pages:
        sys.exit(f"{site} has no page")
    links = sum(len(_page(path).links) for path in pages)
    print(f"{len(pages)} pages, {links} links: each leads somewhere; other hosts are not asked")


if __name__ == "__main__":
    main()
