"""What the package page of an index shows that depends on the address of the sources.

The address is ``INTERLACE_REPOSITORY``, or else ``repository`` of this hook in ``pyproject.toml``.
Where there is one, the package has project URLs, and relative links of the README lead to the files
of the version's tag, in the form of GitHub. Where there is none, links stay as they are: nothing is
invented.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_TARGET = re.compile(r"(!?)(\[[^\]]*\])\(([^)\s]+)\)")
# A line of a block of code begins and ends it; links in a block are none.
_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def urls_of(address: str, version: str) -> dict[str, str]:
    """Return the project URLs, by the names that package indexes know.

    Args:
        address: Where the repository is, without a slash at the end; empty if it is unknown.
        version: The version of the package, whose tag is ``v`` and the version.
    """
    if not address:
        return {}
    files = f"{address}/blob/v{version}"
    return {
        "Source": address,
        "Documentation": f"{files}/docs/concepts.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def with_absolute_links(readme: str, address: str, version: str) -> str:
    """Return the README with every relative link replaced by the address of the file.

    Args:
        readme: Markdown, whose links are relative to the root of the repository.
        address: Where the repository is, without a slash at the end; empty if it is unknown.
        version: The version of the package, whose tag is ``v`` and the version.
    """
    if not address:
        return readme

    def absolute(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if ":" in target:
            return match[0]
        # An index names the anchors of headings in its own way: links within the page lead to the
        # repository's page.
        path = f"README.md{target}" if target.startswith("#") else target
        return f"{picture}{text}({address}/{'raw' if picture else 'blob'}/v{version}/{path})"

    pieces, end = [], 0
    for block in _BLOCK.finditer(readme):
        pieces += [_TARGET.sub(absolute, readme[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*pieces, _TARGET.sub(absolute, readme[end:])])


class PackagePage(MetadataHookInterface):
    """Fill ``readme`` and ``urls`` of the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README and the project URLs.

        Args:
            metadata: The table ``project``, with the version that has been resolved.
        """
        stated = self.config.get("repository", "")
        address = os.environ.get("INTERLACE_REPOSITORY", stated).rstrip("/")
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(readme, address, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls_of(address, metadata["version"])
