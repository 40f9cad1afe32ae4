"""Whether an ONNX file names nothing that it must not: files to read, operators to run."""

import math
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import onnx

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, Missing, UnsafeInput
from fuseport.exporter.inspect.onnx import graphs, has_operator, inner_graphs, loaded
from fuseport.exporter.inspect.single_assignment import first_fault
from fuseport.ops import OPS

__all__ = ["found"]

_KEYS = ("location", "offset", "length", "checksum")
_LIMIT = 2**63
_MICROSOFT = ("com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc", "ai.onnx.ml")


def found(path: str) -> dict[str, Any]:
    """Nothing, for a file that may be loaded.

    Raises:
        UnsafeInput, CorruptInput, Missing: as `admission.admit`.
    """
    model = loaded(path)
    for tensor in _tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            _check_external(Path(path), tensor)
    _check_operators(path, model)
    if fault := first_fault(model.functions, model.graph):
        raise CorruptInput(f"{show(path)}: {fault}; write the artifact again")
    return {}


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor in a model: initializers, sparse ones too, and attributes of nodes."""
    nodes = [node for function in model.functions for node in function.node]
    for graph in (*graphs(model.graph), *_inner(nodes)):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        nodes += graph.node
    for node in nodes:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)


def _inner(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for graph in inner_graphs(nodes):
        yield from graphs(graph)


def _check_external(path: Path, tensor: onnx.TensorProto) -> None:
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key not in _KEYS or entry.key in entries:
            raise _corrupt(path, tensor, f"an entry {show(entry.key, 40)!r}")
        entries[entry.key] = entry.value
    location = entries.get("location", "")
    parts = PurePosixPath(location).parts
    if "\\" in location or ":" in location or location.startswith(("/", "*")) or ".." in parts:
        raise _unsafe(path, tensor, location, "which leads out of the file's folder")
    if not location or "\0" in location:
        raise _corrupt(path, tensor, "no location")
    file = path.parent / location
    try:
        status = os.stat(file)
    except OSError as error:
        raise _corrupt(path, tensor, f"{show(location)}: {error.strerror}") from error
    resolved = file.resolve()
    if not any(resolved.is_relative_to(folder) for folder in _folders(path)):
        raise _unsafe(path, tensor, location, "a link that leads out of the file's folder")
    if not stat.S_ISREG(status.st_mode):
        raise _unsafe(path, tensor, location, "which is no plain file")
    if status.st_nlink > 1:
        raise _unsafe(path, tensor, location, "which has other names, maybe outside: copy it")
    offset = _whole(path, tensor, entries.get("offset", "0"))
    length = _whole(path, tensor, entries["length"]) if entries.get("length") else _size(tensor)
    if offset + max(length, _size(tensor)) > status.st_size:
        raise _corrupt(path, tensor, f"{show(location)} is too short for it")


def _folders(path: Path) -> Iterator[Path]:
    """Where data may lie: in the file's folder, or in the blobs of a Hugging Face cache."""
    folder = path.parent.absolute()
    yield folder.resolve()
    if folder.parent.name == "snapshots":
        yield (folder.parent.parent / "blobs").resolve()


def _whole(path: Path, tensor: onnx.TensorProto, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text[:20]) >= _LIMIT:
        raise _corrupt(path, tensor, f"{show(text, 40)!r} for an offset or length")
    return int(text)


def _size(tensor: onnx.TensorProto) -> int:
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except (KeyError, ValueError):
        return 0  # of a type that the checker refuses
    bits = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4}.get(dtype.name, 8 * dtype.itemsize)
    return int(math.prod(max(0, d) for d in tensor.dims)) * int(bits) // 8


def _check_operators(path: str, model: onnx.ModelProto) -> None:
    opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.opset_import}
    known = onnx.defs.onnx_opset_version()
    if opsets.get("", 1) < 1:
        raise CorruptInput(f"{show(path)}: opset {opsets['']}; write the artifact again")
    if opsets.get("", 1) > known:
        raise Missing(
            f"{show(path)}: opset {opsets['']}, and the onnx installed here knows up to {known}: "
            "pip install -U onnx onnxruntime-gpu, or write the artifact for an earlier opset"
        )
    bodies = {(f.domain, f.name) for f in model.functions}
    fused = {o.qualified_name.partition("::")[2] for spec in OPS.values() for o in spec.operators}
    nodes = [n for graph in graphs(model.graph) for n in graph.node]
    nodes += [n for function in model.functions for n in function.node]
    for node in nodes:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if (node.domain, node.op_type) in bodies or domain in _MICROSOFT:
            continue
        if domain == "" and has_operator(node.op_type, opsets.get("", 1), ""):
            continue
        if domain == "fuseport.ops" and node.op_type in fused:
            continue
        name = f"{show(node.domain or 'ai.onnx', 60)}::{show(node.op_type, 60)}"
        raise Missing(
            f"{show(path)}: the operator {name} has no body in the file, and no library here has "
            "it: write the artifact with a function body for it"
        )


def _unsafe(path: Path, tensor: onnx.TensorProto, location: str, why: str) -> UnsafeInput:
    return UnsafeInput(
        f"{show(path)}: {show(tensor.name)}: its data is to be read from {show(location)}, {why}; "
        "nothing was read"
    )


def _corrupt(path: Path, tensor: onnx.TensorProto, why: str) -> CorruptInput:
    return CorruptInput(
        f"{show(path)}: {show(tensor.name)}: external data: {why}; write the artifact again"
    )
