"""The truth in float64, and how far equally good computations in the working dtype are from it.

Truth is the model over the reference implementations of its ops, in float64 throughout: casts to
narrower types in model code are raised. The baseline is the same in the working dtype, computed in
several equally good ways; the largest error among them is what a candidate is measured by.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models import Model
from fuseport.exporter.models.model import example
from fuseport.exporter.program import named_outputs, one_line, trainable
from fuseport.exporter.runtimes._torch_module import ModuleSession
from fuseport.exporter.verify.plan import Case
from fuseport.ops import OPS

__all__ = ["Errors", "Sample", "compute", "errors", "read", "read_all"]

INDEX = "samples.json"


@dataclass(frozen=True)
class Errors:
    """How far a tensor is from another one: the largest and the root mean square difference."""

    max_abs: float
    rms: float


@dataclass(frozen=True)
class Sample:
    """A case with its truth, on disk.

    Attributes:
        case: what was computed.
        file: safetensors with `input/…`, `cotangent/…`, and the truth, `truth/<name>` in float64,
            for outputs and for `grad/<name>`.
        dtypes: of each output and gradient in the working dtype.
        baseline: errors of each output and gradient.
        none: gradients that do not exist: what they are of does not enter the outputs.
        omitted: what was too large to be stored.
        unstable: tensors that differ between two runs of one and the same computation.
        refused: why the model cannot run this case; nothing else is there then.
    """

    case: Case
    file: Path
    dtypes: Mapping[str, str]
    baseline: Mapping[str, Errors]
    none: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()
    refused: str | None = None


def compute(
    model: Model,
    cases: Sequence[Case],
    folder: Path,
    *,
    limit: int | None = None,
    given: Mapping[str, Path] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Sample, ...]:
    """Compute truth and baseline of `model` on each case, and write them to `folder`.

    Args:
        model: in the working dtype; it is the same afterwards.
        cases: to compute.
        folder: exists, and gets one file for each case and an index.
        limit: truth of more bytes is left out of the files.
        given: files of an earlier call by the case's name, whose inputs and cotangents are taken.
        progress: told what is being done.
    """
    wide = copy.deepcopy(model.module).double()
    samples = []
    for number, case in enumerate(cases):
        progress(f"truth in float64: {case.name}")
        file = folder / f"case{number}.safetensors"
        samples.append(_sample(model, wide, case, file, limit, (given or {}).get(case.name)))
    index = [{**asdict(sample), "file": sample.file.name} for sample in samples]
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return tuple(samples)


def read_all(folder: Path) -> tuple[Sample, ...]:
    """The samples that `compute` wrote to a folder."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return tuple(
        Sample(
            case=Case(**entry["case"]),
            file=folder / entry["file"],
            dtypes=entry["dtypes"],
            baseline={name: Errors(**values) for name, values in entry["baseline"].items()},
            none=tuple(entry["none"]),
            omitted=tuple(entry["omitted"]),
            unstable=tuple(entry["unstable"]),
            refused=entry["refused"],
        )
        for entry in index
    )


def read(sample: Sample, name: str) -> Tensor:
    """The truth of one output or gradient, in float64; it is read from disk."""
    with safe_open(sample.file, "pt") as file:
        tensor: Tensor = file.get_tensor(f"truth/{name}")
    return tensor


def errors(value: Tensor, truth: Tensor) -> Errors:
    """Errors of `value` against float64 truth of the same shape, by chunks to bound the memory."""
    largest, squares = 0.0, 0.0
    pairs = zip(value.reshape(-1).split(2**22), truth.reshape(-1).split(2**22), strict=True)
    for part, exact in pairs:
        # Equal infinities differ by NaN, and are no error; where one is not finite, all is lost.
        difference = torch.where(part == exact, 0.0, (part.double() - exact).abs())
        largest = max(largest, float(difference.nan_to_num(nan=torch.inf).max()))
        squares += float(difference.square().sum())
    return Errors(largest, (squares / max(1, value.numel())) ** 0.5)


def _sample(
    model: Model, wide: nn.Module, case: Case, file: Path, limit: int | None, given: Path | None
) -> Sample:
    if given is not None:
        stored = load_file(given)
        inputs = {spec.name: stored[f"input/{spec.name}"] for spec in model.inputs}
        prefix = "cotangent/"
        cotangents = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
    else:
        generator = torch.Generator().manual_seed(case.seed)
        inputs = {spec.name: example(spec, case.sizes, generator) for spec in model.inputs}
        try:
            with _References():
                outputs = _session(model, model.module).run(inputs)
        except Exception as error:  # model code may refuse a shape with any error
            return Sample(case, file, {}, {}, refused=one_line(error))
        cotangents = {
            name: _cotangent(output, case.layout, generator)
            for name, output in outputs.items()
            if output.is_floating_point()
        }
    truth = _exact(model, wide, inputs, cotangents)
    baseline, dtypes, unstable = _baseline(model, inputs, cotangents, truth)
    tensors = {f"input/{name}": t.contiguous() for name, t in inputs.items()}
    tensors |= {f"cotangent/{name}": t.contiguous() for name, t in cotangents.items()}
    kept = {n: t for n, t in truth.items() if t is not None}
    omitted = [n for n, t in kept.items() if limit is not None and t.nbytes > limit]
    tensors |= {f"truth/{n}": t.contiguous() for n, t in kept.items() if n not in omitted}
    save_file(tensors, file)
    none = tuple(name for name, tensor in truth.items() if tensor is None)
    return Sample(case, file, dtypes, baseline, none, tuple(omitted), unstable)


