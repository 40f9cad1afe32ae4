"""Linear layers that a Hugging Face folder has quantized, of all kinds that are read.

Each kind has how a layer is stored, `Stored`, and the module that takes a layer's place.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import Missing
from fuseport.exporter.models._quantized import four_bits, nbits
from fuseport.exporter.models._quantized.nbits_formats import said_by

__all__ = ["described", "layers", "named", "place", "taken", "without"]

_Stored = four_bits.Stored | nbits.Stored


def named(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a configuration says of a checkpoint's quantized layers; nothing as a rule.

    Raises:
        CorruptInput: what is there of one is no such weight.
        Missing: weights are of a kind that is not read.
    """
    return {
        **four_bits.named(four_bits.stored(checkpoint)),
        **nbits.named(nbits.stored(checkpoint)),
    }


def layers(config: Mapping[str, Any]) -> dict[str, _Stored]:
    """The quantized layers that a configuration names, and how each is stored.

    Raises:
        CorruptInput: it does not say what `named` returns.
    """
    return {**four_bits.layers(config), **nbits.layers(config)}


def without(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as of the model before its layers were quantized."""
    kinds = {*four_bits.QUANT_TYPES, nbits.FIELD}
    left = {name: value for name, value in config.items() if name not in kinds}
    if layers(config):
        left.pop("quantization_config", None)
    return left


def place(module: nn.Module, config: Mapping[str, Any]) -> None:
    """Put such layers in the places of the module's own that the configuration names.

    Raises:
        CorruptInput: it does not say what `named` returns.
        Missing: the module has no linear layer of one of the names.
    """
    placed = layers(config)
    for name, how in placed.items():
        owner, _, leaf = name.rpartition(".")
        try:
            like: Any = module.get_submodule(name)
        except AttributeError:
            like = None
        if not isinstance(like, nn.Linear) and not hasattr(like, "nx"):
            bits, instead = ("four", four_bits.DEQUANTIZE)
            if isinstance(how, nbits.Stored):
                bits, instead = (f"{how.bits}", "save the model dequantized")
            raise Missing(
                f"{show(name)} is stored in {bits} bits, and is no linear layer of a"
                f" {type(module).__name__}: give the config.json that belongs to the weights; if it"
                f" does, and the layer has another name in transformers today, {instead}"
            )
        if isinstance(how, four_bits.Stored):
            layer: nn.Module = four_bits.FourBitLinear(like, how)
        else:
            layer = nbits.NBitsLinear(like, how)
        setattr(module.get_submodule(owner), leaf, layer)
    settings: Any = getattr(module, "config", None)
    if placed and settings is not None:
        settings._is_quantized = True  # as transformers tells models that multiply by a weight


def taken(
    module: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """A checkpoint's tensors by the names of a module with the layers placed.

    Raises:
        CorruptInput: what is there of one is no weight as the configuration says.
    """
    return nbits.taken(module, config, four_bits.taken(tensors, four_bits.layers(config)))


def described(config: Mapping[str, Any]) -> list[str]:
    """What a user is told of quantized layers, a line for each way that they are stored."""
    settings = config.get("settings", config)
    method = ""
    if placed := nbits.layers(settings):
        method = said_by(settings, "the folder", next(iter(placed))).method

    def said(how: _Stored) -> str:
        if isinstance(how, four_bits.Stored):
            return f"by bitsandbytes, in {how.quant_type.upper()}, blocks of {how.block_size}"
        more = ", inputs in another order" if how.reordered else ""
        return f"by {method}, in {how.bits} bits, groups of {how.group_size}{more}"

    found = Counter(map(said, layers(settings).values()))
    return [f"{count} layer{'s' * (count > 1)} {what}" for what, count in found.items()]
