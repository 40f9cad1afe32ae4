"""The CUDA kernels of an op on the CPU, and what tests hold them against.

`device.hpp` stands in for the GPU: kernels, launches and the binding to torch are those that nvcc
compiles, registered under another namespace. Only the half a dozen functions of
`native/cuda_device.cuh`, and the sort of `native/cuda_sort.cuh`, are others, and a GPU's own: what
nvcc makes of the rest is not seen here.

The library for ONNX Runtime's CUDA provider is made in the same way, for its CPU provider.
"""

import ctypes
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseport.ops import build, ort
from fuseport.ops.spec import Case, Inputs, Operator, OpSpec, as_tuple

__all__ = [
    "DTYPES",
    "Device",
    "Settings",
    "assert_as_good",
    "by_reference",
    "check",
    "compared_in",
    "cotangents_of",
    "device",
    "forward_and_backward",
    "host",
    "onnxruntime_library",
    "onnxruntime_units",
    "widened",
]

FOLDER = Path(__file__).parent
NAMESPACE = "fuseport_cuda_on_cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


_QUICK = ("-O1", "-U_FORTIFY_SOURCE", f"-I{FOLDER.parent}")
_BINDING = ("-DFUSEPORT_CUDA_ON_CPU", "-O0")


class Settings:
    """Of the stand-in for a GPU in a library."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def multiprocessors(self, count: int) -> None:
        """How many it has: plans depend on it."""
        self.library.cuda_on_cpu_multiprocessors(ctypes.c_int(count))

    def shared_memory(self, kibibytes: int) -> None:
        """Of a block, at most: 99 KiB on GPUs for desktops, 163 on an A100, 227 on an H100."""
        self.library.cuda_on_cpu_shared_memory(ctypes.c_int64(kibibytes * 1024))

    def order(self, order: int) -> None:
        """In which order threads run between barriers: 0 ascending, 1 descending, else drawn."""
        self.library.cuda_on_cpu_order(ctypes.c_int(order))


class Device(Settings):
    """The stand-in for a GPU, with the kernels of one op."""

    def __init__(self, spec: OpSpec, library: Path) -> None:
        super().__init__(library)
        self.spec = spec

    def __call__(self, operator: Operator, *inputs: Any) -> tuple[Tensor, ...]:
        return as_tuple(getattr(getattr(torch.ops, NAMESPACE), operator.name)(*inputs))

    def forward_and_backward(
        self, operator: Operator, inputs: Inputs, cotangents: Inputs
    ) -> dict[str, Tensor]:
        return forward_and_backward(self.spec, self, operator, inputs, cotangents)


@contextmanager
def device(spec: OpSpec) -> Iterator[Device]:
    """The device of an op, compiled on first use, one small multiprocessor, threads ascending."""
    found, _ = _built(spec.name)
    found.multiprocessors(1)
    found.shared_memory(99)
    found.order(0)
    yield found


def host(spec: OpSpec, source: str) -> ctypes.CDLL:
    """A C++ file of this folder that calls an op's kernels, and the stand-in for a GPU."""
    files = [build.Unit(FOLDER / name, _QUICK) for name in (source, "device.cpp")]
    name = f"{spec.name}-{Path(source).stem}-cuda_on_cpu"
    units = (_kernels(spec.folder / "kernel.cu"), *files)
    return ctypes.CDLL(str(build.built(build.Library(name, units))))


def onnxruntime_units(specs: Sequence[OpSpec]) -> tuple[build.Unit, ...]:
    """What `ops.ort` makes the library for the CUDA provider of, compiled for the CPU's."""
    native = build.OPS_FOLDER / "native"
    bindings = (native / "ort.cpp", *(spec.folder / "ort_cuda.cpp" for spec in specs))
    kernels = (native / "memory.cu", *(spec.folder / "kernel.cu" for spec in specs))
    return (
        *(build.Unit(path, _BINDING, lambda: (f"-I{ort.headers()}",)) for path in bindings),
        *(_kernels(path) for path in kernels),
    )


@functools.cache
def onnxruntime_library() -> Path:
    """Of all ops that have kernels for the CUDA provider, and the stand-in for a GPU."""
    from fuseport.ops import OPS

    specs = [spec for spec in OPS.values() if ort.bound(spec, "cuda")]
    units = (*onnxruntime_units(specs), build.Unit(FOLDER / "device.cpp", _QUICK))
    return build.built(build.Library("onnxruntime-cuda_on_cpu", units))


