"""Where layers keep their states when decoding."""

from typing import Any

from torch import Tensor

__all__ = ["kept_of", "states_of"]


def states_of(
    layer: Any, inference_params: Any, batch_size: int, initialize_states: bool
) -> tuple[Tensor, Tensor]:
    """The two states of `layer` in `inference_params`; see `kept_of`."""
    conv_state, ssm_state = kept_of(layer, inference_params, batch_size, initialize_states)
    return conv_state, ssm_state


def kept_of(
    layer: Any, inference_params: Any, batch_size: int, initialize_states: bool
) -> tuple[Tensor, ...]:
    """The states of `layer` in `inference_params`, zeros at first.

    Raises:
        ValueError: the layer has no layer_idx, by which its states are kept.
    """
    if layer.layer_idx is None:
        raise ValueError(f"{type(layer).__name__} needs a layer_idx to decode")
    kept = inference_params.key_value_memory_dict
    if layer.layer_idx not in kept:
        kept[layer.layer_idx] = layer.allocate_inference_cache(batch_size, 0)
    states: tuple[Tensor, ...] = kept[layer.layer_idx]
    if initialize_states:
        for state in states:
            state.zero_()
    return states
