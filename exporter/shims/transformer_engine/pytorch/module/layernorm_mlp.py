"""A norm and two linear layers."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._compute import ACTIVATIONS, GATED, activate, bias_gelu
from .._refused import plain, refuse_parallel
from .base import Init, TransformerEngineBaseModule, normal
from .layernorm_linear import add_norm, norm_of, returned

__all__ = ["LayerNormMLP"]


class LayerNormMLP(TransformerEngineBaseModule):
    """A norm, a linear layer, an activation, and another linear layer.

    The sum of the first bias is not rounded before a "gelu", as in the package, unless
    NVTE_BIAS_GELU_NVFUSION is 0.

    Args:
        hidden_size: of x and the result.
        ffn_hidden_size: between; where the activation is gated, the first layer has twice as many.
        eps: under the norm's root.
        return_bias: whether the last bias is returned instead of added.
        tp_group: the processes that it is divided among, one at most, or None.
        tp_size: how many without a group.
        init_method: initial values of the first weight; None for a normal distribution.
        bias: whether the linear layers have one.
        normalization: "LayerNorm" or "RMSNorm", which has no bias.
        activation: gelu, qgelu, relu, srelu, silu; or gated, the first half through the function:
            geglu, qgeglu, reglu, sreglu, swiglu, glu, clamped_swiglu.
        activation_params: options of clamped_swiglu.
        output_layer_init_method: initial values of the last weight, as init_method.
        params_dtype: of the parameters; None for torch's default.
        return_layernorm_output: whether the norm is returned, too.
        set_parallel_mode: whether the last bias is added to the rounded product.
        zero_centered_gamma: whether 1 is added to the norm's weight.
        device: where parameters are; None for torch's default.
        name: has no effect.
        checkpoint: has no effect on values.
        tuning: options that have no effect.

    Raises:
        NotImplementedError: there is more than one process; the activation is unknown.
        TypeError: an option is unknown.
        ValueError: the norm is another one.
    """

    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        return_bias: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        output_layer_init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = None,
        name: str | None = None,
        checkpoint: bool = False,
        **tuning: Any,
    ) -> None:
        super().__init__(name)
        plain("LayerNormMLP", tuning)
        refuse_parallel("LayerNormMLP", tp_group, tp_size)
        if activation not in ACTIVATIONS and activation not in GATED:
            known = ", ".join((*ACTIVATIONS, *GATED))
            raise NotImplementedError(f"activation is {activation!r}; there are: {known}")
        self.use_bias = bias
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.activation = activation
        self.activation_params = dict(activation_params or {})
        self.set_parallel_mode = set_parallel_mode
        made = {"device": device, "dtype": params_dtype}
        add_norm(self, hidden_size, eps, normalization, zero_centered_gamma, **made)
        first = ffn_hidden_size * (2 if activation in GATED else 1)
        for layer, rows, columns, init in (
            ("fc1", first, hidden_size, init_method),
            ("fc2", hidden_size, ffn_hidden_size, output_layer_init_method),
        ):
            self.add_parameter(f"{layer}_weight", (rows, columns), init or normal, **made)
            if bias:
                self.add_parameter(f"{layer}_bias", (rows,), nn.init.zeros_, **made)
            else:
                setattr(self, f"{layer}_bias", torch.empty(0, **made))

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """(…, hidden_size) → the same; then the last bias, or None, and the norm, as asked."""
        dtype = self.compute_dtype(inp)
        normed = norm_of(self, inp.to(dtype))
        first, last = self.fc1_weight.to(dtype), self.fc2_weight.to(dtype)
        biases = (self.fc1_bias.to(dtype), self.fc2_bias.to(dtype)) if self.use_bias else [None] * 2
        if self.activation == "gelu" and os.getenv("NVTE_BIAS_GELU_NVFUSION", "1") != "0":
            inner = bias_gelu(F.linear(normed, first), biases[0])
        else:
            inner = F.linear(normed, first, biases[0])
            inner = activate(inner, self.activation, self.activation_params)
        if biases[1] is None or self.return_bias:
            out = F.linear(inner, last)
        elif self.set_parallel_mode:
            out = F.linear(inner, last) + biases[1]
        else:
            out = F.linear(inner, last, biases[1])
        return returned(self, out, biases[1], normed)
