"""What a program is: a captured graph with named inputs and outputs and symbolic sizes.

`forward` captures the forward program of a module, or that of a decoding step, `gradient` derives
the gradient program from the first, and `formats` write any, so that all formats mean the same.
"""

import keyword
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, get_args

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fuseport.exporter.errors import ExportFailed

__all__ = [
    "KINDS",
    "Entry",
    "Kind",
    "Program",
    "TensorSpec",
    "argument_names",
    "count_nodes",
    "entry_of",
    "left_out",
    "module_tree",
    "mutates",
    "named_outputs",
    "one_line",
    "real",
    "rebuilt",
    "shape_env",
    "trainable",
]

Kind = Literal["forward", "gradient", "step"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""All kinds of programs."""

Entry = Literal["forward", "step"]
"""What of a model a program calls, whose inputs it takes: whole sequences, or a decoding step."""

# What torch notes of the origin of nodes: paths of the exporting machine, and numbers that differ
# from run to run.
_ORIGIN = ("stack_trace", "from_node")


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a program.

    Attributes:
        name: as users see it, in every format.
        dtype: torch's name of it without the prefix, `float32` for example.
        dims: a size each, or the name of a dynamic dimension, or (outputs only) an expression over
            such names.
        high: for integers, the exclusive upper bound of valid values: a number, a dynamic dimension
            of an input, or one more, `length+1`; or a number for each column, of rows that are the
            coordinates of places.
        low: the lower one, which is a valid value.
        descending: for a vector of lengths, whether they are valid in decreasing order alone.
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    high: int | str | tuple[int, ...] | None = None
    low: int = 0
    descending: bool = False

    @property
    def floating(self) -> bool:
        """Whether a gradient can be asked for."""
        return self.torch_dtype.is_floating_point

    @property
    def mask(self) -> bool:
        """Whether it is of zeros and ones."""
        return self.dtype == "bool" or (self.low, self.high) == (0, 2)

    def shape(self, sizes: Mapping[str, int]) -> list[int]:
        """Its shape at sizes of the dynamic dimensions, by their names."""
        return [dim if isinstance(dim, int) else sizes[dim] for dim in self.dims]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True)
class Program:
    """What is exported of a model.

    Attributes:
        kind: `forward`, `gradient` or `step`.
        exported: the captured graph with its parameters under the model's own names.
        inputs: in the order in which they are passed; a gradient program takes the model's inputs,
            then one `cotangent_<output>` per floating output.
        outputs: the model's, then, in a gradient program, `grad/<name>` per floating input and
            trainable parameter.
        none: `grad/<name>` of what the outputs do not depend on at all; it is no output.
        left_out: what the model returns beside, which is no tensor.
        requires: what must be so of the dynamic dimensions; artifacts refuse what is not.
        decided: a sentence on each decision by a value, and each loop, that is in the model's code.
        both_ways: the places of those, `file:line`, of which the program has both ways.
    """

    kind: Kind
    exported: ExportedProgram
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    none: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    requires: tuple[sympy.Basic, ...] = ()
    decided: tuple[str, ...] = ()
    both_ways: tuple[str, ...] = ()

    def state(self, *, requires_grad: bool) -> dict[str, Tensor]:
        """Parameters (as `nn.Parameter`, a tied one once), buffers and constants, by name.

        Args:
            requires_grad: False for none; True where the captured parameter does.
        """
        tensors = {**self.exported.constants, **self.exported.state_dict}
        state: dict[str, Tensor] = {}
        for spec in self.exported.graph_signature.input_specs:
            if spec.target is None:
                continue
            value = tensors[spec.target]
            if isinstance(value, nn.Parameter):
                wanted = requires_grad and value.requires_grad
                value = nn.Parameter(value.detach(), requires_grad=wanted)
            state[spec.target] = value
        return state


def entry_of(kind: str) -> Entry:
    """What a program of this kind calls."""
    return "step" if kind == "step" else "forward"


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """Parameters that get a gradient, by name; a tied one once, under its first name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def named_outputs(
    result: Any, names: Sequence[str] | None = None, inputs: Collection[str] = ()
) -> dict[str, Tensor]:
    """What a module returned, as name → tensor: keys of a mapping, else `names`, else `output…`.

    What is inside a value of a mapping has the keys and positions on the way to it after a dot,
    `states.0`. What is no tensor is left out; see `left_out`. One that is called as one of `inputs`
    is `output_<name>`: in ONNX, a name is of one value.

    Raises:
        ExportFailed: there are other names than tensors, or two tensors of one name.
    """
    if _keyed(result) is not None:
        within = [(name, value) for name, value in _within("", result) if isinstance(value, Tensor)]
        found = [(f"output_{n}" if n in inputs else n, value) for n, value in within]
        named = dict(found)
        if len(named) < len(found):
            raise ExportFailed(f"of the outputs {', '.join(name for name, _ in found)} two are one")
        return named
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    if names is None:
        names = ["output"] if len(leaves) == 1 else [f"output_{i}" for i in range(len(leaves))]
    if len(names) != len(leaves):
        raise ExportFailed(f"the model returned {len(leaves)} tensors where {len(names)} are named")
    names = [f"output_{name}" if name in inputs else name for name in names]
    return dict(zip(names, leaves, strict=True))


def is_reserved(name: str) -> bool:
    """Whether torch.fx calls no node so: words and functions of Python, and what its code needs.

    torch.export calls placeholders as arguments, in lower case, even so; their copies are not.
    """
    names = {name, name.lower()}
    return keyword.iskeyword(name) or any(
        fx.Graph().create_node("placeholder", n, name=n).name != n for n in names
    )


def argument_names(
    inputs: Iterable[str], refused: Callable[[str], bool] = is_reserved
) -> list[str]:
    """What code calls inputs, in order: their names, as far as those can be names in it.

    Args:
        inputs: their names; what is no identifier is made one.
        refused: whether an identifier is no name there.
    """
    found: dict[str, None] = {}
    for wanted in inputs:
        name = plain = re.sub(r"^(?=\d)|\W", "_", wanted, flags=re.ASCII)
        number = 1
        while name in found or refused(name):
            number += 1
            name = f"{plain}_{number}"
        found[name] = None
    return list(found)


def left_out(result: Any) -> list[str]:
    """What of a result `named_outputs` leaves out, but None: names and types."""
    counted = _keyed(result) is None  # then all is taken apart that torch knows how to

    def taken(value: Any) -> bool:
        leaves = pytree.tree_leaves(value) if counted else [value]
        return any(isinstance(leaf, Tensor) for leaf in leaves)

    return [
        f"{name} ({type(value).__name__})" if name else type(value).__name__
        for name, value in _within("", result)
        if value is not None and not taken(value)
    ]


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """All that Python's own containers hold, by the way to it."""
    inside = _keyed(value)
    if inside is None and isinstance(value, list | tuple):
        inside = dict(enumerate(value))
    if inside is None:
        yield name, value
        return
    for key, item in inside.items():
        yield from _within(f"{name}.{key}" if name else str(key), item)


def _keyed(value: Any) -> Mapping[Any, Any] | None:
    """What has names in it: transformers' ModelOutput is a mapping, others' are dataclasses."""
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return None


def module_tree(tensors: Mapping[str, Tensor], root: nn.Module | None = None) -> nn.Module:
    """`root`, by default an empty module, with parameters and buffers of the dotted names given.

    An `nn.Parameter` becomes a parameter, any other tensor a buffer.
    """
    root = nn.Module() if root is None else root
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor)
    return root


