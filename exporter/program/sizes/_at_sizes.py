"""Numbers that code reads of what hangs on no values of inputs, and is the same at all sizes.

A mask that code makes by itself, as `torch.zeros_like(ids)` of which a column is set, is the same
for all inputs of a size; to torch, what is read of it hangs on values.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fuseport.exporter.program._drawing import draws
from fuseport.exporter.program._needed import needed
from fuseport.exporter.program._writing import written_by
from fuseport.exporter.program.loops._turns import TURN
from fuseport.exporter.program.sizes.of_graph import examples_of, expr_of

__all__ = ["in_turns", "same_at_all"]

aten = torch.ops.aten

Sizes = Mapping[Any, int]
"""By symbol."""

_UNKNOWN = object()
"""What a node gives that hangs on values of inputs."""

_OF_SHAPES = {
    aten.empty_like.default, aten.full_like.default, aten.new_empty.default, aten.new_full.default,
    aten.new_ones.default, aten.new_zeros.default, aten.ones_like.default, aten.zeros_like.default,
}  # fmt: skip
"""What asks of its first tensor only how large it is, and of which dtype."""

_KINDS: dict[type, type] = {SymInt: int, SymFloat: float, SymBool: bool}
_SYMBOLIC: Any = tuple(_KINDS)

_OTHERS = ((2, 0), (3, 0), (1, 1), (1, 2))
"""Sizes beside the example's: so many times those, and so many more."""
_FAR = (2**12, 2**17)  # of one size, the others as in the example
_MOST = 2**24  # elements of what is computed for this


def same_at_all(end: fx.Node, buffers: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """What a node gives, if that is the same at several sizes; None if it hangs on more than these,
    or is written to.

    Args:
        end: the node, of one number.
        buffers: by node, what they are, and constants.
    """
    writing = {n: needed(to, _sharing) for n in end.graph.nodes if (to := written_by(n))}
    of = _hangs_on(end, writing)
    if in_turns(of) or any(end in to for to in writing.values()):
        return None
    found: list[Tensor] = []
    for sizes in _several(of):
        try:
            made = _made_at(end, of, buffers, sizes)
        except Exception:  # an operator's own, of sizes that do not go together, or are too large
            if not found:
                return None
            continue
        if made is None or (found and not torch.equal(made, found[0])):
            return None
        found.append(made)
    return found[0] if len(found) > 1 else None


def in_turns(of: Iterable[fx.Node]) -> bool:
    """Whether a loop has made one of some nodes, of which a capture has a few turns."""
    return any(user.target is TURN for node in of for user in node.users)


def _hangs_on(end: fx.Node, writing: Mapping[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """The nodes that may have a part in what a node gives, with those that write to such."""
    of = needed([end])
    while more := [n for n, to in writing.items() if n not in of and not of.isdisjoint(to)]:
        of |= needed(more)
    return of


def _sharing(node: fx.Node) -> Iterable[fx.Node]:
    """The tensors that it may be part of the memory of."""
    if isinstance(node.target, OpOverload):
        own = node.target.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)
        views = any(each.alias_info is not None for each in node.target._schema.returns)
        if not own and not views:
            return ()
    return [x for x in node.all_input_nodes if not isinstance(x.meta.get("val"), _SYMBOLIC)]


def _several(of: Iterable[fx.Node]) -> Iterator[Sizes]:
    """The sizes of the example, and others; none where nothing is of any size."""
    made: list[Any] = pytree.tree_leaves([node.meta.get("val") for node in of])
    made += [size for x in made if isinstance(x, Tensor) for size in x.shape]
    symbolic = [x for x in made if isinstance(x, _SYMBOLIC)]
    if not symbolic:
        return
    hints = examples_of(symbolic[0].node.shape_env)
    known = {s: int(hints[s]) for x in symbolic for s in x.node.expr.free_symbols if s in hints}
    yield known
    for times, more in _OTHERS:
        yield {symbol: size * times + more for symbol, size in known.items()}
    for symbol, size in known.items():
        for far in _FAR:
            yield {**known, symbol: size * max(2, far // size)}


def _made_at(
    end: fx.Node, of: set[fx.Node], buffers: Mapping[fx.Node, Tensor], sizes: Sizes
) -> Tensor | None:
    kept = {_memory(buffer) for buffer in buffers.values()}
    found: dict[fx.Node, Any] = {}
    for node in end.graph.nodes:
        if node not in of:
            continue
        written = written_by(node)
        if any(_memory(found[each]) in kept for each in written):
            return None
        found[node] = buffers[node] if node in buffers else _made(node, found, sizes)
        if written and found[node] is _UNKNOWN:
            return None
    made = found[end]
    return made if isinstance(made, Tensor) else None


def _made(node: fx.Node, found: Mapping[fx.Node, Any], sizes: Sizes) -> Any:
    value = node.meta.get("val")
    if isinstance(value, _SYMBOLIC):
        number = value.node.expr.subs(sizes)
        if not number.free_symbols:
            return _KINDS[type(value)](number)
    if not callable(node.target) or draws(node):
        return _UNKNOWN
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
    if node.target in _OF_SHAPES and args[0] is _UNKNOWN:
        args = _like(node.args[0], sizes), *args[1:]
    if any(each is _UNKNOWN for each in pytree.tree_leaves((args, kwargs))):
        return _UNKNOWN
    if isinstance(value, Tensor) and math.prod(_shape(value, sizes) or ()) > _MOST:
        raise MemoryError("more than a look at sizes is worth")
    return node.target(*args, **kwargs)


def _like(node: Any, sizes: Sizes) -> Any:
    """A tensor of the shape and dtype of one that hangs on values."""
    x: Tensor = node.meta["val"]
    shape = _shape(x, sizes)
    return _UNKNOWN if shape is None else torch.zeros((), dtype=x.dtype).expand(shape)


def _shape(x: Tensor, sizes: Sizes) -> list[int] | None:
    """That of a tensor at some sizes; None where it hangs on values."""
    shape = [expr_of(size).subs(sizes) for size in x.shape]
    return [*map(int, shape)] if all(size.is_number for size in shape) else None


def _memory(x: Any) -> int | None:
    return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else None
