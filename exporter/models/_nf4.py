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

__all__ = [
    "LAYERS",
    "InNf4",
    "Nf4Linear",
    "features",
    "layers",
    "place",
    "stored",
    "taken",
    "without",
]

LAYERS = "nf4"
"""Under which name a configuration has what `stored` returns."""

_STATE = ".quant_state.bitsandbytes__"
_DEQUANTIZE = (  # without that, transformers 5 fails to save what it has dequantized
    "load the model with transformers, call its dequantize(), and"
    " save_pretrained(FOLDER, save_original_format=False)"
)
_IN_CODE = 'quantize its layers in NF4, quant_type="nf4", or save it with plain ones'
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class InNf4(nn.Module):
    """A linear layer that multiplies by a weight in NF4."""

    packed: Tensor
    absmax: Tensor
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    block_size: int
    compute_dtype: torch.dtype | None = None
    """What `x` is cast to, and the result from it; None for x's own."""

    def store(self, block_size: int) -> None:
        """Take in the place of the weight what there is of it in NF4, its values not set yet.

        Args:
            block_size: values of the weight that share an absmax.
        """
        self.block_size = block_size
        count = self.in_features * self.out_features
        self.register_buffer("packed", torch.zeros((count + 1) // 2, dtype=torch.uint8))
        self.register_buffer("absmax", torch.zeros(-(-count // block_size)))

    @property
    def weight(self) -> Tensor:
        """The values, in absmax's dtype, for code that asks its layer for them."""
        shape = (self.out_features, self.in_features)
        return dequantize_nf4(self.packed, self.absmax, shape, self.block_size)

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)  # it may stay in float32
        out = nf4_linear(
            x, self.packed, self.absmax, self.out_features, bias, block_size=self.block_size
        )
        return out if self.compute_dtype is None else out.to(dtype)


class Nf4Linear(InNf4):
    """`nn.Linear` with its weight in NF4.

    Args:
        like: the layer whose place it takes, transformers' Conv1D perhaps: its weight is stored as
            that of a linear layer, too.
        block_size: see `store`.
    """

    def __init__(self, like: Any, block_size: int) -> None:
        super().__init__()
        self.in_features, self.out_features = features(like)
        self.bias = like.bias
        self.store(block_size)


def stored(checkpoint: Checkpoint, *, own_code: bool = False) -> dict[str, int]:
    """The layers whose weights are in NF4, by name, each with its block size; none as a rule.

    Args:
        checkpoint: from `checkpoint.load`.
        own_code: whether it is of the user's own code, and not a folder of transformers.

    Raises:
        Missing: weights are in another 4-bit code of bitsandbytes, or in eight bits.
        CorruptInput: what is there of one is no weight in NF4.
    """
    found = {}
    said = f"only NF4 is read; {_IN_CODE if own_code else _DEQUANTIZE}"
    for name in checkpoint.tensors:
        if name.endswith(".SCB") and name.replace(".SCB", ".weight") in checkpoint.tensors:
            raise Missing(
                f"{checkpoint.path}: {show(name[:-4])}.weight is in eight bits of bitsandbytes: "
                + said
            )
        weight, marked, code = name.partition(_STATE)
        if not marked or not weight.endswith(".weight"):
            continue
        if code != "nf4":
            raise Missing(
                f"{checkpoint.path}: {show(weight)} is in {show(code.upper(), 20)} of bitsandbytes:"
                f" {said}"
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
    for name, block_size in layers(config).items():
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
    for name in layers(config):
        weight = f"{name}.weight"
        found = from_bitsandbytes(left, weight)
        for part in ("", f"{_STATE}nf4", *(f".{part}" for part in _PARTS)):
            left.pop(weight + part, None)
        left |= {f"{name}.packed": found.packed, f"{name}.absmax": found.absmax}
    return left


def layers(config: Mapping[str, Any]) -> Mapping[str, int]:
    """What a configuration says of layers in NF4, as `stored` does; nothing as a rule.

    Raises:
        CorruptInput: it is not that.
    """
    found = config.get(LAYERS, {})
    if not isinstance(found, Mapping) or not all(
        isinstance(size, int) and size >= 16 and size & (size - 1) == 0 for size in found.values()
    ):
        raise CorruptInput(f"what is said of layers in NF4 is no block size each: {show(found)}")
    return found


def features(layer: Any) -> tuple[int, int]:
    """What a linear layer takes and gives; transformers' Conv1D is one, too.

    Raises:
        AttributeError: it is no such layer.
    """
    if hasattr(layer, "nx"):
        return layer.nx, layer.nf
    return layer.in_features, layer.out_features
