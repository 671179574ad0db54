"""Chakra execution traces, read and written through the package ``mlc-chakra``.

A trace is one file per NPU, ``PREFIX.RANK.et``: a message of metadata, then one message per node,
each after its length as a varint. See https://github.com/mlcommons/chakra, ``et_def.proto``.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from interlace.documents import read_bytes
from interlace.errors import ConfigError
from interlace.extras import needing
from interlace_sim.astra.graph import Kind, Node
from interlace_sim.configfile import parse_json, read

_COLLECTIVES = {
    0: "all_reduce",
    2: "all_gather",
    5: "broadcast",
    6: "all_to_all",
    7: "reduce_scatter",
}
_INVALID, _METADATA, _LOAD, _STORE, _COMPUTE, _SEND, _RECEIVE, _COLLECTIVE = range(8)
_NUMBER = re.compile(r"[0-9]{1,9}")
"""Id of a communicator group."""


def _definitions() -> Any:
    with needing("A Chakra trace"):
        from chakra.schema.protobuf import et_def_pb2
    return et_def_pb2


def read_traces(prefix: str, npus: int, *, replay_only: bool = False) -> list[list[Node]]:
    """Read the graphs of ``PREFIX.0.et`` to ``PREFIX.{npus-1}.et``.

    Args:
        prefix: What the files' names begin with.
        npus: Number of files.
        replay_only: Nodes will only take their durations, so the attributes of their communication
            are not read, and loads and stores of remote memory are accepted.

    Raises:
        ConfigError: a file is missing, cut short, or has nodes that are not modelled, or are
            another NPU's; the message names the file and the node.
        BackendError: ``mlc-chakra`` is not installed.
    """
    return [
        read_trace(Path(f"{prefix}.{rank}.et"), rank, replay_only=replay_only)
        for rank in range(npus)
    ]


def read_trace(file: Path, rank: int | None = None, *, replay_only: bool = False) -> list[Node]:
    """Read the graph of NPU ``rank``, or of one that is not known; arguments and errors are those
    of :func:`read_traces`.
    """
    definitions = _definitions()
    try:
        content = read_bytes(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{file} must be a Chakra trace; {reason}. Traces are named PREFIX.RANK.et, "
            "one for each NPU."
        ) from error
    messages = _messages(content, file)
    metadata = next(messages, None)
    if metadata is None:
        raise ConfigError(
            f"{file} must begin with a message of metadata; it is empty. Write it again."
        )
    nodes = []
    for number, message in enumerate(messages):
        node = definitions.Node()
        try:
            node.ParseFromString(message)
        # Protobuf's own class of errors is not imported, as the package may lack protobuf.
        except Exception as error:
            raise ConfigError(
                f"{file}: node {number} must be a Chakra node; it cannot be parsed. Write the "
                "trace again."
            ) from error
        nodes.append(_Reader(node, file).node(rank, replay_only))
    return nodes


def _messages(content: bytes, file: Path) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        start, size, shift = at, 0, 0
        while True:
            if at >= len(content) or shift > 63:
                raise ConfigError(
                    f"{file} must end with a whole message; it is cut short at byte {start}. "
                    "Write or copy it again."
                )
            byte = content[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        if at + size > len(content):
            # A trace that a full disk cut short must not simulate as a shorter program.
            raise ConfigError(
                f"{file} must end with a whole message; the one at byte {start} has {size} bytes, "
                f"of which {len(content) - at} are there. Write or copy the file again."
            )
        yield content[at : at + size]
        at += size


class _Reader:
    """A message of Chakra, whose attributes have the types that ASTRA-sim wants."""

    def __init__(self, message: Any, file: Path) -> None:
        self._message = message
        self._location = f"{file}: node {message.id} ({message.name[:60]})"
        self._values = {attribute.name: attribute for attribute in message.attr}

    def node(self, rank: int | None, replay_only: bool) -> Node:
        """Return the node.

        Raises:
            ConfigError: it is not modelled, or not NPU ``rank``'s.
        """
        message, kind = self._message, self._message.type
        # ASTRA-sim treats control and data dependencies alike; duplicates are dropped.
        deps = tuple(dict.fromkeys([*message.ctrl_deps, *message.data_deps]))
        base = Node(
            message.id,
            message.name,
            deps,
            duration_us=message.duration_micros,
            cpu=self._flag("is_cpu_op"),
        )
        if kind not in range(8):
            raise self._error(
                f"type must be one of Chakra's; got {kind}. Is the trace newer than mlc-chakra?"
            )
        if replay_only:
            kinds: dict[int, Kind] = {
                _COMPUTE: "compute",
                _SEND: "send",
                _RECEIVE: "receive",
                _COLLECTIVE: "collective",
            }
            return dataclasses.replace(base, kind=kinds.get(kind, "none"))
        if kind in (_LOAD, _STORE):
            raise self._error(
                "remote memory must not be used: its loads and stores are not modelled. A trace "
                "without them is of another program"
            )
        if kind == _INVALID:
            return dataclasses.replace(base, kind="none")
        if kind == _METADATA:
            return dataclasses.replace(base, kind="none", defines=self._groups())
        if kind == _COMPUTE:
            return dataclasses.replace(
                base, flops=self._number("num_ops", 0), size=self._number("tensor_size", 0)
            )
        if base.cpu:
            # Older converters of Chakra wrote the host's call of a collective like this, beside
            # the kernel that it launches; newer ones write a computation.
            if kind == _COLLECTIVE and self._kind("comm_type") is None:
                return base
            raise self._error(
                "is_cpu_op must be false of communication, as in ASTRA-sim; got true. Correct it"
            )
        if kind in (_SEND, _RECEIVE):
            return self._single(base, rank)
        return self._collective(base)

    def _single(self, base: Node, rank: int | None) -> Node:
        """Return a send or a receive."""
        sends = self._message.type == _SEND
        own, other = ("comm_src", "comm_dst") if sends else ("comm_dst", "comm_src")
        if rank is not None and self._number(own, rank) != rank:
            raise self._error(
                f"{own} must be NPU {rank}, whose file it is; got {self._number(own)}. Is the "
                "file another NPU's?"
            )
        return dataclasses.replace(
            base,
            kind="send" if sends else "receive",
            size=self._number("comm_size", 0),
            peer=self._number(other),
            tag=self._number("comm_tag", 0),
        )

    def _collective(self, base: Node) -> Node:
        number = self._number("comm_type")
        if number not in _COLLECTIVES:
            names = dict(_definitions().CollectiveCommType.items())
            name = next((name for name, value in names.items() if value == number), number)
            raise self._error(
                "comm_type must be ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER or "
                f"BROADCAST; got {name}, which is not modelled, nor is it by ASTRA-sim"
            )
        # A collective without the name of a group is one of all NPUs.
        group = self._text("pg_name") or "0"
        if not _NUMBER.fullmatch(group):
            raise self._error(
                f"pg_name must be a number, as in ASTRA-sim; got {group[:60]!r}. Number the "
                "communicator groups"
            )
        return dataclasses.replace(
            base,
            kind="collective",
            collective=_COLLECTIVES[number],
            size=self._number("comm_size", 0),
            dims=self._dimensions(),
            group=int(group),
            priority=self._number("comm_priority", 0),
        )

    def _groups(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the communicator groups that a node of metadata defines.

        PyTorch's ``process_group:init`` has them as JSON, in the list of its inputs, as Python
        writes such a list: ``['[{"pg_name": "1", "ranks": [0, 1], ...}]']``. Groups whose names are
        no numbers are left out; a collective of one is refused.
        """
        values = self._message.inputs.values
        # A node of metadata about something else defines none.
        if '"pg_name"' not in values.replace("\\", ""):
            return ()
        try:
            groups = [(str(group["pg_name"]), group["ranks"]) for group in parse_json(values[2:-2])]
            if not all(isinstance(r, list) and all(map(_is_number, r)) for _, r in groups):
                raise ValueError("ranks are no list of numbers")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise self._error(
                "inputs must define process groups as PyTorch does, by a list of pg_name and "
                f"ranks; {type(error).__name__}: {str(error)[:60]}. Write the trace again, or "
                "clear the node's inputs and give the groups in --groups"
            ) from error
        return tuple((int(name), tuple(ranks)) for name, ranks in groups if _NUMBER.fullmatch(name))

    def _kind(self, name: str) -> str | None:
        return self._values[name].WhichOneof("value") if name in self._values else None

    def _value(self, name: str, kinds: tuple[str, ...], rule: str) -> Any:
        kind = self._kind(name)
        assert kind is not None
        value = getattr(self._values[name], kind)
        if kind not in kinds:
            shown = str(list(value.values)[:8] if kind.endswith("_list") else value)[:60]
            raise self._error(f"{name} must be {rule}; got {kind} {shown}. Correct it")
        return value

    def _number(self, name: str, default: int | None = None) -> int:
        if self._kind(name) is None:
            if default is None:
                raise self._error(f"{name} must be given; it is missing. Add it")
            return default
        return int(self._value(name, _INTEGERS, "an integer"))

    def _flag(self, name: str) -> bool:
        return self._kind(name) is not None and self._value(name, ("bool_val",), "a bool_val")

    def _text(self, name: str) -> str:
        return "" if self._kind(name) is None else self._value(name, ("string_val",), "text")

    def _dimensions(self) -> tuple[bool, ...] | None:
        if self._kind("involved_dim") is None:
            return None
        values = self._value("involved_dim", ("bool_list",), "a bool_list")
        return tuple(values.values)

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"{self._location}: {text}{'' if text[-1] in '.?' else '.'}")


