"""Program → ONNX: standard operators, and one node for each custom op, with a function body.

The exporter of torch translates the captured graph. Before it, custom ops become symbolic nodes of
domain `fuseport.ops`, and derivatives that ONNX has no operator for are decomposed; after it, the
nodes' function bodies are attached, so that a runtime without the op library runs the same file.
"""

import json
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    IdentityEliminationPass,
    NameFixPass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _constants
from torch.onnx._internal.exporter._registration import ONNXRegistry

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.formats import Options
from fuseport.exporter.formats._numbers import written_out
from fuseport.exporter.formats._onnx.axes import from_the_front
from fuseport.exporter.formats._onnx.bfloat16 import in_float32
from fuseport.exporter.formats._onnx.checks import refuse, refuse_values, returning_conditions
from fuseport.exporter.formats._onnx.complex import in_parts
from fuseport.exporter.formats._onnx.decompositions import decompositions
from fuseport.exporter.formats._onnx.float64 import factors_apart, in_full
from fuseport.exporter.formats._onnx.functions import columns
from fuseport.exporter.formats._onnx.lacking import lacking
from fuseport.exporter.formats._onnx.lowering import VALUE_OF, Lowering
from fuseport.exporter.formats._onnx.padded import padded_apart
from fuseport.exporter.formats._onnx.promotion import promoted_by_known_values
from fuseport.exporter.formats._onnx.singular import asserting_regular
from fuseport.exporter.formats._onnx.splits import without_sequences
from fuseport.exporter.formats._onnx.sums import in_blocks, one_axis_at_a_time
from fuseport.exporter.formats._onnx.turned import turned_by_themselves
from fuseport.exporter.formats._onnx.versions import inside_of_version
from fuseport.exporter.formats._quiet import quiet
from fuseport.exporter.program import Program, one_line, shape_env
from fuseport.exporter.program.forward import dynamic_sizes, is_dynamic
from fuseport.exporter.program.loops.until import carrying
from fuseport.exporter.program.regions import refuse_writers
from fuseport.exporter.program.rewriting import Table
from fuseport.exporter.program.tracing._asked import asked_once
from fuseport.exporter.program.tracing._branches import alike_merged
from fuseport.exporter.program.tracing._unbound import unbound_sizes
from fuseport.ops import OPS
from fuseport.ops.registration import implementation
from fuseport.ops.spec import OpSpec

__all__ = [
    "DEFAULT",
    "EMBED_LIMIT",
    "SUFFIX",
    "portable",
    "value_names",
    "value_names_as",
    "write",
    "write_as",
]

Decompositions = Mapping[str, Callable[..., Any]]
"""Operators of fused ops, by qualified name, each with what computes the same."""

SUFFIX = ".onnx"
DEFAULT = True

# Above this size the file points into the bundle's weights; below it, it holds them, and is whole
# by itself. Protocol buffers end at 2 GB.
EMBED_LIMIT = 64 * 2**20


def write(program: Program, path: Path, options: Options) -> dict[str, Any]:
    """Write `program` as an ONNX file, checked by onnx's own checker.

    Where the weights are larger than `EMBED_LIMIT`, the file refers to `options.weights` as
    external data; both must stay in one folder then.

    Raises:
        ExportFailed: an operator of the graph has no ONNX form.
    """
    write_as(program, path, options, {})
    return {"opset": options.opset}


def write_as(program: Program, path: Path, options: Options, instead: Decompositions) -> set[str]:
    """The same, where some operators of fused ops become something else than their node.

    Returns:
        The types of all nodes of the graph.
    """
    refuse_writers(program.exported.graph, "form in ONNX of")
    try:
        model, _ = _translate(program, options.opset, instead)
    except Exception as error:  # of several unrelated types
        said = str(error) if isinstance(error, ExportFailed) else one_line(error)
        raise ExportFailed(f"ONNX refuses the {program.kind} program: {said}") from error
    refuse(model, program)
    _name_apart(model)
    _rename_dimensions(model, program)
    _strip_metadata(model)
    _attach_functions(model, options.opset)
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    if size > EMBED_LIMIT:
        _refer_to(options.weights, model)
    ir.save(model, path)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportFailed(f"ONNX's checker refuses {path.name}: {one_line(error)}") from error
    return {node.op_type for node in model.graph.all_nodes()}


def value_names(program: Program, options: Options) -> dict[str, str]:
    """Which value of the file that `write` makes each node of the program's graph is, by name.

    Nodes that ONNX computes otherwise, or only once where the graph does it twice, are left out.
    """
    return value_names_as(program, options, {})


def value_names_as(program: Program, options: Options, instead: Decompositions) -> dict[str, str]:
    """The same, of the file that `write_as` makes."""
    return _translate(program, options.opset, instead)[1]


