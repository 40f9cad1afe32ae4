"""What an op declares: the only abstractions that all ops share.

An op is one folder in `fuseport/ops/`, whose `__init__.py` has a public function and a `SPEC`; or,
of a user's own, any file with one. It declares and computes; what is made of it (registration here,
export and verification in `fuseport.exporter`) is derived from the `SPEC`.

Gradients are wired by name. The operator that computes the gradients of operator `f` takes, in any
order, inputs of `f`, outputs of `f`, and for each differentiable output `y` its cotangent `dy`; for
each differentiable input `x` it returns `dx`. An output without a cotangent is not differentiable.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from fuseport.ops.evidence import Evidence
from fuseport.ops.lowering import Bodies, Lowering

__all__ = [
    "FLOATING",
    "NAMESPACE",
    "Case",
    "Inputs",
    "OpSpec",
    "Operator",
    "Outputs",
    "PlantedBug",
    "Run",
    "as_tuple",
]

NAMESPACE = "fuseport"
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

Inputs = dict[str, Any]
"""The inputs of an operator by name, in the order of its schema: tensors, and plain values."""


Outputs = dict[str, Tensor]
"""What an operator returns, by name, in the order of its schema."""

Run = Callable[[Inputs], Outputs]
"""An operator's own computation."""


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What an operator, its reference or its fake returned, as a tuple where it is one tensor."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


