"""Say what must be so for a recorded call to be played, in a form that compiled code checks; see
:mod:`interlace.comm.replay.tapes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

Condition = tuple[Any, ...]
"""``("c", function, arguments, value)``: the function, of one argument or none, returns the value;
``("a", object, name, value)``: the attribute has it; ``("i", mapping, key, value)``: it is there,
None for nothing. With the value's ``id`` in its place and True behind it, the value is not kept
alive.
"""


def returns(function: Callable[..., Any], *arguments: Any) -> Condition:
    """Return the condition that a function of at most one argument returns what it does now."""
    return "c", function, arguments, function(*arguments)


def answers(function: Callable[..., Any], value: object) -> Condition:
    """Return the condition that a function without arguments returns a value, whether it does now
    or not.
    """
    return "c", function, (), value


def has(holder: object, name: str) -> Condition:
    """Return the condition that an attribute has the value that it has now."""
    return "a", holder, name, getattr(holder, name)


def is_in_environment(variable: str) -> Condition:
    """Return the condition that an environment variable is what it is now."""
    held = getattr(os.environ, "_data", None)  # os.environ raises an error for what it lacks
    if type(held) is not dict:
        return returns(os.environ.get, variable)
    key = os.fsencode(variable)
    return "i", held, key, held.get(key)


def by_id(condition: Condition) -> Condition:
    """Return a condition that does not keep its value alive. Whoever asks for it sees to it that
    it is not asked any more when something else may have come to lie where the value was.
    """
    *others, value = condition
    return *others, id(value), True
