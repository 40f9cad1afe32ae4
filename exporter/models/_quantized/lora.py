"""LoRA adapters beside a model's layers, as PEFT saves them.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, section 4.1; for the
scale alpha/√r, Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA",
2023.
"""

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models._quantized.four_bits import features
from fuseport.exporter.models.model import Model

__all__ = ["ADAPTER", "adapted", "command", "place"]

ADAPTER = "lora"
"""Under which name a model's configuration says where adapters are; see `place`."""

_PREFIX = "base_model.model."
_PAIR = re.compile(r"(.+)\.lora_([AB])(\.\w+)?\.weight")
_BASE = ".base_layer."  # in the names of what a layer with an adapter has itself
_OTHERS = (  # settings of PEFT with which a layer computes something else
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the layer's weight
_MISFITS = (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)
_LARGE = 1e30
_NAMES = re.compile(r"[\w.]+")
_LONG = 1000
_MERGE = "merge it with PEFT, merge_and_unload(), and export the model that gives"


def command(adapter: Checkpoint) -> str:
    """What exports an adapter: with the model that it says it is of."""
    base = adapter.config.get("base_model_name_or_path") or "MODEL"
    base, path = (shlex.quote(show(part)) for part in (base, adapter.path))
    return f"fuseport export {base} --adapter {path} -o bundle/"


class _Added:
    """What an adapter adds to the output of its layer.

    Args:
        scaling: of the product of the two matrices.
    """

    def __init__(self, scaling: float) -> None:
        self._scaling = scaling

    def __call__(self, layer: Any, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x = given[0].to(layer.lora_A.dtype)
        more = F.linear(F.linear(x, layer.lora_A), layer.lora_B) * self._scaling
        return (out + more).to(out.dtype)


def adapted(model: Model, adapter: Checkpoint) -> tuple[Model, tuple[str, ...]]:
    """The model with an adapter, which alone is trained, and what the user should know.

    Args:
        model: with its weights; its module is changed.
        adapter: of the layout `peft`.

    Raises:
        Missing: it is no LoRA adapter, or one of a kind that is not here, or of another model.
        CorruptInput: it is no adapter that PEFT saves.
    """
    _refuse_others(adapter)
    pairs, saved = _parts(adapter, model.module)
    alphas = _alphas(adapter)
    where = show(adapter.path)
    for path in _again(model.module, pairs, where):
        del pairs[path]
    layers = {
        path: _layer(model.module, path, pair, adapter, alphas) for path, pair in pairs.items()
    }
    if not layers:
        raise CorruptInput(f"{where}: there is no adapter in it")
    config = {**model.config, ADAPTER: {"layers": layers, "saved": sorted(saved)}}
    for parameter in model.module.parameters():
        parameter.requires_grad_(False)
    place(model.module, config)
    values = {f"{path}.{leaf}": t for path, pair in pairs.items() for leaf, t in pair.items()}
    for name, tensor in {**values, **saved}.items():
        _set(model.module, name, tensor.clone())
    count = sum(tensor.numel() for tensor in (*values.values(), *saved.values()))
    said = f"{len(layers)} layers have LoRA adapters, which alone have gradients: {count:,} numbers"
    return replace(model, config=config), (said,)


def _refuse_others(adapter: Checkpoint) -> None:
    """Refuse what is no plain LoRA.

    Raises:
        Missing: it is none.
    """
    settings, where = adapter.config, show(adapter.path)
    if adapter.layout != "peft":
        raise Missing(f"{where}: no adapter that PEFT saved, but a checkpoint ({adapter.layout})")
    if settings.get("peft_type") != "LORA":
        kind = show(settings.get("peft_type"), 40)
        raise Missing(f"{where}: an adapter of the type {kind}, and only LORA is read: {_MERGE}")
    if other := next((name for name in _OTHERS if settings.get(name)), None):
        raise Missing(f"{where}: {other} is set, and only plain LoRA is read: {_MERGE}")
    if (start := settings.get("init_lora_weights")) not in _STARTS:
        raise Missing(
            f"{where}: init_lora_weights is {show(start, 40)}, with which PEFT changes the layers'"
            f" own weights, too: {_MERGE}"
        )


def _parts(
    adapter: Checkpoint, module: nn.Module
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The two matrices of each layer by its name, and parameters of the model that are its own.

    Raises:
        Missing: they are of no such parameters, or there are several adapters.
        CorruptInput: they are of no dtype that weights have.
    """
    where = show(adapter.path)
    pairs: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    for name, tensor in adapter.tensors.items():
        own = name.removeprefix(_PREFIX)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise CorruptInput(f"{where}: {show(name)} is of {str(tensor.dtype)[6:]}")
        if pair := _PAIR.fullmatch(own):
            if pairs.setdefault(pair[1], {}).setdefault(f"lora_{pair[2]}", tensor) is not tensor:
                raise Missing(f"{where}: {show(pair[1])} has several adapters: save one alone")
        else:
            saved[own.replace(_BASE, ".")] = tensor
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for path in pairs:  # PEFT adds a layer's own weight where the layer is a model's last one
        has, weight = parameters.get(f"{path}.weight"), saved.get(f"{path}.weight")
        if has is not None and weight is not None and torch.equal(has, weight.to(has.dtype)):
            del saved[f"{path}.weight"]
    for name, tensor in saved.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise Missing(f"{where}: {show(name)} is in no layer that is here: {_MERGE}")
    return pairs, saved


def place(module: nn.Module, config: Mapping[str, Any]) -> None:
    """Give layers the adapters that a configuration names, their values not set yet.

    Args:
        module: of the model.
        config: under `ADAPTER`, if it is there, `layers`, by name the rank and the scaling of each,
            and `saved`, parameters of the model that are the adapter's own.

    Raises:
        CorruptInput: it is no such configuration, or of another module.
    """
    if ADAPTER not in config:
        return
    try:
        for name in config[ADAPTER]["saved"]:
            _set(module, name, module.get_parameter(name).detach().clone())
        for path, (rank, scaling) in config[ADAPTER]["layers"].items():
            layer: Any = module.get_submodule(path)
            inner, outer = features(layer)
            if hasattr(layer, "lora_A"):
                raise ValueError(f"{path} has an adapter already")
            # Whatever the rank is said to be, no memory is taken for it.
            layer.lora_A = nn.Parameter(torch.empty(rank, inner, device="meta"))
            layer.lora_B = nn.Parameter(torch.empty(outer, rank, device="meta"))
            layer.register_forward_hook(_Added(float(scaling)))
    except _MISFITS as error:
        raise CorruptInput(
            f"what is said of adapters fits no {type(module).__name__}: {show(error)}"
        ) from error


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a module a parameter, which is tied to nothing, in the place of another."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(value))


def _again(module: nn.Module, pairs: Mapping[str, Mapping[str, Tensor]], where: str) -> list[str]:
    """The names of layers that others of the names are of, too, as in a block that is used twice.

    Raises:
        Missing: PEFT adapts such a layer under one of its names alone.
    """
    places = Counter(id(part) for owner in module.modules() for part in owner._modules.values())
    first: dict[int, Mapping[str, Tensor]] = {}
    again = []
    for path, pair in pairs.items():
        try:
            layer = id(module.get_submodule(path))
        except AttributeError:
            continue  # what it is, `_layer` says
        if places[layer] > 1:
            raise Missing(
                f"{where}: {show(path)} has other names in the model, and PEFT adapts one alone:"
                f" {_MERGE}"
            )
        other = first.setdefault(layer, pair)
        if other is not pair:
            again.append(path)
            if any(not torch.equal(pair[k], other[k]) for k in pair.keys() & other.keys()):
                raise Missing(f"{where}: {show(path)} has another adapter under another name")
    return again


def _layer(
    module: nn.Module,
    path: str,
    pair: Mapping[str, Tensor],
    adapter: Checkpoint,
    alphas: Sequence[tuple[re.Pattern[str] | str, Any]],
) -> list[float]:
    """The rank and the scaling of one layer's adapter."""
    where = f"{show(adapter.path)}: {show(path)}"
    try:
        inner, outer = features(module.get_submodule(path))
    except AttributeError:
        raise Missing(
            f"{where} has an adapter, and is no linear layer of a {type(module).__name__}: give "
            f"the adapter's own model{_base(adapter)}, or {_MERGE}"
        ) from None
    shapes = {name: tuple(tensor.shape) for name, tensor in pair.items()}
    rank, *_ = shapes.get("lora_A") or (0,)
    if shapes != {"lora_A": (rank, inner), "lora_B": (outer, rank)}:
        raise Missing(
            f"{where}: its adapter is {shapes}, and the layer takes {inner} and gives {outer}:"
            f" give the adapter's own model{_base(adapter)}"
        )
    alpha: Any = next(
        (v for key, v in alphas if _says(key, path)), adapter.config.get("lora_alpha")
    )
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not number or not abs(alpha) < _LARGE or rank == 0:
        raise CorruptInput(f"{where}: lora_alpha is {show(alpha, 40)}, and the rank {rank}")
    scaling = alpha / (math.sqrt(rank) if adapter.config.get("use_rslora") else rank)
    return [rank, scaling]


def _base(adapter: Checkpoint) -> str:
    name = adapter.config.get("base_model_name_or_path")
    return f", which it calls {show(name)}" if name else ""


def _alphas(adapter: Checkpoint) -> list[tuple[re.Pattern[str] | str, Any]]:
    """What PEFT's alpha_pattern says: keys, plain names or regular expressions, and values.

    Raises:
        CorruptInput: it is no such pattern.
        Missing: it has expressions that might take for ever to match.
    """
    said, where = adapter.config.get("alpha_pattern") or {}, show(adapter.path)
    if not isinstance(said, Mapping):
        raise CorruptInput(f"{where}: alpha_pattern is {show(said, 60)}, and no object")
    found: list[tuple[re.Pattern[str] | str, Any]] = []
    compiled = 0
    for key, value in said.items():
        if _NAMES.fullmatch(key):
            found.append((key, value))
            continue
        compiled += 1
        if len(key) > _LONG or compiled > _LONG or _slow(key):
            raise Missing(
                f"{where}: alpha_pattern has {show(key, 60)}, which might take for ever to match:"
                " write the layers' names there"
            )
        try:
            found.append((re.compile(rf"(.*\.)?({key})$"), value))
        except (re.error, OverflowError, RecursionError) as error:
            raise CorruptInput(f"{where}: alpha_pattern: {show(key, 60)}: {error}") from error
    return found


def _slow(key: str) -> bool:
    """Whether a regular expression may take more than a moment, on a name of 200 characters."""
    many, few = (sum(map(key.count, signs)) for signs in ("*+{", "?|"))
    return many > 3 or few > 16 or re.search(r"\)[*+{]", key) is not None


def _says(key: re.Pattern[str] | str, path: str) -> bool:
    """Whether a key of a pattern is of a layer: its name ends so, or matches."""
    return f".{path}".endswith(f".{key}") if isinstance(key, str) else bool(key.match(path))
