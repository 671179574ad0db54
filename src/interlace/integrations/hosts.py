"""What the environment says of the programs that load Interlace as a plug-in."""

from __future__ import annotations

import os

from interlace import environment
from interlace.integrations.calls import log

_NAME = "interlace"
"""The plug-in's name, by its entry points."""

_OFF = ("", "0", "false", "no", "off")


def is_on(variable: str) -> bool:
    """Return whether a variable of another program is on.

    Any value counts that is no word for off: a promise is kept rather than broken.
    """
    return os.environ.get(variable, "").strip().lower() not in _OFF


def is_chosen(program: str, variable: str, plugins: str) -> bool:
    """Return whether the user has chosen Interlace for a program that found it installed.

    One line in the log says so either way.

    Args:
        program: The program's name.
        variable: Interlace's variable for it; ``0`` counts for more than the program's list.
        plugins: The program's variable with the names of the plug-ins to load.

    Raises:
        ArgumentError: ``variable`` is neither on nor off.
    """
    names = {name.strip() for name in os.environ.get(plugins, "").split(",")}
    asked = environment.switch(variable)
    is_asked = _NAME in names if asked is None else asked
    if is_asked:
        log.info("Interlace is on in %s: %s=0 switches it off.", program, variable)
    else:
        log.info(
            "Interlace is installed, but off in %s: %s=1, or %s in %s, switches it on.",
            program, variable, _NAME, plugins,
        )  # fmt: skip
    return is_asked
