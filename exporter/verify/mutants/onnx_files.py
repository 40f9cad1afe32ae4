"""Wrong ONNX files, made of right ones."""

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import onnx
from onnx import external_data_helper, helper, numpy_helper
from torch import Tensor

from fuseport.exporter.program.refusing import HOLDS
from fuseport.exporter.runtimes._numpy import to_array, to_tensor
from fuseport.exporter.verify.mutants.files import WEIGHTS, Asked, Made
from fuseport.exporter.verify.mutants.onnx_edits import EDITS, Edit, applied, sites

__all__ = ["made"]

Model = Any  # onnx.ModelProto: onnx has no types
Change = Callable[[Model], None]

_FLOATING = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)


def made(asked: Asked) -> Iterator[Made]:
    """See `files.Maker`."""
    model = onnx.load(asked.artifact, load_external_data=False)
    folder = asked.artifact.parent

    def of(kind: str, place: str, change: Change) -> Made:
        return Made(kind, place, partial(_write, model, change, folder))

    weights = [t.name for t in model.graph.initializer if t.data_type in _FLOATING]
    for kind, (_, holds, edit) in WEIGHTS.items():
        fitting = (n for n in weights if holds(_value(model, n, folder)))
        for name in asked.drawn(fitting, kind):
            yield of(kind, name, partial(_weight, name, edit, folder))
    outputs = [o.name for o in model.graph.output if o.type.tensor_type.elem_type in _FLOATING]
    for kind, change in _OUTPUTS.items():
        for name in asked.drawn(outputs, kind):
            yield of(kind, name, partial(change, name))
    for one, other in asked.drawn(_pairs(model), "outputs swapped"):
        yield of("outputs swapped", f"{one} and {other}", partial(_swapped, one, other))
    shapes = {
        spec["name"]: [asked.sizes.get(d, d) for d in spec["dims"]]
        for spec in asked.program["inputs"]
    }
    sized = [
        node.output[0]
        for node in model.graph.node
        if node.op_type == "Shape" and node.input[0] in shapes and not node.name.startswith(HOLDS)
    ]
    for name in asked.drawn(sized, "size baked in"):
        yield of("size baked in", name, partial(_baked, name, shapes))
    for kind, mistake in EDITS.items():
        results = [value.name for value in model.graph.output]
        found = [(-1, site) for site in sites(model.graph.node, results, mistake)]
        for i, function in enumerate(model.functions):
            found += [(i, site) for site in sites(function.node, function.output, mistake)]
        for where, site in asked.drawn(found, kind):
            owner = model.graph if where < 0 else model.functions[where]
            words = applied(copy.deepcopy(owner).node, mistake, site)
            place = words if where < 0 else f"{owner.name}: {words}"
            yield of(f"file: {kind}", place, partial(_edited, where, site, mistake))


def _write(model: Model, change: Change, folder: Path, path: Path) -> None:
    wrong = copy.deepcopy(model)
    change(wrong)
    for tensor in wrong.graph.initializer:
        if external_data_helper.uses_external_data(tensor):
            name = external_data_helper.ExternalDataInfo(tensor).location
            beside = path.parent / name  # where a runtime looks for it, and follows no symlink
            if not beside.exists():
                try:
                    beside.hardlink_to(folder / name)
                except OSError:  # on another file system
                    shutil.copyfile(folder / name, beside)
    onnx.save(wrong, path)


def _value(model: Model, name: str, folder: Path) -> Tensor:
    tensor = copy.deepcopy(next(t for t in model.graph.initializer if t.name == name))
    if external_data_helper.uses_external_data(tensor):
        external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    return to_tensor(numpy_helper.to_array(tensor))


def _weight(name: str, edit: Callable[[Tensor], Tensor], folder: Path, model: Model) -> None:
    wrong = numpy_helper.from_array(to_array(edit(_value(model, name, folder))), name)
    next(t for t in model.graph.initializer if t.name == name).CopyFrom(wrong)


def _behind(output: str, model: Model, ops: Sequence[tuple[str, float | None]]) -> None:
    """Operators more at the end of an output, each with a constant."""
    kind = next(o.type.tensor_type.elem_type for o in model.graph.output if o.name == output)
    nodes = model.graph.node
    last = f"{output}_right"
    for node in nodes:
        node.output[:] = [last if name == output else name for name in node.output]
        node.input[:] = [last if name == output else name for name in node.input]
    for i, (op, value) in enumerate(ops):
        result = output if i == len(ops) - 1 else f"{output}_{i}"
        if op == "Cast":
            to = onnx.TensorProto.FLOAT16 if i == 0 else kind
            nodes.append(helper.make_node("Cast", [last], [result], to=to))
        else:
            dtype = helper.tensor_dtype_to_np_dtype(kind)
            constant = numpy_helper.from_array(numpy.asarray(value, dtype), f"{result}_by")
            model.graph.initializer.append(constant)
            nodes.append(helper.make_node(op, [last, constant.name], [result]))
        last = result


def _dropped(output: str, model: Model) -> None:
    kept = [value for value in model.graph.output if value.name != output]
    del model.graph.output[:]
    model.graph.output.extend(kept)


_OUTPUTS: dict[str, Callable[[str, Model], None]] = {
    "output's sign": lambda name, model: _behind(name, model, [("Mul", -1.0)]),
    "output zero": lambda name, model: _behind(name, model, [("Mul", 0.0)]),
    "output off by 0.1 %": lambda name, model: _behind(name, model, [("Mul", 1.001)]),
    "output cast to half": lambda name, model: _behind(
        name, model, [("Cast", None), ("Cast", None)]
    ),
    "output dropped": _dropped,
}


def _pairs(model: Model) -> list[tuple[str, str]]:
    """Outputs of one shape and dtype; of any, where no two are alike."""

    def facts(value: onnx.ValueInfoProto) -> bytes:
        kind: bytes = value.type.SerializeToString()
        return kind

    values = list(model.graph.output)
    every = [(a.name, b.name) for i, a in enumerate(values) for b in values[i + 1 :]]
    kinds = {value.name: facts(value) for value in values}
    return [pair for pair in every if kinds[pair[0]] == kinds[pair[1]]] or every


def _swapped(one: str, other: str, model: Model) -> None:
    names = {one: other, other: one}
    for node in model.graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
        node.input[:] = [names.get(name, name) for name in node.input]


def _baked(name: str, shapes: dict[str, list[int]], model: Model) -> None:
    node = next(n for n in model.graph.node if name in n.output)
    begin = next((a.i for a in node.attribute if a.name == "start"), 0)
    end = next((a.i for a in node.attribute if a.name == "end"), None)
    sizes = numpy.asarray(shapes[node.input[0]][begin:end], numpy.int64)
    value = numpy_helper.from_array(sizes)
    node.CopyFrom(helper.make_node("Constant", [], [name], value=value))


def _edited(where: int, site: Sequence[int], edit: Edit, model: Model) -> None:
    owner = model.graph if where < 0 else model.functions[where]
    applied(owner.node, edit, site)
