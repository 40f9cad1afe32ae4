"""The decoding step of transformers' models that scan: their cache, as inputs and outputs."""

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.models._stepping import PAST, PAST_SIZE, called_by
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec, one_line
from fuseport.ops.causal_conv1d_update import causal_conv1d_update
from fuseport.ops.selective_state_update import selective_state_update

__all__ = ["LIMITED", "REPLACEMENTS", "limited", "step"]

_SIZES = {"batch": 2, PAST: PAST_SIZE}
# Of all layers together, and what the layers of a cache call them.
_STACKED = {"conv_states": "conv_states", "ssm_states": "recurrent_states"}


def step(
    module: nn.Module,
    config: Any,
    scans: int | None,
    fused: Callable[[], AbstractContextManager[None]],
) -> Model:
    """One token, and the states of all layers as transformers' `DynamicCache` has them.

    Args:
        module: of transformers, with its weights.
        config: as `Model` has it.
        scans: how often the layers scan; None if unknown.
        fused: the context in which the module calls the ops.

    Raises:
        UsageError: its layers keep something else than keys, values and states of one size.
        Missing: the caches of this version of transformers are of another kind.
    """
    try:
        states = _states(module)
    except (AttributeError, ImportError, KeyError, TypeError, IndexError, RuntimeError) as error:
        version = importlib.import_module("transformers").__version__
        raise Missing(
            f"program step: transformers {version} keeps its states in another way"
            f" ({one_line(error)}): install transformers 5"
        ) from error
    text: Any = module.config
    vocab_size = text.get_text_config().vocab_size
    names = tuple(spec.name for spec in states)
    dims = {dim for spec in states for dim in spec.dims}
    return Model(
        module=called_by(module, partial(_forward, names=names, limit=_limit_of(module))),
        architecture="huggingface",
        config=config,
        inputs=(TensorSpec("input_ids", "int64", ("batch", 1), vocab_size), *states),
        sizes={name: size for name, size in _SIZES.items() if name in dims},
        outputs=("logits", *(f"new_{name}" for name in names)),
        scans=scans,
        fused=fused,
        differentiable=False,
    )


def _states(module: nn.Module) -> tuple[TensorSpec, ...]:
    """Of filters and scans over all layers, and the keys and values of each that attends."""
    cache = _cache(module)
    with torch.no_grad():
        ids = torch.zeros(1, 1, dtype=torch.int64)
        module(ids, **{_cache_of(module): cache}, use_cache=True)
    specs = []
    for name, attribute in _STACKED.items():
        found = [getattr(layer, attribute)[i] for layer, i in _scanning(cache)]
        if any(state is not None for state in found):
            state = torch.stack(found)
            least = torch.float32 if name == "ssm_states" else state.dtype
            dtype = torch.promote_types(state.dtype, least)
            specs.append(_spec(name, dtype, (len(found), "batch", *state.shape[2:])))
    attending = [(n, v) for n, v in enumerate(cache.layers) if getattr(v, "keys", None) is not None]
    for number, layer in attending:
        for name, of_layer in (("key", layer.keys), ("value", layer.values)):
            _, heads, _, width = of_layer.shape
            dims = ("batch", heads, PAST, width)
            specs.append(_spec(f"{name}_{number}", of_layer.dtype, dims))
    return tuple(specs)


def _spec(name: str, dtype: torch.dtype, dims: Sequence[int | str]) -> TensorSpec:
    return TensorSpec(name, str(dtype).removeprefix("torch."), tuple(dims))


def _cache(module: nn.Module) -> Any:
    """An empty one, in which layers that look back on a window keep what is before it, too.

    What they may look at their masks say, and states have one size, and this one for all.
    """
    kinds = importlib.import_module("transformers.cache_utils")
    plain = (kinds.DynamicLayer, kinds.LinearAttentionLayer, kinds.DummyLayer)
    cache = kinds.DynamicCache(config=module.config)
    for number, layer in enumerate(cache.layers):
        if type(layer) is kinds.DynamicSlidingWindowLayer:
            cache.layers[number] = kinds.DynamicLayer()
        elif type(layer) is kinds.LinearAttentionAndSlidingWindowAttentionLayer:
            whole = kinds.LinearAttentionAndFullAttentionLayer(layer.number_of_states)
            cache.layers[number] = whole
        elif type(layer) not in (*plain, kinds.LinearAttentionAndFullAttentionLayer):
            raise UsageError(
                f"program step: layer {number} keeps neither keys and values nor states of one"
                f" size, but a {type(layer).__name__}"
            )
    return cache


def _cache_of(module: nn.Module) -> str:
    """What its forward calls the cache."""
    names = inspect.signature(type(module).forward).parameters
    return next(name for name in ("past_key_values", "cache_params") if name in names)


