"""Models that differentiate in their own forward: forces are derivatives of an energy."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["deriving", "shapes_of"]

_derive: "WeakSet[nn.Module]" = WeakSet()
# By module, for which shapes of its inputs it takes no derivative.
_plain: "WeakKeyDictionary[nn.Module, set[Any]]" = WeakKeyDictionary()


class _Kept(TorchFunctionMode):
    """Derivatives that a module takes leave the graph, by which what it gives has gradients.

    Attributes:
        taken: whether it has taken any.
    """

    taken = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.autograd.grad:
            self.taken = True
            kwargs = {**(kwargs or {}), "retain_graph": True}
        return func(*args, **(kwargs or {}))


def deriving(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which calls the module, with autograd on where the module differentiates itself.

    Where autograd is off, what comes of it has no gradient all the same. Where it is on, that has
    gradients also if the module takes its derivatives with `create_graph=False`, which frees the
    graph of what it differentiates.
    """

    def called(*inputs: Any) -> Any:
        if torch.is_grad_enabled():
            plain, shapes = _plain.setdefault(module, set()), shapes_of(inputs)
            if shapes in plain:
                return call(*inputs)
            with _Kept() as kept:
                result = call(*inputs)
            if not kept.taken:
                plain.add(shapes)
            return result
        if module not in _derive:
            try:
                return call(*inputs)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
        with torch.enable_grad():
            result = call(*(x.detach() if isinstance(x, Tensor) else x for x in inputs))
        _derive.add(module)
        return pytree.tree_map_only(Tensor, Tensor.detach, result)

    return called


def shapes_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What tells calls of a module apart: the shapes of its inputs, and whether autograd is on."""
    shapes = (tuple(x.shape) if isinstance(x, Tensor) else None for x in inputs)
    return (torch.is_grad_enabled(), *shapes)
