"""Operators that ONNX lacks, in terms of those that it has.

A formula for `<operator>_backward` is the vector-Jacobian product of the operator.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, product
from numbers import Number
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuseport.exporter.formats._onnx.attention import attention
from fuseport.exporter.formats._onnx.float64 import IN_FLOAT32, of_float64
from fuseport.exporter.formats._onnx.functions import FUNCTIONS
from fuseport.exporter.formats._onnx.functions.special import sigmoid
from fuseport.exporter.formats._onnx.integers import OF_FEW_BITS
from fuseport.exporter.formats._onnx.losses import of_loss
from fuseport.exporter.formats._onnx.none import of_none
from fuseport.exporter.formats._onnx.products import WITH_VECTOR, einsum
from fuseport.exporter.formats._onnx.ranges import RANGES
from fuseport.exporter.formats._onnx.ranks import OF_INTEGERS, RANKS
from fuseport.exporter.formats._onnx.repeats import BY_SIZES
from fuseport.exporter.formats._onnx.resampling import ADAPTIVE, DIVIDED, RESAMPLING, even
from fuseport.exporter.formats._onnx.scatter import ADDING
from fuseport.exporter.formats._onnx.sums import of_volume
from fuseport.exporter.program.portable import masked_select
from fuseport.exporter.program.regions import nodes
from fuseport.exporter.program.rewriting import Table, is_composite
from fuseport.exporter.program.sizes.bounds import may_be_none

__all__ = ["decompositions"]

aten = torch.ops.aten


def decompositions(exported: ExportedProgram) -> Table:
    """For the operators in a program that ONNX cannot take as they are, what to take instead."""
    table: dict[Any, Callable[..., Any]] = {}
    for node in nodes(exported.graph_module):
        target = node.target
        if target in IN_FLOAT32 and of_float64(node):
            table |= IN_FLOAT32
        elif isinstance(target, OpOverload) and "backward" in target._schema.name:
            if target in decomposition_table:
                table[target] = decomposition_table[target]
            elif is_composite(target):
                table[target] = target.decompose
        elif (inside := of_loss(node)) is not None:
            table[target] = inside
        elif target is aten.sigmoid.default and node.args[0].meta["val"].dtype == torch.float32:
            table[target] = sigmoid
        elif target in ADAPTIVE and not even(node):
            table[target] = ADAPTIVE[target]
        elif target in DIVIDED and len(node.args) > 6 and node.args[6] is not None:
            table[target] = DIVIDED[target]
        elif target in OF_INTEGERS and _of_integers(node, target):
            table[target] = OF_INTEGERS[target]
        elif target in _PADS and _cuts(node.args[1]):
            table[target] = _PADS[target]
        elif target is aten.conv3d.default and node.args[2:3] in ((), (None,)):
            table[target] = _conv3d
        elif target in WITH_VECTOR and node.args[1].meta["val"].dim() == 1:
            table[target] = WITH_VECTOR[target]
        elif target in _NORMS and (_mixed(node) or target is aten.native_layer_norm.default):
            table[target] = functools.partial(_in_one_dtype, target)
        elif (norm := of_volume(node)) is not None:
            table[target] = norm
        elif target in (aten.squeeze.dim, aten.squeeze.dims):
            table[target] = _squeeze
    return {**of_none(exported), **attention(exported), **table, **_OWN}


def _of_integers(node: torch.fx.Node, target: OpOverload) -> bool:
    """Whether it is of such integers as ONNX does not take: of all for `relu`, booleans else."""
    if not isinstance(node.args[0], torch.fx.Node):  # a number is added to
        return False
    dtype = node.args[0].meta["val"].dtype
    return dtype == torch.bool or (target is aten.relu.default and not dtype.is_floating_point)


def _by_number(of_tensors: OpOverload, x: Tensor, number: Any, *more: Any) -> Any:
    """An operator of a tensor and a number: of a size, which torch.onnx takes for a constant."""
    return NotImplemented if isinstance(number, Number) else of_tensors(x, number, *more)


def _remainder(x: Tensor, number: Any) -> Any:
    if isinstance(number, Number):
        return NotImplemented
    dtype = torch.float64 if isinstance(number, torch.SymFloat) else torch.int64
    by = torch.scalar_tensor(number, dtype=dtype, device=x.device)
    return aten.remainder.Tensor(x, by)


def _conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    groups: int = 1,
) -> Tensor:
    # torch.onnx gives one without a bias a bias of the wrong size.
    batch = x if x.dim() == 5 else x.unsqueeze(0)
    y: Tensor = aten.convolution.default(
        batch, weight, bias, stride, padding, dilation, False, (0, 0, 0), groups
    )
    return y if x.dim() == 5 else y.squeeze(0)


_NORMS = (
    aten.layer_norm.default,
    aten.native_layer_norm.default,
    aten.group_norm.default,
    aten.native_group_norm.default,
    aten.instance_norm.default,
    aten._native_batch_norm_legit.no_stats,
)


def _mixed(node: torch.fx.Node) -> bool:
    """Whether an input is of a half type, and a weight of a norm in float32."""
    values = [n.meta["val"] for n in node.all_input_nodes]
    return len({value.dtype for value in values if isinstance(value, Tensor)}) > 1


def _in_one_dtype(norm: OpOverload, x: Tensor, *others: Any) -> Any:
    # ONNX's norms take one dtype. torch computes these in the wider one, too. And of a half type
    # ONNX leaves the mean and the deviation in float32, which torch rounds.
    wide = functools.reduce(
        torch.promote_types,
        (other.dtype for other in others if isinstance(other, Tensor)),
        torch.promote_types(x.dtype, torch.float32)
        if norm is aten.native_layer_norm.default
        else x.dtype,
    )
    if wide == x.dtype:
        return NotImplemented
    return norm(x.to(wide), *(o.to(wide) if isinstance(o, Tensor) else o for o in others))


def _sort(
    x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Tensor, Tensor]:
    # The first of equal values comes first in ONNX's TopK, as in a stable sort.
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, indices = torch.topk(x, x.shape[dim], dim, largest=descending, sorted=True)
    return values, indices


def _cuts(widths: Any) -> bool:
    sizes = (width.meta["val"] if isinstance(width, torch.fx.Node) else width for width in widths)
    return any(statically_known_true(size < 0) for size in sizes)


def _constant_pad(x: Tensor, widths: Sequence[int], value: float = 0) -> Tensor:
    # A gradient of padding pads by negative widths, which few runtimes know.
    for i, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        dim = x.dim() - 1 - i
        less, more = [[_positive(n) for n in pair] for pair in ((-before, -after), (before, after))]
        x = aten.slice.Tensor(x, dim, less[0], x.shape[dim] - less[1])
        shape = list(x.shape)
        ends = [x.new_full((*shape[:dim], n, *shape[dim + 1 :]), value) for n in more]
        if any(isinstance(n, torch.SymInt) or n for n in more):
            x = torch.cat([ends[0], x, ends[1]], dim)
    return x


def _positive(width: Any) -> Any:
    if statically_known_true(width <= 0):
        return 0
    return width if statically_known_true(width >= 0) else torch.sym_max(width, 0)


def _pad(x: Tensor, widths: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    return _constant_pad(x, widths, value or 0) if mode == "constant" else NotImplemented


_PADS: Table = {aten.constant_pad_nd.default: _constant_pad, aten.pad.default: _pad}


def _squeeze(x: Tensor, dims: int | Sequence[int]) -> Tensor:
    # torch leaves a dimension of another size as it is, ONNX refuses it.
    chosen = {dim % max(1, x.dim()) for dim in ([dims] if isinstance(dims, int) else dims)}
    kept = [n for i, n in enumerate(x.shape) if i not in chosen or n != 1]
    return aten.reshape.default(x, kept)  # type: ignore[no-any-return]


def _split(x: Tensor, size: int, dim: int = 0) -> tuple[Tensor, ...]:
    length = x.shape[dim]
    return tuple(aten.slice.Tensor(x, dim, i, i + size) for i in range(0, length, size))


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    ends = list(accumulate(sizes))
    return tuple(
        aten.slice.Tensor(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)
    )


def _unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(aten.select.int(x, dim, i) for i in range(x.shape[dim]))


def _diagonal_backward(
    cotangent: Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Tensor:
    rows = torch.arange(sizes[dim1], device=cotangent.device) - max(-offset, 0)
    columns = torch.arange(sizes[dim2], device=cotangent.device) - max(offset, 0)
    on = (rows[:, None] == columns) & (rows[:, None] >= 0)
    values = cotangent.index_select(-1, rows.clamp(0, cotangent.shape[-1] - 1))
    return torch.where(on, values[..., None], 0).movedim((-2, -1), (dim1, dim2))


def _masked_scatter_backward(cotangent: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Of the source: its i-th value went to the i-th place where the mask is true."""
    taken = mask.expand(cotangent.shape).reshape(-1)
    places = (taken.to(torch.int64).cumsum(0) - 1).clamp(min=0)
    values = torch.where(taken, cotangent.reshape(-1), 0)
    count = math.prod(sizes)
    some = count + int(may_be_none(count))  # or there would be no place at all
    source = torch.zeros([some], dtype=values.dtype, device=values.device)
    return source.scatter_add(0, places, values)[:count].reshape(sizes)


