"""Module → forward program."""

import inspect
import io
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
)
from typing import Any, TypeGuard
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, _trace
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    statically_known_true,
)
from torch.utils._pytree import tree_leaves

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import (
    Entry,
    Kind,
    Program,
    TensorSpec,
    argument_names,
    left_out,
    named_outputs,
    one_line,
    rebuilt,
)
from fuseport.exporter.program._dtypes import named_dtypes
from fuseport.exporter.program.derivatives import merge_equal, taking
from fuseport.exporter.program.derivatives._detached import detach_regions
from fuseport.exporter.program.derivatives._jacobians import by_derivatives
from fuseport.exporter.program.instead._single import single
from fuseport.exporter.program.loops.rolled import rolled
from fuseport.exporter.program.portable import DIFFERENTIABLE
from fuseport.exporter.program.sequences.packed import packing, with_values
from fuseport.exporter.program.sizes._functions import functions
from fuseport.exporter.program.sizes._known import buffers_of, knowing
from fuseport.exporter.program.sizes._logarithms import logarithms
from fuseport.exporter.program.sizes.bounds import of_inputs
from fuseport.exporter.program.sizes.listed import listing
from fuseport.exporter.program.sizes.symbolic import Symbolic
from fuseport.exporter.program.tracing import any_sizes, known_constants
from fuseport.exporter.program.tracing._asked import asked_once
from fuseport.exporter.program.tracing._layouts import contiguous_matrices
from fuseport.exporter.program.tracing._ones import forget_ones
from fuseport.exporter.program.tracing._unbound import forget_beyond
from fuseport.ops import OPS

__all__ = [
    "FixedDimension",
    "capture_forward",
    "dynamic_sizes",
    "entry",
    "failing_as",
    "is_dynamic",
    "output_specs",
]

aten = torch.ops.aten


def capture_forward(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    specs: Sequence[TensorSpec],
    output_names: Sequence[str] | None = None,
    kind: Entry = "forward",
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    one_by_one: bool = True,
    singled: bool = False,
) -> Program:
    """Capture `module.forward`, with the dynamic dimensions that `specs` name.

    The program takes the inputs by position. It returns one tensor as it is, several as a
    dictionary from name to tensor.

    Args:
        module: in eval mode, its gradients wanted where a parameter's `requires_grad` says so.
        inputs: example inputs by name, in the order in which `module.forward` takes them.
        specs: one for each input.
        output_names: names for what the module returns without a name.
        kind: of program: what the module is of a model.
        within: makes what the module is called in.
        one_by_one: whether its code may go over the numbers of vectors; see `listing`.
        singled: whether parts of one step are there, whatever the sizes; see `single`.

    Raises:
        ExportFailed: torch cannot capture the module, a dimension named dynamic is in truth fixed,
            or the module changes its own state.
    """
    names: list[str] = []
    beside: list[str] = []
    gone_over: list[Tensor] = []
    perhaps_none: list[Any] = []
    buffers = buffers_of(module)
    replaced: dict[str, str] = {}
    differentiated = False

    def call(*tensors: Tensor) -> Any:
        if differentiated:
            for x in tensors:
                x.requires_grad_(x.is_floating_point())
        known, numbers = knowing(module, buffers), listing(one_by_one, gone_over)
        ones = single(singled, perhaps_none)
        with known, logarithms(), functions(), Symbolic(), numbers, packing(), ones, within():
            result = module.forward(*tensors)
            found = named_outputs(result, output_names, list(inputs))
            outputs = with_values(found)
        names[:] = outputs
        beside[:] = left_out(result)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    try:
        with _replacing(replaced), taking() as has_derivatives:
            try:
                exported = _exported(entry(module, specs, call), inputs, specs, kind)
            except ExportFailed:
                if not has_derivatives():
                    raise
            if has_derivatives():  # whose code may ask what is differentiated
                differentiated = True
                exported = _exported(entry(module, specs, call), inputs, specs, kind)
                merge_equal(exported.graph)
        _check_dynamic(kind, exported, specs)
    except ExportFailed as error:
        if perhaps_none and not isinstance(error.__cause__, GuardOnDataDependentSymNode):
            return capture_forward(
                module, inputs, specs, output_names, kind, within, one_by_one, singled=True
            )
        if not gone_over:
            raise
        # What hangs on a number of a vector: without, torch says what that fixes.
        return capture_forward(module, inputs, specs, output_names, kind, within, one_by_one=False)
    for node in exported.graph.nodes:
        # Contiguous examples make a view of what callers may pass in another layout.
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        elif node.target is aten.as_strided.default:
            _of_contiguous(node)
        elif node.target is aten.clamp.default and node.meta["val"].is_floating_point():
            # Of a bound of each kind, `clamp(1, 1e4)`, torch.onnx finds no form.
            x, *bounds = node.args
            node.args = (x, *(None if bound is None else float(bound) for bound in bounds))
        elif node.target is aten._to_copy.default and isinstance(node.args[0], int | float):
            # What `torch.vmap` makes of a number beside a tensor.
            node.target = aten.scalar_tensor.default
    forget_beyond(exported.graph)
    if mutated := _changed(exported, replaced):
        raise ExportFailed(
            f"{kind} writes to {', '.join(mutated)}: a program changes neither its inputs nor "
            "buffers; compute something new there, x = x / n for x /= n"
        )
    forget_ones(exported)
    exported = _untied(exported, module)
    outputs = output_specs(exported, specs, names)
    return Program(kind, exported, tuple(specs), outputs, left_out=tuple(beside))


