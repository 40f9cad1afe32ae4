"""An `.onnx` file with values of its graph as outputs more, and parts of it by themselves."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import onnx
import torch
from torch import Tensor

from fuseport.exporter import formats
from fuseport.exporter.program import Program
from fuseport.exporter.verify.localise.trial import UnknownError
from fuseport.exporter.verify.localise.written import Written

__all__ = ["OnnxFile"]

_TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int64: onnx.TensorProto.INT64,
    torch.int32: onnx.TensorProto.INT32,
    torch.int16: onnx.TensorProto.INT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.bool: onnx.TensorProto.BOOL,
}


@dataclass(frozen=True)
class OnnxFile:
    """A candidate, see `candidates.Candidate`.

    Its values are known by the names that the exporter gives them, which it says again from the
    captured program; tools that change a file leave most of them. `given` are its inputs.
    """

    runtime: str
    artifact: Path
    names: Mapping[str, str]
    values: Mapping[str, Tensor]  # of the program as captured, without data
    given: Sequence[str]
    method: Literal["intermediates", "bisection"] = "intermediates"

    @classmethod
    def of(
        cls,
        runtime: str,
        format_name: str,
        artifact: Path,
        program: Program,
        opset: int,
        weights: Path,
    ) -> "OnnxFile":
        """The candidate for a file that was made from `program`, or changed after that."""
        named = _names(format_name, program, formats.Options(weights, opset))
        there = {name for node in _read(artifact).graph.node for name in node.output}
        found = {node: value for node, value in named.items() if value in there}
        values = {n.name: n.meta.get("val") for n in program.exported.graph.nodes}
        tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
        inputs = zip(program.inputs, program.exported.graph_signature.user_inputs, strict=True)
        given = {str(node): spec.name for spec, node in inputs}
        return cls(runtime, artifact, {**given, **found}, tensors, tuple(given))

    @property
    def visible(self) -> frozenset[str]:
        """As `candidates.Candidate` says."""
        return frozenset(self.names)

    def whole(self, names: Sequence[str], folder: Path) -> Written:
        """As `candidates.Candidate` says."""
        model = _read(self.artifact)
        known = {value.name for value in model.graph.output}
        wanted = {name: self.names[name] for name in names}
        for value in dict.fromkeys(wanted.values()):
            if value not in known:
                model.graph.output.append(onnx.helper.make_empty_tensor_value_info(value))
        return Written(self._save(model, folder), None, wanted)

    def part(self, entries: Sequence[str], output: str, folder: Path) -> Written:
        """As `candidates.Candidate` says."""
        model = _read(self.artifact)
        inputs = {n: self.names[n] for n in (*entries, *self.given) if n in self.names}
        graph = model.graph
        goal = self.names[output]
        taken, outside = _between(graph, goal, set(inputs.values()))
        kept = {name: value for name, value in inputs.items() if value in outside}
        for value in [*graph.input]:
            if value.name in outside and value.name not in kept.values():
                raise UnknownError(
                    f"{output} needs {value.name} of the file, whose value is unknown"
                )
        nodes = [node for i, node in enumerate(graph.node) if i in taken]
        constants = [t for t in graph.initializer if t.name in outside]
        sparse = [t for t in graph.sparse_initializer if t.values.name in outside]
        given = [self._declared(name, value) for name, value in kept.items()]
        result = onnx.helper.make_empty_tensor_value_info(goal)
        for part, content in (
            (graph.node, nodes),
            (graph.initializer, constants),
            (graph.sparse_initializer, sparse),
            (graph.input, given),
            (graph.output, [result]),
        ):
            content = [type(item).FromString(item.SerializeToString()) for item in content]
            del part[:]
            part.extend(content)
        del graph.value_info[:]
        used = {(node.domain, node.op_type) for node in _all_nodes(graph.node)}
        functions = _reached(model.functions, used)
        del model.functions[:]
        model.functions.extend(functions)
        return Written(self._save(model, folder), kept, {output: goal})

    def _declared(self, name: str, value: str) -> onnx.ValueInfoProto:
        """A value as an input; a loop over it needs to know how many dimensions it has."""
        known = self.values[name]
        shape = [size if isinstance(size, int) else None for size in known.shape]
        return onnx.helper.make_tensor_value_info(value, _TYPES[known.dtype], shape)

    def _save(self, model: onnx.ModelProto, folder: Path) -> Path:
        """Beside the files that it has its weights in: the standard wants them in one folder."""
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location" and not (folder / entry.value).exists():
                    (folder / entry.value).parent.mkdir(parents=True, exist_ok=True)
                    _beside(self.artifact.parent / entry.value, folder / entry.value)
        file = folder / self.artifact.name
        onnx.save(model, file)
        return file


@lru_cache(maxsize=2)
def _names(format_name: str, program: Program, options: formats.Options) -> Mapping[str, str]:
    """The name in a file of each value; of one program once, since it takes an export."""
    writer: Any = formats.get(format_name)
    named: dict[str, str] = writer.value_names(program, options)
    return named


def _read(artifact: Path) -> onnx.ModelProto:
    return onnx.load(artifact, load_external_data=False)


def _beside(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _between(graph: onnx.GraphProto, goal: str, stops: set[str]) -> tuple[set[int], set[str]]:
    """The nodes that compute a value from others, by number, and the names they take from outside.

    Args:
        graph: in which they are.
        goal: the value.
        stops: values that are given.
    """
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    taken: set[int] = set()
    outside: set[str] = set()
    waiting = [goal]
    while waiting:
        name = waiting.pop()
        if name not in maker or (name in stops and name != goal):
            outside.add(name)
            continue
        number = maker[name]
        if number not in taken:
            taken.add(number)
            waiting += _needed(graph.node[number])
    return taken, outside


def _needed(node: onnx.NodeProto) -> Iterator[str]:
    """What a node takes; its bodies may take values of the graph around them too."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            made = {*(v.name for v in body.input), *(t.name for t in body.initializer)}
            for inner in body.node:
                yield from (name for name in _needed(inner) if name not in made)
                made.update(inner.output)
            yield from (v.name for v in body.output if v.name not in made)


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _all_nodes(body.node)


def _reached(
    functions: Iterable[onnx.FunctionProto], used: set[tuple[str, str]]
) -> list[onnx.FunctionProto]:
    """The functions that these nodes call, and those that these call."""
    known = {(f.domain, f.name): f for f in functions}
    found: dict[tuple[str, str], onnx.FunctionProto] = {}
    waiting = [key for key in known if key in used]
    while waiting:
        key = waiting.pop()
        if key in known and key not in found:
            found[key] = onnx.FunctionProto.FromString(known[key].SerializeToString())
            waiting += [(n.domain, n.op_type) for n in _all_nodes(known[key].node)]
    return list(found.values())