def _cotangent(output: Tensor, layout: str, generator: torch.Generator) -> Tensor:
    if layout == "expanded" and output.dim() > 1:
        row = torch.randn(output.shape[-1:], generator=generator).to(output.dtype)
        return row.expand(output.shape)
    return torch.randn(output.shape, generator=generator).to(output.dtype)


def _session(model: Model, module: nn.Module) -> ModuleSession:
    return ModuleSession(
        module, module.named_parameters(), lambda result: named_outputs(result, model.outputs)
    )


def _exact(
    model: Model,
    wide: nn.Module,
    inputs: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
) -> dict[str, Tensor | None]:
    def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}

    with _References(), _Float64():
        results = _session(model, wide).differentiate(widened(inputs), widened(cotangents))
    for name, value in results.items():
        if value is not None and value.is_floating_point() and value.dtype != torch.float64:
            raise ExportFailed(f"truth of {name} came out as {value.dtype}, not float64")
    return results


def _baseline(
    model: Model,
    inputs: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    truth: Mapping[str, Tensor | None],
) -> tuple[dict[str, Errors], dict[str, str], tuple[str, ...]]:
    """The largest errors among equally good computations, dtypes, and what does not repeat."""
    worst: dict[str, Errors] = {}
    dtypes: dict[str, str] = {}
    unstable: set[str] = set()
    previous: dict[str, Tensor | None] = {}
    for number, way in enumerate(_ways(model.module)):
        with way, _References():
            results = _session(model, model.module).differentiate(inputs, cotangents)
        for name, exact in truth.items():
            value = results[name]
            if value is None or exact is None:
                continue
            dtypes[name] = str(value.dtype).removeprefix("torch.")
            found = errors(value, exact)
            known = worst.get(name, found)
            worst[name] = Errors(max(found.max_abs, known.max_abs), max(found.rms, known.rms))
            if number == 1 and not _identical(value, previous[name]):
                unstable.add(name)
        previous = results if number == 0 else {}
    return worst, dtypes, tuple(sorted(unstable))


def _identical(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(one.nan_to_num(), other.nan_to_num())


def _ways(module: nn.Module) -> Iterator[Any]:
    """Equally good ways to compute; the first two are the same one."""
    yield _plainly()
    yield _plainly()
    yield _one_thread()
    yield _other_kernels()
    for seed in range(3):
        yield _moved(module, seed)


@contextmanager
def _plainly() -> Iterator[None]:
    yield


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _other_kernels() -> Iterator[None]:
    """Convolutions and products by other libraries, which sum in another order."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@contextmanager
def _moved(module: nn.Module, seed: int) -> Iterator[None]:
    """Every parameter moved by at most one unit in the last place; in half types, every fourth."""
    generator = torch.Generator().manual_seed(seed)
    originals = {name: parameter.data for name, parameter in trainable(module).items()}
    try:
        for name, data in originals.items():
            if data.is_floating_point():
                toward = torch.randint(-1, 2, data.shape, generator=generator).to(data.dtype)
                if data.dtype.itemsize < 4:
                    toward *= torch.rand(data.shape, generator=generator) < 0.25
                target = torch.where(toward == 0, data, toward * torch.inf)
                module.get_parameter(name).data = torch.nextafter(data, target.to(data.dtype))
        yield
    finally:
        for name, data in originals.items():
            module.get_parameter(name).data = data


class _References(TorchFunctionMode):
    """Calls of fused ops run their reference implementations, in plain differentiable torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _REFERENCES.get(_operator(func), func)(*args, **(kwargs or {}))


def _operator(func: Any) -> str:
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name
    return func._schema.name if isinstance(func, torch._ops.OpOverload) else ""


_REFERENCES: dict[str, Callable[..., Any]] = {
    operator.qualified_name: operator.reference for op in OPS.values() for operator in op.operators
}

_NARROW = {torch.float32, torch.float16, torch.bfloat16}
_NARROWING = {Tensor.float, Tensor.half, Tensor.bfloat16}


class _Float64(TorchFunctionMode):
    """Casts to narrower floating types become casts to float64, and so do tensors made in them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NARROWING:
            return args[0].double()
        raised = [_raised(a) for a in args]
        return func(*raised, **{name: _raised(a) for name, a in (kwargs or {}).items()})


def _raised(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