def _scanning(cache: Any) -> Iterator[tuple[Any, int]]:
    """The layers that scan, each as often as it has states, and the number of these."""
    for layer in cache.layers:
        for number in range(getattr(layer, "number_of_states", 0)):
            yield layer, number


def _forward(
    self: nn.Module,
    input_ids: Tensor,
    *past: Tensor,
    names: Sequence[str],
    limit: tuple[float, float] | None,
) -> tuple[Tensor, ...]:
    """Logits of the token after this one, and the states after it.

    Args:
        input_ids: (b, 1) int64.
        past: the states, as they are called in `names`.
            conv_states: (scans, b, channels, W), the inputs of each scan's filter before this
            token, the last one last; zeros before the first token. The first is not used.
            ssm_states: (scans, b, …), float32 at least; zeros before the first token.
            key_0, value_0, …: of a layer of attention, (b, heads, past, width); `past` is 0 before
            the first token.
        names: of the states.
        limit: of the time steps.

    Returns:
        logits (b, 1, vocab_size), and the new states: keys and values are of one token more.
    """
    cache, given = _cache(self), dict(zip(names, past, strict=True))
    stacked = [(given.pop(name), _STACKED[name]) for name in _STACKED if name in given]
    for states, attribute in stacked:
        for (layer, i), state in zip(_scanning(cache), states, strict=True):
            # The model writes to its states: to copies, as a program's inputs are not its own.
            getattr(layer, attribute)[i] = state.clone()
            getattr(layer, f"is_{attribute}_initialized")[i] = layer.has_previous_state[i] = True
            if attribute == "conv_states":
                layer.conv_kernel_size[i] = state.shape[-1]
    held = [(name.split("_"), state) for name, state in given.items()]
    for (kind, number), state in held:
        layer = cache.layers[int(number)]
        setattr(layer, kind + "s", state)
        layer.dtype, layer.device, layer.is_initialized = state.dtype, state.device, True
    options = {_cache_of(self): cache, "use_cache": True}
    if held and "position_ids" in inspect.signature(type(self).forward).parameters:
        # As `generate` gives them: some models count from 0 by themselves, whatever the cache has.
        before = held[0][1].shape[2]
        options["position_ids"] = torch.arange(before, before + 1, device=input_ids.device)[None]
    before_this = _limits.set(limit)
    try:
        out = type(self).forward(self, input_ids=input_ids, **options)
    finally:
        _limits.reset(before_this)
    new = [out.logits]
    for _, attribute in stacked:
        new.append(torch.stack([getattr(layer, attribute)[i] for layer, i in _scanning(cache)]))
    return (*new, *(getattr(cache.layers[int(number)], kind + "s") for (kind, number), _ in held))


# Of time steps, in this thread.
_limits: ContextVar[tuple[float, float] | None] = ContextVar("limits", default=None)


def _limit_of(module: nn.Module) -> tuple[float, float] | None:
    """What the model's scans keep their time steps within; None for any."""
    found = (getattr(part, "time_step_limit", None) for part in module.modules())
    low, high = next((limit for limit in found if limit is not None), (0.0, math.inf))
    return None if (low, high) == (0.0, math.inf) else (low, high)


def limited(update: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A state update of transformers' signature that keeps the limit of the model's time steps.

    transformers' own leaves it out, so that its step is not its forward.
    """
    if hasattr(update, "keeps_limits"):
        return update

    @wraps(update)
    def kept(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **choices: Any,
    ) -> Tensor:
        if (limit := _limits.get()) is not None:
            wide = dt.to(torch.promote_types(dt.dtype, torch.float32))
            wide = wide if dt_bias is None else wide + dt_bias
            dt = (F.softplus(wide) if dt_softplus else wide).clamp(*limit).to(dt.dtype)
            dt_bias, dt_softplus = None, False
        steps = {"dt_bias": dt_bias, "dt_softplus": dt_softplus}
        return update(state, hidden_states, dt, A, B, C, D, **steps, z=z, **choices)

    kept.keeps_limits = True  # type: ignore[attr-defined]
    return kept


# Each has transformers' signature.


def _conv_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    silu = activation if activation in ("silu", "swish") else None
    out = causal_conv1d_update(hidden_states, conv_state, weight, bias, silu)
    if activation is not None and silu is None:
        out = importlib.import_module("transformers.activations").ACT2FN[activation](out)
    return out


def _state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **choices: Any,
) -> Tensor:
    del choices
    return selective_state_update(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)


LIMITED = "mamba2_selective_state_update"
"""The one whose time steps have limits."""
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": _conv_update,
    "mamba_selective_state_update": _state_update,
    LIMITED: limited(_state_update),
}
"""What transformers calls in a step, by its name there."""
