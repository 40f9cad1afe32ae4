"""Linear layers whose weights a checkpoint has in a few bits in groups, as GPTQ and AWQ store them.

They stay in these bits: a layer of the model becomes one that multiplies by such a weight, which
has no gradient. Neither GPTQ's packages nor AWQ's are needed.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models._four_bits import features
from fuseport.ops.matmul_nbits import (
    WeightNBits,
    dequantize_nbits,
    from_awq,
    from_gptq,
    matmul_nbits,
)
from fuseport.ops.matmul_nbits.storage import BITS, groups_of, row_bytes, whole_row

__all__ = ["FIELD", "NBitsLinear", "Stored", "layers", "named", "stored", "taken"]

FIELD = "nbits"
"""Under which name a model's configuration says which layers are such; see `named`."""

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_AGAIN = "quantize the model again so, with GPTQModel for example"


class Stored(NamedTuple):
    """How a layer's weight is stored.

    Attributes:
        bits: of a code.
        group_size: how many codes of a row have a scale and a zero point.
        reordered: whether codes of a row are in another order than inputs.
        biased: whether the file has a bias for it that is not all zeros.
    """

    bits: int
    group_size: int
    reordered: bool
    biased: bool


class NBitsLinear(nn.Module):
    """`nn.Linear` with its weight in a few bits.

    Args:
        like: the layer whose place it takes.
        stored: how; the values are not set yet.
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
    names = [n.removesuffix(".qweight") for n in checkpoint.tensors if n.endswith(".qweight")]
    said, where = checkpoint.config.get("quantization_config"), show(checkpoint.path)
    if not names:
        return {}
    if not isinstance(said, Mapping) or "quant_method" not in said:
        raise Missing(
            f"{where}: {show(names[0])}.qweight is of a quantized layer, and config.json does not"
            ' say of which kind: write "quantization_config" there, as GPTQModel and AutoAWQ do,'
            ' with "quant_method": "gptq" or "awq", "bits" and "group_size" (what'
            " quantize_config.json or quant_config.json says, where there is one)"
        )
    method, bits, group_size = _method(said, where)
    found = {}
    for name in names:
        try:
            found[name] = _how(checkpoint.tensors, name, method, bits, group_size)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise _corrupt(f"{where}: {show(name)}", method, error) from error
    return found


def _method(said: Mapping[str, Any], where: str) -> tuple[str, int, int]:
    """Which of the methods a folder's weights are of, how many bits, and the size of groups.

    Raises:
        CorruptInput: it is no such configuration.
        Missing: there is no reader of it.
    """
    method = said["quant_method"]
    if method not in _FORMATS:
        raise Missing(
            f"{where}: config.json says quant_method {show(method, 40)}: only bitsandbytes' four"
            f" bits, GPTQ's and AWQ's are read; {_AGAIN}"
        )
    way = _format(said)
    if way not in _FORMATS[method]:
        known = " and ".join(_FORMATS[method])
        raise Missing(
            f"{where}: weights of {method.upper()} in the format {show(way, 40)}, and only"
            f" {known} is read; {_AGAIN}"
        )
    bits, group_size = said.get("bits"), said.get("group_size", 128)
    if not isinstance(bits, int) or not isinstance(group_size, int):
        raise CorruptInput(
            f"{where}: config.json says bits {show(bits, 40)} and group_size"
            f" {show(group_size, 40)}, which are no numbers"
        )
    known_bits = (4,) if method == "awq" else BITS
    if bits not in known_bits:
        listed = " or ".join(map(str, known_bits))
        raise Missing(
            f"{where}: weights of {method.upper()} in {bits} bits, and only {listed} are read;"
            f" {_AGAIN}"
        )
    rules = said.get("dynamic") or {}
    if others := [rule for rule in rules if not str(rule).startswith("-:")]:
        raise Missing(
            f"{where}: config.json says dynamic, by which layers are quantized differently"
            f" ({show(others[0], 60)}), and only one way for all is read; {_AGAIN}"
        )
    return method, bits, group_size


def _format(said: Mapping[str, Any]) -> str:
    """How codes lie in words; `version` is AWQ's name for it."""
    plain = "gemm" if said["quant_method"] == "awq" else "gptq"
    way = said.get("checkpoint_format") or said.get("format") or said.get("version") or plain
    return str(way).lower()


def _how(
    tensors: Mapping[str, Tensor], name: str, method: str, bits: int, group_size: int
) -> Stored:
    inputs = tensors[f"{name}.qweight"].shape[0] * (32 // bits if method == "gptq" else 1)
    group, bias = tensors.get(f"{name}.g_idx"), tensors.get(f"{name}.bias")
    reordered = method == "gptq" and group is not None and bool((group.diff() < 0).any())
    biased = bias is not None and bool((bias != 0).any())
    size = whole_row(inputs) if group_size == -1 else group_size
    if size < 16 or size % 16:
        raise ValueError(f"groups of {size} codes, which are no multiple of 16")
    return Stored(bits, size, reordered, biased)


def _corrupt(what: str, method: str, error: Exception) -> CorruptInput:
    return CorruptInput(f"{what} is no weight of {method.upper()}: {show(error)}")


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
    left = dict(tensors)
    for name in layers(config):
        said = config["quantization_config"]
        try:
            found = _read(left, name, said)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise _corrupt(show(name), said["quant_method"], error) from error
        for part in _PARTS:
            left.pop(f"{name}.{part}", None)
        layer: Any = module.get_submodule(name)
        if layer.bias is None:
            left.pop(f"{name}.bias", None)  # of zeros
        parts = {"packed": found.packed, "scales": found.scales, "zero_points": found.zero_points}
        if found.order is not None:
            parts["order"] = found.order
        left |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return left


def _read(tensors: Mapping[str, Tensor], name: str, said: Mapping[str, Any]) -> WeightNBits:
    bits, group_size = said["bits"], said.get("group_size", 128)
    if said["quant_method"] == "awq":
        return from_awq(tensors, name, bits, group_size)
    plain = _format(said) != "gptq_v2"
    return from_gptq(tensors, name, bits, group_size, stored_less_one=plain)
