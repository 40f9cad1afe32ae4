"""What a failing artifact computes inside: the same artifact, with values of its graph handed out.

A candidate writes files, which the runtime that failed runs as it runs any artifact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch.export import ExportedProgram

from fuseport.exporter import formats, runtimes
from fuseport.exporter.program import Program, rebuilt
from fuseport.exporter.verify.localise import parts
from fuseport.exporter.verify.localise.onnx_file import OnnxFile
from fuseport.exporter.verify.localise.written import Written

__all__ = ["Candidate", "Graph", "model_graph", "of"]

Method = Literal["intermediates", "bisection"]


class Candidate(Protocol):
    """An artifact that can be looked into."""

    @property
    def runtime(self) -> str:
        """What runs the files that are written here."""

    @property
    def method(self) -> Method:
        """How it is looked into."""

    @property
    def visible(self) -> frozenset[str]:
        """Nodes of the program's graph whose values can be had."""

    def whole(self, names: Sequence[str], folder: Path) -> Written:
        """The artifact, with these values as outputs more."""

    def part(
        self, compute: Sequence[str], entries: Sequence[str], output: str, folder: Path
    ) -> Written:
        """What of it computes one value from others."""


def of(
    runtime: str, artifact: Path, program: Program, facts: Mapping[str, object], weights: Path
) -> Candidate:
    """The candidate for an artifact in a runtime.

    Args:
        runtime: that failed.
        artifact: its file.
        program: as captured from the model.
        facts: what the manifest says of the artifact, `opset` for example; empty for a file made
            elsewhere.
        weights: of the bundle.
    """
    format_name = runtimes.get(runtime).FORMAT
    nodes = {node.name: node for node in program.exported.graph.nodes}
    if format_name is None:
        return model_graph(program)
    if artifact.name.endswith(".onnx"):
        opset = facts.get("opset", formats.DEFAULT_OPSET)
        assert isinstance(opset, int)
        return OnnxFile.of(runtime, str(format_name), artifact, program, opset, weights)
    if format_name == "exported_program":
        inside = replace(program, exported=torch.export.load(artifact))
        there = {node.name: node for node in inside.exported.graph.nodes}
        same = frozenset(
            n for n in nodes if n in there and parts.called(nodes[n]) == parts.called(there[n])
        )
        return Graph(runtime, format_name, inside, same)
    method: Method = "bisection"
    if format_name == "torchscript":
        method = "intermediates" if runtime == "torchscript" else "bisection"
        state = torch.jit.load(str(artifact), map_location="cpu").state_dict()
        program = replace(program, exported=_with_state(program.exported, state))
    return Graph(runtime, format_name, program, frozenset(nodes), method, weights)


def model_graph(program: Program) -> "Graph":
    """A program as captured from the model, run by the kernels that run the model."""
    nodes = frozenset(node.name for node in program.exported.graph.nodes)
    return Graph("exported_program", "exported_program", program, nodes)


@dataclass(frozen=True)
class Graph:
    """A graph of torch's, written in a format: an artifact's own, or that which it was made of."""

    runtime: str
    format: str
    program: Program
    visible: frozenset[str]
    method: Method = "intermediates"
    weights: Path = Path()

    def whole(self, names: Sequence[str], folder: Path) -> Written:
        """As `Candidate` says."""
        program = parts.with_outputs(self.program, names)
        file = self._write(program, folder)
        return Written(file, None, {name: name for name in names})

    def part(
        self, compute: Sequence[str], entries: Sequence[str], output: str, folder: Path
    ) -> Written:
        """As `Candidate` says."""
        program = parts.cut(self.program, compute, entries, [output])
        file = self._write(program, folder)
        return Written(file, {name: parts.ENTRY + name for name in entries}, {output: output})

    def differentiable(self, program: Program, folder: Path) -> Path:
        """A program that `parts` made of this one, as a file."""
        return self._write(program, folder)

    def _write(self, program: Program, folder: Path) -> Path:
        writer = formats.get(self.format)
        file = folder / f"{program.kind}{writer.SUFFIX}"
        writer.write(program, file, formats.Options(self.weights))
        return file


def _with_state(exported: ExportedProgram, state: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """The same graph over an artifact's own parameters, where it has them under their names."""
    known = {
        name: torch.nn.Parameter(state[name], requires_grad=value.requires_grad)
        if isinstance(value, torch.nn.Parameter)
        else state[name]
        for name, value in exported.state_dict.items()
        if name in state and state[name].shape == value.shape and state[name].dtype == value.dtype
    }
    specs = exported.graph_signature.input_specs
    return rebuilt(exported, exported.graph, specs, state={**exported.state_dict, **known})