@dataclass(frozen=True)
class Operator:
    """One operator `<namespace>::<name>`.

    The namespace is that of the op, which sets it. `schema` has fixed arity, tensors in and a tuple
    of tensors out, or one tensor, and equals the one that the op's `torch.cpp` declares.
    `reference` computes it in plain torch on any device, in float64 too; it checks its inputs, and
    is differentiable unless it computes gradients itself.
    `fake` checks the same way and returns empty outputs of the right shapes, dtypes and *strides*.
    `backward` names the operator that computes its gradients; an operator without one refuses
    to be differentiated.
    """

    name: str
    schema: str
    reference: Callable[..., Tensor | tuple[Tensor, ...]]
    fake: Callable[..., Tensor | tuple[Tensor, ...]]
    backward: str | None = None
    namespace: str = NAMESPACE

    @property
    def qualified_name(self) -> str:
        """`fuseport::<name>`, as the dispatcher knows it."""
        return f"{self.namespace}::{self.name}"

    @property
    def overload(self) -> Any:
        """The registered operator as graphs have it: `fuseport.ops.register()` comes first."""
        return getattr(getattr(torch.ops, self.namespace), self.name).default

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs, in order."""
        return tuple(a.name for a in self._parsed.arguments)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs, in order."""
        return tuple(r.name for r in self._parsed.returns)

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Calls the registered operator: `fuseport.ops.register()` comes first.

        Torch returns a single output as it is; here it is a tuple of one.
        """
        return as_tuple(self.overload(*inputs))

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """All inputs in order, of a call that names some and leaves others at their defaults."""
        known = {**dict(zip(self.inputs, args, strict=False)), **kwargs}
        return tuple(known.get(a.name, a.default_value) for a in self._parsed.arguments)

    @cached_property
    def _parsed(self) -> Any:
        return torch._C.parse_schema(self.name + self.schema)


@dataclass(frozen=True)
class Case:
    """One set of inputs to compare on: shapes and memory layout fixed, dtype and seed open.

    `make(dtype, seed)` returns the inputs of the operator named `operator`, which `dtype` is one
    of `dtypes`. The same arguments give the same bits. `lowers` says whether the op's ONNX lowering
    has a form of it; where not, the lowering refuses it.
    """

    name: str
    operator: str
    make: Callable[[torch.dtype, int], Inputs]
    dtypes: tuple[torch.dtype, ...] = FLOATING
    lowers: bool = True


@dataclass(frozen=True)
class PlantedBug:
    """A mistake that an implementation of this op could make, or has made: checks have to see it.

    `run(right, inputs)` takes the place of the operator named `operator`: `right(inputs)` is what
    that computes. Whatever it returns has the shapes, dtypes and strides of the right outputs.
    `description` says what is wrong; `source`, which published code was wrong so. Those that any op
    can have are in `fuseport.exporter.verify.mutants`; an op declares what only it can get wrong.
    """

    name: str
    description: str
    operator: str
    run: Callable[[Run, Inputs], Outputs]
    source: str = ""


@dataclass(frozen=True)
class OpSpec:
    """An op: its public function, the operators under it, the cases it is compared on.

    `package` is the import path of the op's folder; of a module, `__name__` there, for an op that
    is all Python. `bench` are cases of a size worth timing; where there are none, the largest of
    `cases` are timed. `lacks` says by column of `fuseport ops list` why the op has not something.

    For an op of the user's own, `namespace` is that of its operators, which may be registered with
    torch already, by Python or by the compiled `library` that is loaded then. `onnx` are its nodes'
    bodies, where it has no `onnx.py`. `stands_for` are parts of the names of functions, modules and
    kernels elsewhere that compute the same, by which a user is told of the op; `replaces` are
    operators of other packages, `<namespace>::<name>`, in whose place programs call it, with a
    function of the same arguments for each. `keeps_float32` are
    ends of the names that published models give to parameters which stay float32 in half precision,
    and `float32_arguments` arguments of its operators of which the same holds, whatever the name.
    `evidence` is what of a checkpoint's tensors tells that its model calls the op.
    `bugs` are mistakes that its checks have to see; `no_bugs` says by pattern, of
    `<kind>: <operator>: <place>`, why one is none in this op: what computes the same is no mistake.
    """

    name: str
    package: str
    function: Callable[..., Any]
    operators: tuple[Operator, ...]
    cases: tuple[Case, ...]
    bench: tuple[Case, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    namespace: str = NAMESPACE
    library: Path | None = None
    onnx: Bodies | None = None
    stands_for: tuple[str, ...] = ()
    replaces: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    keeps_float32: tuple[str, ...] = ()
    float32_arguments: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    bugs: tuple[PlantedBug, ...] = ()
    no_bugs: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Give the operators the namespace."""
        own = tuple(replace(operator, namespace=self.namespace) for operator in self.operators)
        object.__setattr__(self, "operators", own)

    def operator(self, name: str) -> Operator:
        """The operator of this op with that name; KeyError if there is none."""
        return {operator.name: operator for operator in self.operators}[name]

    @property
    def folder(self) -> Path:
        """Where the native sources of the op are."""
        location = importlib.import_module(self.package).__file__
        assert location is not None
        return Path(location).parent

    def has(self, file: str) -> bool:
        """Whether a file of that name is in the op's folder; False where the op is a module."""
        is_folder = hasattr(importlib.import_module(self.package), "__path__")
        return is_folder and (self.folder / file).is_file()

    def differentiable(self, operator: Operator) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The inputs that get a gradient, and the outputs that take a cotangent, in order."""
        if operator.backward is None:
            return (), ()
        gradient = self.operator(operator.backward)
        return (
            tuple(name for name in operator.inputs if "d" + name in gradient.outputs),
            tuple(name for name in operator.outputs if "d" + name in gradient.inputs),
        )

    @property
    def lowers(self) -> bool:
        """Whether the op has a form in ONNX."""
        return self.onnx is not None or self.has("onnx.py")

    def lowering(self) -> Lowering:
        """The op's ONNX lowering, `<package>.onnx`; imported here, since few uses need onnx."""
        if self.onnx is not None:
            return self.onnx.of(self)
        return cast(Lowering, importlib.import_module(f"{self.package}.onnx"))

    def native_lowering(self) -> ModuleType:
        """Its operators as those that ONNX or ONNX Runtime has: `<package>.onnx_native`."""
        return importlib.import_module(f"{self.package}.onnx_native")

    def backward_inputs(
        self, operator: Operator, inputs: Mapping[str, Any], cotangents: Mapping[str, Tensor]
    ) -> Inputs:
        """The inputs of the operator that computes the gradients of `operator` at `inputs`.

        `cotangents` holds `d<output>` for each differentiable output. Saved outputs come from
        the reference, in the dtypes of `inputs`.
        """
        assert operator.backward is not None, f"{operator.name} is not differentiable"
        outputs = as_tuple(operator.reference(*inputs.values()))
        known = {**inputs, **dict(zip(operator.outputs, outputs, strict=True)), **cotangents}
        return {name: known[name] for name in self.operator(operator.backward).inputs}
