"""What may be injected into kernels on the CPU backend; what it does there is tested with the
operators, and with the language.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

import interlace
from interlace import ArgumentError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": 1.5}, "seed must be a whole number; got 1.5."),
        ({"max_delay_s": -1}, "max_delay_s must be seconds from 0 on; got -1."),
        ({"max_delay_s": math.nan}, "max_delay_s must be seconds from 0 on; got nan."),
        ({"max_delay_s": math.inf}, "max_delay_s must be seconds from 0 on; got inf."),
        ({"max_delay_s": "1"}, "max_delay_s must be seconds from 0 on; got '1'."),
        ({"die_after_puts": -1}, "die_after_puts must be a whole number from 0 on, or None; got "),
        ({"die_after_puts": 1.5}, "die_after_puts must be a whole number from 0 on, or None; got "),
    ],
)
def test_faults_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        interlace.Faults(**given)
    assert str(caught.value).startswith(f"Faults: {message}")


def test_nothing_but_faults_is_injected() -> None:
    nothing: Any = None
    with (
        pytest.raises(
            ArgumentError, match=r"^inject: faults must be interlace\.Faults; got None\."
        ),
        interlace.inject(nothing),
    ):
        pytest.fail("the context was entered")