@contextmanager
def _replacing(replaced: dict[str, str]) -> Iterator[None]:
    """Have torch note what code puts in the place of buffers for us, and not write it to them."""
    noting = _trace.register_buffer_assignment_hook  # type: ignore[attr-defined]  # imported there

    def note(module: nn.Module, _: dict[str, str]) -> Any:
        return noting(module, replaced)

    with mock.patch.object(_trace, "register_buffer_assignment_hook", note):
        yield


def _changed(exported: ExportedProgram, replaced: Container[str]) -> list[str]:
    """What a program writes to. A buffer that code puts something else in the place of, as of
    frequencies of positions, is one of these if what was there is read, too."""
    signature = exported.graph_signature
    nodes = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    buffers = signature.inputs_to_buffers.items()
    read = [name for node, name in buffers if name in replaced and nodes[node].users]
    written = signature.buffers_to_mutate, signature.user_inputs_to_mutate
    return [*read, *(name for names in written for name in names.values())]


def _of_contiguous(node: fx.Node) -> None:
    """Have a view by strides be of what is contiguous, as the example was in its memory."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    value = x.meta["val"]
    with value.fake_mode.shape_env.suppress_guards():
        order = _order_in_memory(value)
    if order is None:
        return
    with node.graph.inserting_before(node), value.fake_mode:
        turned = x
        if order != sorted(order):
            turned = node.graph.call_function(aten.permute.default, (x, order))
            turned.meta["val"] = value.permute(order)
        copied = node.graph.call_function(
            aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}
        )
        copied.meta["val"] = turned.meta["val"].clone(memory_format=torch.contiguous_format)
    node.replace_input_with(x, copied)


def _order_in_memory(x: Tensor) -> list[int] | None:
    """The order of a tensor's dimensions in which it is contiguous; None where it has gaps."""
    if x.storage_offset() != 0:
        return None
    if x.is_contiguous():
        return [*range(x.dim())]
    order: list[int] = []
    step: int | torch.SymInt = 1
    for _ in x.shape:
        left = (i for i in range(x.dim()) if i not in order)
        dim = next((i for i in left if statically_known_true(x.stride(i) == step)), None)
        if dim is None:
            return None
        order.insert(0, dim)
        step = x.stride(dim) * x.shape[dim]
    return order


def _exported(
    module: nn.Module, inputs: Mapping[str, Tensor], specs: Sequence[TensorSpec], kind: Entry
) -> ExportedProgram:
    """What torch captures of a module: without in-place operators, composite ones whole."""
    # What a loop was traced as before, maybe for one size, would be taken for what it is at any.
    torch._dynamo.reset()
    called = dict(zip(argument_names(inputs), inputs, strict=True))
    capturing = any_sizes(), known_constants(), warnings.catch_warnings(), by_derivatives()
    with failing_as(kind, called), ExitStack() as stack:
        for each in capturing:
            stack.enter_context(each)
        # That of a recurrent layer is a list of its parameters, which all enter the graph.
        warnings.filterwarnings("ignore", r"The tensor attributes? self\.[\w.]*_flat_weights\[")
        exported: ExportedProgram = torch.export.export(
            module,
            tuple(inputs.values()),
            dynamic_shapes=tuple(
                {i: Dim.DYNAMIC if isinstance(d, str) else Dim.STATIC for i, d in enumerate(s.dims)}
                for s in specs
            ),
            strict=False,
        )
        _take_assigned(exported.graph_module)
        detach_regions(exported.graph_module)
        with asked_once():
            exported = exported.run_decompositions({**DIFFERENTIABLE, **_replaced_operators()})
    exported = contiguous_matrices(rolled(exported), inside=True)
    named_dtypes(exported.graph_module)
    return exported


