"""Module → programs: `forward`, and `gradient`, its vector-Jacobian product.

Both are `torch.export.ExportedProgram`s with named inputs and outputs and symbolic sizes; every
format is written from them, so that all formats mean the same thing.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fuseport.exporter.errors import ExportFailed

__all__ = [
    "Kind",
    "Program",
    "TensorSpec",
    "capture_forward",
    "capture_gradient",
    "count_nodes",
    "module_tree",
    "named_outputs",
    "one_line",
    "trainable",
]

Kind = Literal["forward", "gradient"]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a program.

    Attributes:
        name: as users see it, in every format.
        dtype: torch's name of it without the prefix, `float32` for example.
        dims: a size each, or the name of a dynamic dimension, or (outputs only) an expression over
            such names.
        high: for integers, the exclusive upper bound of valid values; 0 is the lower one.
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    high: int | None = None

    @property
    def floating(self) -> bool:
        """Whether a gradient can be asked for."""
        return self.torch_dtype.is_floating_point

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
        kind: `forward` or `gradient`.
        exported: the captured graph with its parameters under the model's own names.
        inputs: in the order in which they are passed; a gradient program takes the model's inputs,
            then one `cotangent_<output>` per floating output.
        outputs: the model's, then, in a gradient program, `grad/<name>` per floating input and
            trainable parameter.
        none: `grad/<name>` of what the outputs do not depend on at all; it is no output.
    """

    kind: Kind
    exported: ExportedProgram
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    none: tuple[str, ...] = ()

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


def capture_forward(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    specs: Sequence[TensorSpec],
    output_names: Sequence[str] | None = None,
) -> Program:
    """Capture `module.forward`, with the dynamic dimensions that `specs` name.

    The program takes the inputs by position. It returns one tensor as it is, several as a
    dictionary from name to tensor.

    Args:
        module: in eval mode, its gradients wanted where a parameter's `requires_grad` says so.
        inputs: example inputs by name, in the order in which `module.forward` takes them.
        specs: one for each input.
        output_names: names for what the module returns without a name.

    Raises:
        ExportFailed: torch cannot capture the module, or a dimension named dynamic is in truth
            fixed.
    """
    names: list[str] = []

    def call(*tensors: Tensor) -> Any:
        outputs = named_outputs(module.forward(*tensors), output_names)
        names[:] = outputs
        return _bare(outputs)

    with _failing_as("forward"):
        exported = torch.export.export(
            _entry(module, specs, call),
            tuple(inputs.values()),
            dynamic_shapes=_dynamic_shapes(specs),
            strict=False,
        )
        # In-place operators become functional ones; composite operators stay whole.
        exported = exported.run_decompositions({})
    mutated = exported.graph_signature.buffers_to_mutate.values()
    if mutated:
        raise ExportFailed(f"forward writes to buffers ({', '.join(mutated)}): export a pure model")
    _merge_tied(exported, module)
    outputs = _output_specs(exported, specs, names)
    return Program("forward", exported, tuple(specs), outputs)


