"""How language models of state-space layers are recognised: from names, shapes and a config."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import Missing
from fuseport.exporter.models._attention import AttentionConfig
from fuseport.exporter.models.model import OWN_CODE
from fuseport.exporter.models.weights import unwrap
from fuseport.ops.compositions.rotary_attention import Heads

__all__ = ["Found", "Settings", "find", "renamed"]

_HUGGING_FACE = re.compile(r"(?<![^.])backbone\.embeddings\.weight$")
_OTHER_LAYERS = re.compile(r"backbone\.layers\.\d+\.(mixer\.Wqkv\..*|mlp\.(?!fc[12]\.weight$).*)")
_MIXER = re.compile(r"backbone\.layers\.(\d+)\.mixer\.(\w+).*")
_OF_ATTENTION = ("in_proj", "conv1d", "out_proj")
# What state-spaces' attention is told: our word for it, and the default.
_OF_HEADS = {
    "num_heads": ("queries", None),
    "num_heads_kv": ("keys", None),
    "head_dim": ("width", None),
    "rotary_emb_dim": ("turned", 0),
    "rotary_emb_base": ("base", 10000.0),
    "rotary_emb_interleaved": ("interleaved", False),
    "softmax_scale": ("scale", None),
    "causal": ("causal", False),
}
_BESIDE_HEADS = {
    "mlp_dim": ("d_mlp", 0),
    "d_conv": ("d_conv", 0),
    "qkv_proj_bias": ("qkv_bias", True),
    "out_proj_bias": ("out_bias", True),
}
_EPSILON = ("norm_epsilon", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps")
_LAYERS = ("n_layer", "num_hidden_layers", "n_layers")
_TIED = ("tie_embeddings", "tie_word_embeddings")


@dataclass(frozen=True)
class Found:
    """A stack of layers with a scan each, `backbone.layers.i.mixer`.

    Attributes:
        tensors: of the checkpoint, under state-spaces' names, prefixes kept.
        prefix: of the model's names.
        layers: the numbers of those that have a scan.
        shapes: of the tensors under the prefix, by their names without it.
        settings: what the checkpoint's config says.
        huggingface: whether the names are those of transformers, which has several architectures
            under them.
    """

    tensors: Mapping[str, Tensor]
    prefix: str
    layers: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    settings: "Settings"
    huggingface: bool

    @property
    def mixer(self) -> str:
        """The name of the first layer's mixer."""
        return f"backbone.layers.{self.layers[0]}.mixer"

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of one of the first mixer's tensors; None if it has none of that name."""
        return self.shapes.get(f"{self.mixer}.{name}")

    def common(self, what: str) -> dict[str, Any]:
        """What every `LanguageModelConfig` has.

        Args:
            what: the kind of layer, for an error.

        Raises:
            Missing: layers are absent, or of a kind that is not built here, or the config
                contradicts the weights.
        """
        path = show(self.settings.path)
        other = [name for name in self.shapes if _OTHER_LAYERS.fullmatch(name)]
        if other:
            raise Missing(
                f"{path}: {show(other[0])}: layers beside the {what} ones that are not built in;"
                f" {OWN_CODE}"
            )
        vocab_size, d_model = self.shapes["backbone.embedding.weight"]
        attention = self._attention(d_model)
        layers = sorted([*self.layers, *(attention.layers if attention else ())])
        last = layers[-1]
        n_layer = self.settings.get(_LAYERS, int, last + 1)
        if len(layers) != n_layer or last != n_layer - 1:
            beside = f" and {len(attention.layers)} of attention" if attention else ""
            raise Missing(
                f"{path}: backbone.layers: {len(self.layers)} {what} layers{beside}, up to number"
                f" {last}, where {n_layer} are expected; give the whole checkpoint"
            )
        halves, _ = self.shapes.get(f"backbone.layers.{self.layers[0]}.mlp.fc1.weight", (0, 0))
        return {
            "d_model": d_model,
            "n_layer": n_layer,
            "vocab_size": vocab_size,
            "norm_epsilon": self.settings.get(_EPSILON, float, 1e-5),
            "rms_norm": "backbone.norm_f.bias" not in self.shapes,
            "residual_in_fp32": self.settings.get(("residual_in_fp32",), bool, True),
            "tie_embeddings": self._tied(),
            "conv_bias": self.shape("conv1d.bias") is not None,
            "proj_bias": self.shape("in_proj.bias") is not None,
            "attention": attention,
            "d_intermediate": halves // 2,
        }

    def assumed(self) -> list[str]:
        """What of `common` neither weights nor config say."""
        return [] if self.settings.find(_EPSILON) else ["norm_epsilon"]

    def _attention(self, d_model: int) -> AttentionConfig | None:
        """Of the layers whose mixers have no scan; None if there are none."""
        path = show(self.settings.path)
        found = [m for name in self.shapes if (m := _MIXER.fullmatch(name))]
        scanning = {int(m[1]) for m in found if m[2] not in _OF_ATTENTION}
        layers = sorted({int(m[1]) for m in found} - scanning)
        listed = self.settings.get_list("attn_layer_idx")
        if listed and sorted(set(listed)) != layers:
            raise Missing(
                f"{path}: attn_layer_idx is {show(listed, 60)}, but the layers without a scan are"
                f" {show(layers, 60)}; correct the config or give the whole checkpoint"
            )
        if not layers:
            return None
        _, told = self.settings.find(("attn_cfg",)) or ("", None)
        if not isinstance(told, Mapping) or "num_heads" not in told:
            raise Missing(
                f"{path}: layer {layers[0]} is attention, whose weights do not tell its heads;"
                " give a folder with the config.json, or attn_cfg in the checkpoint's configuration"
            )
        unknown = set(told) - {*_OF_HEADS, *_BESIDE_HEADS}
        if unknown:
            raise Missing(
                f"{path}: attn_cfg: {show(min(unknown))} is no argument of state-spaces' attention;"
                f" correct the config; or {OWN_CODE}"
            )
        heads: dict[str, Any]
        heads, beside = (
            {ours: told.get(name, default) for name, (ours, default) in table.items()}
            for table in (_OF_HEADS, _BESIDE_HEADS)
        )
        try:
            if heads["keys"] is None:
                heads["keys"] = heads["queries"]
            if heads["width"] is None:
                heads["width"] = d_model // heads["queries"]
            beside["d_mlp"] = math.ceil(beside["d_mlp"] / 256) * 256
            return AttentionConfig(layers=tuple(layers), heads=Heads(**heads), **beside)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise Missing(f"{path}: attn_cfg: {show(error)}; correct the config") from error

    def _tied(self) -> bool:
        """The weights decide; the config only where they are equal, or to contradict."""
        head = self.tensors.get(f"{self.prefix}lm_head.weight")
        embedding = self.tensors[f"{self.prefix}backbone.embedding.weight"]
        equal = (
            head is None or head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)
        )
        tied = self.settings.get(_TIED, bool, equal)
        if tied and not equal:
            raise Missing(
                f"{show(self.settings.path)}: lm_head.weight: tied to the embedding by the config,"
                " but not equal to it; correct the config or the weights"
            )
        return tied


