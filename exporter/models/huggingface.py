"""Hugging Face's models, through transformers, with the fused ops, and those of packages beside it.

The models' own code stays untouched: transformers calls scans, causal filters and attention at
learned places through functions of each modeling file, and those names are bound to the ops for the
time of an export or of a run. Truth and baseline run without it, on transformers' own path, which
makes them independent of the ops.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

from packaging.version import Version
from torch import nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models import _quantized as quantized
from fuseport.exporter.models._forward import ordered
from fuseport.exporter.models._huggingface import step as decoding
from fuseport.exporter.models._huggingface.library import Library, library
from fuseport.exporter.models._huggingface.ops import fused, modelings
from fuseport.exporter.models._huggingface.weights import offline, quiet, renamed
from fuseport.exporter.models._inputs import kept, with_inputs
from fuseport.exporter.models._stand_ins import call_under
from fuseport.exporter.models.model import OWN_CODE, Model
from fuseport.exporter.program import TensorSpec

__all__ = ["SIGNS", "fused", "general", "model", "readied", "recognise", "to_install"]

_INSTALL = "pip install 'fuseport[huggingface]'"
_ATTENTION = ("attn_implementation", "_attn_implementation")
_EXPERTS = "batched_mm"  # how a mixture of experts is computed

_SCANS = {
    "mamba": "mamba_selective_scan",
    "falcon_mamba": "mamba_selective_scan",
    "mamba2": "mamba2_chunk_scan",
    "jamba": "mamba_selective_scan",
    "zamba": "mamba_selective_scan",
    "zamba2": "mamba2_chunk_scan",
    "bamba": "mamba2_chunk_scan",
    "falcon_h1": "mamba2_chunk_scan",
    "nemotron_h": "mamba2_chunk_scan",
    "granitemoehybrid": "mamba2_chunk_scan",
}
"""Models that scan, and the function of their modeling files that does."""

SIGNS = ("config:model_type",)

_IN_FLOAT32 = ("A_log", ".D", "dt_proj.bias", "dt_bias", ".inv_freq")
# Not the bias of a step's layer: that adds it to its product, and the model takes it off again.
_QUANTIZED_IN_FLOAT32 = ("A_log", ".D", "dt_bias", ".inv_freq", ".absmax", ".scales")

_SIZES = {"batch": 2, "length": 16, "height": 64, "width": 96, "samples": 2000}
_TOKENS, _PIXELS, _WAVES = "input_ids", "pixel_values", "input_values"


def recognise(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The folder's config.json, where it says what transformers calls its model, and which layers
    are quantized.

    It is the configuration of a language model that scans; of another model, its `settings`.

    Raises:
        CorruptInput: what is there of a quantized layer is no such weight.
        Missing: the config names no class of transformers, or several; or weights are of a kind
            that is not read.
    """
    config = dict(checkpoint.config)
    kind, name = config.get("model_type"), _class(config)
    if checkpoint.layout != "huggingface" or not isinstance(kind, str):
        return None
    config |= quantized.named(checkpoint)
    if kind in _SCANS and (name is None or name.endswith("ForCausalLM")):
        return config
    if name is None:
        raise Missing(
            f"{checkpoint.path}: config.json names no architecture, or several"
            f" ({show(config.get('architectures'), 60)}): write the one class that the model is of,"
            ' "architectures": ["BertForSequenceClassification"] for example'
        )
    return {"settings": config}


def _class(config: Mapping[str, Any]) -> str | None:
    """What the config calls the model's class; None where it does not, or not one."""
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    return None