def shape_env(exported: ExportedProgram) -> ShapeEnv:
    """What torch knows of the symbolic sizes of a program."""
    value = next(n.meta["val"] for n in exported.graph.nodes if n.op == "placeholder")
    env = value.fake_mode.shape_env
    assert isinstance(env, ShapeEnv)
    return env


def rebuilt(
    exported: ExportedProgram,
    graph: fx.Graph,
    inputs: Sequence[InputSpec],
    *,
    outputs: Sequence[str] | None = None,
    arguments: Sequence[str] | None = None,
    state: dict[str, Any] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> ExportedProgram:
    """`exported` with another graph, over the same symbolic sizes.

    Args:
        exported: stays as it is.
        graph: its placeholders are called as `inputs` say.
        inputs: what the placeholders stand for.
        outputs: names of the dictionary that is returned; None to return what `exported` does.
        arguments: names of the user's inputs; None for those of `exported`.
        state: parameters and persistent buffers; None for those of `exported`.
        constants: other tensors, by name; None for those of `exported`. What is not taken is left.
    """
    entry = exported.module_call_graph[0]
    assert entry.signature is not None
    signature = replace(entry.signature, inputs=[], outputs=[])
    if arguments is not None:
        signature.forward_arg_names = list(arguments)
        signature.in_spec = pytree.tree_structure(((0,) * len(arguments), {}))
    if outputs is not None:
        signature.out_spec = pytree.tree_structure(dict.fromkeys(outputs, 0))
    for node in graph.nodes:
        for key in _ORIGIN:
            node.meta.pop(key, None)
    results: Any = graph.output_node().args[0]
    taken = {spec.target for spec in inputs}
    return ExportedProgram(
        graph.owning_module or exported.graph_module,
        graph,
        ExportGraphSignature(
            list(inputs),
            [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in results],
        ),
        exported.state_dict if state is None else state,
        exported.range_constraints,
        [replace(entry, signature=signature)],
        constants={
            name: constant
            for name, constant in (exported.constants if constants is None else constants).items()
            if name in taken or not isinstance(constant, torch.Tensor)
        },
        verifiers=exported.verifiers,
    )


def mutates(node: fx.Node) -> bool:
    """Whether a node of a graph writes to what it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def count_nodes(program: Program, operator: str) -> int:
    """How many nodes call `operator`, such as `fuseport::selective_scan`, whatever the overload."""
    return sum(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == operator
        for node in program.exported.graph.nodes
    )


def real(gradient: Tensor) -> Tensor:
    """A gradient as programs and runtimes give it.

    That of a complex parameter is real, of shape (…, 2): its real and imaginary parts, as
    `torch.view_as_real` has them. ONNX has no complex outputs.
    """
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def near(file: str) -> str:
    """A file's path from the current folder, if it is in it."""
    found = os.path.relpath(file)
    return file if found.startswith("..") else found


def one_line(error: BaseException) -> str:
    """The first telling line of an error of torch's, which often go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
