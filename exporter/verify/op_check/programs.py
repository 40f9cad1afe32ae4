"""Checks that compilers and serializers of torch's keep an op as it is, gradients included."""

import io
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.verify.op_check.subject import (
    Point,
    Subject,
    Trial,
    Unsupported,
    cotangents,
    differentiated,
    outputs,
    points,
    tensors,
    unlike,
)
from fuseport.ops import build
from fuseport.ops.spec import Inputs, Operator, as_tuple

__all__ = ["aot_inductor", "compiled", "export", "torchscript"]

_numbers = itertools.count()
_CALLS = 3  # TorchScript optimises after two: a model was once right twice, and wrong then


def torchscript(subject: Subject) -> Iterator[Trial]:
    """Scripted, saved and loaded, an operator gives eager's bits, three times, and gradients."""

    def trial(point: Point) -> str | None:
        operator, given = subject.forward(point.case), point.inputs()
        saved = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            torch.jit.save(_scripted(operator, given), saved)
            saved.seek(0)
            loaded = torch.jit.load(saved)
        seeds = cotangents(subject, operator, given, "as it is")
        expected = differentiated(subject, operator, operator, given, seeds)
        for number in range(1, _CALLS + 1):
            found = differentiated(subject, operator, loaded, given, seeds)
            if reason := unlike(expected, found, f"in TorchScript's call {number}"):
                return reason
        return None

    return ((str(point), partial(trial, point)) for point in points(subject, torch.float32))


def export(subject: Subject) -> Iterator[Trial]:
    """Exported with dynamic shapes, saved and loaded, an operator gives eager's bits.

    At its own sizes, and at those of every other case that the program accepts.
    """

    def trial(point: Point) -> str | None:
        operator, given = subject.forward(point.case), point.inputs()
        module = _Call(operator, given)
        example = tuple(map(_dense, tensors(given).values()))
        auto = tuple(dict.fromkeys(range(t.dim()), torch.export.Dim.AUTO) for t in example)
        with torch.no_grad():
            program = torch.export.export(module, example, dynamic_shapes=(auto,))
        saved = io.BytesIO()
        torch.export.save(program, saved)
        saved.seek(0)
        loaded = torch.export.load(saved).module()
        for other in (point, *points(subject, point.dtype)):
            there = other.inputs()
            alike = other.case.operator == operator.name and _form(there) == _form(given)
            if not alike:
                continue
            try:
                found = loaded(*tensors(there).values())
            except (AssertionError, RuntimeError, TypeError, ValueError):
                if other is point:
                    raise
                continue  # of a size that the program was specialised for another of
            expected = outputs(operator, there)
            names = operator.outputs
            if reason := unlike(
                dict(zip(names, expected, strict=True)),
                dict(zip(names, found, strict=True)),
                f"in the exported program, at {other}",
            ):
                return reason
        return None

    for point in points(subject, torch.float32, empty=False):
        yield str(point), partial(trial, point)


def compiled(subject: Subject) -> Iterator[Trial]:
    """Under torch.compile, Inductor and all, results and gradients have eager's bits."""
    _need_compiler()

    def trial(point: Point) -> str | None:
        operator, given = subject.forward(point.case), point.inputs()
        module = _Transposed(operator, given)
        torch._dynamo.reset()
        has_gradients = operator.backward is not None
        found = _gradients(torch.compile(module, fullgraph=True), module.bases, has_gradients)
        expected = _gradients(module, module.bases, has_gradients)
        return unlike(expected, found, "under torch.compile")

    for point in _one_for_each(subject):
        yield str(point), partial(trial, point)


