"""Functions of torch's that fix sizes in a capture, and what computes the same and does not."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from fuseport.exporter.program._addresses import Address
from fuseport.exporter.program._by_values import BY_VALUES
from fuseport.exporter.program._derivatives import grad
from fuseport.exporter.program._losses import LOSSES
from fuseport.exporter.program._parts import PARTS, named, unlike_the_usual
from fuseport.exporter.program._recurrent import LAYERS
from fuseport.exporter.program._signals import istft
from fuseport.exporter.program._single import part
from fuseport.exporter.program._transforms import TRANSFORMS
from fuseport.exporter.program._triangles import TRIANGLES
from fuseport.exporter.program._windows import WINDOWS
from fuseport.exporter.program._written_by_values import written
from fuseport.exporter.program.listed import of_list

__all__ = ["INSTEAD"]

_Form = Callable[..., Any]

_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor of C


def _max_pool1d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    # In one dimension as in two, one of them of size 1.
    def single(value: Any) -> int:
        return int(value[0] if isinstance(value, Sequence) else value)

    pooled: Any = F.max_pool2d_with_indices(
        x.unsqueeze(-2),
        (1, single(kernel_size)),
        (1, single(kernel_size if stride is None else stride)),
        (0, single(padding)),
        (1, single(dilation)),
        ceil_mode,
    )
    values, indices = pytree.tree_map(lambda t: t.squeeze(-2), pooled)
    return (values, indices) if return_indices else values


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


def _linspace(
    start: Any,
    end: Any,
    steps: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **others: Any,
) -> Any:
    # Torch's takes a number of steps that is a number. This has its formula: from both ends.
    if not isinstance(steps, torch.SymInt) or unlike_the_usual(others):
        return NotImplemented
    count: Any = steps
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not kind.is_floating_point:
        return NotImplemented
    first, last = (
        at.to(device, kind)
        if isinstance(at, Tensor)
        else torch.full((), at, dtype=kind, device=device)
        for at in (start, end)
    )
    i = torch.arange(count, device=device)
    step = (last - first) / torch.sym_max(count - 1, 1)
    from_start = i < torch.sym_max(count // 2, 1)
    return torch.where(from_start, first + step * i, last - step * (count - 1 - i))


def _frequencies(
    half: bool,
    n: Any,
    d: Any = 1.0,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **others: Any,
) -> Any:
    # Those of a Fourier transform. Torch's takes a length that is a number, and ONNX has none.
    if unlike_the_usual(others):
        return NotImplemented
    i = torch.arange(n // 2 + 1 if half else n, device=device)
    whole = i if half else torch.where(i < (n + 1) // 2, i, i - n)
    kind = torch.get_default_dtype() if dtype is None else dtype
    return whole.to(kind) * (1 / (n * d))


def _kron(input: Tensor, other: Tensor) -> Tensor:
    # Torch's takes sizes as numbers. Each dimension of one beside the same of the other, both
    # counted from the last, and of the two one.
    dims = max(input.dim(), other.dim())
    left, right = ([1] * (dims - x.dim()) + list(x.shape) for x in (input, other))
    beside = input.reshape([n for size in left for n in (size, 1)])
    product = beside * other.reshape([n for size in right for n in (1, size)])
    return product.reshape([a * b for a, b in zip(left, right, strict=True)])


def _block_diag(*tensors: Tensor) -> Any:
    """Of matrices, whose sizes torch takes as numbers."""
    matrices = [x.reshape(1, -1) if x.dim() < 2 else x for x in tensors]
    widths = [x.shape[1] for x in matrices]
    known = all(isinstance(size, int) for x in matrices for size in x.shape)
    if known or len({x.dtype for x in matrices}) > 1:
        return NotImplemented
    rows = [
        F.pad(x, (sum(widths[:number]), sum(widths[number + 1 :])))
        for number, x in enumerate(matrices)
    ]
    return torch.cat(rows)


def _fill_diagonal_(x: Tensor, value: Any, wrap: bool = False) -> Any:
    """Of a matrix, whose sizes torch takes as numbers."""
    if wrap or x.dim() != 2:
        return NotImplemented
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return x.masked_fill_(rows[:, None] == columns, value)


def _meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    # Its meta computation has to be told what is the default.
    return torch.meshgrid(*tensors, indexing=indexing or "ij")


def _by_values(form: _Form) -> _Form:
    """It, where a size of one of the tensors hangs on values."""

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


def _both(name: str, form: _Form) -> dict[Any, _Form]:
    return {getattr(of, name): form for of in (torch, Tensor)}


INSTEAD: Mapping[Any, _Form] = {
    F.max_pool1d: _max_pool1d,
    _DATA: Tensor.detach,  # of the other torch.export makes a constant that it cannot write
    Tensor.data_ptr: Address,
    **_both("take_along_dim", _take_along_dim),
    torch.linspace: _linspace,
    torch.fft.fftfreq: functools.partial(_frequencies, False),
    torch.fft.rfftfreq: functools.partial(_frequencies, True),
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
    **{of: _by_values(form) for of, form in (BY_VALUES | LOSSES).items()},
    F.scaled_dot_product_attention: _by_values(_attention),
    **_both("kron", _kron),
    torch.block_diag: _block_diag,
    Tensor.fill_diagonal_: _fill_diagonal_,
    torch.meshgrid: _meshgrid,
    **LAYERS,
    torch.autograd.grad: grad,
}
"""Functions of torch's, each with what computes the same of the same arguments.

Where this gives NotImplemented, the function itself fixes nothing.
"""
