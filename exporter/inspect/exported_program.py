"""A `.pt2` archive: an exported program's JSON, or an AOTInductor package's list of members."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput
from fuseport.exporter.inspect import known
from fuseport.exporter.inspect.archive import Archive, opened

__all__ = ["found"]

_COMPILED = "data/aotinductor/"
_CODE = (".so", ".cpp", ".o", ".cubin", ".pyd", ".dll")


def found(path: str) -> dict[str, Any]:
    """Inputs, outputs and op counts of each program in it; for compiled code, its files.

    Raises:
        UnsafeInput, CorruptInput: as the archive's reader does.
    """
    with opened(Path(path)) as archive:
        if any(name.startswith(_COMPILED) for name in archive.members):
            return _package(archive)
        models = [n for n in archive.members if n.startswith("models/") and n.endswith(".json")]
        if not models:
            raise CorruptInput(f"{show(path)}: no models/*.json; export the program again")
        programs = [_program(archive, name) for name in models]
        data = {n: size for n, size in archive.members.items() if n.startswith("data/")}
        first = {key: value for key, value in programs[0].items() if key != "model"}
        return {
            "what": "an exported program" + (f", and {len(models) - 1} more" * (len(models) > 1)),
            **first,
            "weights": _weights(archive),
            "pickles": [n for n, size in data.items() if n.endswith(".pt") and size],
            "others": programs[1:],
        }


def _package(archive: Archive) -> dict[str, Any]:
    inside = {n: size for n, size in archive.members.items() if n.startswith(_COMPILED)}
    metadata: dict[str, Any] = {}
    for name in inside:
        if name.endswith("metadata.json"):
            metadata |= json.loads(archive.read(name))
    return {
        "what": "an AOTInductor package: machine code, which loading runs",
        "inputs": [],
        "outputs": [],
        "code": {n: size for n, size in inside.items() if n.endswith(_CODE)},
        "metadata": metadata,
    }


def _weights(archive: Archive) -> dict[str, Any]:
    """By the lists of weights and constants; a tensor that occurs twice counts once."""
    seen: dict[str, tuple[str, int]] = {}
    for name in archive.members:
        if name.endswith(("_weights_config.json", "_constants_config.json")):
            for entry in json.loads(archive.read(name))["config"].values():
                file = f"{name.rpartition('/')[0]}/{entry['path_name']}"
                dtype = _dtype((entry.get("tensor_meta") or {}).get("dtype"))
                seen[file] = dtype, archive.members.get(file, 0)
    dtypes: dict[str, dict[str, int]] = {}
    for dtype, size in seen.values():
        entry = dtypes.setdefault(dtype, {"elements": 0, "bytes": 0})
        entry["bytes"] += size
        item = getattr(getattr(torch, dtype, None), "itemsize", 0)
        entry["elements"] += size // item if item else 0
    return known.total(dtypes)


def _program(archive: Archive, name: str) -> dict[str, Any]:
    content = json.loads(archive.read(name))
    graph, signature = (content["graph_module"][key] for key in ("graph", "signature"))
    specs = signature["input_specs"], signature["output_specs"]
    inputs = [_value(s["user_input"]["arg"], graph) for s in specs[0] if "user_input" in s]
    outputs = [_value(s["user_output"]["arg"], graph) for s in specs[1] if "user_output" in s]
    for output, key in zip(outputs, _keys(content), strict=False):
        output["name"] = key
    counts = Counter(_target(str(node["target"])) for node in graph["nodes"])
    return {
        "model": name,
        "version": {
            "torch": content.get("torch_version"),
            "schema": ".".join(str(v) for v in content["schema_version"].values()),
            "opset": content["opset_version"],
        },
        "inputs": inputs,
        "outputs": outputs,
        "ops": known.tally(counts, _judge),
        "parameters": sum("parameter" in s for s in specs[0]),
    }


def _target(target: str) -> tuple[str, str]:
    parts = target.split(".")
    if parts[:2] == ["torch", "ops"] and len(parts) > 3:
        return parts[2], parts[3]
    return "python", parts[-1]


def _judge(domain: str, name: str) -> str | None:
    return None if domain == "python" else known.of_torch(domain, name)


def _keys(content: dict[str, Any]) -> list[str]:
    """Names of outputs, where the program returns a dictionary."""
    calls = content["graph_module"]["module_call_graph"]
    spec = json.loads(calls[0]["signature"]["out_spec"])[1] if calls else {}
    if spec.get("type") != "builtins.dict":
        return []
    keys = json.loads(spec["context"])
    return [str(key) for key in keys]


def _value(argument: dict[str, Any], graph: dict[str, Any]) -> dict[str, Any]:
    tensor = argument.get("as_tensor")
    if tensor is None:
        return {"name": "", "type": next(iter(argument), "").removeprefix("as_")}
    meta = graph["tensor_values"].get(tensor["name"], {})
    return {
        "name": tensor["name"],
        "dtype": _dtype(meta.get("dtype")),
        "shape": [_size(size) for size in meta.get("sizes", ())],
    }


def _dtype(number: Any) -> str:
    """By the numbers that torch.export writes."""
    from torch._export.serde.schema import ScalarType

    try:
        name = ScalarType(number).name.lower()
    except ValueError:
        return str(number)
    short = {"float": "float32", "double": "float64", "half": "float16", "long": "int64"}
    return short.get(name, {"int": "int32", "short": "int16", "byte": "uint8"}.get(name, name))


def _size(size: dict[str, Any]) -> int | str:
    if "as_int" in size:
        return int(size["as_int"])
    expression = str(size["as_expr"]["expr_str"])
    return expression.split("'")[1] if expression.startswith("Symbol('") else expression