_INTEGERS = (
    "int32_val",
    "int64_val",
    "uint32_val",
    "uint64_val",
    "sint32_val",
    "sint64_val",
    "fixed32_val",
    "fixed64_val",
    "sfixed32_val",
    "sfixed64_val",
)


def _is_number(value: Any) -> bool:
    # True and false are ints in Python.
    return type(value) is int


def read_groups(file: Path) -> dict[int, list[int]]:
    """Read communicator groups from ASTRA-sim's JSON, ``{"1": [0, 1, 2, 3], ...}``.

    Raises:
        ConfigError: the file does not have that form.
    """
    data = read(file)
    if not isinstance(data, dict):
        raise ConfigError(
            f"{file} must map group numbers to lists of NPUs; got {type(data).__name__}."
        )
    groups: dict[int, list[int]] = {}
    for key, members in data.items():
        if (
            not _NUMBER.fullmatch(str(key))
            or not isinstance(members, list)
            or not all(map(_is_number, members))
        ):
            raise ConfigError(
                f"{file}: {str(key)[:60]} must be a number with a list of NPUs; got "
                f"{str(members)[:60]}."
            )
        number = int(key)
        if number == 0:
            raise ConfigError(
                f"{file}: {key} must be above 0, which is all NPUs. Number the group anew."
            )
        if number in groups:
            raise ConfigError(f"{file}: {key} must be given once; it is there twice. Remove one.")
        groups[number] = members
    return groups


