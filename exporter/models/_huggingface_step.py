"""The decoding step of transformers' state-space models: their cache, as inputs and outputs."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.models._stepping import called_by
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec, one_line
from fuseport.ops.causal_conv1d_update import causal_conv1d_update
from fuseport.ops.selective_state_update import selective_state_update

__all__ = ["REPLACEMENTS", "step"]


def step(
    module: nn.Module,
    vocab_size: int,
    config: Any,
    scans: int,
    fused: Callable[[], AbstractContextManager[None]],
) -> Model:
    """One token, and the states of all layers as transformers' `DynamicCache` has them.

    Args:
        module: of transformers, with its weights.
        vocab_size: of its tokens.
        config: as `Model` has it.
        scans: how many layers there are; all of them scan.
        fused: the context in which the module calls the ops.

    Raises:
        UsageError: the model's own step is not its forward.
        Missing: the caches of this version of transformers are of another kind.
    """
    settings: Any = module.config
    low, high = getattr(settings, "time_step_limit", None) or (0.0, float("inf"))
    if (low, high) != (0.0, float("inf")) and settings.model_type == "mamba2":
        raise UsageError(
            "program step: transformers' own step leaves out this model's time_step_limit of"
            f" [{low}, {high}], so that it is not its forward; without a limit it is"
        )
    try:
        conv, ssm = _states(module)
    except (AttributeError, ImportError, KeyError, TypeError, IndexError) as error:
        version = importlib.import_module("transformers").__version__
        raise Missing(
            f"program step: transformers {version} keeps its states in another way"
            f" ({one_line(error)}): install transformers 5"
        ) from error
    wide = torch.promote_types(ssm.dtype, torch.float32)
    specs = tuple(
        TensorSpec(name, str(dtype).removeprefix("torch."), (scans, "batch", *state.shape[1:]))
        for name, dtype, state in (("conv_states", conv.dtype, conv), ("ssm_states", wide, ssm))
    )
    return Model(
        module=called_by(module, _forward),
        architecture="huggingface",
        config=config,
        inputs=(TensorSpec("input_ids", "int64", ("batch", 1), vocab_size), *specs),
        sizes={"batch": 2},
        outputs=("logits", *(f"new_{spec.name}" for spec in specs)),
        scans=scans,
        fused=fused,
        differentiable=False,
    )


def _states(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Those of the first layer after one token, for their shapes and dtypes."""
    with torch.no_grad():
        ids = torch.zeros(1, 1, dtype=torch.int64)
        layer = module(ids, use_cache=True).cache_params.layers[0]
    return layer.conv_states[0], layer.recurrent_states[0]


def _forward(
    self: nn.Module, input_ids: Tensor, conv_states: Tensor, ssm_states: Tensor
) -> tuple[Tensor, ...]:
    """Logits of the token after this one, and the states after it.

    Args:
        input_ids: (b, 1) int64.
        conv_states: (layers, b, channels, W), the inputs of each layer's filter before this token,
            the last one last; zeros before the first token. The first of the W is not used.
        ssm_states: (layers, b, …), float32 at least; zeros before the first token.

    Returns:
        logits (b, 1, vocab_size), conv_states, ssm_states.
    """
    transformers = importlib.import_module("transformers")
    cache = transformers.DynamicCache(config=self.config)
    for layer, conv, ssm in zip(cache.layers, conv_states, ssm_states, strict=True):
        # The model writes to its states: to copies, as a program's inputs are not its own.
        layer.conv_states[0], layer.recurrent_states[0] = conv.clone(), ssm.clone()
        layer.conv_kernel_size[0] = conv.shape[-1]
        for known in ("is_conv_states_initialized", "is_recurrent_states_initialized"):
            getattr(layer, known)[0] = True
        layer.has_previous_state[0] = True
    out = type(self).forward(self, input_ids=input_ids, cache_params=cache, use_cache=True)
    return (
        out.logits,
        torch.stack([layer.conv_states[0] for layer in cache.layers]),
        torch.stack([layer.recurrent_states[0] for layer in cache.layers]),
    )


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


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": _conv_update,
    "mamba_selective_state_update": _state_update,
    "mamba2_selective_state_update": _state_update,
}
"""What transformers calls in a step, by its name there."""
