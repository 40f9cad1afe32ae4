"""Small tensors of sizes: `torch.as_tensor([(height, width), (height // 2, width // 2)])`.

Code that goes over several scales has them, and reads sizes out again, to split, to reshape and to
count by, which to a capture would hang on values. What such a tensor is made of is kept with it,
until something is written to it, or to a view of it, which its version tells. Numbers in buffers,
as a layer's stride, are parts of them.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fuseport.exporter.program.instead._parts import named
from fuseport.exporter.program.sizes import _known as of_buffers
from fuseport.exporter.program.sizes._ratios import Ratio, over, rounded, whole
from fuseport.exporter.program.sizes.listed import Listed

__all__ = ["forget", "note", "read", "taken"]

Size = int | SymInt
Table = np.ndarray[Any, np.dtype[np.object_]]
_Form = Callable[..., Any]

_KEPT = "_fuseport_table"
_MOST = 64  # of what is in one
_signature = functools.cache(inspect.signature)
_PURE = "aten", "prims", "fuseport"  # whose operators write to nothing that their version hides


def read(func: Any, args: Sequence[Any]) -> Any:
    """What a call reads out of a tensor, if it is known to be of sizes; else None."""
    reading = _READ.get(func)
    if reading is None or (table := _known(args[0])) is None:
        return None
    return reading(table)


def taken(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, in which sizes are no tensors where it takes numbers."""
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        x, index, *value = args
        each = tuple(map(_bounds, index)) if isinstance(index, tuple) else _bounds(index)
        return (x, each, *value), kwargs
    if func not in _TAKE_NUMBERS:
        return args, kwargs
    first = _TAKE_NUMBERS[func]
    rest, named_ones = pytree.tree_map(_number, (tuple(args[first:]), kwargs))
    return (*args[:first], *rest), named_ones


def forget(func: Any, args: Any, kwargs: Any) -> None:
    """What is done when something is called with these arguments."""
    of_others = isinstance(func, OpOverload) and func.namespace not in _PURE
    if not of_others and not _writes_to_lists(func):
        return
    for given in pytree.tree_leaves((args, kwargs)):
        if isinstance(given, Tensor) and not torch.compiler.is_dynamo_compiling():
            vars(given).pop(_KEPT, None)


