"""Operators for onnx's reference evaluator, where its own are slow, narrow, or less exact than
those of all other runtimes."""

from typing import Any

import ml_dtypes
import numpy as np

from fuseport.exporter.runtimes._grid_sample import grid_sample

__all__ = ["operators", "typed_when_run"]

_NARROW = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

_IN_FLOAT64 = (
    "AveragePool", "Conv", "CumSum", "Einsum", "Exp", "Gemm", "GlobalAveragePool", "MatMul",
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd",
    "ReduceSum", "ReduceSumSquare", "Softmax",
)  # fmt: skip
"""Those that sum, and the exponential.

In float32 numpy adds one row to the next, and OpenBLAS one product to the next in small matrices
with AVX-512: over 4,225 rows their errors are six times those of torch and of ONNX Runtime, which
add in parts. numpy 2.4's exponential is wrong by two ulps where others' are by a half: four times
as much where 1 is taken from it, as discretisations do.
"""


def operators(opset: int) -> list[type]:
    """Those to be used in place of the evaluator's own.

    Args:
        opset: the version of the default domain that a model is of.
    """
    own = [
        _gather_elements(),
        _pad(),
        grid_sample(),
        _in_float64("ConvTranspose", _conv_transpose()),
        _in_float64("LogSoftmax", _log_softmax()),
    ]
    return own + [_in_float64(name, _original(name, opset)) for name in _IN_FLOAT64]


def typed_when_run(model: Any) -> Any:
    """The model, with bodies in which operators may be functions of their inputs' types, as Gelu.

    The evaluator of onnx 1.23 asks for the types as such a node runs, but in the body of a function
    of which it knows no type at all: there it refuses the node as it is loaded.
    """
    from onnx import TensorProto, helper

    for function in model.functions:
        if not function.value_info:
            unused = helper.make_tensor_value_info("fuseport: no value", TensorProto.FLOAT, None)
            function.value_info.append(unused)
    return model


def _original(name: str, opset: int) -> Any:
    from onnx.reference.ops import load_op

    return load_op("", name, opset)


def _in_float64(name: str, original: Any) -> Any:
    """The operator, computed in float64 and rounded once."""

    def run(self: Any, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        dtype = inputs[0].dtype
        if dtype not in _NARROW:
            return original._run(self, *inputs, **attributes)  # type: ignore[no-any-return]
        wide = [x.astype(np.float64) if x is not None and x.dtype in _NARROW else x for x in inputs]
        results = original._run(self, *wide, **attributes)
        return tuple(np.asarray(result).astype(dtype) for result in results)

    return type(name, (original,), {"_run": run})


def _gather_elements() -> Any:
    """The operator, which onnx 1.23 has for 64 values of an axis, and for indices of one size."""
    from onnx.reference.op_run import OpRun

    class GatherElements(OpRun):  # type: ignore[misc]  # onnx has no types
        def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
            axis %= data.ndim
            reached = tuple(slice(None if i == axis else n) for i, n in enumerate(indices.shape))
            return (np.take_along_axis(data[reached], indices, axis),)

    return GatherElements


def _log_softmax() -> Any:
    """The operator, which onnx 1.23 has as the logarithm of what may be 0."""
    from onnx.reference.op_run import OpRun

    class LogSoftmax(OpRun):  # type: ignore[misc]  # onnx has no types
        def _run(self, x: Any, axis: int = -1) -> tuple[Any]:
            if not x.size:
                return (x,)
            x = x - x.max(axis=axis, keepdims=True)
            return (x - np.log(np.exp(x).sum(axis=axis, keepdims=True)),)

    return LogSoftmax


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