def portable(op: OpSpec) -> Decompositions:
    """What each operator of a fused op becomes, by qualified name; empty without an ONNX form."""
    forms = op.lowering().decompositions() if op.lowers else {}
    return {op.operator(name).qualified_name: form for name, form in forms.items()}


def _translate(
    program: Program, opset: int, instead: Decompositions
) -> tuple[ir.Model, dict[str, str]]:
    """The model, and which of its values each node of the program's graph is, by name."""
    whole = written_out(in_parts(carrying(program.exported)), {round})
    exported, asserted = returning_conditions(asserting_regular(whole))
    lowering = Lowering(exported, _table(exported, instead))
    sizes = unbound_sizes(shape_env(exported))
    known = promoted_by_known_values()
    quietly, merged = quiet("torch.onnx", "onnxscript", "onnx_ir"), alike_merged()
    with quietly, _forms_read_once(), asked_once(), sizes, known, merged:
        try:
            onnx_program = torch.onnx.export(
                lowering,
                dynamo=True,
                opset_version=opset,
                input_names=[spec.name for spec in program.inputs],
                optimize=False,
                verbose=False,
            )
        except Exception as error:  # of several unrelated types
            raise ExportFailed(_reason(error, lowering.lowered)) from error
    _refuse_fixed(program)
    assert onnx_program is not None
    model = onnx_program.model
    model.graph.name = program.kind
    refuse_values(model, asserted)
    assert onnx_program.exported_program is not None
    inside_of_version(model, opset)
    in_full(model, onnx_program.exported_program)
    factors_apart(model)
    without_sequences(model)
    in_float32(model)
    in_blocks(model)
    one_axis_at_a_time(model)
    from_the_front(model)
    turned_by_themselves(model)
    padded_apart(model)
    values = _values(model, onnx_program.exported_program)
    with quiet("onnx_ir"):
        _clean(model)
    _part_outputs(model, program)
    # torch names a value after its operator, though a buffer or parameter be called `mean` too.
    NameFixPass()(model)
    _name_apart(model)
    left = {value for node in model.graph for value in node.outputs}
    named = {node: str(value.name) for node, value in values.items() if value in left}
    outputs = zip(program.exported.graph_signature.user_outputs, program.outputs, strict=True)
    return model, {**named, **{str(node): spec.name for node, spec in outputs}}


def _refuse_fixed(program: Program) -> None:
    """Refuse forms of operators that take a size of the example for that of all inputs."""
    for name, i, _, size in dynamic_sizes(program.exported, program.inputs):
        if not is_dynamic(size):
            raise ExportFailed(
                f"dimension {i} of input {name} comes out fixed at {size}, by its form of an "
                "operator; give the number instead of a name for it"
            )


def _clean(model: ir.Model) -> None:
    """Leave out what is there twice, or for nothing."""
    with _copies_kept(model):
        IdentityEliminationPass()(model)
    for clean in (
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        RemoveUnusedFunctionsPass(),
        RemoveUnusedOpsetsPass(),
    ):
        clean(model)


@contextmanager
def _copies_kept(model: ir.Model) -> Iterator[None]:
    """Let the graphs of an If return what they are given: onnx_ir would take it for their own."""
    given = [
        node
        for graph in model.graph.subgraphs()
        for node in (value.producer() for value in graph.outputs)
        if node is not None and node.op_type == "Identity"
    ]
    for node in given:
        node.op_type = "Copy"
    yield
    for node in given:
        node.op_type = "Identity"


@contextmanager
def _forms_read_once() -> Iterator[None]:
    """Let torch.onnx keep its forms of operators, 500 functions that it parses for each file."""
    with mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(_registry)):
        yield


_from_torchlib = ONNXRegistry.from_torchlib
_registries: dict[tuple[int, bool], ONNXRegistry] = {}


def _registry(opset_version: int = _constants.TORCHLIB_OPSET) -> ONNXRegistry:
    key = opset_version, "torchvision" in sys.modules  # some forms are of its operators
    if key not in _registries:
        _registries[key] = _from_torchlib(opset_version)
    return _registries[key]


def _values(model: ir.Model, translated: ExportedProgram) -> dict[str, ir.Value]:
    """The value of each node of the program's graph: torch names it after the node translated."""
    made = {str(value.name): value for node in model.graph for value in node.outputs}
    return {
        node.meta[VALUE_OF]: made[node.name]
        for node in translated.graph.nodes
        if VALUE_OF in node.meta and node.name in made
    }