def aot_inductor(subject: Subject) -> Iterator[Trial]:
    """Compiled ahead of time, results have eager's bits, for inputs transposed in memory too."""
    _need_compiler()

    def trial(point: Point) -> str | None:
        operator, given = subject.forward(point.case), point.inputs()
        module = _Transposed(operator, given)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, on its own code
            program = torch.export.export(module, module.bases)
            path = str(Path(folder) / "op.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=path)
            found = torch._inductor.aoti_load_package(path)(*module.bases)
            expected = module(*module.bases)
        return unlike(_numbered(expected), _numbered(found), "from AOTInductor")

    for point in _one_for_each(subject):
        yield str(point), partial(trial, point)


class _Call(nn.Module):
    """An operator, with its plain inputs fixed: tensors in, tensors out."""

    def __init__(self, operator: Operator, given: Inputs) -> None:
        super().__init__()
        self._operator = operator.overload
        self._fixed = [None if isinstance(v, Tensor) else v for v in given.values()]
        self._tensor = [isinstance(v, Tensor) for v in given.values()]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        left = list(given)
        values = [
            left.pop(0) if is_tensor else fixed
            for is_tensor, fixed in zip(self._tensor, self._fixed, strict=True)
        ]
        return as_tuple(self._operator(*values))


class _Transposed(_Call):
    """The same between code of Inductor's own: inputs are transposed before, outputs copied after.

    Where the fake's strides are not the kernel's, that code reads the wrong elements.
    """

    def __init__(self, operator: Operator, given: Inputs) -> None:
        super().__init__(operator, given)
        made = tensors(given).values()
        self.bases = tuple(t.detach().mT.contiguous() if t.dim() > 1 else t for t in made)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        found = super().forward(*(t.mT if t.dim() > 1 else t for t in given))
        # Into new memory: doubled in place, an element's place would not matter.
        return tuple(torch.stack([y, y * 2]) if y.is_floating_point() else y for y in found)


def _gradients(
    run: Callable[..., Any], bases: Sequence[Tensor], has_gradients: bool
) -> dict[str, Tensor | None]:
    leaves = [t.detach().clone() for t in bases]
    for leaf in leaves:
        leaf.requires_grad_(has_gradients and leaf.is_floating_point())
    results = run(*leaves)
    reached = [y for y in results if y.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    found = _numbered(results)
    if reached:
        seeds = [torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype) for y in reached]
        gradients = torch.autograd.grad(reached, wanted, seeds, allow_unused=True)
        found.update({f"gradient {i}": g for i, g in enumerate(gradients)})
    return found


def _numbered(results: Sequence[Tensor]) -> dict[str, Tensor | None]:
    return {f"output {i}": y.detach() for i, y in enumerate(results)}


def _one_for_each(subject: Subject) -> Iterator[Point]:
    """A case for each operator, in float32: the largest of those that nothing odd is about."""
    found: dict[str, Point] = {}
    for point in points(subject, torch.float32, empty=False):
        real = all(not t.is_complex() for t in tensors(point.inputs()).values())
        if real and point.case.operator not in found:
            found[point.case.operator] = point
    if not found:
        raise Unsupported("there is no case of real numbers")
    yield from found.values()


def _need_compiler() -> None:
    try:
        build.compiler_command()
    except build.BuildError as error:
        raise Unsupported(str(error)) from error


def _dense(t: Tensor) -> Tensor:
    """As it is, unless memory has gaps: of such examples torch.export loses symbols at times."""
    return t if torch.empty_like(t).stride() == t.stride() else t.contiguous()


def _form(given: Inputs) -> Inputs:
    """What an exported program fixes: plain values, and ranks and dtypes of tensors."""
    return {k: (v.dim(), v.dtype) if isinstance(v, Tensor) else v for k, v in given.items()}


def _scripted(operator: Operator, given: Inputs) -> torch.jit.ScriptModule:
    """A module that calls the operator and nothing else, compiled from text."""
    kinds = {name: type(v).__name__ for name, v in given.items()}
    names = ", ".join(given)
    signature = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
    count = len(operator.outputs)
    returns = "Tensor" if count == 1 else f"Tuple[{', '.join(['Tensor'] * count)}]"
    # TorchScript keeps what was compiled under a class's name: a new one each time.
    kind = type(f"Call{next(_numbers)}", (torch.jit.ScriptModule,), {})
    module: torch.jit.ScriptModule = kind()
    module.define(
        f"def forward(self, {signature}) -> {returns}:\n"
        f"    return torch.ops.{operator.namespace}.{operator.name}({names})\n"
    )
    return module
