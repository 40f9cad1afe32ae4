"""Checks of an op's ONNX form: its nodes' bodies in two runtimes, and fused kernels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Literal

import onnx
import torch
from onnx import helper
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuseport.exporter.runtimes._numpy import to_array, to_tensor
from fuseport.exporter.runtimes._onnxruntime import from_value, missing, to_value
from fuseport.exporter.verify.op_check.contract import calls
from fuseport.exporter.verify.op_check.gradients import standard
from fuseport.exporter.verify.op_check.subject import (
    Point,
    Subject,
    Trial,
    Unsupported,
    backward_inputs,
    contiguous,
    cotangents,
    outputs,
    points,
    size,
)
from fuseport.ops import build, ort
from fuseport.ops.spec import Inputs, Operator, as_tuple

__all__ = ["bodies", "fused"]

_OPSET = 20
_EVALUATED = 2_000  # elements of the inputs: onnx's evaluator is a Python loop
_BODY_DTYPES = (torch.float32, torch.float64, torch.float16)  # that ONNX Runtime computes in

Kind = tuple[int, int]  # of a node's output: its dtype, as ONNX numbers them, and its rank
Origin = Literal["node", "around"] | None
Runner = Callable[[str, Sequence[Tensor | None], Mapping[str, Any], Sequence[Kind]], list[Tensor]]


def bodies(subject: Subject) -> Iterator[Trial]:
    """Function bodies, run by ONNX Runtime and by onnx's evaluator, compute what the op does.

    Forward and backward, on the cases that have a form in ONNX; the others are refused.
    """
    lowering = _lowering(subject)
    runners: dict[str, Runner] = {"onnx's evaluator": _Evaluator(lowering)}
    if missing() is None:
        runners["ONNX Runtime"] = _Session(lowering)

    def trial(point: Point, runner: Runner) -> str | None:
        operator, given = subject.forward(point.case), contiguous(point.inputs())
        seeds = cotangents(subject, operator, given, "as it is") if operator.backward else None
        right = standard(subject, operator, given, seeds)
        found, origins = _lowered(lowering, runner, operator, list(given.values()))
        kept = zip(operator.outputs, found, origins, strict=True)
        if reason := right.fault({name: y for name, y, origin in kept if origin}):
            return reason
        if seeds is None:
            return None
        gradient = subject.gradient(operator)
        wanted = backward_inputs(subject, operator, operator.reference, given, seeds)
        found, _ = _lowered(lowering, runner, gradient, list(wanted.values()))
        by_name = dict(zip(gradient.outputs, found, strict=True))
        names = subject.spec.differentiable(operator)[0]
        return right.fault({f"grad/{name}": by_name["d" + name] for name in names})

    for point in points(subject, *_BODY_DTYPES, empty=False):
        if not point.case.lowers:
            if point.dtype == point.case.dtypes[0]:
                for operator, make in calls(subject, point):
                    where = f"{operator.name}, {point}, without a form in ONNX"
                    yield where, partial(_refused, lowering, operator, make)
            continue
        for name, runner in runners.items():
            small = size(point) <= _EVALUATED and point.dtype != torch.float16
            if point.dtype in _BODY_DTYPES and (name == "ONNX Runtime" or small):
                yield f"{point}, {name}", partial(trial, point, runner)


def fused(subject: Subject) -> Iterator[Trial]:
    """Kernels inside ONNX Runtime give the bits of torch's, on one thread and on two.

    So where an output is the node's own; what is reshaped around nodes may be summed otherwise, and
    has to be as near to float64 as plain torch's.
    """
    lowering = _lowering(subject)
    if not subject.spec.has("ort.cpp"):
        raise Unsupported("the op has no ort.cpp")
    if reason := missing():
        raise Unsupported(reason)
    try:
        library = ort.library(subject.all_ops)
    except build.BuildError as error:
        raise Unsupported(str(error)) from error

    def trial(operator: Operator, make: Callable[[], Inputs], runner: Runner) -> str | None:
        given = contiguous(make())
        found, origins = _lowered(lowering, runner, operator, list(given.values()))
        expected = outputs(operator, given)
        compared = list(zip(operator.outputs, found, expected, origins, strict=True))
        for name, mine, torchs, origin in compared:
            if origin == "node" and (reason := _apart(mine, torchs)):
                return f"{name} {reason}"
        others = {name: mine for name, mine, _, origin in compared if origin == "around"}
        return standard(subject, operator, given, None).fault(others) if others else None

    runners = {count: _Session(lowering, str(library), count) for count in (1, 2)}
    for point in points(subject):
        if point.case.lowers:
            for operator, make in calls(subject, point):
                for count, runner in runners.items():
                    where = f"{operator.name}, {point}, threads: {count}"
                    yield where, partial(trial, operator, make, runner)


def _lowering(subject: Subject) -> ModuleType:
    if not subject.spec.has("onnx.py"):
        raise Unsupported("the op has no onnx.py")
    return subject.spec.lowering()


def _refused(lowering: ModuleType, operator: Operator, make: Callable[[], Inputs]) -> str | None:
    try:
        lowering.decompositions()[operator.name](*make().values())
    except ValueError:
        return None
    return "the lowering takes a case that it has no form of"


def _lowered(
    lowering: ModuleType, runner: Runner, operator: Operator, given: Sequence[Any]
) -> tuple[tuple[Tensor, ...], list[Origin]]:
    """What an operator's decomposition computes, its nodes in a runtime.

    Beside the outputs, where each comes from. Saved outputs that the backward node does without
    come from none, and hold nothing.
    """
    nodes = _Nodes(runner, given)
    with nodes, torch.no_grad():
        found = lowering.decompositions()[operator.name](*given)
    results = as_tuple(found)
    return results, [nodes.origin(result) for result in results]


class _Nodes(TorchDispatchMode):
    """Runs symbolic ONNX nodes in a runtime, and follows what becomes of their results."""

    def __init__(self, runner: Runner, given: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runner = runner
        self._given = {id(t) for t in given}
        self._origins: dict[int, Origin] = {}
        self._kept: list[Any] = []  # so that no id is given away again

    def origin(self, t: Tensor) -> Origin:
        """`node` for a node's own output on the operator's own inputs; `around` if reshaped."""
        return self._origins.get(id(t))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "onnx_symbolic":
            inputs, op_type, dtypes = args
            single = name == "_symbolic"
            attributes = _attributes(options)
            shapes = [options["shape"]] if single else options["shapes"]
            kinds = list(zip([dtypes] if single else dtypes, map(len, shapes), strict=True))
            results: Any = self._runner(op_type, inputs, attributes, kinds)
            own = all(t is None or id(t) in self._given for t in inputs)
            self._follow(results, "node" if own else "around")
            return results[0] if single else results
        results = func(*args, **options)
        flat = torch.utils._pytree.tree_leaves((args, options))
        if any(id(t) in self._origins for t in flat):
            self._follow(torch.utils._pytree.tree_leaves(results), "around")
        return results

    def _follow(self, results: Sequence[Any], origin: Origin) -> None:
        self._kept += results
        for result in results:
            self._origins.setdefault(id(result), origin)


def _attributes(options: Mapping[str, Any]) -> dict[str, Any]:
    from torch.onnx.ops import _symbolic_impl

    names = ("attr_keys", "attr_types", "attr_pos", "attr_ints", "attr_floats", "attr_strs")
    return _symbolic_impl.EncodedAttrs(**{n: list(options.get(n, ())) for n in names}).to_dict()


class _Evaluator:
    """onnx's own evaluator, on the nodes' bodies."""

    def __init__(self, lowering: ModuleType) -> None:
        self._lowering = lowering
        self._loaded: dict[Any, Any] = {}

    def __call__(
        self,
        op: str,
        given: Sequence[Tensor | None],
        attributes: Mapping[str, Any],
        kinds: Sequence[Kind],
    ) -> list[Tensor]:
        from onnx.reference import ReferenceEvaluator

        key = _key(op, given, attributes, kinds)
        if key not in self._loaded:
            model = _model(self._lowering, op, given, attributes, kinds, body=True)
            self._loaded[key] = ReferenceEvaluator(model)
        feed = {f"x{i}": to_array(t) for i, t in enumerate(given) if t is not None}
        return [to_tensor(array) for array in self._loaded[key].run(None, feed)]


class _Session:
    """ONNX Runtime on the CPU: on the nodes' bodies, or, with a library, by its kernels alone."""

    def __init__(self, lowering: ModuleType, library: str | None = None, threads: int = 0) -> None:
        self._lowering = lowering
        self._library = library
        self._threads = threads
        self._loaded: dict[Any, Any] = {}

    def __call__(
        self,
        op: str,
        given: Sequence[Tensor | None],
        attributes: Mapping[str, Any],
        kinds: Sequence[Kind],
    ) -> list[Tensor]:
        key = _key(op, given, attributes, kinds)
        if key not in self._loaded:
            body = self._library is None
            model = _model(self._lowering, op, given, attributes, kinds, body=body)
            self._loaded[key] = self._opened(model)
        session = self._loaded[key]
        feed = {f"x{i}": to_value(t) for i, t in enumerate(given) if t is not None}
        names = [output.name for output in session.get_outputs()]
        return [from_value(value) for value in session.run_with_ort_values(names, feed)]

    def _opened(self, model: onnx.ModelProto) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = self._threads
        if self._library is not None:
            options.register_custom_ops_library(self._library)
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )


def _key(
    op: str,
    given: Sequence[Tensor | None],
    attributes: Mapping[str, Any],
    kinds: Sequence[Kind],
) -> tuple[Any, ...]:
    types = tuple(None if t is None else (t.dtype, t.dim()) for t in given)
    return op, types, str(sorted(attributes.items())), tuple(kinds)


def _model(
    lowering: ModuleType,
    op: str,
    given: Sequence[Tensor | None],
    attributes: Mapping[str, Any],
    kinds: Sequence[Kind],
    *,
    body: bool,
) -> onnx.ModelProto:
    """One node, between inputs and outputs of any sizes; with all bodies, or none."""
    from torch.onnx.ops import _dtype_mappings

    codes = {t: code for code, t in _dtype_mappings.ONNX_DTYPE_TO_TORCH_DTYPE.items()}
    inputs = [
        helper.make_tensor_value_info(f"x{i}", codes[t.dtype], [None] * t.dim())
        for i, t in enumerate(given)
        if t is not None
    ]
    results = [
        helper.make_tensor_value_info(f"y{i}", code, [None] * rank)
        for i, (code, rank) in enumerate(kinds)
    ]
    names = ["" if t is None else f"x{i}" for i, t in enumerate(given)]
    node = helper.make_node(
        op, names, [f"y{i}" for i in range(len(kinds))], domain=lowering.DOMAIN, **attributes
    )
    opsets = [
        helper.make_opsetid("", _OPSET),
        helper.make_opsetid(lowering.DOMAIN, lowering.VERSION),
    ]
    model = helper.make_model(
        helper.make_graph([node], op, inputs, results),
        functions=lowering.functions(_OPSET) if body else [],
        opset_imports=opsets,
        ir_version=10,
    )
    if body:
        onnx.checker.check_model(model)
    return model


def _apart(one: Tensor, other: Tensor) -> str | None:
    """How two tensors differ, but for the bits of NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"is {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
    same = (one == other) | (one.isnan() & other.isnan())
    if not bool(same.all()) or not torch.equal(one.signbit(), other.signbit()):
        return f"has other bits than torch's in {int((~same).sum())} of {same.numel()} elements"
    return None
