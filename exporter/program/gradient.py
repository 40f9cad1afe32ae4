"""Forward program → gradient program: its vector-Jacobian product, as one functional graph."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import (
    Program,
    TensorSpec,
    argument_names,
    mutates,
    one_line,
    real,
    rebuilt,
    shape_env,
)
from fuseport.exporter.program._dtypes import named_dtypes
from fuseport.exporter.program.complex_numbers.real_regions import differentiable
from fuseport.exporter.program.conditions import depends_on, dimensions
from fuseport.exporter.program.forward import failing_as, output_specs
from fuseport.exporter.program.loops._lightened import lighten
from fuseport.exporter.program.loops._saved_sizes import sizes_saved
from fuseport.exporter.program.loops.until import counted
from fuseport.exporter.program.portable import PORTABLE, computed_inside
from fuseport.exporter.program.provenance import Provenance
from fuseport.exporter.program.regions import SCAN, graphs, nodes, refuse_writers, regions, view_of
from fuseport.exporter.program.sizes._arithmetic import fails, holds
from fuseport.exporter.program.sizes.bounds import may_be_zero, of_inputs
from fuseport.exporter.program.tracing import any_sizes
from fuseport.exporter.program.tracing._layouts import contiguous_gradients, contiguous_matrices

__all__ = ["capture_gradient"]

aten = torch.ops.aten


def capture_gradient(forward: Program) -> Program:
    """The vector-Jacobian product of a forward program, as a program of its own.

    It takes the forward program's inputs, then `cotangent_<output>` for each floating output. It
    returns a dictionary: the outputs, then `grad/<name>` of each floating input and each trainable
    parameter (a tied one once, under its first name) that the outputs depend on.

    Args:
        forward: from `capture_forward`, with trainable parameters where they require gradients.

    Raises:
        ExportFailed: an operator in the graph has no derivative, or the derivative of one is only
            known for a fixed size.
    """
    cotangents = [
        TensorSpec(f"cotangent_{spec.name}", spec.dtype, spec.dims)
        for spec in forward.outputs
        if spec.floating
    ]
    specs = (*forward.inputs, *cotangents)
    wanted = [spec.name for spec in forward.inputs if spec.floating] + [
        name
        for name, value in forward.state(requires_grad=True).items()
        if isinstance(value, nn.Parameter) and value.requires_grad
    ]
    if not wanted:
        raise ExportFailed(
            "there is no gradient program: no floating input, no trainable parameter"
        )
    loops, saved = contiguous_gradients(), sizes_saved()
    with failing_as("gradient"), _regions_named(forward), any_sizes(), loops, saved:
        joint = _trace(forward, wanted, [spec.name for spec in cotangents])
        names = [spec.name for spec in forward.outputs] + [f"grad/{n}" for n in joint.connected]
        named_dtypes(joint.module)
        exported = _exported(forward, joint, specs, names)
    none = tuple(f"grad/{name}" for name in wanted if name not in joint.connected)
    return Program("gradient", exported, specs, output_specs(exported, specs, names), none)


@contextmanager
def _regions_named(forward: Program) -> Iterator[None]:
    """What torch fails with where a graph has regions tells nothing of them.

    What it makes of the gradient of others than these, it cannot write or load again.
    """
    refuse_writers(forward.exported.graph, "gradient through")
    names = {str(node.target) for node in regions(forward.exported.graph)}
    without = sorted(names - _DIFFERENTIABLE)
    use = "; ".join(dict.fromkeys(_INSTEAD.get(name, "torch.where") for name in without or names))
    advice = f"use {use}, or export outputs alone: --program forward"
    if without:
        refused = ", ".join(f"torch.{name}" for name in without)
        raise ExportFailed(f"there is no gradient through {refused}: {advice}")
    try:
        yield
    except Exception as error:
        if not names or isinstance(error, ExportFailed):
            raise
        called = ", ".join(sorted(f"torch.{name}" for name in names))
        raise ExportFailed(
            f"there is no gradient through {called} ({one_line(error)}): {advice}"
        ) from error


_DIFFERENTIABLE = {"cond", "map_impl", "scan", "while_loop"}
# What has a gradient in the place of a region that has none; of those not named here, torch.where.
_INSTEAD = {"associative_scan": 'its combine_mode="generic" (--shim auto calls that)'}


@dataclass(frozen=True)
class _Joint:
    """A graph of the forward program's placeholders and cotangents → outputs and gradients.

    `connected` are the names whose gradients it returns, after the outputs.
    """

    module: fx.GraphModule
    connected: list[str]


def _trace(forward: Program, wanted: Sequence[str], cotangents: Sequence[str]) -> _Joint:
    exported = contiguous_matrices(differentiable(counted(forward.exported)))
    names = _placeholder_names(forward, cotangents)
    placeholders = exported.graph.find_nodes(op="placeholder")
    fakes = {name: node.meta["val"] for name, node in zip(names, placeholders, strict=True)}
    results = [node.meta["val"] for node in exported.graph.output_node().args[0]]
    inner = computed_inside(exported.graph_module, PORTABLE)
    connected: list[str] = []
    provenance = Provenance()

    def joint(*arguments: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip([*names, *cotangents], arguments, strict=True))
        leaves = {name: given[name].detach().requires_grad_() for name in wanted}
        values = {**given, **leaves}
        for spec in forward.inputs:
            if spec.floating:
                # The graph is traced on contiguous examples and may take views that only those
                # allow; callers pass any layout.
                values[spec.name] = _contiguous(values[spec.name])
        results = _Differentiable(inner, provenance).run(
            *(values[name] for name in names), enable_io_processing=False
        )
        roots, seeds = [], []
        for spec, result in zip(forward.outputs, results, strict=True):
            if spec.floating and result.requires_grad:
                roots.append(result)
                seeds.append(_contiguous(given[f"cotangent_{spec.name}"]))
        gradients = (
            torch.autograd.grad(roots, list(leaves.values()), seeds, allow_unused=True)
            if roots
            else [None for _ in leaves]
        )
        found = {n: real(g) for n, g in zip(leaves, gradients, strict=True) if g is not None}
        connected[:] = found
        return (*(result.detach() for result in results), *found.values())

    # The fake mode stays on, since autograd itself makes zeros, of symbolic sizes; and the Python
    # dispatcher, since some derivatives (of padding, for one) have symbolic forms only there. The
    # fused attention of each device has a backward of its own; the plain form runs anywhere.
    mode = next(iter(fakes.values())).fake_mode
    # Cotangents are contiguous, whatever their outputs are: AOTInductor takes strides for given.
    seeds = (_empty(result) for result in results if result.is_floating_point())
    arguments = [*fakes.values(), *seeds]
    with (
        mode,
        enable_python_dispatcher(),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        _guarded(forward),
        provenance.tracing(),
    ):
        module = make_fx(joint)(*arguments)
        for part in graphs(module):
            if part is not module:
                _return_apart(part.graph)
                part.recompile()  # it may be run again
        # Some derivatives do, inside.
        if any(map(mutates, nodes(module))):
            interpreted = fx.Interpreter(module)  # which keeps the marks of nodes
            with torch.no_grad():  # what is written to parts of complex numbers has no derivative
                module = make_fx(functionalize(interpreted.run))(*arguments)
    for node in list(module.graph.nodes):
        if node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.view.default:
            # Strides that fakes of derivatives have, as of softplus', are not always the kernel's.
            node.target = aten.reshape.default
        elif node.target is aten.masked_fill.Scalar:
            _choose(node, mode)
        elif node.target is aten._conj.default and isinstance(node.args[0], complex):
            _become(node, node.args[0].conjugate())  # an operator takes tensors, not a number
    for part in graphs(module):
        _without_copies(part.graph)
        _divide(part.graph, mode)
        _put_in_order(part.graph, mode)
    module.graph.eliminate_dead_code()
    lighten(module)
    for part in graphs(module):
        for node in regions(part.graph):
            if isinstance(node.meta["val"], list):  # torch's serializer takes a tuple alone
                node.meta["val"] = tuple(node.meta["val"])
    module.graph.eliminate_dead_code()
    provenance.tidy(module.graph)
    return _Joint(module, connected)


def _return_apart(graph: fx.Graph) -> None:
    """Have a region return nothing twice, nothing that it is given, and no part of something that
    it takes apart."""
    output = graph.output_node()
    results: dict[fx.Node, fx.Node] = {}

    def alone(node: fx.Node) -> fx.Node:
        of = node.args[0] if node.target is operator.getitem else None
        part = isinstance(of, fx.Node) and view_of(of) is not None
        if part or node in results or node.op == "placeholder":
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            return copy
        return results.setdefault(node, node)

    output.args = fx.node.map_arg(output.args, alone)


def _without_copies(graph: fx.Graph) -> None:
    """Views where torch has copies of them, as in regions, which formats have no other form of.

    What a region returns stays a copy: it must be nothing of what goes in.
    """
    returned = graph.output_node().all_input_nodes
    for node in graph.nodes:
        view = view_of(node)
        if view is aten.detach.default:
            if node in returned:
                node.target = aten.clone.default
            else:
                node.replace_all_uses_with(node.args[0])
        elif view is not None:
            node.target = view
            if node in returned and isinstance(node.meta["val"], Tensor):
                with graph.inserting_after(node):
                    copied = graph.call_function(aten.clone.default, (node,))
                copied.meta = dict(node.meta)
                graph.output_node().replace_input_with(node, copied)


def _divide(graph: fx.Graph, mode: Any) -> None:
    """Factors that are quotients of sizes, by tensors: of a variance's gradient, `2 / (n - 1)`.

    By zero, Python raises an error where C++, in which torch's derivatives are, has ∞ or NaN.
    """
    for node in graph.find_nodes(op="call_function", target=operator.truediv):
        scaled = [user for user in node.users if user.target is aten.mul.Scalar]
        if not scaled or not may_be_zero(_number_of(node.args[1])):
            continue
        with graph.inserting_after(node):
            quotient = graph.call_function(aten.div.Tensor)
        with graph.inserting_before(quotient):
            sides = [
                graph.call_function(aten.scalar_tensor.default, (side,), {"dtype": torch.float64})
                for side in node.args
            ]
        quotient.args = tuple(sides)
        for made in (*sides, quotient):
            with mode:
                made.meta["val"] = torch.empty((), dtype=torch.float64)
        for user in scaled:
            user.target = aten.mul.Tensor
            user.replace_input_with(node, quotient)


def _choose(node: fx.Node, mode: Any) -> None:
    """Choose where torch's derivative fills in place, which leaves the strides as they are.

    `masked_fill` does not, and kernels behind it, as of group norms, take what derivatives saw.
    """
    x, mask, value = node.args
    made = node.meta["val"]
    with node.graph.inserting_before(node):
        filling = node.graph.call_function(
            aten.scalar_tensor.default, (value,), {"dtype": made.dtype, "device": made.device}
        )
    with mode:
        filling.meta["val"] = torch.empty((), dtype=made.dtype, device=made.device)
    node.target, node.args = aten.where.self, (mask, filling, x)


def _put_in_order(graph: fx.Graph, mode: Any) -> None:
    """Give the backward of a batch norm contiguous copies of its cotangent and its input.

    Its kernel takes channels last too, but not one of each, and does not see which it is where the
    batch is 1.
    """
    for node in graph.find_nodes(
        op="call_function", target=aten.native_batch_norm_backward.default
    ):
        for x in dict.fromkeys(node.args[:2]):
            with graph.inserting_before(node):
                copied = graph.call_function(
                    aten.clone.default, (x,), {"memory_format": torch.contiguous_format}
                )
            with mode:
                copied.meta = {**x.meta, "val": _contiguous(x.meta["val"])}
            node.replace_input_with(x, copied)


def _number_of(x: Any) -> Any:
    return x.meta["val"] if isinstance(x, fx.Node) else x


def _become(node: fx.Node, number: complex) -> None:
    """Put a number where a node's value is taken."""

    def put(part: Any) -> Any:
        return number if part is node else part

    for user in list(node.users):
        user.args = fx.node.map_aggregate(user.args, put)
        user.kwargs = fx.node.map_aggregate(user.kwargs, put)