def _part_outputs(model: ir.Model, program: Program) -> None:
    """Give each output a value and a name of its own: torch lets one value be several.

    One may be an input's, too, which torch itself would give the output's name.
    In the graphs of a Scan or an If, too: where a Scan's new state is its output as well, ONNX
    Runtime, 1.31 at least, takes memory of the one for the other.
    """
    for graph in model.graphs():
        values = graph.outputs
        for i, value in enumerate(tuple(values)):
            node = value.producer()
            # One that comes from outside a graph, or goes straight through, needs a node there.
            outside = node is None or node.graph is not graph
            if value in values[:i] or outside:
                copy = ir.node("Identity", [value])
                copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
                graph.append(copy)
                values[i] = copy.outputs[0]
    for value, spec in zip(model.graph.outputs, program.outputs, strict=True):
        value.name = spec.name


def _name_apart(model: ir.Model) -> None:
    """Give each value in the graphs of a Scan or an If a name that no other value has.

    ONNX Runtime refuses one that a value further below, outside, has too: the pass looks above.
    """
    taken: set[str | None] = set()
    for graph in model.graphs():
        values = [*graph.inputs, *(value for node in graph for value in node.outputs if value.name)]
        for value in values:
            name, count = value.name, 1
            while value.name in taken:
                value.name, count = f"{name}_{count}", count + 1
            taken.add(value.name)
        taken |= graph.initializers.keys()


def _table(exported: ExportedProgram, instead: Decompositions) -> Table:
    """What the operators that ONNX lacks, and the fused ops, become."""
    fused = {}
    for op in OPS.values():
        if implementation(op) is None:
            continue  # then the program cannot have it
        forms = {**portable(op), **instead}
        for operator in (o for o in op.operators if o.qualified_name in forms):
            fused[operator.overload] = forms[operator.qualified_name]
    return {**decompositions(exported), **fused}


def _rename_dimensions(model: ir.Model, program: Program) -> None:
    """Give torch's symbols the names of the dimensions, in every annotated shape."""
    names: dict[str, str] = {}
    for value, spec in zip(model.graph.inputs, program.inputs, strict=True):
        assert value.shape is not None
        for dim, name in zip(value.shape, spec.dims, strict=True):
            if isinstance(dim, ir.SymbolicDim) and isinstance(name, str) and name.isidentifier():
                names[str(dim.value)] = name
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in names) or r"(?!)")
    values = [*model.graph.inputs, *(v for node in model.graph.all_nodes() for v in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape(
                pattern.sub(lambda match: names[match.group()], str(d.value))
                if isinstance(d, ir.SymbolicDim) and d.value is not None
                else d
                for d in value.shape
            )


def _strip_metadata(model: ir.Model) -> None:
    """Drop what the exporter notes of the source code: it names paths of the exporting machine."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
    for value in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()


def _attach_functions(model: ir.Model, opset: int) -> None:
    used = {(node.domain, node.op_type) for node in model.graph.all_nodes()}
    lowerings: Iterator[Any] = (op.lowering() for op in OPS.values() if op.lowers)
    for lowering in (columns, *lowerings):
        for function in lowering.functions(opset):
            if (function.domain, function.name) in used:
                body = ir.serde.deserialize_function(function)
                if body.identifier() in model.functions:
                    raise ExportFailed(
                        f"two ops have a node {function.name} of the ONNX domain {function.domain}:"
                        " give yours a domain of its own"
                    )
                model.functions[body.identifier()] = body
                model.graph.opset_imports[lowering.DOMAIN] = lowering.VERSION


def _refer_to(weights: Path, model: ir.Model) -> None:
    """Make initializers that stand in a safetensors file external data within it."""
    with weights.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: Mapping[str, Any] = json.loads(file.read(length))
    for name, value in model.graph.initializers.items():
        if name not in header or value.const_value is None:
            continue
        begin, end = header[name]["data_offsets"]
        assert value.const_value.nbytes == end - begin
        value.const_value = ir.ExternalTensor(
            location=weights.name,
            offset=8 + length + begin,
            length=end - begin,
            dtype=value.const_value.dtype,
            shape=ir.Shape(value.const_value.shape.numpy()),  # a complex one's has its parts
            name=name,
            base_dir=str(weights.parent),
        )


def _reason(error: BaseException, translated: ExportedProgram | None) -> str:
    """What is at the bottom of a chain of exporter errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ExportFailed):
        return str(error)
    pattern = r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w*)'"
    unknown = re.search(pattern, str(error))
    if unknown is None:
        return one_line(error)
    operator, overload = unknown.groups()
    first = operator if overload in ("", "default") else f"{operator}.{overload}"
    said = f"there is no form of {', '.join(lacking(translated, first))}"
    name = operator.replace(".", "::", 1)
    if any(name == known.qualified_name for op in OPS.values() for known in op.operators):
        return f"{said}: give its OpSpec `onnx`, the bodies of its nodes (README)"
    return said
