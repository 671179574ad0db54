"""Docstrings as Markdown: what reStructuredText writes in another way is rewritten."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# The lines of a section up to the next one.
_RETURNS = re.compile(r"^Returns:\n((?:    .*(?:\n|\Z)|\n)+)", flags=re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?([\w.]+)(\(\))?`")


class Docstrings(griffe.Extension):
    """Rewrite the docstrings of all objects when they are collected."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Turn roles into links, ``::`` before an example into ``:``, and name its section as griffe
        does. What a function returns stays text: its colons do not end a type.
        """
        if obj.docstring is None:
            return

        def link(match: re.Match[str]) -> str:
            name = match[1]
            return f'<autoref identifier="{_path(obj, name)}" optional><code>{name}</code></autoref>'

        text = _ROLE.sub(link, obj.docstring.value)
        text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
        text = _RETURNS.sub(
            lambda match: f"**Returns:**\n\n{textwrap.dedent(match[1]).strip()}\n\n", text
        )
        # Two colons alone announce an example, too, and are not shown.
        text = re.sub(r"^::$", "", text, flags=re.MULTILINE)
        obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _path(obj: griffe.Object, name: str) -> str:
    """Return the full path of what a docstring calls by a name."""
    if name.startswith("interlace."):
        return name
    try:
        return obj.resolve(name)
    except griffe.NameResolutionError:
        return f"{obj.path}.{name}"