@contextmanager
def _guarded(forward: Program) -> Iterator[None]:
    """Refuse derivatives that hold for single sizes only, and let go of bounds on large ones.

    Choices between algorithms have upper bounds, such as a batch that is small enough; what is
    traced is the operator, which chooses anew at every call.
    """
    env = shape_env(forward.exported)
    known, named = len(env.guards), dimensions(forward)
    yield
    large = dict.fromkeys(env.var_to_range, 2**20)
    found = [guard for guard in env.guards[known:] if fails(guard.expr, large)]
    for guard in found:
        if isinstance(guard.expr, sympy.Eq):
            if _is_a_bound(guard.expr, forward):
                continue
            about = ", ".join(depends_on(guard.expr, named))
            raise ExportFailed(
                f"a derivative in the gradient program holds for few sizes of {about}: give the "
                "number instead of a name for it, or export outputs alone: --program forward"
            )
        env.guards.remove(guard)


def _is_a_bound(equation: sympy.Eq, forward: Program) -> bool:
    """Whether it holds at sizes beside those of the example, as `min(64, length) == length`."""
    inputs = (node.meta["val"] for node in forward.exported.graph.find_nodes(op="placeholder"))
    sizes: list[Any] = [size for x in inputs if isinstance(x, Tensor) for size in x.shape]
    here = {s.node.expr: int(s.node.hint) for s in sizes if isinstance(s, torch.SymInt)}
    if not equation.free_symbols <= {*here}:
        return False
    beside = ({**here, size: here[size] + by} for size in equation.free_symbols for by in (-1, 1))
    return all(holds(equation, each) for each in beside)