def find(checkpoint: Checkpoint, of_mixers: str = "A_log") -> Found | None:
    """The layers of a checkpoint, under any prefix; None if it has none, or no embedding.

    Args:
        checkpoint: to look at.
        of_mixers: a parameter that each of the mixers has.
    """
    tensors = renamed(checkpoint.tensors)
    sign = re.compile(rf"(?:.*\.)?backbone\.layers\.(\d+)\.mixer\.{of_mixers}")
    found = {int(m[1]): name for name in tensors if (m := sign.fullmatch(name))}
    if not found:
        return None
    layers = tuple(sorted(found))
    prefix = found[layers[0]].removesuffix(f"backbone.layers.{layers[0]}.mixer.{of_mixers}")
    shapes = {
        name.removeprefix(prefix): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    if len(shapes.get("backbone.embedding.weight", ())) != 2:
        return None
    huggingface = any(map(_HUGGING_FACE.search, unwrap(checkpoint.tensors).values()))
    settings = Settings(checkpoint.config, checkpoint.path)
    return Found(tensors, prefix, layers, shapes, settings, huggingface)


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under state-spaces' names; Hugging Face's `embeddings` and wrappers undone."""
    names = unwrap(tensors)
    return {_HUGGING_FACE.sub("backbone.embedding.weight", names[n]): t for n, t in tensors.items()}


_Value = TypeVar("_Value", int, float, bool, str)


@dataclass(frozen=True)
class Settings:
    """Looks names up in a config: at its top first, then one level below."""

    config: Mapping[str, Any]
    path: Path

    def find(self, names: tuple[str, ...]) -> tuple[str, Any] | None:
        """The first of the names that is there, and its value; None if none is."""
        for level in (self.config, *(v for v in self.config.values() if isinstance(v, Mapping))):
            for name in names:
                if name in level:
                    return name, level[name]
        return None

    def get_list(self, name: str) -> list[Any]:
        """The list of that name; empty if there is none.

        Raises:
            Missing: it is no list.
        """
        found = self.find((name,))
        if found is None or found[1] is None:
            return []
        if isinstance(found[1], list | tuple):
            return list(found[1])
        raise self._wrong(name, found[1], "a list")

    def get(self, names: tuple[str, ...], kind: type[_Value], default: _Value) -> _Value:
        """The value of the first of the names that is there.

        Raises:
            Missing: it is of another type.
        """
        found = self.find(names)
        if found is None:
            return default
        name, value = found
        if type(value) is kind or (kind is float and type(value) is int):
            return kind(value)
        raise self._wrong(name, value, kind.__name__)

    def _wrong(self, name: str, value: object, expected: str) -> Missing:
        return Missing(
            f"{show(self.path)}: {name}: it is {show(repr(value), 40)}, expected {expected};"
            " correct the config"
        )