def write_traces(graphs: Sequence[Sequence[Node]], prefix: str) -> list[Path]:
    """Write one file per NPU, as ASTRA-sim reads them, and return their paths.

    Raises:
        ConfigError: a file cannot be written.
        BackendError: ``mlc-chakra`` is not installed.
    """
    # The package is imported here, so that only commands that read traces need it.
    definitions = _definitions()
    paths = []
    for rank, graph in enumerate(graphs):
        out = io.BytesIO()
        _append(out, definitions.GlobalMetadata(version="0.0.4"))
        for node in graph:
            _append(out, _message(definitions, node))
        path = Path(f"{prefix}.{rank}.et")
        try:
            path.write_bytes(out.getvalue())
        except OSError as error:
            raise ConfigError(
                f"{path} must be a file that can be written; {error.strerror}."
            ) from error
        paths.append(path)
    return paths


def _append(out: io.BytesIO, message: Any) -> None:
    data = message.SerializeToString()
    # Every message follows its length as a varint: seven bits per byte, the lowest first.
    size = len(data)
    while size > 0x7F:
        out.write(bytes((size & 0x7F | 0x80,)))
        size >>= 7
    out.write(bytes((size,)))
    out.write(data)


def _message(definitions: Any, node: Node) -> Any:
    kinds = {
        "compute": _COMPUTE,
        "send": _SEND,
        "receive": _RECEIVE,
        "collective": _COLLECTIVE,
        "none": _METADATA if node.defines else _INVALID,
    }
    message = definitions.Node(
        id=node.id, name=node.name, type=kinds[node.kind], duration_micros=node.duration_us
    )
    message.data_deps.extend(node.deps)

    def put(name: str, **value: Any) -> None:
        message.attr.append(definitions.AttributeProto(name=name, **value))

    put("is_cpu_op", bool_val=node.cpu)
    if node.defines:
        groups = [{"pg_name": str(number), "ranks": ranks} for number, ranks in node.defines]
        message.inputs.values = str([json.dumps(groups)])
    if node.kind == "compute":
        put("num_ops", int64_val=node.flops)
        put("tensor_size", uint64_val=node.size)
    elif node.kind == "collective":
        put(
            "comm_type",
            int64_val={name: number for number, name in _COLLECTIVES.items()}[node.collective],
        )
        put("comm_size", int64_val=node.size)
        if node.group:
            put("pg_name", string_val=str(node.group))
        if node.priority:
            put("comm_priority", int32_val=node.priority)
        if node.dims is not None:
            put("involved_dim", bool_list=definitions.BoolList(values=node.dims))
    elif node.kind in ("send", "receive"):
        put("comm_dst" if node.kind == "send" else "comm_src", int32_val=node.peer)
        put("comm_size", int64_val=node.size)
        put("comm_tag", int32_val=node.tag)
    return message