class _Differentiable(fx.Interpreter):
    """Runs a captured graph, for autograd to see operators that have portable derivatives."""

    def __init__(self, module: fx.GraphModule, provenance: Provenance) -> None:
        super().__init__(module)
        self._provenance = provenance

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and say which layer it is in."""
        self._provenance.mark(n)
        result = super().run_node(n)
        self._provenance.gave(n, result)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator."""
        result = super().call_function(PORTABLE.get(target, target), args, kwargs)
        if target is SCAN:
            states = len(args[1])
            return (*map(_Apart.apply, result[:states]), *result[states:])
        return result


class _Apart(torch.autograd.Function):
    """A state that a `scan` leaves, with a cotangent of its own: one that is another's, too, torch
    takes in the loop back for one and the same at each step."""

    @staticmethod
    def forward(ctx: Any, state: Tensor) -> Tensor:
        """The same."""
        return state.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """A copy."""
        return cotangent.clone()


def _exported(
    forward: Program, joint: _Joint, specs: Sequence[TensorSpec], names: Sequence[str]
) -> ExportedProgram:
    """The joint graph as an exported program: the same state, sizes and names as `forward` has."""
    original = forward.exported
    graph = joint.module.graph
    inputs = [
        *(s for s in original.graph_signature.input_specs if s.kind is not InputKind.USER_INPUT),
        *(InputSpec(InputKind.USER_INPUT, TensorArgument(spec.name), None) for spec in specs),
    ]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for i, (node, spec) in enumerate(zip(placeholders, inputs, strict=True)):
        node._rename(spec.arg.name)
        node.target = node.name
        inputs[i] = replace(spec, arg=TensorArgument(node.name))
    # Sizes that depend on values have other names than in the forward program.
    for node in nodes(joint.module):
        new = node in placeholders and free_unbacked_symbols(node.meta["val"])
        for size in new or node.meta.get("unbacked_bindings") or ():
            original.range_constraints[size] = shape_env(original).var_to_range[size]
    state = forward.state(requires_grad=False)
    return rebuilt(
        original,
        graph,
        inputs,
        outputs=names,
        arguments=argument_names(spec.name for spec in specs),
        state={n: t for n, t in state.items() if n in original.state_dict},
    )