def capture_gradient(
    forward: Program, module: nn.Module, inputs: Mapping[str, Tensor], cotangents: Sequence[Tensor]
) -> Program:
    """The vector-Jacobian product of a forward program, as a program of its own.

    It returns a dictionary: the outputs, then `grad/<name>` of each floating input and each
    trainable parameter (a tied one once, under its first name) that the outputs depend on.

    Args:
        forward: of `module`, from `capture_forward`.
        module: whose parameters get gradients.
        inputs: example inputs by name.
        cotangents: example cotangents, one for each floating output, in order.

    Raises:
        ExportFailed: an operator in the graph has no derivative, or the joint graph cannot be
            captured.
    """
    wanted = [spec.name for spec in forward.inputs if spec.floating] + list(trainable(module))
    cotangent_specs = [
        TensorSpec(f"cotangent_{spec.name}", spec.dtype, spec.dims)
        for spec in forward.outputs
        if spec.floating
    ]
    specs = (*forward.inputs, *cotangent_specs)
    with _failing_as("gradient"):
        joint = _trace_joint(forward, wanted)
        names = [spec.name for spec in forward.outputs] + [f"grad/{n}" for n in joint.connected]
        holder = module_tree(joint.state)

        def call(*tensors: Tensor) -> dict[str, Tensor]:
            given = dict(zip((spec.name for spec in specs), tensors, strict=True))
            arguments = [
                given[name] if name in given else _lookup(holder, name) for name in joint.arguments
            ]
            return dict(zip(names, joint.graph(*arguments), strict=True))

        exported = torch.export.export(
            _entry(holder, specs, call),
            (*inputs.values(), *cotangents),
            dynamic_shapes=_dynamic_shapes(specs),
            strict=False,
        ).run_decompositions({})
    none = tuple(f"grad/{name}" for name in wanted if name not in joint.connected)
    return Program("gradient", exported, specs, _output_specs(exported, specs, names), none)


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """Parameters that get a gradient, by name; a tied one once, under its first name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def named_outputs(result: Any, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """What a module returned, as name → tensor: keys of a mapping, else `names`, else `output…`."""
    if isinstance(result, Mapping):  # transformers' ModelOutput is one
        return {str(key): value for key, value in result.items() if isinstance(value, Tensor)}
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    if names is None:
        names = ["output"] if len(leaves) == 1 else [f"output_{i}" for i in range(len(leaves))]
    if len(names) != len(leaves):
        raise ExportFailed(f"the model returned {len(leaves)} tensors where {len(names)} are named")
    return dict(zip(names, leaves, strict=True))


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


def count_nodes(program: Program, operator: str) -> int:
    """How many nodes call `operator`, such as `fuseport::selective_scan`, whatever the overload."""
    return sum(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == operator
        for node in program.exported.graph.nodes
    )


def one_line(error: BaseException) -> str:
    """The first telling line of an error of torch's, which often go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(frozen=True)
class _Joint:
    graph: torch.fx.GraphModule
    arguments: list[
        str
    ]  # of the graph: names of inputs, cotangents, parameters, buffers, constants
    state: dict[str, Tensor]  # those arguments that are not passed in
    connected: list[str]  # names whose gradients the graph returns, after the outputs


def _trace_joint(forward: Program, wanted: Sequence[str]) -> _Joint:
    exported = forward.exported
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    names = _placeholder_names(forward)
    outputs = next(node for node in exported.graph.nodes if node.op == "output").args[0]
    fakes = {name: node.meta["val"] for name, node in zip(names, placeholders, strict=True)}
    cotangents = {
        f"cotangent_{spec.name}": node.meta["val"]
        for spec, node in zip(forward.outputs, outputs, strict=True)
        if spec.floating
    }
    connected: list[str] = []

    def joint(*arguments: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip([*fakes, *cotangents], arguments, strict=True))
        leaves = {name: given[name].detach().requires_grad_() for name in wanted if name in given}
        values = {**given, **leaves}
        for spec in forward.inputs:
            if spec.floating:
                # The graph is traced on contiguous examples and may take views that only those
                # allow; callers pass any layout.
                values[spec.name] = _contiguous(values[spec.name])
        results = torch.fx.Interpreter(exported.graph_module).run(
            *(values[name] for name in names), enable_io_processing=False
        )
        seeds = {f"cotangent_{s.name}": r for s, r in zip(forward.outputs, results, strict=True)}
        roots = {
            name: root for name, root in seeds.items() if name in cotangents and root.requires_grad
        }
        gradients = torch.autograd.grad(
            list(roots.values()),
            list(leaves.values()),
            [_contiguous(given[name]) for name in roots],
            allow_unused=True,
        )
        found = {n: g for n, g in zip(leaves, gradients, strict=True) if g is not None}
        connected[:] = found
        return (*(result.detach() for result in results), *found.values())

    # The fake mode stays on, since autograd itself makes zeros, of symbolic sizes; and the Python
    # dispatcher, since some derivatives (of padding, for one) have symbolic forms only there.
    mode = next(iter(fakes.values())).fake_mode
    with mode, enable_python_dispatcher(), torch.enable_grad():
        graph = make_fx(joint)(*fakes.values(), *(torch.empty_like(c) for c in cotangents.values()))
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    inputs = {spec.name for spec in forward.inputs}
    known = forward.state(requires_grad=False)
    state = {name: known[name] for name in fakes if name not in inputs}
    return _Joint(graph, [*fakes, *cotangents], state, connected)


