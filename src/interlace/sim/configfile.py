"""Configuration files in YAML or JSON, checked by pydantic; errors name the line or the key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from interlace.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Base of every configuration: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also takes 2.25e15 for a number."""


# As YAML 1.2 has it; PyYAML follows 1.1, in which an exponent has a sign and follows a point.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read(file: Path) -> Any:
    """Read a YAML or JSON file. Nothing in it is executed.

    Raises:
        ConfigError: the file cannot be read or parsed; with line and column if they are known.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{file} must be a file that can be read; {reason}.") from error
    try:
        return json.loads(text) if file.suffix == ".json" else yaml.load(text, _Loader)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{file}, line {error.lineno}, column {error.colno} must be JSON; {error.msg}."
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{file}{position} must be YAML; {error.problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} must be YAML; {error}.") from error


def parse(model: type[Model], data: Any, source: str) -> Model:
    """Validate ``data`` as a ``model``.

    Args:
        model: class of the configuration.
        data: contents of a file.
        source: name of the file or preset, for errors.

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


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
