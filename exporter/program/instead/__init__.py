"""Functions of torch's that fix sizes in a capture, and what computes the same and does not."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fuseport.exporter.program.derivatives import grad
from fuseport.exporter.program.instead._addresses import Address
from fuseport.exporter.program.instead._by_values import BY_VALUES
from fuseport.exporter.program.instead._differences import gradient
from fuseport.exporter.program.instead._grids import GRIDS
from fuseport.exporter.program.instead._losses import LOSSES
from fuseport.exporter.program.instead._matrices import MATRICES
from fuseport.exporter.program.instead._parts import PARTS, named
from fuseport.exporter.program.instead._pools import POOLS
from fuseport.exporter.program.instead._signals import istft
from fuseport.exporter.program.instead._single import part
from fuseport.exporter.program.instead._transforms import TRANSFORMS
from fuseport.exporter.program.instead._triangles import TRIANGLES
from fuseport.exporter.program.instead._windows import WINDOWS
from fuseport.exporter.program.instead._written_by_values import written
from fuseport.exporter.program.sequences._recurrent import LAYERS
from fuseport.exporter.program.sizes.listed import of_list

__all__ = ["INSTEAD"]

_Form = Callable[..., Any]

_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor of C


def _squeeze(*args: Any, **kwargs: Any) -> Any:
    # A dimension that is 1 here, where the sizes say no more: without, it would stay.
    given = named(("input", "dim"), args, kwargs)
    x, dim = given.get("input"), given.get("dim")
    if x is not None and isinstance(dim, int) and x.dim():
        size = x.shape[dim]
        if isinstance(size, torch.SymInt) and size.node.hint == 1 and size == 1:
            return x.select(dim, 0)
    return NotImplemented


def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    # Sizes that are alike stay dynamic; of two, the one that is 1 is expanded.
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    dim %= input.dim()

    def expanded(t: Tensor, like: Tensor) -> Tensor:
        sizes = enumerate(zip(t.shape, like.shape, strict=True))
        return t.expand([b if i != dim and _is_one(a) else a for i, (a, b) in sizes])

    return expanded(input, indices).gather(dim, expanded(indices, input))


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def _like(func: _Form, *args: Any, **kwargs: Any) -> Any:
    vector = of_list(func, args, kwargs)
    if vector is not None or len(args) != 2:
        return NotImplemented if vector is None else vector
    like, data = args
    return _of_numbers(data, **{"dtype": like.dtype, "device": like.device, **kwargs})


def _tensor(func: _Form, *args: Any, **kwargs: Any) -> Any:
    vector = of_list(func, args, kwargs)
    return _of_numbers(*args, **kwargs) if vector is None else vector


def _of_numbers(
    data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **others: Any
) -> Any:
    # Lists of sizes, `torch.tensor([height, width])`: torch's own takes them for numbers.
    if isinstance(data, np.ndarray) and data.dtype == object:
        data = data.tolist()
    leaves, shape = _numbers(data)
    if any(others.values()) or not any(
        isinstance(x, torch.SymInt | torch.SymFloat) for x in leaves
    ):
        return NotImplemented
    if dtype is None:
        floating = any(isinstance(x, float | torch.SymFloat) for x in leaves)
        dtype = torch.get_default_dtype() if floating else torch.int64
    each = [torch.full((), leaf, dtype=dtype, device=device) for leaf in leaves]
    return torch.stack(each).reshape(shape)


def _numbers(data: Any) -> tuple[list[Any], list[int]]:
    """The numbers of lists of lists, and the shape; no numbers, where there is something else."""
    if isinstance(data, bool | int | float | torch.SymInt | torch.SymFloat):
        return [data], []
    if not isinstance(data, list | tuple) or not data:
        return [], []
    inner = [_numbers(part) for part in data]
    if any(not leaves or shape != inner[0][1] for leaves, shape in inner):
        return [], []
    return [x for leaves, _ in inner for x in leaves], [len(data), *inner[0][1]]


def _meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    # Its meta computation has to be told what is the default.
    return torch.meshgrid(*tensors, indexing=indexing or "ij")


def _unless_known(form: _Form) -> _Form:
    """It, where a size of one of the tensors hangs on values."""

    @functools.wraps(form)
    def computed(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        sizes = [size for x in tensors for size in x.shape if isinstance(size, torch.SymInt)]
        if any(free_unbacked_symbols(size) for size in sizes):
            return form(*args, **kwargs)
        return NotImplemented

    return computed


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **by: Any,
) -> Tensor:
    # Its choice of a kernel asks whether there are keys at all.
    attend = torch.ops.aten._scaled_dot_product_attention_math.default
    out: Tensor = attend(query, key, value, attn_mask, dropout_p, is_causal, **by)[0]
    return out


def _sgn(input: Tensor) -> Any:
    # Of its derivative torch decides by strides.
    return NotImplemented if input.is_complex() else torch.sign(input)


def _narrow(*args: Any, **kwargs: Any) -> Any:
    # From a place that a tensor says.
    given = named(("input", "dim", "start", "length"), args, kwargs)
    x, start = given["input"], given["start"]
    if not isinstance(start, Tensor):
        return NotImplemented
    places = torch.arange(given["length"], device=x.device)
    from_end = torch.where(start < 0, x.shape[given["dim"]], 0)
    return x.index_select(given["dim"], start + from_end + places)


def _linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Any:
    # The options are how it is computed: in parts, with gradients at once.
    if options is None:
        return NotImplemented
    return F.linear_cross_entropy(*args, **kwargs)


# Torch 2.11 has none.
_FUSED = dict.fromkeys(
    filter(None, [getattr(F, "linear_cross_entropy", None)]), _linear_cross_entropy
)


def _both(name: str, form: _Form) -> dict[Any, _Form]:
    return {getattr(of, name): form for of in (torch, Tensor)}


INSTEAD: Mapping[Any, _Form] = {
    **POOLS,
    _DATA: Tensor.detach,  # of the other torch.export makes a constant that it cannot write
    Tensor.data_ptr: Address,
    **_both("take_along_dim", _take_along_dim),
    **_both("istft", istft),
    **{func: functools.partial(_tensor, func) for func in (torch.tensor, torch.as_tensor)},
    **{func: functools.partial(_like, func) for func in (Tensor.new, Tensor.new_tensor)},
    **_both("squeeze", _squeeze),
    Tensor.__getitem__: part,
    Tensor.__setitem__: written,
    **PARTS,
    **WINDOWS,
    **TRANSFORMS,
    **TRIANGLES,
    **GRIDS,
    **{of: _unless_known(form) for of, form in (BY_VALUES | LOSSES).items()},
    F.scaled_dot_product_attention: _unless_known(_attention),
    **MATRICES,
    torch.meshgrid: _meshgrid,
    **LAYERS,
    torch.autograd.grad: grad,
    torch.gradient: gradient,
    **_both("sgn", _sgn),
    **_both("narrow", _narrow),
    **_FUSED,
}
"""Functions of torch's, each with what computes the same of the same arguments.

Where this gives NotImplemented, the function itself fixes nothing.
"""
