"""What a failing artifact computes inside: the same artifact, with values of its graph handed out.

A candidate writes files, which the runtime that failed runs as it runs any artifact.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch.export import ExportedProgram

from fuseport.exporter import formats, runtimes
from fuseport.exporter.program import Program, rebuilt
from fuseport.exporter.verify.localise import parts
from fuseport.exporter.verify.localise.onnx_file import OnnxFile
from fuseport.exporter.verify.localise.other_weights import state_of
from fuseport.exporter.verify.localise.script_file import ScriptFile
from fuseport.exporter.verify.localise.written import Written

__all__ = ["Candidate", "Graph", "differentiable", "model_graph", "of"]

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

    def part(self, entries: Sequence[str], output: str, folder: Path) -> Written:
        """What of it computes one value from others: the artifact says itself what lies between."""


def of(
    runtime: str, artifact: Path, program: Program, facts: Mapping[str, object], weights: Path
) -> Iterator[Candidate]:
    """The candidates for an artifact in a runtime; where one does not show the fault, the next may.

    Args:
        runtime: that failed.
        artifact: its file.
        program: as captured from the model.
        facts: what the manifest says of the artifact, `opset` for example; empty for a file made
            elsewhere.
        weights: of the bundle.
    """
    format_name = runtimes.get(runtime).FORMAT
    if format_name is None:
        yield model_graph(program)
    elif artifact.name.endswith(".onnx"):
        opset = facts.get("opset", formats.DEFAULT_OPSET)
        assert isinstance(opset, int)
        yield OnnxFile.of(runtime, str(format_name), artifact, program, opset, weights)
    elif format_name == "exported_program":
        inside = replace(program, exported=torch.export.load(artifact))
        if names := _shared(program, inside):
            yield Graph(runtime, format_name, inside, names)
    elif format_name == "torchscript":
        with suppress(LookupError):  # written by something else
            yield ScriptFile.of(runtime, artifact, program)
        yield _rewritten(runtime, artifact, program, weights)
    else:
        # Machine code hands out no value. Its weights may be at fault, which the model's graph
        # shows; or else the compiler, which shows it again where the cuts leave it what it was.
        inside = replace(
            program, exported=_with_state(program.exported, state_of(format_name, artifact))
        )
        yield Graph("exported_program", "exported_program", inside, _own(inside))
        bound = facts.get("compiled_for", {})
        assert isinstance(bound, Mapping)
        device = bound.get("device", "cpu")
        yield Graph(runtime, format_name, inside, _own(inside), "bisection", weights, device)


def differentiable(
    runtime: str, artifact: Path, program: Program, facts: Mapping[str, object], weights: Path
) -> Iterator["Graph"]:
    """Those of the candidates whose gradients a runtime's autograd can be asked for."""
    if runtimes.get(runtime).FORMAT == "torchscript":
        yield _rewritten(runtime, artifact, program, weights)
    else:
        every = of(runtime, artifact, program, facts, weights)
        yield from (candidate for candidate in every if isinstance(candidate, Graph))


def _rewritten(runtime: str, artifact: Path, program: Program, weights: Path) -> "Graph":
    """The captured program over the parameters of a TorchScript file, as such a file."""
    state = state_of("torchscript", artifact)
    program = replace(program, exported=_with_state(program.exported, state))
    return Graph(runtime, "torchscript", program, _own(program), "bisection", weights)


def model_graph(program: Program) -> "Graph":
    """A program as captured from the model, run by the kernels that run the model."""
    return Graph("exported_program", "exported_program", program, _own(program))


def _own(program: Program) -> dict[str, str]:
    return {node.name: node.name for node in program.exported.graph.nodes}


def _shared(program: Program, other: Program) -> dict[str, str]:
    """The nodes of a program, and what they are in one that was made of it, or changed after that.

    What the other gives as an output stands for the node that is that output, whatever it is; none
    do, where it has more or fewer.
    """
    there = {node.name: node for node in other.exported.graph.nodes}
    names = {
        node.name: node.name
        for node in program.exported.graph.nodes
        if node.name in there and parts.called(node) == parts.called(there[node.name])
    }
    signature, changed = program.exported.graph_signature, other.exported.graph_signature
    for mine, theirs in (
        (signature.user_inputs, changed.user_inputs),
        (signature.user_outputs, changed.user_outputs),
    ):
        if len(mine) != len(theirs):
            return {}
        names |= {str(node): str(its) for node, its in zip(mine, theirs, strict=True)}
    return names


@dataclass(frozen=True)
class Graph:
    """A graph of torch's, written in a format: an artifact's own, or that which it was made of.

    `names` has the nodes of the program that is looked for, and what they are in this one.
    """

    runtime: str
    format: str
    program: Program
    names: Mapping[str, str]
    method: Method = "intermediates"
    weights: Path = Path()
    device: str = "cpu"  # that machine code is compiled for

    @property
    def visible(self) -> frozenset[str]:
        """As `Candidate` says."""
        return frozenset(self.names)

    def whole(self, names: Sequence[str], folder: Path) -> Written:
        """As `Candidate` says."""
        wanted = {name: self.names[name] for name in names}
        program = parts.with_outputs(self.program, list(dict.fromkeys(wanted.values())))
        return Written(self._write(program, folder), None, wanted)

    def part(self, entries: Sequence[str], output: str, folder: Path) -> Written:
        """As `Candidate` says."""
        given = {name: self.names[name] for name in entries}
        goal = self.names[output]
        between, more = parts.between(self.program, [goal], list(given.values()))
        given |= {name: its for name, its in self.names.items() if its in more}
        program = parts.cut(self.program, between, list(dict.fromkeys(given.values())), [goal])
        inputs = {name: parts.ENTRY + its for name, its in given.items()}
        return Written(self._write(program, folder), inputs, {output: goal})

    def differentiable(self, program: Program, folder: Path) -> Path:
        """A program that `parts` made of this one, as a file."""
        return self._write(program, folder)

    def _write(self, program: Program, folder: Path) -> Path:
        writer = formats.get(self.format)
        file = folder / f"{program.kind}{writer.SUFFIX}"
        writer.write(program, file, formats.Options(self.weights, device=self.device))
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