def general(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a language model that scans as that of a model of any inputs."""
    return dict(config) if "settings" in config else {"settings": dict(config)}


def to_install() -> str | None:
    """What installs transformers, where it is not here or too old; it is not imported."""
    here = importlib.util.find_spec("transformers") is not None
    return None if here and Version(metadata.version("transformers")).major >= 5 else _INSTALL


def model(config: Mapping[str, Any]) -> Model:
    """The model of a configuration, with random weights.

    Raises:
        CorruptInput: it is no configuration of `recognise`.
        Missing: transformers is not installed, or is of a version without the model or whose scan
            cannot be replaced, or refuses the config.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise Missing(
            f"this is a Hugging Face model, and transformers is not installed: {_INSTALL}"
        ) from error
    if "settings" in config:
        return _general(config)
    kind = config.get("model_type")
    if kind not in _SCANS:
        raise CorruptInput(f"no configuration of a Hugging Face model: model_type {show(kind, 60)}")
    _check_scan(kind, transformers.__version__)
    module, settings, _ = _built(config)
    files, scans = modelings(module), _scans(module)

    return Model(
        module=module,
        architecture="huggingface",
        config=dict(config),
        inputs=_inputs(module, settings),
        sizes={name: _SIZES[name] for name in ("batch", "length")},
        scans=scans,
        keeps_float32=_QUANTIZED_IN_FLOAT32 if quantized.layers(config) else _IN_FLOAT32,
        fused=lambda: fused(files),
        renamed=lambda tensors: renamed(module, quantized.taken(module, config, tensors)),
        step=partial(decoding.step, module, dict(config), scans, lambda: fused(files)),
    )


def _general(config: Mapping[str, Any]) -> Model:
    """Any model of a config.json, with the ops in the places that are theirs."""
    module, settings, source = _built(config["settings"])
    files = modelings(module)
    call_under(module, source.stand_ins)
    made = Model(
        module=module,
        architecture="huggingface",
        config={"shims": list(source.used), **config},
        inputs=(),
        sizes={},
        fused=lambda: fused(files),
        renamed=lambda tensors: source.call(
            renamed, module, quantized.taken(module, config["settings"], tensors)
        ),
        stand_ins=source.stand_ins,
        general=True,
    )
    if "inputs" in config:
        return _stepping(with_inputs(made, ordered(module, kept(config), "inputs: ")))
    made = with_inputs(made, _inputs(module, settings))  # none, where they are not known
    return _stepping(replace(made, sizes={name: _SIZES[name] for name in made.sizes}))


def _stepping(model: Model) -> Model:
    """With the step of a language model, where it takes nothing but tokens."""
    module: Any = model.module
    generates = getattr(module, "can_generate", lambda: False)()
    if not generates or [spec.name for spec in model.inputs] != [_TOKENS]:
        return model
    return replace(model, step=partial(decoding.step, module, model.config, None, model.fused))


def _built(config: Mapping[str, Any]) -> tuple[Any, Any, Library]:
    """The module of a config.json, its settings, and the library that they are of.

    Raises:
        CorruptInput: what it says of quantized layers is not what `recognise` says.
        Missing: no library has it, or it refuses the config.
    """
    plain = quantized.without(config)
    kind, wanted = show(config["model_type"], 60), show(_class(config) or "language model", 60)
    try:
        source = library(config["model_type"])
    except Exception as error:  # as packages raise that are not of these versions
        raise Missing(
            f"the package of this {wanted} cannot be imported: {type(error).__name__}:"
            f" {show(error)}; install the version that fits"
        ) from error
    try:
        made, settings = source.classes(config["model_type"], _class(config))
    except (AttributeError, KeyError, ImportError) as error:
        raise Missing(
            f"{source.name} has no {wanted} of the model_type {kind} ({show(error)}): install the"
            f" version that has it{source.beside}, or {OWN_CODE}"
        ) from error
    try:
        with quiet(), offline():
            settings = settings.from_dict({**_read(plain), "use_cache": False})
            settings._experts_implementation = _EXPERTS
            module = source.call(made, settings)
    except ImportError as error:
        said = " ".join(str(error).split())
        raise Missing(f"{made.__name__} of {source.name} needs what is not here: {said}") from error
    except Exception as error:  # transformers checks a config with errors of many types
        other = getattr(made.config_class, "model_type", None)
        if other not in (None, config["model_type"], getattr(settings, "model_type", None)):
            raise Missing(
                f"config.json says model_type {kind}, and its class {made.__name__} is of"
                f" {show(other, 60)}: write both as they are of the model ({show(error)})"
            ) from error
        raise Missing(
            f"{source.name} refuses the config.json of this {kind}: "
            f"{type(error).__name__}: {show(error)}; correct it, or install the version it is for"
        ) from error
    quantized.place(module, config)
    return module, settings, source


def _check_scan(kind: str, version: str) -> None:
    modeling = f"transformers.models.{kind}.modeling_{kind}"
    try:
        replaceable = hasattr(importlib.import_module(modeling), _SCANS[kind])
    except ImportError:
        replaceable = False
    if not replaceable:
        raise Missing(
            f"transformers {version} has no {modeling}.{_SCANS[kind]}, where the fused scan goes"
            f" in: install transformers 5: {_INSTALL}"
        )


def _inputs(module: Any, settings: Any) -> tuple[TensorSpec, ...]:
    """What its forward demands, or what transformers calls its main input; a text and a picture,
    where these are compared.

    Nothing, where there is something else than tokens, pixels and sound as samples, as the tokens
    of a decoder.
    """
    given = inspect.signature(module.forward).parameters.values()
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    plain = [p for p in given if p.kind not in variadic]
    demanded = [p.name for p in plain if p.default is p.empty]
    names = demanded or [module.main_input_name]
    if hasattr(module, "logit_scale") and [p.name for p in plain][:2] == [_TOKENS, _PIXELS]:
        names = [_TOKENS, _PIXELS]
    if names != [p.name for p in plain][: len(names)]:
        return ()
    if _TOKENS in names and "decoder_input_ids" in [p.name for p in plain]:
        return ()
    text: Any = settings.get_text_config()
    known: dict[str, Any] = {_PIXELS: ("float32", _picture(settings))}
    if hasattr(text, "vocab_size"):
        known[_TOKENS] = ("int64", ("batch", "length"), text.vocab_size)
    if hasattr(settings, "inputs_to_logits_ratio"):  # else a spectrogram
        known[_WAVES] = ("float32", ("batch", "samples"))
    if not {*names} <= known.keys():
        return ()
    return tuple(TensorSpec(name, *known[name]) for name in names)


def _picture(settings: Any) -> tuple[int | str, ...]:
    """(batch, channels, height, width), as numbers where the config names the size."""
    parts = [settings, *(getattr(settings, n, None) for n in ("vision_config", "backbone_config"))]
    channels = next((c for p in parts if (c := getattr(p, "num_channels", None))), 3)
    size = next((n for p in parts[:2] if (n := getattr(p, "image_size", None))), None)
    sides = [size, size] if isinstance(size, int) else size
    return ("batch", channels, *(sides or ("height", "width")))


def _read(value: Any) -> Any:
    """A config as transformers reads it from a file, but for how attention is to be computed.

    That is its own affair: some ways need a GPU, and what has a slash is code of a hub. Infinity is
    an object in these files.
    """
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {k: _read(inner) for k, inner in value.items() if k not in _ATTENTION}
    return [_read(inner) for inner in value] if isinstance(value, list) else value


def _scans(module: nn.Module) -> int:
    """How often a forward scans: once in each mixer, or once in each of its heads in Zamba's."""
    mixers = [part for part in module.modules() if hasattr(part, "A_log")]
    return sum(getattr(mixer, "n_mamba_heads", 1) for mixer in mixers)


def readied(module: nn.Module) -> list[str]:
    """A module of the user's own is made ready for what it has of transformers' layers.

    Its experts are set to be computed as those of the models here: in any dtype, and without a loop
    over what the data choose.

    Returns:
        The modeling files of these layers, for `fused`; none as a rule.
    """
    for part in module.modules():
        settings: Any = getattr(part, "config", None)
        if hasattr(settings, "_experts_implementation"):
            settings._experts_implementation = _EXPERTS
    return modelings(module)
