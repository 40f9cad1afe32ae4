"""Operators in terms of others, whose derivatives are of any size, and run outside of torch too."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from fuseport.exporter.program.loops.until import below_autograd
from fuseport.exporter.program.portable._antialiased import antialiased
from fuseport.exporter.program.portable._bags import BAGS, bilinear
from fuseport.exporter.program.portable._booleans import chosen, filled
from fuseport.exporter.program.portable._folds import FOLDS
from fuseport.exporter.program.portable._grouped import convolution, transposed_convolution
from fuseport.exporter.program.portable.volumes import grid_sampler_3d
from fuseport.exporter.program.regions import WHILE, graphs
from fuseport.exporter.program.sizes.bounds import may_be_none

__all__ = ["DIFFERENTIABLE", "PORTABLE", "computed_inside", "masked_select"]

aten = torch.ops.aten


def _circular(x: Tensor, pad: Sequence[int]) -> Tensor:
    # torch writes it into an empty tensor piece by piece, whose gradient asks for strides.
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.dim() - 1 - i
        size = x.shape[dim]
        front = aten.slice.Tensor(x, dim, size - before, size)
        x = torch.cat([front, x, aten.slice.Tensor(x, dim, 0, after)], dim)
    return x


def _pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    if mode == "circular" and all(statically_known_true(width >= 0) for width in pad):
        return _circular(x, pad)
    if mode != "replicate":
        return aten.pad.default(x, pad, mode, value)
    names = {2: "replication_pad1d", 4: "replication_pad2d", 6: "replication_pad3d"}
    return decomposition_table[getattr(aten, names[len(pad)]).default](x, pad)


def _grid_sampler(x: Tensor, *arguments: Any) -> Any:
    if x.dim() != 4:
        return grid_sampler_3d(x, *arguments)
    return decomposition_table[aten.grid_sampler_2d.default](x, *arguments)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    return decomposition_table[aten._weight_norm_interface.default](v, g, dim)[0]


def _adaptive_avg_pool(pool: Callable[..., Any], x: Tensor, output_size: Sequence[int]) -> Any:
    if any(size != 1 for size in output_size):
        return pool(x, output_size)
    # As torch does, but for the strides that it gives the mean of a channels-last input in place.
    return aten.mean.dim(x, [-1 - i for i in range(len(output_size))], True)


def _group_norm(x: Tensor, *arguments: Any) -> Any:
    # Its kernel takes channels last too, but does not see it where a dimension before is 1.
    if not x.is_contiguous():
        x = x.clone(memory_format=torch.contiguous_format)
    return aten.group_norm.default(x, *arguments)


def _of_one_feature(operator: Callable[..., Any], x: Tensor, weight: Tensor, *bias: Any) -> Any:
    # Where values say how many rows there are, its derivative asks whether there is one.
    of_values = x.dim() > 1 and weight.dim() == 2 and any(map(free_unbacked_symbols, x.shape))
    if not of_values or not statically_known_true(x.shape[-1] == 1):
        return operator(x, weight, *bias)
    out = x * (weight.mT if operator is aten.linear.default else weight)
    return out if not bias or bias[0] is None else out + bias[0]


def _bag(operator: Callable[..., Any], *arguments: Any) -> Any:
    # Gradients that are scaled by how often rows occur (argument 3) are none of a function.
    scaled = arguments[3:4] == (True,)
    return (operator if scaled else BAGS[operator])(*arguments)


def _log_sigmoid(x: Tensor) -> Any:
    # Its backward asks whether there is anything at all.
    if not any(map(may_be_none, x.shape)):
        return aten.log_sigmoid.default(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # as its kernel takes halves
    out = torch.minimum(wide, torch.zeros_like(wide)) - torch.log1p(torch.exp(-wide.abs()))
    return out.to(x.dtype)


def masked_select(x: Tensor, mask: Tensor) -> Any:
    """`torch.masked_select`: the values where a mask is true, which broadcasts with them."""
    x, mask = torch.broadcast_tensors(x, mask)
    return aten.index.Tensor(x, [mask])


def _as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    if not x.is_contiguous() or x.storage_offset():
        return aten.as_strided.default(x, size, stride, storage_offset)
    places = _places(size, stride, storage_offset, x.device)
    return aten.index.Tensor(x.reshape(-1), [places])


def _as_strided_scatter(
    x: Tensor,
    source: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    """`x.as_strided(…).copy_(source)` as a value."""
    if not x.is_contiguous() or x.storage_offset():
        return NotImplemented
    places = _places(size, stride, storage_offset, x.device)
    return aten.index_put.default(x.reshape(-1), [places], source).reshape(x.shape)


def _places(
    size: Sequence[int], stride: Sequence[int], storage_offset: int | None, device: torch.device
) -> Tensor:
    """Where in memory what has these strides is."""
    where = torch.full([1] * len(size), storage_offset or 0, device=device)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        steps = torch.arange(length, device=device) * step
        where = where + steps.view([-1 if i == dim else 1 for i in range(len(size))])
    return where


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`x.copy_(source)` as a value."""
    return source.to(x.dtype).expand(x.shape).clone()


