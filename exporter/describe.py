"""What a manifest and a report say of where they come from."""

import functools
import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.models import frozen, tables
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import Program, trainable
from fuseport.ops import OPS

__all__ = ["describe", "environment", "own_sources", "versions"]

_PACKAGES = (
    "fuseport",
    "torch",
    "onnx",
    "onnxscript",
    "onnxruntime-gpu",
    "onnxruntime",
    "safetensors",
    "transformers",
)
_SOURCES = (".py", ".cpp", ".hpp", ".h", ".cuh")


def describe(
    checkpoint: Checkpoint,
    model: Model,
    programs: Sequence[Program],
    notes: Sequence[str],
    seed: int,
    adapter: Checkpoint | None = None,
) -> dict[str, Any]:
    """The manifest of a bundle, its artifacts not listed yet."""
    used = {
        node.target._schema.name
        for program in programs
        for node in program.exported.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    }
    operators = [operator for op in OPS.values() for operator in op.operators]
    config = {**model.config, "frozen": frozen(model.module)}
    if made := tables(model.module):
        config["tables"] = {name: str(t.dtype).removeprefix("torch.") for name, t in made.items()}
    parameters = dict(model.module.named_parameters())
    return {
        "checkpoint": {
            "name": checkpoint.path.name,
            "layout": checkpoint.layout,
            "weights": checkpoint.weights,
            "sha256": checkpoint.sha256,
            **({"adapter": _named(adapter)} if adapter else {}),
        },
        "architecture": {
            "name": model.architecture,
            "config": config,
            "sizes": dict(model.sizes),  # of the example that was captured
        },
        "parameters": {
            "count": sum(parameter.numel() for parameter in parameters.values()),
            "trainable": sum(p.numel() for p in trainable(model.module).values()),
            "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()}),
        },
        "programs": {
            program.kind: {
                "inputs": [asdict(spec) for spec in program.inputs],
                "outputs": [asdict(spec) for spec in program.outputs],
                "none": list(program.none),
                **({"both_ways": list(program.both_ways)} if program.both_ways else {}),
            }
            for program in programs
        },
        "artifacts": [],
        "ops": {o.qualified_name: o.schema for o in operators if o.qualified_name in used},
        "versions": versions(),
        "seed": seed,
        "notes": list(notes),
    }


def versions() -> dict[str, str]:
    """The versions of the packages that matter, of those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # an optional one
    return found


def environment(device: str | None = None) -> dict[str, Any]:
    """Versions and machine, for a report; and the device that runtimes computed on, if any did."""
    found = {
        "versions": versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }
    return found if device is None else {**found, "device": device}


@functools.cache
def own_sources() -> str:
    """A hash of fuseport's own sources, which tells more than its version does."""
    root = Path(__file__).parents[1]
    whole = hashlib.sha256()
    for folder in ("exporter", "ops"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in _SOURCES and file.is_file():
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                whole.update(f"{file.relative_to(root).as_posix()}\0{content}\n".encode())
    return whole.hexdigest()


def _named(adapter: Checkpoint) -> dict[str, str]:
    return {"name": adapter.path.name, "sha256": adapter.sha256}