def _writes_to_lists(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_")  # versions do not tell


def note(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
    """Keeps what a call has made, if all of it is sizes that are known."""
    form = _MADE.get(func)
    if form is None or torch.compiler.is_dynamo_compiling() or "out" in kwargs:
        return
    try:
        given = _signature(form).bind(*args, **kwargs)
    except TypeError:  # it is called in a way that has no form here, `torch.cat(…, axis=1)`
        return
    tables = form(*given.args, **given.kwargs)
    if isinstance(made, Tensor):
        _keep(made, tables)
    elif tables is not None:
        for each, table in zip(made, tables, strict=True):
            _keep(each, table)


def _keep(made: Tensor, table: Any) -> None:
    if table is None or tuple(made.shape) != np.shape(table):
        return
    fractions = {isinstance(each, Ratio) for each in np.ravel(table)}
    kinds = _FRACTIONS if fractions == {True} else _WHOLE if fractions == {False} else ()
    if made.dtype in kinds and np.size(table) <= _MOST:
        vars(made)[_KEPT] = _array(table), made._version


_FRACTIONS = (torch.float32, torch.float64)
_WHOLE = (torch.int64, torch.int32, torch.bool)


def _known(given: Any) -> Table | None:
    if not isinstance(given, Tensor) or torch.compiler.is_dynamo_compiling():
        return None
    table, version = vars(given).get(_KEPT, (None, None))
    if version is None and given.dtype == torch.int64 and not given.dim():
        known = of_buffers.number(Tensor.item, (given,))
        return None if known is None else _array(known)
    return None if version != given._version else table


def _array(value: Any) -> Table:
    """An array of such objects; numpy makes none of a single one that has no type of its own."""
    if isinstance(value, np.ndarray):
        return value
    made = np.empty((), dtype=object)
    made[()] = value
    return made


def _of_list(value: Any) -> Table | None:
    """Lists of lists of sizes, and of tensors that are sizes, as an array of them."""
    if isinstance(value, Tensor):
        return _known(value)
    if type(value) in (int, SymInt):
        return _array(value)
    if (
        isinstance(value, Listed)
        or not isinstance(value, list | tuple)
        or not 0 < len(value) <= _MOST
    ):
        return None
    return _stacked([_of_list(each) for each in value])


def _stacked(tables: Sequence[Table | None], dim: int = 0) -> Table | None:
    known = [table for table in tables if table is not None]
    if len(known) < len(tables) or len({np.shape(each) for each in known}) > 1:
        return None
    return np.stack(known, dim)


# --- what reads ---


def _item(table: Table) -> Any:
    value = table.item() if table.size == 1 else None
    return value.number() if isinstance(value, Ratio) else value


def _whole(table: Table) -> Any:
    value = whole(table.item()) if table.size == 1 else None
    return None if value is None else int(value)


def _list(table: Table) -> Any:
    return None if _has_fractions(table) else table.tolist()


def _has_fractions(table: Table) -> bool:
    return any(isinstance(each, Ratio) for each in table.flat)


def _truth(table: Table) -> Any:
    return None if (value := _item(table)) is None else bool(value)


_READ: Mapping[Any, Callable[[Table], Any]] = {
    Tensor.item: _item,
    Tensor.tolist: _list,
    Tensor.__int__: _whole,
    Tensor.__index__: _whole,
    Tensor.__bool__: _truth,
}

# --- what takes numbers ---

_OF_NUMBERS = (torch.arange, torch.linspace, torch.zeros, torch.ones, torch.full, torch.empty)
_OF_A_TENSOR = (
    *(
        getattr(of, name)
        for name in ("split", "reshape", "narrow", "tile")
        for of in (torch, Tensor)
    ),
    *(Tensor.view, Tensor.expand, Tensor.repeat, Tensor.unflatten, Tensor.split_with_sizes),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty),
    *(F.interpolate, F.pad, F.adaptive_avg_pool2d, F.adaptive_avg_pool1d),
)
_TAKE_NUMBERS = {**dict.fromkeys(_OF_NUMBERS, 0), **dict.fromkeys(_OF_A_TENSOR, 1)}
"""By function, the first argument that may be a number."""


def _number(given: Any) -> Any:
    table = _known(given)
    return given if table is None or table.ndim or _has_fractions(table) else table.item()


def _bounds(item: Any) -> Any:
    if not isinstance(item, slice):
        return item
    return slice(*map(_number, (item.start, item.stop, item.step)))


# --- what makes them ---


def _pair(step: _Form) -> _Form:
    def computed(a: Any, b: Any, **options: Any) -> Any:
        x, y = (_array(each) if type(each) in (int, SymInt) else _known(each) for each in (a, b))
        return None if x is None or y is None or options else _each(step, x, y)

    return computed


def _each(step: _Form, *tables: Table) -> Table | None:
    """What a step makes of each, unless it makes nothing of one."""
    try:
        made: Table = np.vectorize(step, otypes="O")(*tables)
    except TypeError:  # of a fraction, which has no such step
        return None
    return None if any(each is None for each in made.flat) else made


def _rounded(name: str) -> _Form:
    step = functools.partial(rounded, name)
    return lambda x: None if (table := _known(x)) is None else _each(step, table)


def _turned(step: _Form) -> _Form:
    return lambda a, b: step(b, a)


def _along(step: _Form) -> _Form:
    """Of all of them, or along a dimension."""

    def reduced(x: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        table = _known(x)
        if table is None or options or not (dim is None or type(dim) is int):
            return None
        if _has_fractions(table):
            return None
        whole = table.reshape(-1) if dim is None else np.moveaxis(table, dim, 0)
        made = _array(functools.reduce(step, whole))
        return np.expand_dims(made, dim) if keepdim and dim is not None else made

    return reduced


def _whole_only(step: _Form) -> _Form:
    along = _along(step)
    return lambda *args, **kwargs: along(*args) if len(args) == 1 and not kwargs else None


def _sums(x: Any, dim: Any, **options: Any) -> Any:
    table = _known(x)
    if table is None or options or _has_fractions(table):
        return None
    return np.add.accumulate(table, dim)


def _part(x: Any, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    table = _known(x)
    if table is None or not all(map(_is_plain, items)):
        return None
    return _array(table[index])


def _is_plain(item: Any) -> bool:
    if isinstance(item, slice):
        return all(each is None or type(each) is int for each in (item.start, item.stop, item.step))
    return item is None or item is Ellipsis or type(item) is int


def _unbound(x: Any, dim: int = 0) -> Any:
    table = _known(x)
    return None if table is None else [_array(each) for each in np.moveaxis(table, dim, 0)]


def _joined(tensors: Any, dim: int = 0) -> Any:
    tables = [table for each in tensors if (table := _known(each)) is not None]
    return np.concatenate(tables, dim) if 0 < len(tables) == len(tensors) else None


def _beside(tensors: Any, dim: int = 0) -> Any:
    return _stacked([_known(each) for each in tensors], dim)


def _filled(*args: Any, **kwargs: Any) -> Any:
    given = named(("size", "fill_value"), args, kwargs)
    return _all(given.get("size"), given.get("fill_value"))


def _all(shape: Any, value: Any) -> Any:
    shape = shape if isinstance(shape, list | tuple) else (shape,)
    if type(value) not in (int, SymInt) or not all(type(size) is int for size in shape):
        return None
    if np.prod(shape) > _MOST:
        return None
    made = np.empty(tuple(shape), dtype=object)
    made.fill(value)
    return made


def _of_one(value: int, of_another: bool) -> _Form:
    def made(*args: Any, size: Any = None, **_: Any) -> Any:
        args = args[1:] if of_another else args
        shape = size if size is not None else args[0] if len(args) == 1 else args
        return _all(shape, value)

    return made


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return _known(x)


def _to(x: Any, *_: Any, **__: Any) -> Any:
    """Of another dtype, which may be whole numbers."""
    table = _known(x)
    return table if table is None else _each(whole, table)


def _shaped(x: Any, *shape: Any) -> Any:
    table, whole = _known(x), shape[0] if len(shape) == 1 else shape
    sizes = whole if isinstance(whole, list | tuple) else (whole,)
    known = table is not None and all(type(size) is int for size in sizes)
    return table.reshape(sizes) if table is not None and known else None


def _flat(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    table = _known(x)
    return table.reshape(-1) if table is not None and (start_dim, end_dim) == (0, -1) else None


def _unsqueezed(x: Any, dim: int) -> Any:
    table = _known(x)
    return None if table is None else np.expand_dims(table, dim)


_STEPS: Mapping[str, _Form] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}


def _functions() -> Mapping[Any, _Form]:
    forms: dict[Any, _Form] = {}
    for name, step in _STEPS.items():
        forms[getattr(Tensor, f"__{name}__")] = _pair(step)
        if (back := getattr(Tensor, f"__r{name}__", None)) is not None:
            forms[back] = _pair(_turned(step))
    of_both: Mapping[str, _Form] = {
        **{name: _pair(_STEPS[name]) for name in ("add", "sub", "mul", "eq", "ne")},
        **{name: _pair(_STEPS[name]) for name in ("lt", "le", "gt", "ge")},
        **{"floor_divide": _pair(operator.floordiv), "remainder": _pair(operator.mod)},
        **{"sum": _along(operator.add), "prod": _along(operator.mul)},
        **{"div": _pair(over), "true_divide": _pair(over)},
        **{name: _rounded(name) for name in ("ceil", "floor")},
        **{"maximum": _pair(torch.sym_max), "minimum": _pair(torch.sym_min)},
        **{"max": _whole_only(torch.sym_max), "min": _whole_only(torch.sym_min)},
        **{"cumsum": _sums, "unbind": _unbound, "clone": _same, "detach": _same},
        **{"reshape": _shaped, "flatten": _flat, "unsqueeze": _unsqueezed},
    }
    for name, form in of_both.items():
        forms |= {getattr(torch, name): form, getattr(Tensor, name): form}
    for name in ("to", "long", "int"):
        forms[getattr(Tensor, name)] = _to
    for name in ("cpu", "cuda", "contiguous"):
        forms[getattr(Tensor, name)] = _same
    for name in ("__truediv__", "__div__"):
        forms[getattr(Tensor, name)] = _pair(over)
    of_lists = dict.fromkeys((torch.tensor, torch.as_tensor), lambda data, **_: _of_list(data))
    new = dict.fromkeys((Tensor.new_tensor, Tensor.new), lambda x, data, **_: _of_list(data))
    filled = {torch.full: _filled, Tensor.new_full: lambda x, *a, **k: _filled(*a, **k)}
    zeros = {torch.zeros: _of_one(0, False), Tensor.new_zeros: _of_one(0, True)}
    ones = {torch.ones: _of_one(1, False), Tensor.new_ones: _of_one(1, True)}
    joined = {**dict.fromkeys((torch.cat, torch.concat), _joined), torch.stack: _beside}
    parts = {Tensor.__getitem__: _part, Tensor.view: _shaped}
    return {**forms, **of_lists, **new, **filled, **zeros, **ones, **joined, **parts}


_MADE = _functions()
"""By function, what computes a table of tables, or gives None where it is none."""
