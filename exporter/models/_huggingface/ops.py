"""The fused ops where transformers calls its scans, filters and attention at learned places.

Each modeling file of transformers has functions of its own for these, of the same names everywhere;
the names are bound to the ops for the time of an export or of a run.
"""

import importlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.models._huggingface import step as decoding
from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.gated_delta_rule import gated_delta_rule
from fuseport.ops.ms_deform_attn import ms_deform_attn
from fuseport.ops.selective_scan import selective_scan
from fuseport.ops.ssd_chunk_scan import ssd_chunk_scan

__all__ = ["fused", "modelings"]

_TRANSFORMERS = "transformers.models."
_KERNELS = "transformers.integrations.hub_kernels"


def modelings(module: nn.Module) -> list[str]:
    """The modeling files of transformers that a module's layers are of, where an op has a place.

    Functions of these files that layers keep are looked up at each call from then on; and those for
    which transformers calls a package for GPUs, where it is installed, are its own on the CPU. A
    step keeps the limit of the model's time steps.
    """
    found = {base.__module__ for part in module.modules() for base in type(part).__mro__}
    theirs = [file for file in found if file.startswith(_TRANSFORMERS)]
    for names in (vars(part) for part in module.modules()):
        names.update({n: _chosen(f) for n, f in names.items() if _of_package(f)})
    for names in (vars(importlib.import_module(file)) for file in theirs):
        names.update({n: _chosen(f) for n, f in names.items() if _of_package(f)})
        if own := names.get(decoding.LIMITED):
            names[decoding.LIMITED] = decoding.limited(own)
    places = {file: _places(importlib.import_module(file)) for file in theirs}
    known = {
        id(own): partial(_called, file, name)
        for file, functions in places.items()
        for name, own in functions.items()
    }
    for part in module.modules():
        vars(part).update({n: known[id(f)] for n, f in vars(part).items() if id(f) in known})
    return sorted(file for file, functions in places.items() if functions)


def _of_package(value: Any) -> bool:
    """Whether it is a function of transformers' that may call a package's in the place of its own.

    It does wherever the package is installed, as mamba_ssm and causal_conv1d are where models are
    trained: their kernels refuse the CPU.
    """
    return (
        inspect.isfunction(value)
        and hasattr(value, "__wrapped__")
        and value.__globals__.get("__name__") == _KERNELS
    )


