"""Equally good ways to compute one and the same thing in the working dtype."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from fuseport.exporter.program import trainable
from fuseport.exporter.program.regions import called

__all__ = [
    "DOUBTFUL",
    "FURTHER",
    "ROUGH",
    "ROUNDS",
    "Inputs",
    "along",
    "further",
    "moved",
    "moved_cotangents",
    "neighbour",
    "ways",
]

aten = torch.ops.aten

FURTHER = 8
"""How many ways `further` has: how many computations a round of a second look adds."""
ROUNDS = 3
"""How many rounds a second look has at most."""
DOUBTFUL = 8.0
"""The largest share of its bound that a right result is thought to take, by an unlucky baseline.

In half-normal errors with one cause, one of 10⁵ takes more of what six computations allow.
"""

_MOVES = 3
_CHUNK = 2**15  # elements at a time, as in `measure`
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Inputs = Mapping[str, Tensor]


def ways(module: nn.Module, inputs: Inputs) -> Iterator[AbstractContextManager[Inputs]]:
    """Contexts to run `module` in, each with the inputs to run it on.

    The first two are one and the same way, in which sums have one order: what differs between them
    does not repeat itself. The others use any order, one thread that adds one value after another,
    other kernels and elementary functions, and parameters and inputs that are moved within a unit
    in the last place; where all these are wide, and the model computes in a half type inside, what
    it casts to that too.
    """
    in_order = _SumsInOrder()
    with called() as regions:  # which torch traces, and what traces takes no such modes
        yield _repeatable(inputs)
    yield _repeatable(inputs)
    yield nullcontext(inputs)
    yield _one_thread(inputs, nullcontext() if regions else in_order)
    yield _other_kernels(inputs, nullcontext() if regions else _ElementaryByOthers())
    for seed in range(_MOVES):
        yield _moved(module, inputs, seed, casts=in_order.cast_to_half)


def further(
    module: nn.Module, inputs: Inputs, begin: int
) -> Iterator[AbstractContextManager[Inputs]]:
    """`FURTHER` more ways, in all of which parameters and inputs are moved.

    Args:
        module: as for `ways`.
        inputs: as for `ways`.
        begin: the first of as many seeds, each from `_MOVES` on.
    """
    first, second, third, *others = range(begin, begin + FURTHER)
    in_order = _SumsInOrder()
    with called() as regions:
        yield _moved(module, inputs, first, casts=False)
    for seed, mode in ((second, in_order), (third, _ElementaryByOthers(third))):
        yield _under(nullcontext() if regions else mode, _moved(module, inputs, seed, casts=False))
    for seed in others:
        yield _moved(module, inputs, seed, casts=in_order.cast_to_half)


def moved(module: nn.Module, inputs: Inputs, seed: int) -> AbstractContextManager[Inputs]:
    """One way in which parameters and inputs are moved, and nothing else is."""
    return _moved(module, inputs, seed, casts=False)


@contextmanager
def _under(
    mode: AbstractContextManager[Any], way: AbstractContextManager[Inputs]
) -> Iterator[Inputs]:
    with way as inputs, mode:
        yield inputs


@contextmanager
def _repeatable(inputs: Inputs) -> Iterator[Inputs]:
    """Deterministic algorithms: else the gradient of `weight[indices]` adds in any order."""
    memory: Any = deterministic  # its flag is a property of the module's own class
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an operator has no such algorithm
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False
        try:
            yield inputs
        finally:
            torch.set_deterministic_debug_mode(mode)
            memory.fill_uninitialized_memory = fills


@contextmanager
def _one_thread(inputs: Inputs, order: AbstractContextManager[Any]) -> Iterator[Inputs]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with order:
            yield inputs
    finally:
        torch.set_num_threads(threads)


class _SumsInOrder(TorchDispatchMode):
    """Sums add one value after another: runtimes do over a leading dimension, torch never does.

    Equal values, as cotangents often are, then round alike at every step. In half types, sums are
    of float32 everywhere; but torch's backward of a batch norm, in float32 beside a half type, has
    another kernel where a cotangent is not contiguous, which rounds more: so it is here.

    Attributes:
        cast_to_half: whether anything was.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cast_to_half = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten.native_batch_norm_backward.default and _is_half(args[0]):
            dy, *others = args
            args = (dy.movedim(1, -1).contiguous().movedim(-1, 1), *others)
        elif func in _OF_SUMS:
            with self:
                return decomposition_table[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func is aten.convolution_backward.default and result[2] is not None:
            with self:  # its kernel sums the cotangent for the bias
                others = [dim for dim in range(args[0].dim()) if dim != 1]
                result = (*result[:2], args[0].sum(others))
        self.cast_to_half |= func is aten._to_copy.default and _is_half(result)
        if func not in _SUMS or not args[0].numel():
            return result
        values: Tensor = args[0]
        if values.dtype != result.dtype or values.dtype not in (torch.float32, torch.float64):
            return result
        dims = (args[1] if len(args) > 1 else None) or range(values.dim())
        first = values.movedim(tuple(dims), tuple(range(len(dims))))
        rows = first.reshape(values.numel() // result.numel(), -1).numpy()
        added = np.add.accumulate(rows, 0)[-1] if rows.shape[1] == 1 else np.add.reduce(rows, 0)
        total = torch.from_numpy(added).view(result.shape)
        return total if func in _SUMS[:2] else total / len(rows)


_SUMS = aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim
_OF_SUMS = (
    aten.native_batch_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.native_layer_norm_backward.default,
)
"""What torch has kernels of, and other runtimes compute by sums."""

_ELEMENTARY = {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "celu", "cos", "cosh", "elu",
    "erf", "erfc", "exp", "exp2", "expm1", "gelu", "gelu_backward", "lgamma", "log", "log10",
    "log1p", "log2", "log_sigmoid_forward", "logit", "mish", "mish_backward",
    "selu", "sigmoid", "silu", "silu_backward", "sin", "sinh", "softplus", "softplus_backward",
    "tan", "tanh",
}  # fmt: skip
"""Names of operators that compute, element by element, a function by approximation."""

ROUGH = {"acos": 1.25, "asin": 0.95, "atan": 0.7, "mish": 1.0, "tanh": 0.9}
"""Those that ONNX Runtime computes in float32 by short polynomials, and by how many ulps these are
off to both sides: the root of the mean square over 2²⁰ values of a normal distribution of 1.5 (an
eighth of them for `acos` and `asin`); at most by 3 to 7. Torch's are off by 0.3 to 0.5."""

_WITHIN_ONE = frozenset({"cos", "erf", "sigmoid", "sin", "tanh"})


class _ElementaryByOthers(TorchDispatchMode):
    """Elementary functions as other libraries approximate them.

    What they give is too large in size, by a quarter of an ulp on average. Torch's are off to both
    sides alike. ONNX Runtime's sigmoid and mish are too small, and its atan is too large, by a
    quarter to a third of an ulp (200,000 values of a normal distribution): in a sum over the pixels
    of a picture that does not cancel. Those of `ROUGH` are off to both sides beside that. In half
    types, functions are computed in float32 and rounded.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_")
        if name not in _ELEMENTARY:
            return result
        found: Tensor = result[0] if isinstance(result, tuple) else result
        if found.dtype in (torch.float32, torch.float64):
            bits = found.view(_BITS[found.dtype.itemsize])
            steps = (torch.rand(bits.shape, generator=self._generator) < 0.25).to(bits.dtype)
            if name in ROUGH and found.dtype == torch.float32:
                off = torch.randn(bits.shape, generator=self._generator) * ROUGH[name]
                steps += off.round().to(bits.dtype)
            # No step leads out of the numbers, nor past a zero.
            bits.add_(steps * ((found.abs() > _SMALL) & found.isfinite()))
            if name in _WITHIN_ONE:
                found.clamp_(-1, 1)
        return result


_SMALL = 2 * torch.finfo(torch.float32).tiny


@contextmanager
def _other_kernels(inputs: Inputs, functions: AbstractContextManager[Any]) -> Iterator[Inputs]:
    """Convolutions, products and functions by other libraries, which sum and round otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, at every use of these flags
        flags = torch.backends.mkldnn.flags(enabled=False)
        flags.__enter__()
    try:
        with functions:
            yield inputs
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flags.__exit__(None, None, None)


@contextmanager
def _moved(module: nn.Module, inputs: Inputs, seed: int, *, casts: bool) -> Iterator[Inputs]:
    generator = torch.Generator().manual_seed(seed)
    originals = {name: parameter.data for name, parameter in trainable(module).items()}
    casts = casts and not any(map(_is_half, (*originals.values(), *inputs.values())))
    with _replaced(module, {name: neighbour(data, generator) for name, data in originals.items()}):
        moved = {name: neighbour(tensor, generator) for name, tensor in inputs.items()}
        with _MovedCasts(generator) if casts else nullcontext():
            yield moved


@contextmanager
def along(module: nn.Module, inputs: Inputs, direction: Inputs) -> Iterator[Inputs]:
    """Parameters and inputs moved along a direction, as little as tells from rounding.

    Args:
        module: as for `ways`.
        inputs: as for `ways`.
        direction: of any length, by the names of parameters and inputs; others stay.
    """
    own = {**inputs, **{name: p.data for name, p in trainable(module).items()}}
    known = {name: t for name, t in direction.items() if name in own and t.shape == own[name].shape}
    steps = [
        torch.finfo(own[name].dtype).eps ** 0.5 * float(own[name].abs().max() / t.abs().max())
        for name, t in known.items()
        if t.any() and own[name].any()
    ]
    step = min(steps, default=0.0)
    moved = {name: (own[name] + step * t).to(own[name].dtype) for name, t in known.items()}
    with _replaced(module, {name: t for name, t in moved.items() if name not in inputs}):
        yield {name: moved.get(name, tensor) for name, tensor in inputs.items()}


@contextmanager
def _replaced(module: nn.Module, values: Inputs) -> Iterator[None]:
    """Parameters with other values."""
    originals = {name: module.get_parameter(name).data for name in values}
    try:
        for name, value in values.items():
            module.get_parameter(name).data = value
        yield
    finally:
        for name, data in originals.items():
            module.get_parameter(name).data = data


class _MovedCasts(TorchDispatchMode):
    """What is cast to a half type is moved within a unit in the last place of that."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default and _is_half(result):
            return neighbour(result, self._generator)
        return result


def _is_half(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


def moved_cotangents(cotangents: Inputs, generator: torch.Generator) -> dict[str, Tensor]:
    """Those in float64 within an ulp: its baseline sums them in the truth's own order."""
    return {
        name: neighbour(tensor, generator) if tensor.dtype == torch.float64 else tensor
        for name, tensor in cotangents.items()
    }


def neighbour(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Every element moved by at most one unit in the last place; in half types, every fourth."""
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.detach().resolve_conj())
        return torch.view_as_complex(neighbour(parts, generator))
    if not tensor.is_floating_point():
        return tensor
    moved = tensor.detach().clone(memory_format=torch.contiguous_format)
    for part in moved.view(-1).split(_CHUNK):
        # The next number away from zero is the next larger integer, read as one.
        bits = part.view(_BITS[part.dtype.itemsize])
        step = torch.randint(-1, 2, part.shape, generator=generator, dtype=bits.dtype)
        # Zero stays: its neighbours are not what another rounding would have made of it.
        still = (part == 0) | ~part.isfinite()
        if part.dtype.itemsize < 4:
            still |= torch.rand(part.shape, generator=generator) >= 0.25
        bits.add_(step.masked_fill_(still, 0))
    return moved
