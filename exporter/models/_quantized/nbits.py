"""Linear layers whose weights a checkpoint has in a few bits, in groups with zero points.

They stay in these bits: a layer of the model becomes one that multiplies by such a weight, which
has no gradient. The packages that quantized them are not needed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput
from fuseport.exporter.models._quantized.four_bits import features
from fuseport.exporter.models._quantized.nbits_formats import SIGNS, Stored, said_by
from fuseport.ops.matmul_nbits import dequantize_nbits, matmul_nbits
from fuseport.ops.matmul_nbits.storage import BITS, groups_of, row_bytes, whole_row

__all__ = ["FIELD", "NBitsLinear", "Stored", "layers", "named", "stored", "taken"]

_MISFITS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)

FIELD = "nbits"
"""Under which name a model's configuration says which layers are such; see `named`."""


class NBitsLinear(nn.Module):
    """`nn.Linear` with its weight in a few bits.

    Args:
        like: the layer whose place it takes.
        stored: how; the values are not set yet.

    Raises:
        CorruptInput: its groups are larger than a row.
    """

    packed: Tensor
    scales: Tensor
    zero_points: Tensor
    order: Tensor

    def __init__(self, like: Any, stored: Stored) -> None:
        super().__init__()
        self.in_features, self.out_features = features(like)
        self.stored = stored
        self.bias = like.bias
        if self.bias is None and stored.biased:  # some versions give all layers one
            self.bias = nn.Parameter(torch.zeros(self.out_features))
        bits, group_size, *_ = stored
        if group_size > whole_row(self.in_features):  # memory that nothing needs
            raise CorruptInput(f"groups of {group_size} codes in rows of {self.in_features}")
        groups, rows = groups_of(self.in_features, group_size), self.out_features
        packed = torch.zeros(rows, groups, row_bytes(group_size, bits), dtype=torch.uint8)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", torch.zeros(rows, groups))
        zero_points = torch.zeros(rows, row_bytes(groups, bits), dtype=torch.uint8)
        self.register_buffer("zero_points", zero_points)
        if stored.reordered:
            self.register_buffer("order", torch.arange(self.in_features))

    @property
    def weight(self) -> Tensor:
        """The values, in the dtype of the scales, for code that asks its layer for them."""
        stored = (self.packed, self.scales, self.zero_points)
        values = dequantize_nbits(*stored, self.in_features, self.stored.bits)
        return values[:, self.order.argsort()] if self.stored.reordered else values

    def forward(self, x: Tensor) -> Tensor:
        if self.stored.reordered:
            x = x.index_select(-1, self.order)
        bias = None if self.bias is None else self.bias.to(x.dtype)  # it may stay in float32
        bits, group_size, *_ = self.stored
        return matmul_nbits(
            x, self.packed, self.scales, self.zero_points, bias, bits=bits, group_size=group_size
        )


def stored(checkpoint: Checkpoint) -> dict[str, Stored]:
    """The layers of a folder whose weights are stored so, by name; none as a rule.

    Raises:
        CorruptInput: what is there of one is no weight of such a layer.
        Missing: they are in a format, or of a number of bits, that is not read.
    """
    weights = [name for name in checkpoint.tensors if name.endswith(SIGNS)]
    if not weights:
        return {}
    where = show(checkpoint.path)
    way, found = said_by(checkpoint.config, where, weights[0]), {}
    for name in (weight.rpartition(".")[0] for weight in weights):
        try:
            found[name] = way.of(checkpoint.tensors, name)
        except _MISFITS as error:
            raise way.corrupt(f"{where}: {show(name)}", error) from error
    return found


def named(stored: Mapping[str, Stored]) -> dict[str, Any]:
    """What a configuration says of such layers, as JSON data; nothing where there are none."""
    return {FIELD: {name: how._asdict() for name, how in stored.items()}} if stored else {}


def layers(config: Mapping[str, Any]) -> dict[str, Stored]:
    """What a configuration says of such layers, as `stored` does; nothing as a rule.

    Raises:
        CorruptInput: it is not what `named` returns.
    """
    said = config.get(FIELD, {})
    try:
        found = {name: Stored(**how) for name, how in said.items()}
    except (AttributeError, TypeError):
        found = None
    if found is None or not all(map(_sound, found.values())):
        raise CorruptInput(
            "what is said of layers in a few bits is not how each is stored: " + show(said)
        )
    return found


def _sound(how: Stored) -> bool:
    group = isinstance(how.group_size, int) and how.group_size >= 16 and how.group_size % 16 == 0
    flags = isinstance(how.reordered, bool) and isinstance(how.biased, bool)
    return how.bits in BITS and group and flags


def taken(
    module: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """A checkpoint's tensors by the names of a module that has such layers in their places.

    Args:
        module: with the layers placed.
        config: of the folder, with what `named` returns.
        tensors: by the checkpoint's names.

    Raises:
        CorruptInput: what is there of one is no weight of such a layer.
    """
    placed = layers(config)
    if not placed:
        return tensors
    left, way = dict(tensors), said_by(config, "the folder", next(iter(placed)))
    for name in placed:
        try:
            found = way.read(left, name)
        except _MISFITS as error:
            raise way.corrupt(show(name), error) from error
        for part in way.parts:
            left.pop(f"{name}{part}", None)
        layer: Any = module.get_submodule(name)
        if layer.bias is None:
            left.pop(f"{name}.bias", None)  # of zeros
        parts = {"packed": found.packed, "scales": found.scales, "zero_points": found.zero_points}
        if found.order is not None:
            parts["order"] = found.order
        left |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return left
