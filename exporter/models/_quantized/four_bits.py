"""Linear layers whose weights a checkpoint has in four bits, as bitsandbytes stores them.

They stay as they are stored: a layer of the model becomes one that multiplies by such a weight, and
trains no more of it than bitsandbytes does, its bias alone.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.ops.nf4_linear import dequantize_4bit, from_bitsandbytes, nf4_linear
from fuseport.ops.nf4_linear.storage import QUANT_TYPES

__all__ = [
    "DEQUANTIZE",
    "QUANT_TYPES",
    "FourBitLinear",
    "InFourBits",
    "Stored",
    "features",
    "layers",
    "named",
    "stored",
    "taken",
]

_STATE = ".quant_state.bitsandbytes__"
DEQUANTIZE = (  # without that, transformers 5 fails to save what it has dequantized
    "load the model with transformers, call its dequantize(), and"
    " save_pretrained(FOLDER, save_original_format=False)"
)
"""What to do with a folder whose weights are not read."""

_IN_CODE = "have them in bitsandbytes' Linear4bit, or save it with plain layers"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class Stored(NamedTuple):
    """How a layer's weight is stored: how many values share an absmax, and the code."""

    block_size: int
    quant_type: str


class InFourBits(nn.Module):
    """A linear layer that multiplies by a weight in four bits."""

    packed: Tensor
    absmax: Tensor
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    stored: Stored
    compute_dtype: torch.dtype | None = None
    """What `x` is cast to, and the result from it; None for x's own."""

    def store(self, stored: Stored) -> None:
        """Take in the place of the weight what is stored of it, its values not set yet."""
        self.stored = stored
        count = self.in_features * self.out_features
        self.register_buffer("packed", torch.zeros((count + 1) // 2, dtype=torch.uint8))
        self.register_buffer("absmax", torch.zeros(-(-count // stored.block_size)))

    @property
    def weight(self) -> Tensor:
        """The values, in absmax's dtype, for code that asks its layer for them."""
        shape = (self.out_features, self.in_features)
        block_size, quant_type = self.stored
        return dequantize_4bit(self.packed, self.absmax, shape, block_size, quant_type)

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)  # it may stay in float32
        block_size, quant_type = self.stored
        out = nf4_linear(
            x,
            self.packed,
            self.absmax,
            self.out_features,
            bias,
            block_size=block_size,
            quant_type=quant_type,
        )
        return out if self.compute_dtype is None else out.to(dtype)


class FourBitLinear(InFourBits):
    """`nn.Linear` with its weight in four bits.

    Args:
        like: the layer whose place it takes, transformers' Conv1D perhaps: its weight is stored as
            that of a linear layer, too.
        stored: how.
    """

    def __init__(self, like: Any, stored: Stored) -> None:
        super().__init__()
        self.in_features, self.out_features = features(like)
        self.bias = like.bias
        self.store(stored)


def stored(checkpoint: Checkpoint, *, own_code: bool = False) -> dict[str, Stored]:
    """The layers whose weights are in four bits, by name; none as a rule.

    Args:
        checkpoint: from `checkpoint.load`.
        own_code: whether it is of the user's own code, and not a folder of transformers.

    Raises:
        Missing: weights are in a code that is unknown, or in eight bits.
        CorruptInput: what is there of one is no weight in its code.
    """
    found = {}
    said = f"only four bits, NF4 and FP4, are read; {_IN_CODE if own_code else DEQUANTIZE}"
    for name in checkpoint.tensors:
        if name.endswith(".SCB") and name.replace(".SCB", ".weight") in checkpoint.tensors:
            raise Missing(
                f"{checkpoint.path}: {show(name[:-4])}.weight is in eight bits of bitsandbytes: "
                + said
            )
        weight, marked, code = name.partition(_STATE)
        if not marked or not weight.endswith(".weight"):
            continue
        if code not in QUANT_TYPES:
            raise Missing(
                f"{checkpoint.path}: {show(weight)} is in {show(code.upper(), 20)} of bitsandbytes:"
                f" {said}"
            )
        try:
            read = from_bitsandbytes(checkpoint.tensors, weight)
        except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CorruptInput(
                f"{checkpoint.path}: {show(weight)} is no weight in {code.upper()}: {show(error)}"
            ) from error
        found[weight.removesuffix(".weight")] = Stored(read.block_size, read.quant_type)
    return found


def named(stored: Mapping[str, Stored]) -> dict[str, dict[str, int]]:
    """What a configuration says of such layers: under each code's name, their block sizes."""
    found: dict[str, dict[str, int]] = {}
    for name, (block_size, quant_type) in stored.items():
        found.setdefault(quant_type, {})[name] = block_size
    return found


def taken(tensors: Mapping[str, Tensor], placed: Iterable[str]) -> Mapping[str, Tensor]:
    """A checkpoint's tensors by the names of a module with the layers of these names placed."""
    left = dict(tensors)
    for name in placed:
        weight = f"{name}.weight"
        found = from_bitsandbytes(left, weight)
        for part in ("", _STATE + found.quant_type, *(f".{part}" for part in _PARTS)):
            left.pop(weight + part, None)
        left |= {f"{name}.packed": found.packed, f"{name}.absmax": found.absmax}
    return left


def layers(config: Mapping[str, Any]) -> dict[str, Stored]:
    """What a configuration says of layers in four bits, as `stored` does; nothing as a rule.

    Raises:
        CorruptInput: it is not what `named` returns.
    """
    placed: dict[str, Stored] = {}
    for quant_type in QUANT_TYPES:
        found = config.get(quant_type, {})
        if not isinstance(found, Mapping) or not all(
            isinstance(n, int) and n >= 16 and n & (n - 1) == 0 for n in found.values()
        ):
            raise CorruptInput(
                f"what is said of layers in {quant_type.upper()} is no block size each:"
                f" {show(found)}"
            )
        placed |= {name: Stored(size, quant_type) for name, size in found.items()}
    return placed


def features(layer: Any) -> tuple[int, int]:
    """What a linear layer takes and gives; transformers' Conv1D is one, too.

    Raises:
        AttributeError: it is no such layer.
    """
    if hasattr(layer, "nx"):
        return layer.nx, layer.nf
    return layer.in_features, layer.out_features
