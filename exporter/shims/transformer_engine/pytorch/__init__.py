"""Layers for PyTorch."""

from . import attention, module, optimizers
from ._refused import Refused
from .attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from .distributed import CudaRNGStatesTracker, checkpoint
from .export import onnx_export
from .float8_tensor import Float8Tensor
from .module import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from .quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from .transformer import TransformerLayer

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "Float8Tensor",
    "GroupedLinear",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "attention",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "module",
    "onnx_export",
    "optimizers",
    "quantized_model_init",
]


class GroupedLinear(Refused):
    """Refuses to be made."""

    _why = "multiplies as many rows by each of its weights as a list says"
    _instead = "call one Linear for each of them"
