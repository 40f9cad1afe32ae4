"""Program → ONNX: standard operators, and one node for each custom op, with a function body.

The exporter of torch translates the captured graph. Before it, custom ops become symbolic nodes of
domain `fuseport.ops`, and derivatives that ONNX has no operator for are decomposed; after it, the
nodes' function bodies are attached, so that a runtime without the op library runs the same file.
"""

import json
import logging
import re
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import (
    IdentityEliminationPass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.formats import Options
from fuseport.exporter.formats import _derivatives as derivatives
from fuseport.exporter.program import Program, one_line
from fuseport.ops import OPS

__all__ = ["EMBED_LIMIT", "SUFFIX", "write"]

SUFFIX = ".onnx"

# Above this size the file points into the bundle's weights; below it, it holds them, and is whole
# by itself. Protocol buffers end at 2 GB.
EMBED_LIMIT = 64 * 2**20


def write(program: Program, path: Path, options: Options) -> None:
    """Write `program` as an ONNX file, checked by onnx's own checker.

    Where the weights are larger than `EMBED_LIMIT`, the file refers to `options.weights` as
    external data; both must stay in one folder then.

    Raises:
        ExportFailed: an operator of the graph has no ONNX form.
    """
    try:
        model = _translate(program, options.opset)
    except Exception as error:  # the exporter raises errors of several unrelated types
        raise ExportFailed(f"ONNX refuses the {program.kind} program: {_reason(error)}") from error
    _rename_dimensions(model, program)
    _strip_metadata(model)
    _attach_functions(model, options.opset)
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    if size > EMBED_LIMIT:
        _refer_to(options.weights, model)
    ir.save(model, path)
    onnx.checker.check_model(str(path), full_check=False)


def _translate(program: Program, opset: int) -> ir.Model:
    exported = program.exported
    exported = exported.run_decompositions(_decompositions(exported))
    with _quiet():
        onnx_program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=opset,
            input_names=[spec.name for spec in program.inputs],
            output_names=[spec.name for spec in program.outputs],
            custom_translation_table=derivatives.translations(),
            optimize=False,
            verbose=False,
        )
    assert onnx_program is not None
    model = onnx_program.model
    model.graph.name = program.kind
    for clean in (
        IdentityEliminationPass(),
        RemoveUnusedNodesPass(),
        RemoveUnusedFunctionsPass(),
        RemoveUnusedOpsetsPass(),
    ):
        clean(model)
    return model


def _decompositions(exported: torch.export.ExportedProgram) -> dict[Any, Callable[..., Any]]:
    """For each operator in the graph that ONNX cannot take as it is, what to take instead."""
    targets = {
        n.target for n in exported.graph.nodes if isinstance(n.target, torch._ops.OpOverload)
    }
    table = derivatives.decompositions(targets)
    table[torch.ops.aten.view.default] = _reshape
    for op in OPS.values():
        for name, decomposition in op.lowering().decompositions().items():
            table[getattr(torch.ops.fuseport, name).default] = decomposition
    return table


def _reshape(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    # Symbolic nodes are contiguous where the ops are laid out like their inputs. A view may not fit
    # any more then; ONNX has no strides, so a copy here costs nothing there.
    contiguous = torch.clone(x, memory_format=torch.contiguous_format)
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(contiguous, shape)
    return result


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
    for op in OPS.values():
        lowering = op.lowering()
        for function in lowering.functions(opset):
            if (function.domain, function.name) in used:
                body = ir.serde.deserialize_function(function)
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
            shape=ir.Shape(header[name]["shape"]),
            name=name,
            base_dir=str(weights.parent),
        )


def _reason(error: BaseException) -> str:
    """What is at the bottom of a chain of exporter errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)


@contextmanager
def _quiet() -> Any:
    """Without the exporter's notes on packages that are not installed and its own deprecations."""
    loggers: Sequence[logging.Logger] = [
        logging.getLogger("torch.onnx"),
        logging.getLogger("onnxscript"),
    ]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