def _placeholder_names(forward: Program, cotangents: Sequence[str]) -> list[str]:
    """What each placeholder of the forward program stands for, none of them as a cotangent."""
    user_inputs = iter(spec.name for spec in forward.inputs)
    names = []
    for spec in forward.exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            names.append(next(user_inputs))
        elif spec.target is not None and isinstance(spec.arg, TensorArgument):
            names.append(spec.target)
        else:
            raise ExportFailed(f"the graph takes {spec.arg}, which has no gradient program")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ExportFailed(f"{', '.join(twice)}: an input and a parameter of one name; rename one")
    if clash := [name for name in names if name in cotangents]:
        raise ExportFailed(
            f"{', '.join(clash)}: the gradient program takes the cotangent of an output under this "
            "name: rename what is called so, or export outputs alone: --program forward"
        )
    return names


def _contiguous(tensor: Tensor) -> Tensor:
    return torch.clone(tensor, memory_format=torch.contiguous_format)


def _empty(like: Tensor) -> Tensor:
    """A contiguous fake of the same sizes; one that hangs on values is a size of its own.

    As what is computed of such sizes, torch could not load it: nothing in the graph says what they
    are before there are inputs.
    """
    shape = [of_inputs(size) for size in like.shape]
    for i, size in enumerate(shape):
        if isinstance(size, torch.SymInt) and free_unbacked_symbols(size):
            env = size.node.shape_env
            with env.ignore_fresh_unbacked_symbols():
                shape[i] = env.create_unbacked_symint()
            torch._check(shape[i] >= 0)
    return like.new_empty(shape)
