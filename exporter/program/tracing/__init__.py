"""How torch is to trace, so that no size is fixed and what code makes of numbers is known."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._decomp import decomposition_table, decompositions
from torch._subclasses import fake_tensor
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental import proxy_tensor

from fuseport.exporter.program.sizes._logarithms import beginnings_of_powers
from fuseport.exporter.program.sizes.quotients import whole_quotients
from fuseport.exporter.program.sizes.symbolic import orders_of_products
from fuseport.exporter.program.tracing._branches import alike_merged
from fuseport.exporter.program.tracing._constraints import what_fixes_sizes
from fuseport.exporter.program.tracing._copies import copied_as_viewed
from fuseport.exporter.program.tracing._overlaps import asked_by_strides

__all__ = ["any_sizes", "known_constants", "resized_to_one"]

_KNOWN = 1024  # elements of a tensor whose values are known in a trace


@contextmanager
def any_sizes() -> Iterator[None]:
    """Trace without telling size 1 from others, or the program would not be good for size 1."""

    def unguarded(ask: Callable[..., Any]) -> Callable[..., Any]:
        # Which kernel a convolution has, and which layout its result, is asked by its sizes: one of
        # size 1 has any. The program does not depend on it: it has no view, and no strides.
        def asked(*given: Any, **named: Any) -> Any:
            x: Tensor = named["input"] if "input" in named else given[0]
            sizes: Sequence[int | torch.SymInt] = x.shape
            size = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
            if size is None:
                return ask(*given, **named)
            with size.node.shape_env.suppress_guards():
                return ask(*given, **named)

        return asked

    with ExitStack() as patched:
        patched.enter_context(symbolic_config.patch(backed_size_oblivious=True))  # type: ignore[attr-defined]
        for name in ("_conv_determine_backend_memory_format", "_select_conv_backend"):
            ask = getattr(torch._C, name)
            patched.enter_context(mock.patch.object(torch._C, name, unguarded(ask)))
        layer = mock.patch.object(decompositions, "one_layer_lstm", _lstm_layer)
        norm = mock.patch.object(torch._refs.fft, "_apply_norm", _normalised)
        products, quotients = orders_of_products(), whole_quotients()
        sizes = asked_by_strides(), what_fixes_sizes(), alike_merged(), beginnings_of_powers()
        # `float(length > 7)` is decided as `int` of it is; torch has none.
        number = mock.patch.object(torch.SymBool, "__float__", _as_float, create=True)
        patched.enter_context(number)
        called = resized_to_one(), _as_called(), copied_as_viewed()
        for each in (layer, norm, *called, products, quotients, *sizes):
            patched.enter_context(each)
        yield


@contextmanager
def _as_called() -> Iterator[None]:
    """Without torch's forms in Python of functions that it takes other arguments for than these
    get: a reduction's name for its number, deviations without `unbiased`."""
    with mock.patch.dict(decomposition_table):
        for function in _OF_OTHER_ARGUMENTS:
            decomposition_table.pop(function, None)
        yield


_aten = torch.ops.aten
_OF_OTHER_ARGUMENTS = (
    _aten.nll_loss.default,
    _aten.margin_ranking_loss.default,
    _aten.hinge_embedding_loss.default,
    _aten.std_mean.default,
    _aten.std_mean.dim,
)


def _as_float(condition: torch.SymBool) -> float:
    return float(bool(condition))


_apply_norm = torch._refs.fft._apply_norm


def _normalised(x: Tensor, norm: Any, signal_numel: Any, forward: bool) -> Tensor:
    """What torch scales a Fourier transform by; it takes the root of a number, not of a size."""
    if norm != "ortho" or isinstance(signal_numel, int):
        scaled: Tensor = _apply_norm(x, norm, signal_numel, forward)
        return scaled
    dtype = x.dtype.to_real()
    return x / torch.sqrt(torch.scalar_tensor(signal_numel, dtype=dtype, device=x.device))


_compute_scale: Any = decompositions._compute_scale


@contextmanager
def resized_to_one() -> Iterator[None]:
    """Resize from corner to corner to any size, also to one place: torch divides by what it has
    beside the first."""
    with mock.patch.object(decompositions, "_compute_scale", _scale):
        yield


def _scale(in_size: Any, out_size: Any, align_corners: bool, scale: float | None = None) -> Any:
    if not align_corners or isinstance(out_size, int):
        return _compute_scale(in_size, out_size, align_corners, scale)
    return (in_size - 1.0) / torch.sym_max(out_size - 1, 1)


@contextmanager
def known_constants() -> Iterator[None]:
    """Trace with the values of small tensors that the model's code makes of numbers.

    Code reads sizes back out of them, as Deformable DETR's does; torch knows single values only.
    """
    with ExitStack() as patched:
        for module in (fake_tensor, proxy_tensor):
            patched.enter_context(mock.patch.object(module, "CONSTANT_NUMEL_LIMIT", _KNOWN))
        yield


_one_layer_lstm: Any = decompositions.one_layer_lstm


def _lstm_layer(x: Tensor, hidden: Sequence[Tensor], *others: Any, **named: Any) -> Any:
    """What torch has a layer's shapes from; 2.11 leaves its last states a dimension of size 1."""
    y, last = _one_layer_lstm(x, hidden, *others, **named)
    pairs = zip(last, hidden, strict=True)
    return y, tuple(t.squeeze(0) if t.dim() > before.dim() else t for t, before in pairs)
