"""Derivatives that model code takes itself: `torch.autograd.grad(energy.sum(), positions)`.

Autograd saves what operators of a capture have made inside, which no graph knows. So it is the
graph that is differentiated: from the inputs of the derivative to its outputs, as a gradient
program is, with the nodes of it put behind what the capture has as yet.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fuseport.exporter.program._needed import needed
from fuseport.exporter.program.derivatives._between import Between, attribute, refused, written
from fuseport.exporter.program.sizes._known import is_function, node_of

__all__ = ["grad", "merge_equal", "taking"]

aten = torch.ops.aten

functorch = torch._C._functorch

_ATEN = {torch.ops.prims.copy_to.default: aten.copy_.default}  # of what others have other forms


class _State:
    """Of the capture that is going on: whether its code has taken a derivative."""

    taken = False


@contextmanager
def taking() -> Iterator[Callable[[], bool]]:
    """In a capture: tells whether model code has taken derivatives."""
    with mock.patch.object(_State, "taken", False):
        yield lambda: _State.taken


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """What `torch.autograd.grad` gives, in a capture; NotImplemented where there is none.

    Raises:
        ExportFailed: the derivative is of something that the capture does not know.
        RuntimeError: as torch's, of inputs that the outputs do not depend on.
    """
    mode = get_proxy_mode()
    if mode is None or torch.compiler.is_dynamo_compiling():
        return NotImplemented
    roots, leaves = _tensors(outputs), _tensors(inputs)
    seeds = [None] * len(roots) if grad_outputs is None else _tensors(grad_outputs)
    given = [torch.ones_like(x) if g is None else g for x, g in zip(roots, seeds, strict=True)]
    nodes = [[_known(x) for x in each] for each in (roots, leaves, given)]
    over = _gone_over([*roots, *leaves, *given])
    tracer, (ends, by, cotangents) = mode.tracer, nodes
    made = _put(tracer, ends, by, cotangents, again=create_graph, batched=is_grads_batched)
    found = [x and _tracked(tracer, x, over, again=create_graph) for x in made]
    _State.taken = True
    if materialize_grads:
        found = [
            torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)
        ]
    elif not allow_unused and any(g is None for g in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    return tuple(found)


def _known(x: Tensor) -> fx.Node:
    if (node := node_of(x)) is None:
        raise refused("of a tensor that it does not know")
    return node


def _tensors(given: Any) -> list[Any]:
    return [given] if isinstance(given, Tensor) else list(given)


def _gone_over(tensors: Sequence[Tensor]) -> dict[int, Any]:
    """The levels of `torch.vmap` that some tensors are in, and how many it goes over."""
    found: dict[int, Any] = {}
    for x in tensors:
        while functorch.is_batchedtensor(x):
            level, dim = functorch.maybe_get_level(x), functorch.maybe_get_bdim(x)
            x = functorch.get_unwrapped(x)
            found[level] = x.shape[dim]
    return dict(sorted(found.items()))


def _put(
    tracer: Any,
    roots: Sequence[fx.Node],
    leaves: Sequence[fx.Node],
    seeds: Sequence[fx.Node],
    *,
    again: bool,
    batched: bool,
) -> list[fx.Node | None]:
    """Put the nodes of a derivative into the graph that is being made.

    Args:
        tracer: that makes it.
        roots: what is differentiated.
        leaves: by what.
        seeds: a cotangent for each root.
        again: whether what comes of it is differentiated, too.
        batched: whether cotangents have one dimension more, in front, of many.
    """
    region = Between(tracer, roots, leaves)
    operands = [*leaves, *region.given, *seeds]
    count = len(operands) - len(seeds)
    connected: list[int] = []

    def derivative(*arguments: Tensor) -> list[Tensor]:
        values = dict(zip(operands[:count], arguments, strict=False))
        by = [values[leaf].detach().requires_grad_() for leaf in leaves]
        ends = region.run({**values, **dict(zip(leaves, by, strict=True))})
        pairs = zip(ends, arguments[count:], strict=True)
        pulling = [(end, cotangent) for end, cotangent in pairs if end.requires_grad]
        if not pulling:
            return []
        pulled_from = [end for end, _ in pulling]

        def pulled(*cotangents: Tensor) -> list[Tensor]:
            made = torch.autograd.grad(
                pulled_from, by, cotangents, create_graph=again, allow_unused=True
            )
            connected[:] = [number for number, each in enumerate(made) if each is not None]
            return [each for each in made if each is not None]

        return (torch.func.vmap(pulled) if batched else pulled)(*(g for _, g in pulling))

    fakes: list[Any] = [_fake(node) for node in operands]
    with _apart(fakes[0].fake_mode):
        module = make_fx(derivative)(*fakes)
    for node in module.graph.find_nodes(op="call_function", target=aten.detach.default):
        if node not in region.known:  # of what autograd saves, not of the model's
            node.replace_all_uses_with(node.args[0])
    results: list[fx.Node | None] = [None] * len(leaves)
    made = _copied(tracer, module, dict(zip(_placeholders(module), operands, strict=True)), region)
    for number, node in zip(connected, made, strict=True):
        results[number] = node
    return results


@contextmanager
def _unseen() -> Iterator[None]:
    """What is done is done for no capture, and in no transform of a function."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        temporarily_clear_interpreter_stack(),
    ):
        yield