@cache
def _chosen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on a GPU, and what transformers has in plain torch elsewhere."""
    own: Callable[..., Any] = function.__wrapped__  # type: ignore[attr-defined]

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        there = any(isinstance(value, Tensor) and value.is_cuda for value in given)
        return (function if there else own)(*args, **kwargs)

    return called


def _called(file: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(importlib.import_module(file), name)(*args, **kwargs)


@contextmanager
def fused(modelings: Sequence[str]) -> Iterator[None]:
    """Meanwhile the scans and filters of these files are the fused ops, in every thread."""
    for file in modelings:
        module = importlib.import_module(file)
        with _lock:
            if not _fused[file]:
                _own[file] = _places(module)
                for name in _own[file]:
                    _put(module, name, _REPLACEMENTS[name])
            _fused[file] += 1
    try:
        yield
    finally:
        for file in modelings:
            with _lock:
                _fused[file] -= 1
                if not _fused[file]:
                    for name, own in _own.pop(file).items():
                        _put(importlib.import_module(file), name, own)


_lock = threading.Lock()
_fused: Counter[str] = Counter()  # by file, how often that holds now
_own: dict[str, dict[str, Any]] = {}  # by file, what was there


def _places(module: Any) -> dict[str, Callable[..., Any]]:
    """What of a modeling file an op replaces, by name: functions, and methods of its classes.

    One whose arguments are called otherwise is another function, and stays.
    """
    found = {}
    for name, replacement in _REPLACEMENTS.items():
        owner, _, last = name.rpartition(".")
        own = vars(vars(module).get(owner, object) if owner else module).get(last)
        if callable(own) and _demanded(own) == _demanded(replacement):
            found[name] = own
    return found


def _put(module: Any, name: str, function: Callable[..., Any]) -> None:
    owner, _, last = name.rpartition(".")
    setattr(getattr(module, owner) if owner else module, last, function)


def _demanded(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a call has to give."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    given = inspect.signature(function).parameters.values()
    return [p.name for p in given if p.default is p.empty and p.kind not in kinds]


# Each has transformers' signature; `choices` are between its own ways to compute the same.


def _selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **choices: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    del choices
    # A module in float64 has its float32 casts in the way of the op, which takes one dtype.
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    return selective_scan(
        hidden_states,
        dt,
        A.to(wide),
        B,
        C,
        None if D is None else D.to(wide),
        z,
        None if delta_bias is None else delta_bias.to(wide),
        delta_softplus,
        return_last_state,
    )


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **choices: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    del choices
    low, high = dt_limit
    return ssd_chunk_scan(
        hidden_states,
        dt,
        A,
        B,
        C,
        chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        initial_states=initial_states,
        dt_softplus=dt_softplus,
        dt_limit=(low, high),
        return_final_states=return_final_states,
    )


def _causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **choices: Any,
) -> Tensor:
    del choices
    silu = activation if activation in ("silu", "swish") else None
    out = causal_conv1d(hidden_states.to(weight.dtype), weight, bias, activation=silu)
    if activation is not None and silu is None:
        out = importlib.import_module("transformers.activations").ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **choices: Any,
) -> tuple[Tensor, Tensor | None]:
    del chunk_size, choices
    # As transformers: from half types on in float32, norms of queries and keys included.
    wide = torch.promote_types(query.dtype, torch.float32)
    out, state = gated_delta_rule(
        query.to(wide),
        key.to(wide),
        value.to(wide),
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return out.to(query.dtype), state


def _ms_deform_attn(
    self: nn.Module,
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_spatial_shapes_list: Sequence[tuple[int, int]],
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    del self, value_spatial_shapes_list
    return ms_deform_attn(
        value,
        value_spatial_shapes,
        level_start_index,
        sampling_locations,
        attention_weights,
        im2col_step,
    )


def _ms_deform_attn_of_list(
    value: Tensor,
    value_spatial_shapes: Tensor | Sequence[tuple[int, int]],
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    shapes = torch.as_tensor(value_spatial_shapes, device=value.device)
    starts = torch.cat((shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]))
    return ms_deform_attn(value, shapes, starts, sampling_locations, attention_weights)


def _ms_deform_attn_v2(
    value: Tensor,
    value_spatial_shapes: Tensor | Sequence[tuple[int, int]],
    sampling_locations: Tensor,
    attention_weights: Tensor,
    num_points_list: Sequence[int],
    method: str = "default",
) -> Tensor:
    """Of RT-DETR v2 and D-FINE: each map has a number of points of its own."""
    if method != "default":  # by the nearest place, which the op does not have
        own: Any = next(found[_V2] for found in _own.values() if _V2 in found)
        given = value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list
        nearest: Tensor = own(*given, method)
        return nearest
    most = max(num_points_list)

    def by_map(x: Tensor) -> Tensor:
        """(batch, queries, heads, all points, …) → (…, maps, points, …): no weight for a spare."""
        rest = (0, 0) * (x.dim() - 4)
        parts = zip(x.split(num_points_list, 3), num_points_list, strict=True)
        return torch.stack([F.pad(part, (*rest, 0, most - count)) for part, count in parts], 3)

    locations, weights = by_map(sampling_locations), by_map(attention_weights)
    return _ms_deform_attn_of_list(value, value_spatial_shapes, locations, weights)


_V2 = "multi_scale_deformable_attention_v2"
_REPLACEMENTS: Mapping[str, Callable[..., Any]] = {
    "mamba_selective_scan": _selective_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "causal_conv1d_fn": _causal_conv1d,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "MultiScaleDeformableAttention.forward": _ms_deform_attn,
    "multi_scale_deformable_attention": _ms_deform_attn_of_list,
    _V2: _ms_deform_attn_v2,
    **decoding.REPLACEMENTS,
}
