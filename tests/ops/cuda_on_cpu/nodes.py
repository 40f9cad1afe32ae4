"""Ops as their nodes compute them, in a session with kernels for the CUDA provider."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.runtimes._onnxruntime import from_value, to_value
from fuseport.exporter.verify.op_check.symbolic import Kind, Nodes, Session, Type
from fuseport.ops import OPS, ort
from fuseport.ops.spec import Case, Inputs, Operator, OpSpec, as_tuple
from fuseport.tests.ops.cuda_on_cpu import stand_in

__all__ = [
    "CASES",
    "OF_OPERATOR",
    "SPECS",
    "OnNaN",
    "by_nodes",
    "check",
    "check_case",
    "contiguous",
]

SPECS = [spec for spec in OPS.values() if ort.bound(spec, "cuda")]
OF_OPERATOR = {operator.name: spec for spec in SPECS for operator in spec.operators}
# Of one number a norm's gradient is nothing but rounding.
_OF_ONE = ("one_of_everything", "channels_1", "groups_of_1")
# Nodes see no layouts: their inputs are contiguous.
CASES = [
    case
    for spec in SPECS
    for case in spec.cases
    if case.lowers and not case.name.startswith("layout")
    if case.name.removesuffix("_gate_before_norm") not in _OF_ONE
]
Runner = Callable[..., list[Tensor]]


class OnNaN(Session):
    """Runs each node twice, the second time into memory that is full of NaN."""

    def __init__(self, library: Path) -> None:
        super().__init__(None, str(library), 1)

    def __call__(
        self,
        op: Type,
        given: Sequence[Tensor | None],
        attributes: Mapping[str, Any],
        kinds: Sequence[Kind],
    ) -> list[Tensor]:
        self._loaded.clear()
        once = super().__call__(op, given, attributes, kinds)
        [session] = self._loaded.values()
        binding = session.io_binding()
        for i, t in enumerate(given):
            assert t is not None
            self.bind(binding, f"x{i}", t)
        for i, t in enumerate(once):
            binding.bind_ortvalue_output(f"y{i}", to_value(torch.full_like(t, torch.nan)))
        session.run_with_iobinding(binding)
        again = [from_value(value) for value in binding.get_outputs()]
        assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))
        return again

    def bind(self, binding: Any, name: str, t: Tensor) -> None:
        """Make a tensor an input of the second run."""
        binding.bind_ortvalue_input(name, to_value(t))


def contiguous(inputs: Inputs) -> Inputs:
    return {k: v.contiguous() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def by_nodes(
    run: Runner, spec: OpSpec, operator: Operator, given: Sequence[Any]
) -> dict[str, Tensor]:
    """The outputs of nodes of the operator's form in ONNX; it lacks some that only torch reads."""
    nodes = Nodes(run, given)
    with nodes, torch.no_grad():
        found = as_tuple(spec.lowering().decompositions()[operator.name](*given))
    named = zip(operator.outputs, found, strict=True)
    return {name: t.contiguous() for name, t in named if nodes.origin(t)}


def check(
    run: Runner,
    spec: OpSpec,
    operator: Operator,
    inputs: Inputs,
    *,
    into: Inputs | None = None,
    scale: int = 1,
) -> dict[str, Tensor]:
    """What nodes compute of contiguous inputs is as good as what the reference does.

    Args:
        run: how nodes are run.
        spec: of the op.
        operator: of it, that is lowered.
        inputs: of the operator.
        into: where the reference's outputs go, too.
        scale: of the ulps that are allowed beside the reference's error.
    """
    truth = stand_in.by_reference(operator, *stand_in.widened(inputs).values())
    baseline = stand_in.by_reference(operator, *inputs.values())
    got = by_nodes(run, spec, operator, list(inputs.values()))
    expected = [
        {name: t.contiguous() for name, t in zip(operator.outputs, those, strict=True)}
        for those in (baseline, truth)
    ]
    those = ({name: values[name] for name in got} for values in expected)
    stand_in.assert_as_good(got, *those, scale=scale)
    if into is not None:
        into |= expected[0]
    return got


def check_case(run: Runner, case: Case, dtype: torch.dtype, *, scale: int = 1) -> dict[str, Tensor]:
    """Outputs, and gradients where the operator has any."""
    spec = OF_OPERATOR[case.operator]
    operator = spec.operator(case.operator)
    inputs = contiguous(case.make(dtype, 1))
    saved: Inputs = {}
    got = check(run, spec, operator, inputs, into=saved, scale=scale)
    assert got.keys() >= set(spec.differentiable(operator)[1])
    if operator.backward is None:
        return got
    gradient = spec.operator(operator.backward)
    known = {**inputs, **saved, **stand_in.cotangents_of(spec, operator, inputs, 2)}
    given = {name: known[name] for name in gradient.inputs}
    found = check(run, spec, gradient, given, scale=scale)
    assert found.keys() == set(gradient.outputs)
    return got | found