def _replaced_operators() -> dict[Any, Callable[..., Any]]:
    """Operators of other packages that are registered here and have an op in their place."""
    found = {}
    for name, function in [pair for op in OPS.values() for pair in op.replaces.items()]:
        namespace, _, short = name.partition("::")
        if operator := getattr(getattr(torch.ops, namespace), short, None):
            found[operator.default] = function
    return found


def output_specs(
    exported: ExportedProgram, inputs: Sequence[TensorSpec], names: Sequence[str]
) -> tuple[TensorSpec, ...]:
    """Specs of a program's outputs, their dimensions in terms of those of the inputs."""
    signature = exported.graph_signature
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if "val" in node.meta}
    symbols = {
        str(size): dim
        for spec, placeholder in zip(inputs, signature.user_inputs, strict=True)
        for size, dim in zip(values[placeholder].shape, spec.dims, strict=True)
        if isinstance(dim, str) and str(size).isidentifier()
    }

    def dim(size: int | torch.SymInt) -> int | str:
        known = str(of_inputs(size))
        text = re.sub(r"\b[a-z]\d+\b", lambda m: symbols.get(m[0], m[0]), known)
        return int(text) if text.isdigit() else text

    for name, out in zip(names, signature.user_outputs, strict=True):
        if values[out].dtype.is_complex:
            raise ExportFailed(
                f"output {name} is {values[out].dtype}, which few formats can hold: return its "
                "real and imaginary parts, as torch.view_as_real has them"
            )
    return tuple(
        TensorSpec(
            name, str(values[out].dtype).removeprefix("torch."), tuple(map(dim, values[out].shape))
        )
        for name, out in zip(names, signature.user_outputs, strict=True)
    )


class FixedDimension(ExportFailed):
    """A dimension that was to be dynamic has one size, `size`.

    Args:
        kind: of program.
        name: of the input.
        dim: of it.
        size: the only one.
        where: the place in the model's code that fixes it, if known.
        instead: a function that computes the same for any size, if known.
        since: why a loop there cannot be one of any number of turns, if that was tried.
    """

    def __init__(
        self,
        kind: Kind,
        name: str,
        dim: int,
        size: int,
        where: str = "",
        instead: str | None = None,
        since: str = "",
    ) -> None:
        self.size = size
        self._place = where, instead
        self._about = kind, name, dim, size
        by = f"at {where}" if where else "by a loop over it, or a parameter of that size"
        super().__init__(
            f"the {kind} program cannot be captured: dimension {dim} of input {name} comes out "
            f"fixed at {size}, {by}; give the number instead of a name for it"
            + (f", or call {instead} there, which takes any" if instead else "")
            + (f": {since}" if since else "")
        )

    def at(self, where: str, instead: str | None) -> "FixedDimension":
        """The same error with the place, and what could be called there."""
        return FixedDimension(*self._about, where, instead)

    def since(self, reason: str) -> "FixedDimension":
        """The same error with why a loop that it is by cannot be one of any number of turns."""
        return FixedDimension(*self._about, *self._place, reason)


def _check_dynamic(kind: Kind, exported: ExportedProgram, specs: Sequence[TensorSpec]) -> None:
    """Raises ExportFailed where named dimensions came out as a number, or as one."""
    named: dict[Any, str] = {}
    for name, i, dim, size in dynamic_sizes(exported, specs):
        if not is_dynamic(size):
            raise FixedDimension(kind, name, i, int(size))
        other = named.setdefault(size.node.expr, dim)
        if other != dim:
            raise ExportFailed(
                f"the {kind} program cannot be captured: {other} and {dim} come out as one"
                " size: give both one name, or the number instead"
            )


def is_dynamic(size: int | torch.SymInt) -> TypeGuard[torch.SymInt]:
    """Whether a size of a program is no number, neither at first nor at second sight."""
    return not isinstance(size, int) and not size.node.expr.is_number


def dynamic_sizes(
    exported: ExportedProgram, specs: Sequence[TensorSpec]
) -> Iterator[tuple[str, int, str, int | torch.SymInt]]:
    """The input, the number, the name and the size of each dimension that is to be dynamic."""
    values = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    for spec, placeholder in zip(specs, exported.graph_signature.user_inputs, strict=True):
        for i, (dim, size) in enumerate(zip(spec.dims, values[placeholder].shape, strict=True)):
            if isinstance(dim, str):
                yield spec.name, i, dim, size


