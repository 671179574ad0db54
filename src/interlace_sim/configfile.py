"""Configuration files in YAML or JSON, checked by pydantic; errors name the line or the key."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, PositiveFloat, ValidationError

from interlace.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

_MOST_BYTES = {".json": 2**28, "YAML": 2**20}
"""Bytes of the largest file that is read. PyYAML takes ten seconds for its mebibyte."""


class Strict(BaseModel):
    """Base of every configuration: unknown keys are errors, values do not change and are finite."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False
    )


def _in_reach(value: float) -> float:
    if not 1e-24 <= value <= 1e24:
        raise ValueError("it must be between 1e-24 and 1e24")
    return value


Rate = Annotated[PositiveFloat, AfterValidator(_in_reach)]
"""Units per unit of time. Products and quotients of several such numbers are finite."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also takes 2.25e15 for a number, and refuses what hides values:
    aliases, which make an endless document of a short one, and a key that is given twice.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None, None, "an alias stands for a value; write the value out", self.get_mark()
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            twice = _repeated(self.construct_object(key) for key, _ in node.value)
            raise yaml.constructor.ConstructorError(
                None, None, f"{_show(twice)} is given twice; remove one", node.start_mark
            )
        return mapping


# As YAML 1.2 has it; PyYAML follows 1.1, in which an exponent has a sign and follows a point.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read(file: Path) -> Any:
    """Read a YAML or JSON file. Nothing in it is executed.

    Raises:
        ConfigError: the file cannot be read or parsed, gives a key twice, or is larger than any
            such file; with line and column if they are known.
    """
    kind = "JSON" if file.suffix == ".json" else "YAML"
    most = _MOST_BYTES.get(file.suffix, _MOST_BYTES["YAML"])
    try:
        with file.open("rb") as stream:
            content = stream.read(most + 1)
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(f"{file} must be a file that can be read; {reason}.") from error
    if len(content) > most:
        raise ConfigError(f"{file} must have at most {most} bytes of {kind}; it has more.")
    try:
        return parse_json(text) if kind == "JSON" else yaml.load(text, _Loader)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{file}, line {error.lineno}, column {error.colno} must be JSON; {error.msg}."
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{file}{position} must be YAML; {error.problem}.") from error
    except RecursionError as error:
        raise ConfigError(
            f"{file} must be {kind} that is not nested thousands deep; it is."
        ) from error
    # The constructors of PyYAML's own types (dates, tagged scalars) raise errors of many kinds.
    except Exception as error:
        raise ConfigError(f"{file} must be {kind}; {_first_line(error)}.") from error


def parse_json(text: str) -> Any:
    """Parse JSON by its standard: no NaN, no infinity, no key twice.

    Raises:
        ValueError: the text is no such JSON; a :class:`json.JSONDecodeError` where a place is
            known.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice = _repeated(name for name, _ in pairs)
        raise ValueError(f"{_show(twice)} is given twice; remove one")
    return mapping


def _repeated(names: Iterable[Hashable]) -> Hashable:
    """Return the first of some names that an earlier one equals; there is one."""
    seen: set[Hashable] = set()
    for name in names:
        if name in seen:
            break
        seen.add(name)
    return name


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{_show(text)} is too large for a number")
    return value


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].removesuffix(".") or type(error).__name__


def parse(model: type[Model], data: Any, source: str) -> Model:
    """Validate ``data`` as a ``model``.

    Args:
        model: Class of the configuration.
        data: Contents of a file.
        source: Name of the file or preset, for errors.

    Raises:
        ConfigError: a key or value is wrong; the message names the source, the key, the rule and
            the value.
    """
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source} must be a mapping of keys to values; got {_show(data)}. "
            f"Keys: {_keys(model)}."
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # One error at a time: the first is mostly the cause of the others.
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        # Unknown and missing keys are the commonest mistakes, so their messages name the fix.
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"{source}: {key} must be a known key; it is not. {_known(model, first['loc'])}"
            ) from error
        if first["type"] == "missing":
            raise ConfigError(f"{source}: {_missing(error)}") from error
        message = first["msg"].removeprefix("Value error, ").removesuffix(".")
        # A rule of the whole file names its keys and values itself.
        if not first["loc"]:
            raise ConfigError(f"{source}: {message}.") from error
        value = first["input"]
        # The number, without its source and confidence.
        shown = value["value"] if isinstance(value, dict) and "value" in value else value
        raise ConfigError(f"{source}: {key} is wrong: {message}; got {_show(shown)}.") from error


def load(model: type[Model], file: Path) -> Model:
    """Read and validate a file as a ``model``; see :func:`read` and :func:`parse`."""
    return parse(model, read(file), str(file))


def number(value: Any, location: str, *, least: float = 0.0, most: float = 2.0**60) -> float:
    """Return a value of a file that must be a number between two others.

    Raises:
        ConfigError: it is not; the message begins with ``location``.
    """
    # True and false are ints in Python. A NaN is not between any numbers.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(
            f"{location} must be a number from {least:g} to {most:g}; got {_show(value)}."
        )
    return value


def integer(value: Any, location: str, *, least: int = 0, most: int = 2**60) -> int:
    """Return a value of a file that must be a whole number between two others; as :func:`number`
    does.
    """
    if number(value, location, least=least, most=most) != int(value):
        raise ConfigError(f"{location} must be a whole number; got {_show(value)}.")
    return int(value)


def listed(value: Any, location: str) -> list[Any]:
    """Return a value of a file that must be a list; errors are those of :func:`number`."""
    if not isinstance(value, list):
        raise ConfigError(f"{location} must be a list; got {_show(value)}.")
    return value


def mapped(value: Any, location: str) -> dict[str, Any]:
    """Return a value of a file that must be a mapping; errors are those of :func:`number`."""
    if not isinstance(value, dict):
        raise ConfigError(f"{location} must be a mapping; got {_show(value)}.")
    return value


def _show(value: Any) -> str:
    """Return the value's text of at most 60 characters; no value takes long."""
    try:
        shown = _SHORT.repr(value)
    except ValueError:
        # Python writes no integer of more than some thousand digits.
        shown = "a number of thousands of digits"
    return shown if len(shown) <= 60 else shown[:57] + "..."


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def _missing(error: ValidationError) -> str:
    """Say which keys a file lacks, all at once for those who begin with an empty one."""
    keys = [".".join(map(str, e["loc"])) for e in error.errors() if e["type"] == "missing"]
    if len(keys) == 1:
        return f"{keys[0]} must be given; it is missing. Add it."
    return f"{', '.join(keys)} must be given; they are missing. Add them."


def _keys(model: type[BaseModel]) -> str:
    return ", ".join(field.alias or name for name, field in model.model_fields.items())


def _known(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """List the keys that a model has at ``location``, whose last part is an unknown key."""
    current: Any = model
    for part in location[:-1]:
        fields = getattr(current, "model_fields", {})
        field = next((f for name, f in fields.items() if part in (name, f.alias)), None)
        if field is None:
            break
        # A field may be Optional or a union; its model is the first of the alternatives.
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        current = next(
            (o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None
        )
        if current is None:
            return "Remove it."
    return f"Remove it, or use one of: {_keys(current)}."