def _merge_tied(exported: ExportedProgram, module: nn.Module) -> None:
    """Let a tied parameter enter the graph once, under its first name.

    torch.export gives each of its names a placeholder, and `ep.module()` a parameter, which
    training would then change apart from the others.
    """
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    original = {n: first[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    specs = exported.graph_signature.input_specs
    placeholders = {spec.target: nodes[spec.arg.name] for spec in specs if spec.target is not None}
    for spec in list(specs):
        if spec.target is not None and original.get(spec.target, spec.target) != spec.target:
            placeholders[spec.target].replace_all_uses_with(placeholders[original[spec.target]])
            exported.graph.erase_node(placeholders[spec.target])
            specs.remove(spec)
            del exported.state_dict[spec.target]
    exported.graph_module.recompile()


def _placeholder_names(forward: Program) -> list[str]:
    """What each placeholder stands for."""
    user_inputs = iter(spec.name for spec in forward.inputs)
    names = []
    for spec in forward.exported.graph_signature.input_specs:
        if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
            names.append(next(user_inputs))
        elif spec.target is not None and isinstance(
            spec.arg, torch.export.graph_signature.TensorArgument
        ):
            names.append(spec.target)
        else:
            raise ExportFailed(f"the graph takes {spec.arg}, which has no gradient program")
    return names


def _lookup(root: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    value = getattr(root.get_submodule(path), leaf)
    assert isinstance(value, Tensor)
    return value


def _contiguous(tensor: Tensor) -> Tensor:
    return torch.clone(tensor, memory_format=torch.contiguous_format)


def _entry(module: nn.Module, specs: Sequence[TensorSpec], call: Callable[..., Any]) -> nn.Module:
    """`module`, its forward replaced: the same parameters under the same names, other arguments."""

    def forward(*tensors: Tensor) -> Any:
        sizes: dict[str, int] = {}
        for spec, tensor in zip(specs, tensors, strict=True):
            for dim, size in zip(spec.dims, tensor.shape, strict=True):
                # torch gives every size a symbol of its own. Those that are one dimension must be
                # known as equal before they meet in the graph, or it guesses, and guards its guess.
                if isinstance(dim, str):
                    expected = (
                        sizes.setdefault(dim, size) if dim.isidentifier() else _size(dim, sizes)
                    )
                    torch._check(size == expected)
        return call(*tensors)

    parameter = inspect.Parameter
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # torch reads it
        [parameter(spec.name, parameter.POSITIONAL_OR_KEYWORD) for spec in specs]
    )
    entry = copy.copy(module)
    entry.forward = forward
    return entry


def _size(expression: str, sizes: Mapping[str, int]) -> int:
    """A dimension as torch prints its expression over named ones; the sizes may be symbolic."""
    value: int = eval(expression, {"__builtins__": {}, "Max": max, "Min": min}, dict(sizes))
    return value


def _bare(outputs: Mapping[str, Tensor]) -> Any:
    return next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)


def _dynamic_shapes(specs: Sequence[TensorSpec]) -> tuple[dict[int, Any], ...]:
    named: dict[str, Any] = {}

    def dimension(size: int | str) -> Any:
        if isinstance(size, int):
            return Dim.STATIC
        if not size.isidentifier():  # an expression over other dimensions: torch derives it again
            return Dim.AUTO
        return named.setdefault(size, Dim(size, min=1))

    return tuple({i: dimension(size) for i, size in enumerate(spec.dims)} for spec in specs)


def _output_specs(
    exported: ExportedProgram, inputs: Sequence[TensorSpec], names: Sequence[str]
) -> tuple[TensorSpec, ...]:
    signature = exported.graph_signature
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if "val" in node.meta}
    symbols = {}
    for spec, placeholder in zip(inputs, signature.user_inputs, strict=True):
        for size, dim in zip(values[placeholder].shape, spec.dims, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(dim, str) and dim.isidentifier():
                symbols[str(size)] = dim

    def dims(shape: torch.Size) -> Iterator[int | str]:
        for size in shape:
            text = str(size)
            for symbol, name in symbols.items():
                text = re.sub(rf"\b{symbol}\b", name, text)
            yield int(text) if text.isdigit() else text

    return tuple(
        TensorSpec(
            name, str(values[out].dtype).removeprefix("torch."), tuple(dims(values[out].shape))
        )
        for name, out in zip(names, signature.user_outputs, strict=True)
    )


@contextmanager
def _failing_as(kind: Kind) -> Iterator[None]:
    try:
        yield
    except ExportFailed:
        raise
    except Exception as error:
        # torch's exporter raises any type; all of them mean the same to the caller.
        raise ExportFailed(f"the {kind} program cannot be captured: {one_line(error)}") from error
