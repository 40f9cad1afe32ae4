"""Symbolic ONNX nodes, each run in a runtime; what is around them runs in torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import onnx
import torch
from onnx import helper
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuseport.exporter.runtimes._numpy import to_array, to_tensor
from fuseport.exporter.runtimes._onnx_operators import typed_when_run
from fuseport.exporter.runtimes._onnxruntime import from_value, to_value
from fuseport.ops.lowering import Lowering

__all__ = ["Evaluator", "Kind", "Nodes", "Origin", "Runner", "Session", "Type"]

_OPSET = 20

Type = tuple[str, str, int]
"""Of a node: its domain, its name there, and the version of the domain."""

Kind = tuple[int, int]
"""Of a node's output: its dtype, as ONNX numbers them, and its rank."""

Origin = Literal["node", "around"] | None

Runner = Callable[[Type, Sequence[Tensor | None], Mapping[str, Any], Sequence[Kind]], list[Tensor]]


class Nodes(TorchDispatchMode):
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
            of = (options.get("domain", ""), op_type, options["version"])
            results: Any = self._runner(of, inputs, attributes, kinds)
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


class Evaluator:
    """onnx's own evaluator, on the nodes' bodies."""

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = lowering
        self._loaded: dict[Any, Any] = {}

    def __call__(
        self,
        op: Type,
        given: Sequence[Tensor | None],
        attributes: Mapping[str, Any],
        kinds: Sequence[Kind],
    ) -> list[Tensor]:
        from onnx.reference import ReferenceEvaluator

        key = _key(op, given, attributes, kinds)
        if key not in self._loaded:
            model = _model(self._lowering, op, given, attributes, kinds)
            self._loaded[key] = ReferenceEvaluator(typed_when_run(model))
        feed = {f"x{i}": to_array(t) for i, t in enumerate(given) if t is not None}
        return [to_tensor(array) for array in self._loaded[key].run(None, feed)]


class Session:
    """ONNX Runtime on the CPU: on the nodes' bodies, or by kernels alone.

    Args:
        lowering: of the op, for the bodies; None where there must be kernels.
        library: with kernels for the nodes, or None.
        threads: 0 for as many as ONNX Runtime takes.
    """

    def __init__(
        self, lowering: Lowering | None, library: str | None = None, threads: int = 0
    ) -> None:
        self._lowering = lowering
        self._library = library
        self._threads = threads
        self._loaded: dict[Any, Any] = {}

    def __call__(
        self,
        op: Type,
        given: Sequence[Tensor | None],
        attributes: Mapping[str, Any],
        kinds: Sequence[Kind],
    ) -> list[Tensor]:
        key = _key(op, given, attributes, kinds)
        if key not in self._loaded:
            model = _model(self._lowering, op, given, attributes, kinds)
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
    op: Type,
    given: Sequence[Tensor | None],
    attributes: Mapping[str, Any],
    kinds: Sequence[Kind],
) -> tuple[Any, ...]:
    types = tuple(None if t is None else (t.dtype, t.dim()) for t in given)
    return op, types, str(sorted(attributes.items())), tuple(kinds)


def _model(
    lowering: Lowering | None,
    op: Type,
    given: Sequence[Tensor | None],
    attributes: Mapping[str, Any],
    kinds: Sequence[Kind],
) -> onnx.ModelProto:
    """One node, between inputs and outputs of any sizes; with the bodies of `lowering`."""
    from torch.onnx.ops import _dtype_mappings

    codes: dict[torch.dtype, int] = {}
    for code, t in _dtype_mappings.ONNX_DTYPE_TO_TORCH_DTYPE.items():
        codes.setdefault(t, code)  # later ones are of ONNX's types of 4 bits, which lie in uint8
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
    domain, name, version = op
    node = helper.make_node(
        name, names, [f"y{i}" for i in range(len(kinds))], domain=domain, **attributes
    )
    opsets = {"": _OPSET, domain: version}
    model = helper.make_model(
        helper.make_graph([node], name, inputs, results),
        functions=[] if lowering is None else lowering.functions(_OPSET),
        opset_imports=[helper.make_opsetid(*opset) for opset in opsets.items()],
        ir_version=11,
    )
    if lowering is not None:
        onnx.checker.check_model(model)
    return model
