"""How language models of state-space layers are recognised: from names, shapes and a config."""

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
from fuseport.exporter.models.model import OWN_CODE
from fuseport.exporter.models.weights import unwrap

__all__ = ["Found", "Settings", "find", "renamed"]

_HUGGING_FACE = re.compile(r"(?<![^.])backbone\.embeddings\.weight$")
_OTHER_LAYERS = re.compile(r"backbone\.layers\.\d+\.(mixer\.Wqkv|mlp)\..*")
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
        other = [m[1] for name in self.shapes if (m := _OTHER_LAYERS.fullmatch(name))]
        if other or self.settings.get_list("attn_layer_idx"):
            kinds = {"mixer.Wqkv": "attention", "mlp": "feed-forward"}
            found = " and ".join(dict.fromkeys(kinds[name] for name in other)) or "attention"
            raise Missing(
                f"{path}: {found} layers beside the {what} ones: such hybrids (attn_layer_idx,"
                f" d_intermediate) are not built in; {OWN_CODE}"
            )
        vocab_size, d_model = self.shapes["backbone.embedding.weight"]
        last = max(self.layers)
        n_layer = self.settings.get(_LAYERS, int, last + 1)
        if len(self.layers) != n_layer or last != n_layer - 1:
            raise Missing(
                f"{path}: backbone.layers: {len(self.layers)} {what} layers, up to number {last},"
                f" where {n_layer} are expected; give the whole checkpoint"
            )
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
        }

    def assumed(self) -> list[str]:
        """What of `common` neither weights nor config say."""
        return [] if self.settings.find(_EPSILON) else ["norm_epsilon"]

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