@contextmanager
def failing_as(kind: Kind, called: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise every error as ExportFailed, in one line that names the program.

    torch prints the graph that it had come to, of thousands of lines: all but that is printed. An
    argument that it names is the input that `called` has for it.
    """
    printed, graph = io.StringIO(), ""
    try:
        with redirect_stderr(printed):
            yield
    except ExportFailed:
        raise
    except Exception as error:
        graph = str(getattr(error, "partial_fx_graph", ""))
        # torch's exporter raises any type; all of them mean the same to the caller.
        fixed = re.search(
            r"marked L\['(\w+)'\]\.size\(\)\[(\d+)\] .* specialized it to be a constant \((\d+)\)",
            str(error),
        )
        reason = one_line(error)
        if isinstance(error, GuardOnDataDependentSymNode):
            reason = "a size or a decision hangs on the values of a tensor"
        if "isIntList() INTERNAL ASSERT" in reason:
            reason = (
                "torch has an operator for sizes that are numbers alone, as interpolation with "
                "antialias: give them so, --input-shapes"
            )
        if fixed is not None:
            name = (called or {}).get(fixed[1], fixed[1])
            raise FixedDimension(kind, name, int(fixed[2]), int(fixed[3])) from error
        raise ExportFailed(f"the {kind} program cannot be captured: {reason}") from error
    finally:
        rest = printed.getvalue()
        sys.stderr.write(rest.replace(f"{graph}\n", "") if graph else rest)


def entry(module: nn.Module, specs: Sequence[TensorSpec], call: Callable[..., Any]) -> nn.Module:
    """`module`, its forward replaced: the same parameters under the same names, other arguments."""

    def forward(*tensors: Tensor) -> Any:
        sizes: dict[str, int] = {}
        for spec, tensor in zip(specs, tensors, strict=True):
            for dim, size in zip(spec.dims, tensor.shape, strict=True):
                # torch gives every size a symbol of its own. Those that are one dimension must be
                # known as equal before they meet in the graph, or it guesses, and guards its guess.
                if isinstance(dim, str):
                    torch._check(size == sizes.setdefault(dim, size))
        return call(*tensors)

    parameter = inspect.Parameter
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # torch reads it
        [
            parameter(name, parameter.POSITIONAL_OR_KEYWORD)
            for name in argument_names(spec.name for spec in specs)
        ]
    )
    # Not copy.copy: a parametrized module refuses it.
    entry = nn.Module.__new__(type(module))
    entry.__dict__.update(module.__dict__, forward=forward)
    return entry


def _take_assigned(module: torch.fx.GraphModule) -> None:
    """Take what a tensor is set to for the tensor, which decomposing would give its size before."""
    for node in module.graph.find_nodes(op="call_function", target=aten.set_.source_Tensor):
        node.replace_all_uses_with(node.args[1])
        module.graph.erase_node(node)
    module.recompile()


def _untied(exported: ExportedProgram, module: nn.Module) -> ExportedProgram:
    """A tied parameter enters the graph once, under its first name.

    torch.export gives each of its names a placeholder, and `ep.module()` a parameter, which
    training would then change apart from the others. One that the module's code has in a list of
    its own, too, is a constant there; detached, it has the values but no gradient.
    """
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    original = {n: first[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
    held = {_memory(p): name for name, p in module.named_parameters() if p.numel()}
    kept = {id(value) for part in module.modules() for value in tree_leaves(vars(part))}
    detached = set()
    for name, constant in exported.constants.items():
        if isinstance(constant, Tensor) and _memory(constant) in held:
            original[name] = held[_memory(constant)]
            if id(constant) in kept:  # of a parameter torch.export keeps its `data`
                detached.add(name)
    graph = exported.graph
    nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
    specs = exported.graph_signature.input_specs
    placeholders = {spec.target: nodes[spec.arg.name] for spec in specs if spec.target is not None}
    others = {n for n in placeholders if original.get(n, n) != n}
    begin = next(node for node in graph.nodes if node.op != "placeholder")
    for name in others:
        value = placeholders[original[name]]
        if name in detached:
            with graph.inserting_before(begin):
                value = graph.call_function(aten.detach.default, (value,))
            value.meta["val"] = placeholders[name].meta["val"]
        placeholders[name].replace_all_uses_with(value)
        graph.erase_node(placeholders[name])
    state = {name: value for name, value in exported.state_dict.items() if name not in others}
    return rebuilt(exported, graph, [s for s in specs if s.target not in others], state=state)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
