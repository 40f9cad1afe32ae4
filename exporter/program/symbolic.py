"""Sizes that stay dynamic in a capture where torch's own code fixes them.

In `x.shape[2:].numel()`, in `torch.tensor([height, width])`, in the steps of `linspace` and of
recurrent layers, in frequencies, in pooling, in parts of a tensor, in what is broadcast, in the
order of products. And `math.ceil(length / 2)`, which torch can write to no file, as one of its
forms that it can.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import sympy  # type: ignore[import-untyped]  # it has no types
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from fuseport.exporter.program import _known, _of_sizes, _ranges_of_numbers
from fuseport.exporter.program._addresses import Address
from fuseport.exporter.program._by_values import BY_VALUES
from fuseport.exporter.program._losses import LOSSES
from fuseport.exporter.program._parts import PARTS, named
from fuseport.exporter.program._recurrent import recurrent
from fuseport.exporter.program._signals import istft
from fuseport.exporter.program.listed import of_list
from fuseport.exporter.program.packed import Packing, Unmade, with_values

__all__ = [
    "Symbolic",
    "may_be_none",
    "may_be_zero",
    "not_negative",
    "of_inputs",
    "orders_of_products",
    "quotient_of",
    "whole_quotients",
]

_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor of C
_USUAL = 16  # a size of which nothing is known


class Symbolic(TorchFunctionMode):
    """Computes the same by other functions of torch where a size would become a number."""

    def __init__(self) -> None:
        super().__init__()
        self._packing = Packing()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packed = self._packing.result(func, args, kwargs or {})
        if packed is not NotImplemented:
            return packed
        _ranges_of_numbers.forget(args)
        if (size := _of_sizes.read(func, args)) is not None:
            return size
        args, kwargs = _of_sizes.taken(func, args, kwargs or {})
        _of_sizes.forget(func, args, kwargs)
        if any(issubclass(kind, Unmade) for kind in types):
            args, kwargs = with_values((tuple(args), kwargs or {}))
        if (number := _known.number(func, args)) is not None:
            return number
        if func is F.max_pool1d:
            return _max_pool1d(*args, **(kwargs or {}))
        if func == _DATA:  # of which torch.export makes a constant that it cannot write
            return args[0].detach()
        if func is Tensor.data_ptr:
            return Address(args[0])
        if func in (torch.take_along_dim, Tensor.take_along_dim):
            return _take_along_dim(*args, **(kwargs or {}))
        if func is torch.linspace and (spaced := _linspace(*args, **(kwargs or {}))) is not None:
            return spaced
        if func in (torch.fft.fftfreq, torch.fft.rfftfreq):
            found = _frequencies(func is torch.fft.rfftfreq, *args, **(kwargs or {}))
            if found is not None:
                return found
        if (signal := istft(func, args, kwargs or {})) is not None:
            return signal
        if (vector := of_list(func, args, kwargs or {})) is not None:
            return vector
        if func in (torch.tensor, torch.as_tensor):
            made = _of_numbers(*args, **(kwargs or {}))
            if made is not None:
                return made
        if func in (torch.squeeze, Tensor.squeeze):
            return _squeeze(func, *args, **(kwargs or {}))
        if func in PARTS:
            return PARTS[func](func, *args, **(kwargs or {}))
        if func in _BY_VALUES and _by_values(args, kwargs or {}):
            return _BY_VALUES[func](*args, **(kwargs or {}))
        if func in (torch.kron, Tensor.kron):
            return _kron(*args, **(kwargs or {}))
        if func is torch.block_diag:
            return _block_diag(*args)
        if func is Tensor.fill_diagonal_ and args[0].dim() == 2:
            return _fill_diagonal_(*args, **(kwargs or {}))
        if func is torch.meshgrid:  # whose meta computation has to be told what is the default
            kwargs = {"indexing": (kwargs or {}).get("indexing") or "ij"}
        layers = recurrent(func, args, kwargs or {})
        if layers is not None:
            return layers
        result = func(*args, **(kwargs or {}))
        _ranges_of_numbers.note(func, args, kwargs or {}, result)
        _of_sizes.note(func, args, kwargs or {}, result)
        if isinstance(result, torch.Size) and any(
            isinstance(size, torch.SymInt) for size in result
        ):
            return _Sizes(result)
        return result


def _by_values(args: Any, kwargs: Any) -> bool:
    """Whether a size of one of the tensors hangs on values."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    sizes = [size for x in tensors for size in x.shape if isinstance(size, torch.SymInt)]
    return any(free_unbacked_symbols(size) for size in sizes)


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


class _Sizes(tuple[Any, ...]):
    """A `torch.Size` whose `numel` is no number where the sizes are none.

    Torch's own cannot be derived from; for `isinstance` this is one.
    """

    __class__ = property(lambda self: torch.Size)

    def numel(self) -> Any:
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return _Sizes(found) if isinstance(index, slice) else found


