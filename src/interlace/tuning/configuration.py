"""The common base of kernels' configurations: text that survives compiled graphs and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from interlace.errors import ArgumentError

Value = TypeVar("Value")

_ANYTHING: tuple[Callable[[Any], bool], str] = (lambda _: True, "anything")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to run a fused kernel. Every rank must use the same one in a call.

    Subclasses are frozen dataclasses whose fields are integers and words. A field that is declared
    by :func:`power_of_two`, :func:`between` or :func:`one_of` is checked.
    """

    def __post_init__(self) -> None:
        """Check every field by the rule that it was declared with.

        Raises:
            ArgumentError: A field breaks its rule.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # A subclass in somebody else's package may have fields without a rule.
            admits, rule = field.metadata.get("rule", _ANYTHING)
            if not admits(value):
                raise ArgumentError(
                    f"{type(self).__name__}: {field.name} must be {rule}; got {value!r}."
                )

    def __str__(self) -> str:
        """Return ``"name=value, ..."``, which :meth:`parse` reads: operators carry configurations
        through compiled graphs in this form, and tuned tables hold it.
        """
        fields = dataclasses.fields(self)
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields)

    @staticmethod
    def regime(sizes: Mapping[str, int]) -> object:
        """Return what tells sizes whose kernels run other code, so that a configuration that was
        tuned for some says nothing of others; by default it is the same for all sizes.
        """
        return None

    @classmethod
    def has_fields_of(cls, text: str) -> bool:
        """Return whether a text has the names of this type's fields, so that :meth:`parse` may read
        it.
        """
        return _values_in(text).keys() == {field.name for field in dataclasses.fields(cls)}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the configuration whose ``str`` is ``text``.

        Raises:
            ArgumentError: It is not the text of a configuration, or its values are refused.
        """
        values = _values_in(text)
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        numbers = {name for name, value in values.items() if value.isdecimal()}
        config = None
        if values.keys() == fields.keys() and numbers == {
            name for name, kind in fields.items() if kind == "int"
        }:
            config = cls(**values | {name: int(values[name]) for name in numbers})
        # The comparison refuses anything between the fields, and another order of them.
        if config is None or str(config) != text:
            raise ArgumentError(
                f"{cls.__name__}: text must be str() of a configuration; got {text!r}."
            )
        return config


def _values_in(text: str) -> dict[str, Any]:
    """Return the values of a configuration's text by the names of its fields."""
    return dict(item.split("=", 1) for item in text.split(", ") if "=" in item)


def power_of_two(default: int, least: int, most: int) -> int:
    """Declare a field that is a power of two in a range."""
    return _field(
        default,
        lambda value: least <= value <= most and value & (value - 1) == 0,
        f"a power of two from {least} to {most}",
    )


def between(default: int, least: int, most: int) -> int:
    """Declare a field that is an integer in a range."""
    return _field(default, lambda value: least <= value <= most, f"between {least} and {most}")


def one_of(default: Value, values: tuple[Value, ...]) -> Value:
    """Declare a field that is one of some words or integers."""
    return _field(default, values.__contains__, f"one of {values}")


def _field(default: Value, admits: Callable[[Value], bool], rule: str) -> Value:
    """Declare a field whose value must be ``rule``, which ``admits`` tells."""
    return dataclasses.field(default=default, metadata={"rule": (admits, rule)})