def _of_real(scatter: Callable[..., Any], x: Tensor, source: Tensor, dim: int = 0, *at: Any) -> Any:
    if not x.is_complex():
        return NotImplemented
    real = (torch.view_as_real(tensor.resolve_conj()) for tensor in (x, source.to(x.dtype)))
    return torch.view_as_complex(scatter(*real, dim % x.dim(), *at))


def _power(base: Any, exponent: Any) -> Any:
    """Of a size, or to one, torch knows no derivative, and ONNX's exporter no form."""
    if not isinstance(base, torch.SymInt) and not isinstance(exponent, torch.SymInt):
        return NotImplemented
    x = base if isinstance(base, Tensor) else exponent
    dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64

    def tensor(value: Any) -> Tensor:
        return value if value is x else torch.scalar_tensor(value, dtype=dtype, device=x.device)

    return aten.pow.Tensor_Tensor(tensor(base), tensor(exponent))


def _clamp(x: Tensor, *bounds: Any) -> Any:
    """With a bound that is a size, ONNX's exporter has no form of it."""
    if not any(isinstance(bound, (torch.SymInt, torch.SymFloat)) for bound in bounds):
        return NotImplemented
    tensors = (
        None if bound is None else torch.scalar_tensor(bound, dtype=x.dtype, device=x.device)
        for bound in bounds
    )
    return aten.clamp.Tensor(x, *tensors)


_ADAPTIVE_AVG_POOLS = (
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
)

_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_TRANSPOSED = (
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)

_PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default)

_WHERE = (aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther)

DIFFERENTIABLE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_CONVOLUTIONS, convolution),
    **dict.fromkeys(_TRANSPOSED, transposed_convolution),
    **dict.fromkeys(_WHERE, chosen),
    aten.masked_fill.Scalar: filled,
    aten.masked_fill.Tensor: filled,
    aten.copy.default: _copy,
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Scalar: _power,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda x, most: _clamp(x, None, most),
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.slice_scatter.default: partial(_of_real, aten.slice_scatter.default),
    aten.select_scatter.default: partial(_of_real, aten.select_scatter.default),
}
"""What the forward program computes instead of an operator that torch has no derivative of, or none
of complex numbers, or that ONNX has no form of; NotImplemented leaves it where it is."""

PORTABLE: dict[Any, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,  # what stands before it may have other strides here
    aten.as_strided.default: _as_strided,
    aten.log_sigmoid.default: _log_sigmoid,
    aten.masked_select.default: masked_select,
    aten.pad.default: _pad,
    aten.grid_sampler.default: _grid_sampler,
    aten._weight_norm.default: _weight_norm,
    aten._upsample_bilinear2d_aa.vec: antialiased(2),
    aten._upsample_bicubic2d_aa.vec: antialiased(4),
    aten.bilinear.default: bilinear,
    **{bag: partial(_bag, bag) for bag in BAGS},
    aten.group_norm.default: _group_norm,
    WHILE: below_autograd,  # it counts the turns of another loop
    **FOLDS,
    **{product: partial(_of_one_feature, product) for product in _PRODUCTS},
    **{pool: partial(_adaptive_avg_pool, pool) for pool in _ADAPTIVE_AVG_POOLS},
}
"""What the gradient program computes instead of an operator of the forward program."""


def computed_inside(
    module: fx.GraphModule, forms: Mapping[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """A graph whose regions call functions in the place of operators: the one given, if they call
    none of these.

    Args:
        module: stays as it is.
        forms: of each operator; NotImplemented leaves it.
    """
    if not any(node.target in forms for body in _inside(module) for node in body.graph.nodes):
        return module
    module = copy.deepcopy(module)
    for body in _inside(module):
        for node in body.graph.nodes:
            if node.target in forms:
                node.target = _function(node.target, forms[node.target])
        body.recompile()
    return module


def _inside(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [body for body in graphs(module) if body is not module]


def _function(operator: Any, form: Callable[..., Any]) -> Callable[..., Any]:
    """The form of an operator under a name of its own, as code of a graph needs it."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        made = form(*args, **kwargs)
        return operator(*args, **kwargs) if made is NotImplemented else made

    computed.__name__ = computed.__qualname__ = f"portable_{str(operator).replace('.', '_')}"
    return computed
