"""The weights in an artifact that are not the model's: what a wrong value may come of."""

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from safetensors import safe_open
from torch import Tensor

from fuseport.exporter import runtimes
from fuseport.exporter.runtimes._numpy import to_tensor
from fuseport.exporter.verify.localise.package_constants import constants

__all__ = ["sentence", "state_of"]


def sentence(runtime: str, artifact: Path, weights: Path) -> str | None:
    """Which of an artifact's weights are not those of the bundle; None if none is.

    Those that a writer or a tool gave another name, or folded into others, are not found.

    Args:
        runtime: that runs the artifact.
        artifact: its file.
        weights: of the bundle.

    Raises:
        Unsupported: it is machine code for another machine or version of torch.
    """
    known = 0
    others: list[tuple[str, float]] = []
    with safe_open(weights, "pt") as file:
        for name, value in _within(runtime, artifact, frozenset(file.keys())):
            known += 1
            if (off := _off(value, file.get_tensor(name))) != 0.0:
                others.append((name, off))
    if not others:
        return None
    name, off = max(others, key=lambda other: other[1])
    by = f"off by up to {off:.3g}" if off < math.inf else "of another shape, or not finite"
    if len(others) == 1:
        return f"its weight {name} is not the model's: it is {by}"
    return f"{len(others)} of its {known} weights are not the model's: {name} is {by}"


def _off(value: Tensor, truth: Tensor) -> float:
    """The largest difference; infinity where there is none to be had."""
    if truth.is_complex() and not value.is_complex():  # as ONNX has it
        truth = torch.view_as_real(truth)
    if value.shape != truth.shape:
        return math.inf
    either = value.is_complex() or truth.is_complex()
    wide = torch.complex128 if either else torch.float64
    value, truth = value.to(wide), truth.to(wide)
    same = (value == truth) | ((value != value) & (truth != truth))  # NaN and NaN
    off = torch.where(same, 0.0, (value - truth).abs()).amax().item() if same.numel() else 0.0
    return off if off == off else math.inf


def _within(runtime: str, artifact: Path, names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """The artifact's weights that have names of the model's."""
    format_name = str(runtimes.get(runtime).FORMAT)
    if format_name.startswith("onnx"):
        for tensor in onnx.load(artifact, load_external_data=False).graph.initializer:
            if tensor.name in names:
                array = numpy_helper.to_array(tensor, str(artifact.parent))
                known = array.dtype.isbuiltin == 1 or array.dtype == ml_dtypes.bfloat16
                yield tensor.name, to_tensor(array if known else array.astype(np.float32))
        return
    yield from ((n, v.cpu()) for n, v in state_of(format_name, artifact).items() if n in names)


def state_of(format_name: str, artifact: Path) -> Mapping[str, Tensor]:
    """The parameters and buffers in a file of one of torch's formats, by name.

    Raises:
        Unsupported: it is machine code for another machine or version of torch.
    """
    if format_name == "exported_program":
        state: dict[str, Tensor] = torch.export.load(artifact).state_dict
        return state
    if format_name == "torchscript":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, and says so at every call
            found: dict[str, Tensor] = torch.jit.load(
                str(artifact), map_location="cpu"
            ).state_dict()
        return found
    return constants(artifact)
