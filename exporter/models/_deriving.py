"""Models that differentiate in their own forward: forces are derivatives of an energy."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["deriving"]

_derive: "WeakSet[nn.Module]" = WeakSet()


class _Kept(TorchFunctionMode):
    """Derivatives that a module takes leave the graph, by which what it gives has gradients."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.autograd.grad:
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
            with _Kept():
                return call(*inputs)
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
