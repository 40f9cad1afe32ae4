"""Linear layers whose weights a checkpoint has in NF4, as bitsandbytes stores them.

They stay as they are stored: a layer of the model becomes one that multiplies by such a weight, and
trains no more of it than bitsandbytes does, its bias alone.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.ops.nf4_linear import dequantize_nf4, from_bitsandbytes, nf4_linear

__all__ = ["LAYERS", "Nf4Linear", "features", "place", "stored", "taken", "without"]

LAYERS = "nf4"
"""Under which name a configuration has what `stored` returns."""

_STATE = ".quant_state.bitsandbytes__"
_DEQUANTIZE = (  # without that, transformers 5 fails to save what it has dequantized
    "load the model with transformers, call its dequantize(), and"
    " save_pretrained(FOLDER, save_original_format=False)"
)
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class Nf4Linear(nn.Module):
    """`nn.Linear` with its weight in NF4.

    Args:
        like: the layer whose place it takes, transformers' Conv1D perhaps: its weight is stored as
            that of a linear layer, too.
        block_size: values of the weight that share an absmax.
    """

    packed: Tensor
    absmax: Tensor

    def __init__(self, like: Any, block_size: int) -> None:
        super().__init__()
        self.in_features, self.out_features = features(like)
        self.block_size = block_size
        count = self.in_features * self.out_features
        self.register_buffer("packed", torch.zeros((count + 1) // 2, dtype=torch.uint8))
        self.register_buffer("absmax", torch.zeros(-(-count // block_size)))
        self.bias = like.bias

    @property
    def weight(self) -> Tensor:
        """The values, in absmax's dtype, for code that asks its layer for them."""
        shape = (self.out_features, self.in_features)
        return dequantize_nf4(self.packed, self.absmax, shape, self.block_size)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)  # it may stay in float32
        return nf4_linear(
            x, self.packed, self.absmax, self.out_features, bias, block_size=self.block_size
        )


def stored(checkpoint: Checkpoint) -> dict[str, int]:
    """The layers whose weights are in NF4, by name, each with its block size; none as a rule.

    Raises:
        Missing: weights are in another 4-bit code of bitsandbytes.
        CorruptInput: what is there of one is no weight in NF4.
    """
    found = {}
    for name in checkpoint.tensors:
        weight, marked, code = name.partition(_STATE)
        if not marked or not weight.endswith(".weight"):
            continue
        if code != "nf4":
            raise Missing(
                f"{checkpoint.path}: {show(weight)} is in {show(code.upper(), 20)} of bitsandbytes:"
                f" only NF4 is read; {_DEQUANTIZE}"
            )
        try:
            found[weight.removesuffix(".weight")] = from_bitsandbytes(
                checkpoint.tensors, weight
            ).block_size
        except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CorruptInput(
                f"{checkpoint.path}: {show(weight)} is no weight in NF4: {show(error)}"
            ) from error
    return found


def without(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as of the model before its weights were stored so."""
    left = {name: value for name, value in config.items() if name != LAYERS}
    if config.get(LAYERS):
        left.pop("quantization_config", None)
    return left


def place(module: nn.Module, config: Mapping[str, Any]) -> None:
    """Put such layers in the places of the module's own that the configuration names.

    Raises:
        CorruptInput: it does not name them as `stored` does.
        Missing: the module has no linear layer of one of the names.
    """
    for name, block_size in _layers(config).items():
        owner, _, leaf = name.rpartition(".")
        try:
            like: Any = module.get_submodule(name)
        except AttributeError:
            like = None
        if not isinstance(like, nn.Linear) and not hasattr(like, "nx"):
            raise Missing(
                f"{show(name)} is stored in NF4, and is no linear layer of a"
                f" {type(module).__name__}: give the config.json that belongs to the weights; if it"
                f" does, and the layer has another name in transformers today, {_DEQUANTIZE}"
            )
        setattr(module.get_submodule(owner), leaf, Nf4Linear(like, block_size))
    settings: Any = getattr(module, "config", None)
    if config.get(LAYERS) and settings is not None:
        settings._is_quantized = True  # as transformers tells models that multiply by a weight


def taken(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """A checkpoint's tensors by the names of a module with layers placed."""
    left = dict(tensors)
    for name in _layers(config):
        weight = f"{name}.weight"
        found = from_bitsandbytes(left, weight)
        for part in ("", f"{_STATE}nf4", *(f".{part}" for part in _PARTS)):
            left.pop(weight + part, None)
        left |= {f"{name}.packed": found.packed, f"{name}.absmax": found.absmax}
    return left


def features(layer: Any) -> tuple[int, int]:
    """What a linear layer takes and gives; transformers' Conv1D is one, too.

    Raises:
        AttributeError: it is no such layer.
    """
    if hasattr(layer, "nx"):
        return layer.nx, layer.nf
    return layer.in_features, layer.out_features


def _layers(config: Mapping[str, Any]) -> Mapping[str, int]:
    layers = config.get(LAYERS, {})
    if not isinstance(layers, Mapping) or not all(
        isinstance(size, int) and size >= 16 and size & (size - 1) == 0 for size in layers.values()
    ):
        raise CorruptInput(f"what is said of layers in NF4 is no block size each: {show(layers)}")
    return layers