_BY_VALUES: dict[Any, Any] = {**BY_VALUES, **LOSSES, F.scaled_dot_product_attention: _attention}


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


def _squeeze(func: Any, *args: Any, **kwargs: Any) -> Any:
    # A dimension that is 1 here, where the sizes say no more: without, it would stay.
    given = named(("input", "dim"), args, kwargs)
    x, dim = given.get("input"), given.get("dim")
    if x is not None and isinstance(dim, int) and x.dim():
        size = x.shape[dim]
        if isinstance(size, torch.SymInt) and size.node.hint == 1 and size == 1:
            return x.select(dim, 0)
    return func(*args, **kwargs)


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


def _of_numbers(
    data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **others: Any
) -> Tensor | None:
    # Lists of sizes, `torch.tensor([height, width])`: torch's own takes them for numbers.
    if isinstance(data, np.ndarray) and data.dtype == object:
        data = data.tolist()
    leaves, shape = _numbers(data)
    if any(others.values()) or not any(
        isinstance(x, torch.SymInt | torch.SymFloat) for x in leaves
    ):
        return None
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
) -> Tensor | None:
    # Torch's takes a number of steps that is a number. This has its formula: from both ends.
    if not isinstance(steps, torch.SymInt) or any(others.values()):
        return None
    count: Any = steps
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not kind.is_floating_point:
        return None
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
) -> Tensor | None:
    # Those of a Fourier transform. Torch's takes a length that is a number, and ONNX has none.
    if any(others.values()):
        return None
    i = torch.arange(n // 2 + 1 if half else n, device=device)
    whole = i if half else torch.where(i < (n + 1) // 2, i, i - n)
    kind = torch.get_default_dtype() if dtype is None else dtype
    found: Tensor = whole.to(kind) * (1 / (n * d))
    return found


def _kron(input: Tensor, other: Tensor) -> Tensor:
    # Torch's takes sizes as numbers. Each dimension of one beside the same of the other, both
    # counted from the last, and of the two one.
    dims = max(input.dim(), other.dim())
    left, right = ([1] * (dims - x.dim()) + list(x.shape) for x in (input, other))
    beside = input.reshape([n for size in left for n in (size, 1)])
    product = beside * other.reshape([n for size in right for n in (1, size)])
    return product.reshape([a * b for a, b in zip(left, right, strict=True)])


def _block_diag(*tensors: Tensor) -> Tensor:
    """Of matrices, whose sizes torch takes as numbers."""
    matrices = [x.reshape(1, -1) if x.dim() < 2 else x for x in tensors]
    widths = [x.shape[1] for x in matrices]
    known = all(isinstance(size, int) for x in matrices for size in x.shape)
    if known or len({x.dtype for x in matrices}) > 1:
        whole: Tensor = torch.block_diag(*tensors)
        return whole
    rows = [
        F.pad(x, (sum(widths[:number]), sum(widths[number + 1 :])))
        for number, x in enumerate(matrices)
    ]
    return torch.cat(rows)


def _fill_diagonal_(x: Tensor, value: Any, wrap: bool = False) -> Tensor:
    """Of a matrix, whose sizes torch takes as numbers."""
    if wrap:
        return x.fill_diagonal_(value, wrap)
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return x.masked_fill_(rows[:, None] == columns, value)


@contextmanager
def orders_of_products() -> Iterator[None]:
    """Have `einsum` of several tensors find its order at the sizes of the example.

    The package opt_einsum, where it is here, makes numbers of them, and they would be fixed.
    """
    whole = torch.backends.opt_einsum.get_opt_einsum()
    if whole is None:
        yield
        return

    def contract_path(equation: str, *operands: Tensor, **options: Any) -> Any:
        examples = (torch.empty([*map(_hint, x.shape)], device="meta") for x in operands)
        return whole.contract_path(equation, *examples, **options)

    paths = SimpleNamespace(contract_path=contract_path)
    with mock.patch.object(torch.backends.opt_einsum, "get_opt_einsum", return_value=paths):
        yield


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else _USUAL


@contextmanager
def whole_quotients() -> Iterator[None]:
    """Round quotients of sizes, and numbers added to them, by a division of integers."""
    kind: Any = torch.SymFloat
    divide: Any = torch.SymInt.__truediv__
    multiply, multiplied = torch.SymInt.__mul__, torch.SymInt.__rmul__
    add, subtract = kind.__add__, kind.__sub__
    floor, ceil, nearest = kind.__floor__, kind.__ceil__, kind.__round__

    def divided(size: Any, by: Any) -> Any:
        return _remembered(divide(size, by), size, by)

    def part(product: Any, size: Any, by: Any) -> Any:
        # By 0.5 or 0.25 a product has no rounding, as a quotient by 2 or 4 has none.
        exact = type(by) is float and 0 < by < 1 and math.frexp(by)[0] == 0.5
        return _remembered(product, size, int(1 / by)) if exact else product

    def added(quotient: Any, number: Any) -> Any:
        return _moved(add(quotient, number), quotient, number)

    def subtracted(quotient: Any, number: Any) -> Any:
        return _moved(subtract(quotient, number), quotient, -number)

    def rounded_down(quotient: Any) -> Any:
        known = quotient_of(quotient)
        return floor(quotient) if known is None else known[0] // known[1]

    def rounded_up(quotient: Any) -> Any:
        known = quotient_of(quotient)
        return ceil(quotient) if known is None else -(-known[0] // known[1])

    def rounded(quotient: Any, digits: Any = None) -> Any:
        known = quotient_of(quotient)
        if known is None or digits is not None:
            return nearest(quotient, digits)
        over, by = known
        up, beyond = (2 * over + by) // (2 * by), (2 * over + by) % (2 * by)
        if by % 2:
            return up
        half = 1 - torch.sym_min(beyond, 1)  # between two numbers, of which the even one is taken
        return up - half * (up % 2)

    instead: dict[str, Any] = {
        "__add__": added,
        "__radd__": added,
        "__sub__": subtracted,
        "__floor__": rounded_down,
        "__ceil__": rounded_up,
        "__round__": rounded,
    }
    of_sizes: dict[str, Any] = {
        "__truediv__": divided,
        "__mul__": lambda size, by: part(multiply(size, by), size, by),
        "__rmul__": lambda size, by: part(multiplied(size, by), size, by),
    }
    with (
        mock.patch.multiple(torch.SymInt, **of_sizes),
        mock.patch.multiple(kind, **instead),
    ):
        yield


def quotient_of(number: Any) -> tuple[torch.SymInt, int] | None:
    """The size, and the positive number, whose quotient something is; None of others."""
    known: tuple[torch.SymInt, int] | None = getattr(number, "quotient_of", None)
    return known


def not_negative(size: int | torch.SymInt, least: int = 0) -> bool:
    """Whether a number made of sizes is known to be zero or more, sizes being `least` or more."""
    if isinstance(size, int):
        return size >= 0
    env = size.node.shape_env
    if env is None:
        return False
    return bool(_bounds(size, dict.fromkeys(size.node.expr.free_symbols, least)).lower >= 0)


def may_be_none(size: int | torch.SymInt) -> bool:
    """Whether a size may be 0 where no input has one of 0: it hangs on values, or is `s0 - 1`."""
    if isinstance(size, int):
        return size == 0
    if size.node.shape_env is None:
        return True
    by_values = free_unbacked_symbols(size)
    least = {s: 0 if s in by_values else 1 for s in size.node.expr.free_symbols}
    return bool(_bounds(size, least).lower < 1)


def may_be_zero(number: Any) -> bool:
    """Whether a number made of sizes may be 0 where no input has one of 0."""
    if not isinstance(number, torch.SymInt | torch.SymFloat):
        return bool(number == 0)
    by_values = free_unbacked_symbols(number)
    least = {s: 0 if s in by_values else 1 for s in number.node.expr.free_symbols}
    return bool(0 in _bounds(number, least))


def _bounds(size: Any, least: Mapping[sympy.Symbol, int]) -> ValueRanges[Any]:
    """Between what a number made of sizes lies, where each of these is `least` or more."""
    env = size.node.shape_env
    known = {symbol: env.bound_sympy(symbol) for symbol in least}
    given = {
        s: ValueRanges(max(r.lower, least[s]), max(r.upper, least[s])) for s, r in known.items()
    }
    return bound_sympy(size.node.expr, given)


def _moved(result: Any, quotient: Any, number: Any) -> Any:
    known = quotient_of(quotient)
    if known is None or type(number) is not int:
        return result
    over, by = known
    return _remembered(result, over + number * by, by)


def _remembered(result: Any, over: Any, by: Any) -> Any:
    if isinstance(result, torch.SymFloat) and type(by) is int and by > 0:
        result.quotient_of = over, by  # type: ignore[attr-defined]
    return result


def of_inputs(size: Any) -> Any:
    """A size that hangs on values, as one that does not, where a trace has noted that it is that.

    Of the parts that rows are sorted into, `u0 + u1`, there are as many as of rows.
    """
    if not isinstance(size, torch.SymInt) or not free_unbacked_symbols(size):
        return size
    env, expr = size.node.shape_env, size.node.expr
    for noted in itertools.chain(*env.deferred_runtime_asserts.values()):
        if isinstance(noted.expr, sympy.Eq) and expr in noted.expr.args:
            (other,) = {*noted.expr.args} - {expr} or {expr}
            if not free_unbacked_symbols(other):
                return int(other) if other.is_number else env.create_symintnode(other, hint=None)
    return size