def _convolution_backward(
    cotangent: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    axes = range(x.dim() - 2)
    none = [0 for _ in axes]
    # torch has one number for all axes where `padding` is a word.
    stride, padding, dilation = (
        given if len(given) > 1 else [given[0] for _ in axes]
        for given in (stride, padding, dilation)
    )
    dx = dweight = dbias = None
    if mask[0] and transposed:
        dx = aten.convolution.default(
            cotangent, weight, None, stride, padding, dilation, False, none, groups
        )
    elif mask[0] and groups > 1 and (weight.shape[1] > 1 or weight.shape[0] > groups):
        dx = _grouped_dx(cotangent, weight, x.shape[2:], stride, padding, dilation, groups)
    elif mask[0] and max(stride) == 1:
        dx = aten.convolution.default(
            cotangent, weight, None, stride, padding, dilation, True, none, groups
        )
    elif mask[0]:
        dx = _spread(cotangent, weight, x.shape[2:], stride, padding, dilation, groups)
    if mask[1]:
        seen, seeing = (x, cotangent) if transposed else (cotangent, x)
        dweight = _convolution_dweight(seen, seeing, weight, stride, padding, dilation, groups)
    if mask[2]:
        dbias = cotangent.sum([0, *(2 + i for i in axes)])
    return dx, dweight, dbias


def _spread(
    cotangent: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of a convolution's input, whose spatial `sizes` are given."""
    # Strides may leave up to stride - 1 elements over at the far end, which the convolution saw
    # only as a part of windows, or not at all: compute that far, and cut.
    none = [0 for _ in stride]
    over = [s - 1 for s in stride]
    dx: Tensor = aten.convolution.default(
        cotangent, weight, None, stride, none, dilation, True, over, groups
    )
    for axis, size in enumerate(sizes):
        dx = aten.slice.Tensor(dx, 2 + axis, padding[axis], padding[axis] + size)
    return dx


def _grouped_dx(
    cotangent: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The same by a plain convolution, with filters turned round.

    onnx's reference evaluator takes the wrong channels for a ConvTranspose in groups, unless each
    group is of one channel. Where there are strides, zeros stand between the cotangent's elements.
    """
    for axis, step in enumerate(stride):
        if step > 1:
            spread = cotangent.unsqueeze(3 + axis)
            zeros = spread.new_zeros(
                (*spread.shape[: 3 + axis], step - 1, *spread.shape[4 + axis :])
            )
            cotangent = torch.cat([spread, zeros], 3 + axis).flatten(2 + axis, 3 + axis)
    # (g·o, i, taps…) → (g·i, o, taps…)
    turned = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    turned = turned.flip([2 + i for i, size in enumerate(weight.shape[2:]) if size > 1])
    reach = [dilation[i] * (size - 1) - padding[i] for i, size in enumerate(weight.shape[2:])]
    # More padding than a filter reaches was seen by windows that have no input in them.
    cut = [n for r in reversed(reach) for n in (min(r, 0), min(r, 0))]
    cotangent = _constant_pad(cotangent, cut) if any(cut) else cotangent
    ones, none = [1 for _ in stride], [0 for _ in stride]
    dx: Tensor = aten.convolution.default(
        cotangent, turned, None, ones, [max(r, 0) for r in reach], dilation, False, none, groups
    )
    for axis, size in enumerate(sizes):
        if stride[axis] > 1:
            dx = aten.slice.Tensor(dx, 2 + axis, 0, size)
    return dx


def _convolution_dweight(
    cotangent: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """One convolution of x with the cotangent, where batch and channels change places.

    (b, g·i, …) → (i, g·b, …) under filters (g·o, b, out…), in g groups: each output position of it
    is a tap, and its sum over filter positions is that over the batch and output positions. What
    was the stride is now the dilation, and the reverse.
    """
    batch = x.shape[0]
    if may_be_none(batch):  # ONNX Runtime does not end a convolution of no channels: one of zeros
        x, cotangent = (F.pad(t, [0, 0] * (t.dim() - 1) + [0, 1]) for t in (x, cotangent))
    if max(weight.shape[2:]) == 1:
        return _pointwise_dweight(cotangent, x, weight, stride, padding, groups)
    if max(stride) > 2 and max(dilation) == 1:
        # Where a convolution has one output position, ONNX Runtime adds up one product after
        # another: a product of matrices is off by a tenth of that in a volume, and faster.
        # Evaluators that know of no dilation fill the filter up with zeros: stride² times the work.
        return _strided_dweight(cotangent, x, weight, stride, padding, groups)
    seen, filters = x.transpose(0, 1), cotangent.transpose(0, 1)
    if groups > 1:
        seen = seen.unflatten(0, (groups, weight.shape[1])).transpose(0, 1).flatten(1, 2)
    none = [0 for _ in stride]
    taps: Tensor = aten.convolution.default(
        seen, filters, None, dilation, padding, stride, False, none, groups
    )
    # Strides may have left elements over at the far end, which make taps that there are not.
    for axis, size in enumerate(weight.shape[2:]):
        if stride[axis] > 1:
            taps = aten.slice.Tensor(taps, 2 + axis, 0, size)
    return taps.transpose(0, 1)


def _pointwise_dweight(
    cotangent: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
) -> Tensor:
    """One product of matrices: filters of one tap see every stride-th position."""
    seen = _constant_pad(x, [n for pad in reversed(padding) for n in (pad, pad)])
    for axis, step in enumerate(stride):
        if step > 1:
            end = (cotangent.shape[2 + axis] - 1) * step + 1
            seen = aten.slice.Tensor(seen, 2 + axis, 0, end, step)
    # (b, g, o, positions) · (b, g, positions, i)
    left = cotangent.flatten(2).unflatten(1, (groups, -1))
    right = seen.flatten(2).unflatten(1, (groups, -1)).transpose(2, 3)
    return torch.matmul(left, right).sum(0).reshape(weight.shape)


def _strided_dweight(
    cotangent: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
) -> Tensor:
    """One product per block of taps, as large as the stride: patches of 16×16 have 256 taps.

    A window of taps at offsets q·stride to (q + 1)·stride is a slice of x that needs no step: cut
    into blocks, it has the taps beside each other. The last block is filled up with zeros.
    """
    axes = range(len(stride))
    sizes, outs = weight.shape[2:], cotangent.shape[2:]
    blocks = [-(-size // step) for size, step in zip(sizes, stride, strict=True)]
    widths = [(p, p + blocks[i] * stride[i] - sizes[i]) for i, p in enumerate(padding)]
    padded = F.pad(x, [n for pair in reversed(widths) for n in pair])
    # (b, g, o, positions)
    left = cotangent.flatten(2).unflatten(1, (groups, -1))
    products = []
    for block in product(*(range(count) for count in blocks)):
        window = padded
        for i, q in enumerate(block):
            begin = q * stride[i]
            window = aten.slice.Tensor(window, 2 + i, begin, begin + outs[i] * stride[i])
        # (b, c, out, step, out, step, …) → (b, c, step, step, …, out, out, …)
        window = window.reshape(
            *x.shape[:2], *(n for i in axes for n in (outs[i], stride[i]))
        ).permute(0, 1, *(3 + 2 * i for i in axes), *(2 + 2 * i for i in axes))
        right = window.reshape(x.shape[0], groups, -1, math.prod(outs)).transpose(2, 3)
        products.append(torch.matmul(left, right).sum(0))
    taps = torch.stack(products).reshape(*blocks, *weight.shape[:2], *stride)
    # (blocks…, o, i, steps…) → (o, i, block, step, block, step, …)
    count = len(stride)
    order = [n for i in axes for n in (i, count + 2 + i)]
    taps = taps.permute(count, count + 1, *order)
    dweight = taps.reshape(*weight.shape[:2], *(blocks[i] * stride[i] for i in axes))
    for i, size in enumerate(sizes):
        dweight = aten.slice.Tensor(dweight, 2 + i, 0, size)
    return dweight


_OWN: Table = {
    **BY_SIZES,
    **RANGES,
    **RANKS,
    **RESAMPLING,
    # torch.onnx makes sequences of these, which few runtimes know, and of few types.
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten._neg_view.default: aten.neg.default,
    aten._is_all_true.default: aten.all.default,
    aten.einsum.default: einsum,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.masked_select.default: masked_select,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten.diagonal_backward.default: _diagonal_backward,
    aten.convolution_backward.default: _convolution_backward,
    **{
        getattr(aten, name).Scalar: functools.partial(_by_number, getattr(aten, name).Tensor)
        for name in ("add", "div", "mul", "sub")
    },
    aten.remainder.Scalar: _remainder,
    **ADDING,
    **OF_FEW_BITS,
    **FUNCTIONS,
}
