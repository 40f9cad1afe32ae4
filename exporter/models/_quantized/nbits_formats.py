"""What a folder says of weights in a few bits, and how one of them is read."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.ops.matmul_nbits import WeightNBits, from_awq, from_compressed_tensors, from_gptq
from fuseport.ops.matmul_nbits.storage import BITS, whole_row

__all__ = ["SIGNS", "Format", "Stored", "said_by"]

SIGNS = (".qweight", ".weight_packed")
"""What the names of quantized weights end with."""

_AGAIN = "quantize the model again so, with GPTQModel for example"
_FORMATS = {
    "gptq": ("gptq", "gptq_v2"),
    "awq": ("gemm",),
    "compressed-tensors": ("pack-quantized",),
}


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


class Format(NamedTuple):
    """How all weights of a folder are stored.

    Attributes:
        method: as messages call it: `GPTQ`.
        bits: of a code.
        group_size: -1 for whole rows.
        parts: the ends of the names of what a layer has of it, the codes' first.
        group: the end of the name of the group that each input is of; "" for none.
        columns: of codes, as their shape tells.
        read: a weight of a checkpoint's tensors, by the layer's name.
    """

    method: str
    bits: int
    group_size: int
    parts: tuple[str, ...]
    group: str
    columns: Callable[[torch.Size], int]
    read: Callable[[Mapping[str, Tensor], str], WeightNBits]

    def of(self, tensors: Mapping[str, Tensor], name: str) -> Stored:
        """How a layer's weight is stored, without reading it.

        Raises:
            KeyError, RuntimeError, ValueError: it is not.
        """
        codes = tensors[name + self.parts[0]]
        if codes.dim() != 2:
            raise ValueError(f"{name}{self.parts[0]} is no matrix")
        row = whole_row(self.columns(codes.shape))
        size = row if self.group_size == -1 else min(self.group_size, row)
        if size < 16 or size % 16:
            raise ValueError(f"groups of {size} codes, which are no multiple of 16")
        group, bias = tensors.get(f"{name}{self.group}"), tensors.get(f"{name}.bias")
        reordered = bool(self.group) and group is not None and bool((group.diff() < 0).any())
        return Stored(self.bits, size, reordered, bias is not None and bool((bias != 0).any()))

    def corrupt(self, what: str, error: Exception) -> CorruptInput:
        """That something is no weight of this format."""
        return CorruptInput(f"{what} is no weight of {self.method}: {show(error)}")


def said_by(config: Mapping[str, Any], where: str, name: str) -> Format:
    """The format that a folder's config.json says.

    Args:
        config: of the folder.
        where: the folder, for messages.
        name: of one of its quantized weights, for messages.

    Raises:
        CorruptInput: it says no such thing.
        Missing: it says nothing, or a format or number of bits that is not read.
    """
    said = config.get("quantization_config")
    if not isinstance(said, Mapping) or "quant_method" not in said:
        raise Missing(
            f"{where}: {show(name)} is of a quantized layer, and config.json does not"
            ' say of which kind: write "quantization_config" there, as GPTQModel and AutoAWQ do,'
            ' with "quant_method": "gptq" or "awq", "bits" and "group_size" (what'
            " quantize_config.json or quant_config.json says, where there is one)"
        )
    method = said["quant_method"]
    if not isinstance(method, str) or method not in _FORMATS:
        raise Missing(
            f"{where}: config.json says quant_method {show(method, 40)}: only bitsandbytes' four"
            " bits, and those of GPTQ, AWQ and compressed-tensors are read; " + _AGAIN
        )
    way = _way(said)
    if way not in _FORMATS[method]:
        known = " and ".join(_FORMATS[method])
        raise Missing(
            f"{where}: weights of {_called(method)} in the format {show(way, 40)}, and only"
            f" {known} is read; {_AGAIN}"
        )
    packed = method == "compressed-tensors"
    bits, group_size = _of_groups(said, where) if packed else _of_all(said, where)
    if not isinstance(bits, int) or not isinstance(group_size, int):
        raise CorruptInput(
            f"{where}: config.json says bits {show(bits, 40)} and group_size"
            f" {show(group_size, 40)}, which are no numbers"
        )
    known_bits = (4,) if method == "awq" else BITS
    if bits not in known_bits:
        listed = " or ".join(map(str, known_bits))
        raise Missing(
            f"{where}: weights of {_called(method)} in {bits} bits, and only {listed} are read;"
            f" {_AGAIN}"
        )
    if packed:
        parts = tuple(
            f".weight_{part}" for part in ("packed", "scale", "zero_point", "shape", "g_idx")
        )

        def read(tensors: Mapping[str, Tensor], name: str) -> WeightNBits:
            return from_compressed_tensors(tensors, name, bits, group_size)

        return Format(
            _called(method), bits, group_size, parts, parts[-1], lambda s: s[1] * 32 // bits, read
        )
    parts = (".qweight", ".qzeros", ".scales", ".g_idx")

    def read_words(tensors: Mapping[str, Tensor], name: str) -> WeightNBits:
        if method == "awq":
            return from_awq(tensors, name, bits, group_size)
        first = way != "gptq_v2"
        return from_gptq(tensors, name, bits, group_size, stored_less_one=first)

    awq = method == "awq"
    return Format(
        _called(method),
        bits,
        group_size,
        parts,
        "" if awq else ".g_idx",
        lambda shape: shape[0] if awq else shape[0] * 32 // bits,
        read_words,
    )


def _called(method: str) -> str:
    return method if "-" in method else method.upper()


def _way(said: Mapping[str, Any]) -> str:
    """How codes lie in words; `version` is AWQ's name for it."""
    plain = _FORMATS[said["quant_method"]][0]
    way = said.get("checkpoint_format") or said.get("format") or said.get("version") or plain
    return str(way).lower()


def _of_all(said: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    """bits and group_size, as GPTQ's and AWQ's packages say them.

    Raises:
        Missing: some layers have others.
    """
    rules = said.get("dynamic") or {}
    if others := [rule for rule in rules if not str(rule).startswith("-:")]:
        raise Missing(
            f"{where}: config.json says dynamic, by which layers are quantized differently"
            f" ({show(others[0], 60)}), and only one way for all is read; {_AGAIN}"
        )
    return said.get("bits"), said.get("group_size", 128)


def _of_groups(said: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    """The same as compressed-tensors says it, of groups of layers.

    Raises:
        CorruptInput: there is none.
        Missing: they differ, or more than weights is quantized, or turned by a matrix.
    """
    groups = said.get("config_groups")
    ways = list(groups.values()) if isinstance(groups, Mapping) else []
    if not ways or not all(
        isinstance(w, Mapping) and isinstance(w.get("weights"), Mapping) for w in ways
    ):
        raise CorruptInput(f"{where}: config.json names no config_groups with weights")
    more = [n for n in ("transform_config", "kv_cache_scheme") if said.get(n)]
    more += [n for w in ways for n in ("input_activations", "output_activations") if w.get(n)]
    if said.get("sparsity_config") not in (None, {}, {"format": "dense"}):
        more.append("sparsity_config")
    if more:
        raise Missing(
            f"{where}: config.json says {more[0]} of compressed-tensors, and only weights alone"
            f" are read; {_AGAIN}"
        )
    found = [(w["weights"].get("num_bits"), w["weights"].get("group_size") or -1) for w in ways]
    if any(way != found[0] for way in found):
        raise Missing(
            f"{where}: config.json says several config_groups of other bits or groups, and only one"
            f" way for all is read; {_AGAIN}"
        )
    return found[0]
