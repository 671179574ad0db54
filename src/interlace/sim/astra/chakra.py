"""Chakra execution traces, read and written through the package ``mlc-chakra``.

A trace is one file per NPU, ``PREFIX.RANK.et``: a message of metadata, then one message per node,
each after its length as a varint. See https://github.com/mlcommons/chakra, ``et_def.proto``.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from interlace.errors import BackendError, ConfigError
from interlace.sim.astra.workload import Kind, Node
from interlace.sim.configfile import read

_COLLECTIVES = {0: "all_reduce", 2: "all_gather", 6: "all_to_all", 7: "reduce_scatter"}
_COMPUTE, _SEND, _RECEIVE, _COLLECTIVE = 4, 5, 6, 7
# Node types that take no time: invalid, metadata, and loads and stores of remote memory. The latter
# two are refused, as remote memory is not modelled.
_TIMELESS = (0, 1, 2, 3)


def _definitions() -> Any:
    try:
        from chakra.schema.protobuf import et_def_pb2
    except ImportError as error:
        raise BackendError(
            f"Chakra traces need the package mlc-chakra; {error}. Run pip install mlc-chakra."
        ) from error
    return et_def_pb2


def read_traces(prefix: str, npus: int) -> list[list[Node]]:
    """Read the graphs of ``PREFIX.0.et`` to ``PREFIX.{npus-1}.et``.

    Raises:
        ConfigError: a file is missing, cut short, or has nodes that are not modelled; the message
            names the file and the node.
        BackendError: ``mlc-chakra`` is not installed.
    """
    return [read_trace(Path(f"{prefix}.{rank}.et")) for rank in range(npus)]


def read_trace(file: Path) -> list[Node]:
    """Read the graph of one NPU; errors are those of :func:`read_traces`."""
    definitions = _definitions()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file} must be a Chakra trace; {error.strerror}. Traces are named PREFIX.RANK.et, "
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
        nodes.append(_node(node, file))
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


def _attributes(node: Any) -> dict[str, Any]:
    out = {}
    for attribute in node.attr:
        kind = attribute.WhichOneof("value")
        if kind is not None:
            value = getattr(attribute, kind)
            out[attribute.name] = tuple(value.values) if kind.endswith("_list") else value
    return out


def _node(node: Any, file: Path) -> Node:
    location = f"{file}: node {node.id} ({node.name})"
    attributes = _attributes(node)
    # ASTRA-sim treats control and data dependencies alike; duplicates are dropped.
    deps = tuple(dict.fromkeys([*node.ctrl_deps, *node.data_deps]))
    base = Node(
        node.id,
        node.name,
        deps,
        duration_us=node.duration_micros,
        cpu=bool(attributes.get("is_cpu_op", False)),
    )
    if node.type in _TIMELESS:
        if node.type in (2, 3):
            raise ConfigError(f"{location}: remote memory is not modelled. Remove the node.")
        return dataclasses.replace(base, kind="none")
    if node.type == _COMPUTE:
        return dataclasses.replace(
            base,
            flops=int(attributes.get("num_ops", 0)),
            size=int(attributes.get("tensor_size", 0)),
        )
    size = int(attributes.get("comm_size", 0))
    # Sends and receives are work of the device, whatever is_cpu_op says.
    if node.type in (_SEND, _RECEIVE):
        kind: Kind = "send" if node.type == _SEND else "receive"
        peer = "comm_dst" if node.type == _SEND else "comm_src"
        if peer not in attributes:
            raise ConfigError(f"{location}: {peer} must be given; it is missing. Add it.")
        return dataclasses.replace(
            base,
            kind=kind,
            size=size,
            peer=int(attributes[peer]),
            tag=int(attributes.get("comm_tag", 0)),
            cpu=False,
        )
    if node.type != _COLLECTIVE:
        raise ConfigError(
            f"{location}: type must be one of Chakra's; got {node.type}. Is the trace newer than "
            "mlc-chakra?"
        )
    number = int(attributes.get("comm_type", -1))
    if number not in _COLLECTIVES:
        raise ConfigError(
            f"{location}: comm_type must be ALL_REDUCE, ALL_GATHER, ALL_TO_ALL or REDUCE_SCATTER; "
            f"got {number}."
        )
    # A collective without the name of a group is one of all NPUs.
    group = str(attributes.get("pg_name", "") or "0")
    if not group.lstrip("-").isdecimal():
        raise ConfigError(
            f"{location}: pg_name must be a number; got {group!r}. Number the communicator groups."
        )
    return dataclasses.replace(
        base,
        kind="collective",
        collective=_COLLECTIVES[number],
        size=size,
        dims=attributes.get("involved_dim"),
        group=int(group),
        priority=int(attributes.get("comm_priority", 0)),
        cpu=False,
    )


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
    groups = {}
    for key, members in data.items():
        if (
            not str(key).isdecimal()
            or not isinstance(members, list)
            or not all(isinstance(npu, int) for npu in members)
        ):
            raise ConfigError(
                f"{file}: {key} must be a number with a list of NPUs; got "
                f"{json.dumps(members)[:60]}."
            )
        groups[int(key)] = members
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
        "none": 0,
    }
    message = definitions.Node(
        id=node.id, name=node.name, type=kinds[node.kind], duration_micros=node.duration_us
    )
    message.data_deps.extend(node.deps)

    def put(name: str, **value: Any) -> None:
        message.attr.append(definitions.AttributeProto(name=name, **value))

    put("is_cpu_op", bool_val=node.cpu)
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
