"""An ONNX file, its external data left where it is."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # it has no types

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput
from fuseport.exporter.inspect import known

__all__ = ["found", "graphs", "has_operator", "inner_graphs", "loaded"]

_STANDARD = ("ai.onnx", "ai.onnx.ml")


def found(path: str) -> dict[str, Any]:
    """Inputs, outputs, op counts by domain, opsets, initializers, and where external data lies.

    Raises:
        CorruptInput: it is no ONNX model.
    """
    model = loaded(path)
    tensors = [t for graph in graphs(model.graph) for t in graph.initializer]
    values = {t.name for t in model.graph.initializer}
    bodies = {(f.domain or "ai.onnx", f.name): len(f.node) for f in model.functions}
    opsets = {o.domain or "ai.onnx": o.version for o in model.opset_import}
    counts = Counter(
        (node.domain or "ai.onnx", node.op_type)
        for graph in graphs(model.graph)
        for node in graph.node
    )

    def judge(domain: str, name: str) -> str | None:
        if (domain, name) in bodies:
            return f"function body of {bodies[domain, name]} nodes in the file"
        if domain in _STANDARD:
            key = "" if domain == "ai.onnx" else domain
            has = has_operator(name, opsets.get(domain, 1), key)
            return None if has else f"unknown: not in opset {opsets.get(domain)}"
        if domain.startswith("com.microsoft"):
            return "an operator of ONNX Runtime's own"
        return "unknown: no function body in the file; a library of kernels must be registered"

    return {
        "what": "an ONNX model",
        "version": {
            "ir": model.ir_version,
            "opset": opsets,
            "producer": f"{show(model.producer_name)} {show(model.producer_version)}".strip(),
        },
        "inputs": [_value(v) for v in model.graph.input if v.name not in values],
        "outputs": [_value(v) for v in model.graph.output],
        "ops": known.tally(counts, judge),
        "functions": [f"{domain}::{name}" for domain, name in bodies],
        "weights": _weights(tensors),
        "external": _external(Path(path), tensors),
        "metadata": {p.key: show(p.value) for p in model.metadata_props},
    }


def loaded(path: str) -> onnx.ModelProto:
    """The model in a file, without its external data.

    Raises:
        CorruptInput: it is none.
    """
    try:
        # The format is said: onnx would take it from the file's name.
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except (DecodeError, ValueError, RuntimeError) as error:
        raise CorruptInput(
            f"{show(path)}: no ONNX model ({show(error, 100)}); write the artifact again"
        ) from error
    if not model.ir_version or not model.opset_import or not model.HasField("graph"):
        raise CorruptInput(f"{show(path)}: no ONNX model: no graph, or no opset; write it again")
    return model


def has_operator(name: str, version: int, domain: str) -> bool:
    """Whether onnx knows an operator; it takes neither what is no Unicode nor more than an int."""
    if not 0 < version < 2**31 or not isinstance(name, str):
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return bool(onnx.defs.has(name, version, domain))


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those inside its nodes (`If`, `Loop`, `Scan`), without recursion."""
    waiting = [graph]
    while waiting:
        current = waiting.pop()
        yield current
        waiting += inner_graphs(current.node)


def inner_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The graphs that are attributes of nodes."""
    for node in nodes:
        for attribute in node.attribute:
            yield from attribute.graphs
            if attribute.HasField("g"):
                yield attribute.g


def _value(value: onnx.ValueInfoProto) -> dict[str, Any]:
    tensor = value.type.tensor_type
    shape = [d.dim_param or d.dim_value for d in tensor.shape.dim]
    return {"name": value.name, "dtype": _dtype(tensor.elem_type), "shape": shape}


def _dtype(number: int) -> str:
    names = onnx.TensorProto.DataType
    name = names.Name(number).lower() if number in names.values() else str(number)
    return {"float": "float32", "double": "float64"}.get(name, name)


def _bytes(tensor: onnx.TensorProto) -> int:
    try:
        item = int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except (KeyError, ValueError):
        item = 0  # strings have no size
    return int(math.prod(tensor.dims)) * item


def _weights(tensors: list[onnx.TensorProto]) -> dict[str, Any]:
    dtypes: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        entry = dtypes.setdefault(_dtype(tensor.data_type), {"elements": 0, "bytes": 0})
        entry["elements"] += math.prod(tensor.dims)
        entry["bytes"] += _bytes(tensor)
    return known.total(dtypes)


def _external(path: Path, tensors: list[onnx.TensorProto]) -> list[dict[str, Any]]:
    """Each file that weights lie in, with how many, and whether it is there and inside."""
    places: dict[str, list[onnx.TensorProto]] = {}
    for tensor in tensors:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {e.key: e.value for e in tensor.external_data}
            places.setdefault(entries.get("location", ""), []).append(tensor)
    return [
        {"file": name, "tensors": len(held), "state": _state(path, name, held)}
        for name, held in sorted(places.items())
    ]


def _state(path: Path, name: str, held: list[onnx.TensorProto]) -> str:
    parts = PurePosixPath(name).parts
    if not name or name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
        return "leads out of the folder: refused by whoever loads it"
    file = path.parent / name
    if not file.is_file():
        return "missing"
    if not file.resolve().is_relative_to(path.parent.resolve()):
        return "a link that leads out of the folder"
    size = file.stat().st_size
    for tensor in held:
        entries = {e.key: e.value for e in tensor.external_data}
        try:
            offset, length = int(entries.get("offset", 0)), int(entries.get("length", 0))
        except ValueError:
            return "an offset or length that is no number"
        if offset < 0 or length < 0 or offset + (length or _bytes(tensor)) > size:
            return f"too short for {tensor.name}"
    return "there"
