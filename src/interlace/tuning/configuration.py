"""The common base of kernels' configurations: text that survives compiled graphs and tables."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from interlace.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to run a fused kernel. Every rank must use the same one in a call.

    Subclasses are frozen dataclasses whose fields are integers and words, and check their values in
    ``__post_init__``.
    """

    def __str__(self) -> str:
        """Return ``"name=value, ..."``, which :meth:`parse` reads: operators carry configurations
        through compiled graphs in this form, and tuned tables hold it.
        """
        fields = dataclasses.fields(self)
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the configuration whose ``str`` is ``text``.

        Raises:
            ArgumentError: It is not the text of a configuration, or its values are refused.
        """
        values: dict[str, Any] = dict(
            item.split("=", 1) for item in text.split(", ") if "=" in item
        )
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

    def require_power_of_two(self, name: str, least: int, most: int) -> None:
        """Refuse a field that is no power of two in a range.

        Raises:
            ArgumentError: The field's value is none.
        """
        value = getattr(self, name)
        if not least <= value <= most or value & (value - 1):
            raise ArgumentError(
                f"{type(self).__name__}: {name} must be a power of two from {least} to {most}; got "
                f"{value}."
            )

    def require_between(self, name: str, least: int, most: int) -> None:
        """Refuse a field that is not in a range.

        Raises:
            ArgumentError: The field's value is outside.
        """
        value = getattr(self, name)
        if not least <= value <= most:
            raise ArgumentError(
                f"{type(self).__name__}: {name} must be between {least} and {most}; got {value}."
            )

    def require_word(self, name: str, words: tuple[str, ...]) -> None:
        """Refuse a field that is none of some words.

        Raises:
            ArgumentError: The field has another value.
        """
        value = getattr(self, name)
        if value not in words:
            raise ArgumentError(
                f"{type(self).__name__}: {name} must be one of {words}; got {value!r}."
            )