@contextmanager
def _apart(mode: Any) -> Iterator[None]:
    """Another trace within a capture, as of a gradient program."""
    with (
        _unseen(),
        mode,
        enable_python_dispatcher(),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


def _placeholders(module: fx.GraphModule) -> Sequence[fx.Node]:
    return module.graph.find_nodes(op="placeholder")


def _copied(
    tracer: Any, module: fx.GraphModule, operands: Mapping[fx.Node, fx.Node], region: Between
) -> list[fx.Node]:
    """The results of a graph, whose nodes are put into the one that is being made.

    What that has already is not computed anew, and what is differentiated by later stays itself.
    """
    copies: dict[fx.Node, Any] = {**region.known, **operands}
    (results,) = module.graph.output_node().args
    nodes = list(module.graph.nodes)

    def taken(node: fx.Node) -> Sequence[fx.Node]:
        return () if node in copies else node.all_input_nodes

    within = written(nodes, needed(_nodes_of(results), taken), taken)
    for node in nodes:
        if node not in within or node in copies:
            continue
        target = _ATEN.get(node.target, node.target)
        if node.op == "get_attr":
            target = _kept(tracer.root, attribute(module, node))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = tracer.create_node(node.op, target, args, kwargs)
        known = {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
        copies[node].meta |= known
    return [copies[node] for node in _nodes_of(results)]


def _nodes_of(results: Any) -> list[fx.Node]:
    return [each for each in pytree.tree_leaves(results) if isinstance(each, fx.Node)]


def _kept(root: Any, value: Any) -> str:
    number = sum(name.startswith("_derivative_") for name in vars(root))
    name = f"_derivative_{number}"
    setattr(root, name, value)
    return name


def _fake(node: fx.Node) -> Tensor:
    """What stands for what a node gives; within `torch.vmap`, for one of many."""
    value: Tensor = node.meta["val"]
    if not functorch.is_batchedtensor(value):
        return value
    sizes, dtype, device = value.shape, value.dtype, value.device
    while functorch.is_batchedtensor(value):
        value = functorch.get_unwrapped(value)
    with _unseen():
        return value.new_empty(sizes, dtype=dtype, device=device)


def _tracked(tracer: Any, node: fx.Node, over: Mapping[int, Any], *, again: bool) -> Tensor:
    """A tensor of the capture, which a node gives."""
    value = node.meta["val"]
    if not again:  # what has no derivative any more
        node = tracer.create_node("call_function", aten.detach.default, (node,), {})
        node.meta["val"] = value
    with _unseen():
        made: Tensor = value.new_empty([*list(over.values())[::-1], *value.shape])
        if again and not over:
            made.requires_grad_()
        for before, level in enumerate(over, 1):
            made = functorch._add_batch_dim(made, len(over) - before, level)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        track_tensor_tree(made, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return made


def merge_equal(graph: fx.Graph) -> None:
    """Compute once what two nodes of a graph without writes compute alike by operators of torch."""
    first: dict[Any, fx.Node] = {}
    output = graph.output_node()
    for node in list(graph.nodes):
        of_torch = getattr(node.target, "namespace", "aten") == "aten"
        if not of_torch or not is_function(node) or output in node.users:
            continue
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        key = (node.target, str(spec), tuple(map(_hashable, leaves)))
        other = first.setdefault(key, node)
        if other is not node:
            node.replace_all_uses_with(other)
            graph.erase_node(node)


def _hashable(x: Any) -> Any:
    return x if isinstance(x, fx.Node) else (type(x), repr(x))
