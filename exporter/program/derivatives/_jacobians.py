"""`torch.func.grad`, `vjp`, `jvp`, and Jacobians by these, in a capture.

Functorch has them by wrappers around tensors, of which a capture loses sight, and sizes. Here they
are by derivatives of the graph: see `_derivatives.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.utils import _pytree as pytree

from fuseport.exporter.program.derivatives import grad

__all__ = ["by_derivatives"]


@contextmanager
def by_derivatives() -> Iterator[None]:
    """In a capture: transforms of functions take no wrappers."""
    instead: dict[str, Any] = {
        "grad_increment_nesting": lambda: nullcontext(0),
        "_wrap_all_tensors": lambda given, level: pytree.tree_map_only(Tensor, _another, given),
        "_create_differentiable": _create_differentiable,
        "_undo_create_differentiable": lambda given, level=None: given,
        "_autograd_grad": _autograd_grad,
        "_jvp_with_argnums": _jvp_with_argnums,
    }
    with mock.patch.multiple(eager_transforms, **instead):
        yield


def _another(x: Tensor) -> Tensor:
    """The same, by which is differentiated what a function does to this, not what others do."""
    return x.view_as(x)


def _create_differentiable(given: Any, level: int | None = None) -> Any:
    def wanted(x: Any) -> Any:
        if not isinstance(x, Tensor):
            raise ValueError(f"Thing passed to transform API must be Tensor, got {type(x)}")
        if x.requires_grad:
            return x
        with eager_transforms.enable_inplace_requires_grad(True):
            return x.requires_grad_()

    return pytree.tree_map(wanted, given)


def _autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool = False,
    create_graph: bool = True,
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = grad(
        outputs, inputs, grad_outputs, create_graph=create_graph, materialize_grads=True
    )
    return found


def _jvp_with_argnums(
    func: Callable[..., Any],
    primals: Any,
    tangents: Any,
    argnums: int | tuple[int, ...] | None,
    *,
    strict: bool = False,
    has_aux: bool,
) -> Any:
    """Two derivatives backward: of a cotangent's product with the Jacobian, by the cotangent."""
    numbers = range(len(primals)) if argnums is None else argnums
    numbers = (numbers,) if isinstance(numbers, int) else tuple(n % len(primals) for n in numbers)
    with torch.enable_grad():
        given = list(pytree.tree_map_only(Tensor, _another, primals))
        by = pytree.tree_leaves([given[number] for number in numbers])
        _create_differentiable(by)
        result = func(*given)
        result, aux = result if has_aux else (result, None)
        ends, spec = pytree.tree_flatten(result)
        cotangents = [_create_differentiable(torch.zeros_like(end)) for end in ends]
        products = _autograd_grad(ends, by, cotangents)
        along = _autograd_grad(products, cotangents, pytree.tree_leaves(tangents))
    pushed = pytree.tree_unflatten(along, spec)
    return (result, pushed, aux) if has_aux else (result, pushed)
