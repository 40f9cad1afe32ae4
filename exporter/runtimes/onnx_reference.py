"""onnx's own reference evaluator: slow, in numpy, the plainest reading of the standard."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fuseport.exporter.runtimes import Unsupported
from fuseport.exporter.runtimes._numpy import to_array, to_tensor

__all__ = ["AUTOGRAD", "FORMAT", "load", "missing"]

FORMAT = "onnx"
AUTOGRAD = False


def missing() -> str | None:
    """What to install, where the package is not there."""
    return None if find_spec("onnx") else "onnx is not installed: pip install onnx"


def load(artifact: Path, program: Mapping[str, Any]) -> "_Session":
    """A session on an `.onnx` file."""
    return _Session(artifact)


class _Session:
    def __init__(self, artifact: Path) -> None:
        from onnx.reference import ReferenceEvaluator

        try:
            self._evaluator = ReferenceEvaluator(
                str(artifact), new_ops=[_gather_elements(), _exp(), _pad(), _conv_transpose()]
            )
        except NotImplementedError as error:
            raise Unsupported(str(error).splitlines()[0]) from error

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        feed = {name: to_array(tensor) for name, tensor in inputs.items()}
        results = self._evaluator.run(None, feed)
        names = self._evaluator.output_names
        return {n: to_tensor(r) for n, r in zip(names, results, strict=True)}


def _gather_elements() -> Any:
    """The operator, which onnx 1.23 has for 64 values of an axis, and for indices of one size."""
    from onnx.reference.op_run import OpRun

    class GatherElements(OpRun):  # type: ignore[misc]  # onnx has no types
        def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
            axis %= data.ndim
            reached = tuple(slice(None if i == axis else n) for i, n in enumerate(indices.shape))
            return (np.take_along_axis(data[reached], indices, axis),)

    return GatherElements


def _exp() -> Any:
    """The operator, which numpy 2.4 has in float32 with errors of two ulps, where others' are of a
    half: four times as much where 1 is taken from it, as discretisations do."""
    from onnx.reference.op_run import OpRun

    class Exp(OpRun):  # type: ignore[misc]  # onnx has no types
        def _run(self, x: Any) -> tuple[Any]:
            return (np.exp(x.astype(np.float64)).astype(x.dtype),)

    return Exp


def _pad() -> Any:
    """The operator, which onnx 1.23 lacks where something is taken away, as by a pad's gradient."""
    from onnx.reference.ops.op_pad import Pad_18

    class Pad(Pad_18):  # type: ignore[misc]  # onnx has no types
        def _run(
            self, data: Any, pads: Any, value: Any = None, axes: Any = None, mode: Any = None
        ) -> tuple[Any]:
            begin, end = np.reshape(pads, (2, -1))
            inner = [slice(None)] * data.ndim
            padded = range(data.ndim) if axes is None else axes
            for axis, b, e in zip(padded, begin, end, strict=True):
                inner[axis] = slice(max(-b, 0), data.shape[axis] - max(-e, 0))
            return super()._run(  # type: ignore[no-any-return]
                data[tuple(inner)], np.maximum(pads, 0), value, axes, mode=mode
            )

    return Pad


def _conv_transpose() -> Any:
    """The operator, which onnx 1.23 adds up element by element in Python, and not in groups: 140 ms
    for 8 channels of 16 by 16, here 1 ms."""
    from onnx.reference.ops.op_conv_transpose import ConvTranspose as Original

    class ConvTranspose(Original):  # type: ignore[misc]  # onnx has no types
        def _run(
            self,
            x: Any,
            weight: Any,
            bias: Any = None,
            auto_pad: str | None = None,
            dilations: Any = None,
            group: int | None = None,
            kernel_shape: Any = None,
            output_padding: Any = None,
            output_shape: Any = None,
            pads: Any = None,
            strides: Any = None,
        ) -> tuple[Any]:
            if auto_pad not in (None, "NOTSET") or output_shape is not None:
                return super()._run(  # type: ignore[no-any-return]
                    x, weight, bias, auto_pad=auto_pad, dilations=dilations, group=group,
                    kernel_shape=kernel_shape, output_padding=output_padding,
                    output_shape=output_shape, pads=pads, strides=strides,
                )  # fmt: skip
            groups, sizes, taps = group or 1, x.shape[2:], weight.shape[2:]
            ones = [1 for _ in sizes]
            steps, spread = strides or ones, dilations or ones
            begin, end = np.reshape(pads or [0 for _ in (*sizes, *sizes)], (2, -1))
            more = output_padding or [0 for _ in sizes]
            whole = [
                step * (size - 1) + apart * (count - 1) + 1 + extra
                for step, size, apart, count, extra in zip(
                    steps, sizes, spread, taps, more, strict=True
                )
            ]
            # (b, g, c, positions), (g, c, o, taps…) → (b, g·o, positions) for each tap
            rows = x.reshape(len(x), groups, x.shape[1] // groups, np.prod(sizes, dtype=int))
            columns = weight.reshape(groups, rows.shape[2], *weight.shape[1:])
            channels = groups * weight.shape[1]
            y: Any = np.zeros((x.shape[0], channels, *whole), x.dtype)
            for tap in np.ndindex(*taps):
                found = columns[(..., *tap)].swapaxes(1, 2) @ rows
                here = tuple(
                    slice(apart * at, apart * at + step * (size - 1) + 1, step)
                    for apart, at, step, size in zip(spread, tap, steps, sizes, strict=True)
                )
                y[(..., *here)] += found.reshape(x.shape[0], channels, *sizes)
            inner = tuple(slice(b, n - e) for b, n, e in zip(begin, whole, end, strict=True))
            y = y[(..., *inner)]
            return (y if bias is None else y + bias.reshape(-1, *ones),)

    return ConvTranspose