def _kernels(source: Path) -> build.Unit:
    emulation = hashlib.sha256((FOLDER / "device.hpp").read_bytes()).hexdigest()
    return build.Unit(source, ("-xc++", *_QUICK), version=emulation)


@functools.cache
def _built(name: str) -> tuple[Device, torch.library.Library]:
    from fuseport.ops import OPS

    spec = OPS[name]
    binding = build.torch_unit(spec.folder / "cuda.cpp", _BINDING)
    units = (
        _kernels(spec.folder / "kernel.cu"),
        binding,
        build.Unit(FOLDER / "device.cpp", _QUICK),
    )
    path = build.built(build.Library(f"{name}-cuda_on_cpu", units, build.torch_link()))
    schemas = torch.library.Library(NAMESPACE, "FRAGMENT")  # which it takes back when collected
    for operator in spec.operators:
        schemas.define(operator.name + operator.schema)
    torch.ops.load_library(path)
    return Device(spec, path), schemas


def wide(dtype: torch.dtype) -> torch.dtype:
    floating = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float64) if floating else dtype


def widened(inputs: Inputs) -> Inputs:
    return {k: v.to(wide(v.dtype)) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def cotangents_of(spec: OpSpec, operator: Operator, inputs: Inputs, seed: int) -> Inputs:
    """Of each differentiable output; drawn in float64, so that all dtypes see the same values."""
    generator = torch.Generator().manual_seed(seed)
    outputs = dict(zip(operator.outputs, as_tuple(operator.fake(*inputs.values())), strict=True))
    drawn = {}
    for name in spec.differentiable(operator)[1]:
        y = outputs[name]
        drawn["d" + name] = torch.randn(y.shape, generator=generator, dtype=wide(y.dtype)).to(
            y.dtype
        )
    return drawn


def by_reference(operator: Operator, *inputs: Any) -> tuple[Tensor, ...]:
    return as_tuple(operator.reference(*inputs))


def forward_and_backward(
    spec: OpSpec,
    run: Callable[..., tuple[Tensor, ...]],
    operator: Operator,
    inputs: Inputs,
    cotangents: Inputs,
) -> dict[str, Tensor]:
    """All outputs, and all gradients if it has any, from what the forward saved."""
    outputs = dict(zip(operator.outputs, run(operator, *inputs.values()), strict=True))
    if operator.backward is None:
        return outputs
    gradient = spec.operator(operator.backward)
    known = {**inputs, **outputs, **cotangents}
    gradients = run(gradient, *(known[name] for name in gradient.inputs))
    return outputs | dict(zip(gradient.outputs, gradients, strict=True))


def compared_in(case: Case, dtype: torch.dtype) -> torch.dtype:
    """The dtype, or float32 where float64 is no truth of itself.

    The gradient of a norm of one number is a difference of what is all but equal.
    """
    alone = case.make(dtype, 1).get("group_size") == 1
    return torch.float32 if alone and dtype == torch.float64 else dtype


def assert_as_good(
    got: dict[str, Tensor],
    baseline: dict[str, Tensor],
    truth: dict[str, Tensor],
    *,
    scale: int = 1,
) -> None:
    """Errors of at most three times the reference's, and a few ulps of the tensor's scale.

    `scale` is of the ulps: a GPU's own functions are off by more than those that stand in for them.
    A truth in the same dtype is off itself, by what sums that cancel lose in any order.
    """
    assert got.keys() == baseline.keys() == truth.keys()
    for name, value in got.items():
        expected, usual = truth[name], baseline[name]
        assert (value.shape, value.dtype) == (expected.shape, usual.dtype), name
        assert value.stride() == usual.stride() or value.numel() <= 1, name
        if value.numel() == 0:
            continue
        error = (value.to(expected.dtype) - expected).abs().max()
        allowed = 3 * (usual.to(expected.dtype) - expected).abs().max()
        ulps = scale * (128 if value.dtype == expected.dtype else 4)
        allowed += ulps * torch.finfo(value.dtype).eps * expected.abs().max()
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


def check(device: Device, case: Case, dtype: torch.dtype, seed: int = 1) -> dict[str, Tensor]:
    """Outputs and gradients of a case, which are as good as the reference's."""
    spec, operator = device.spec, device.spec.operator(case.operator)
    inputs = case.make(dtype, seed)
    cotangents = cotangents_of(spec, operator, inputs, seed + 1)
    truth = forward_and_backward(spec, by_reference, operator, widened(inputs), widened(cotangents))
    baseline = forward_and_backward(spec, by_reference, operator, inputs, cotangents)
    got = device.forward_and_backward(operator, inputs, cotangents)
    assert_as_good(got, baseline, truth)
    return got
