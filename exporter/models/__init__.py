"""Weights → module. One file is one architecture; `user` is the user's own code, and modules with a
leading underscore are parts of architectures.

An architecture module has `recognise`, which says from a checkpoint what configuration to build,
and `model`, which builds it; see `Architecture`.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.errors import CorruptInput, Missing, UsageError
from fuseport.exporter.models import _quantized as quantized_layers
from fuseport.exporter.models import user, weights
from fuseport.exporter.models._forward import ordered, takes
from fuseport.exporter.models._inputs import with_inputs
from fuseport.exporter.models._quantized import four_bits, lora
from fuseport.exporter.models.fresh import remember
from fuseport.exporter.models.given import Given, specs_of
from fuseport.exporter.models.model import OWN_CODE, Model
from fuseport.exporter.program import TensorSpec

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Model",
    "adapter_command",
    "build",
    "convert",
    "from_checkpoint",
    "frozen",
    "quantized",
    "rebuild",
    "recognised",
    "signs",
    "tables",
    "to_install",
    "with_inputs",
]

_NOT_ARCHITECTURES = {"fresh", "given", "model", "user", "weights"}

ARCHITECTURES = tuple(
    m.name
    for m in pkgutil.iter_modules(__path__)
    if m.name not in _NOT_ARCHITECTURES and not m.name.startswith("_")
)
"""The names of the architectures that are recognised without the user's code."""


class Architecture(Protocol):
    """What a module of an architecture implements.

    One that needs a package which fuseport does not require has also `to_install()`: the command
    that installs it, None where it is here. One whose model can take other inputs than its own has
    `general(config)`: the configuration of the same model as one of any code, see `Model`.
    """

    SIGNS: tuple[str, ...]
    """What `fuseport inspect` shows it was told by: patterns of tensors' names, `*.mixer.A_log`, or
    `config:key=value|other`, or `config:key` for any value. They decide nothing: `recognise`
    does."""

    def recognise(self, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """The configuration, as JSON data, of what the checkpoint holds; None if it is another."""

    def model(self, config: Mapping[str, Any]) -> Model:
        """The model of that configuration, its weights not set yet."""


def from_checkpoint(
    checkpoint: Checkpoint,
    *,
    code: str | None = None,
    inputs: Sequence[TensorSpec] | None = None,
    shim: Sequence[str] = (),
    given: Given | None = None,
    adapter: Checkpoint | None = None,
) -> tuple[Model, tuple[str, ...]]:
    """The model that a checkpoint holds, in eval mode, with its weights.

    Args:
        checkpoint: from `checkpoint.load`.
        code: `module:callable` or `file.py:callable` of the user's own; without it, the
            architecture is recognised.
        inputs: of the model, for the user's own code and what is called by their names.
        shim: stand-ins for packages that this code imports; see `shims.installed`.
        given: example inputs, which tell those of such code.
        adapter: of LoRA, which goes beside the model's layers.

    Returns:
        The model, and what the user should know, a sentence each.

    Raises:
        Missing: the architecture is unknown, or the weights do not fit it, or the adapter does not.
        UsageError: `code` names nothing that can be called, or the inputs are not the model's.
    """
    model, notes = _fitted(checkpoint, code, inputs, shim, given)
    if adapter is not None:
        model, said = lora.adapted(model, adapter)
        notes = (*notes, *said)
    model.module.eval()  # some return nothing
    remember(model.module)
    return model, notes


def _fitted(
    checkpoint: Checkpoint,
    code: str | None,
    inputs: Sequence[TensorSpec] | None,
    shim: Sequence[str],
    given: Given | None,
) -> tuple[Model, tuple[str, ...]]:
    if code is not None:
        training = list(checkpoint.training)
        stored = four_bits.stored(checkpoint, own_code=True)
        model = user.model(code, checkpoint.config, inputs, shim, given, training, stored)
        source = str(checkpoint.path)
        others = [note for note in checkpoint.notes if note.endswith("(--weights)")]
        got = model.notes[0] if checkpoint.config else "no hyperparameters are in the checkpoint"
        tensors = model.renamed(checkpoint.tensors)
        report = weights.fit(model.module, tensors, source, own_code="; ".join([got, *others]))
        return model, (*model.notes, *report.notes())
    found = recognised(checkpoint)
    if found is not None:
        model = build(*found, inputs, given)
        said_by = "config.json" if checkpoint.layout == "huggingface" else None
        report = weights.fit(
            model.module,
            model.renamed(checkpoint.tensors),
            str(checkpoint.path),
            said_by=said_by,
        )
        return model, (*model.notes, *report.notes())
    keys = ", ".join(list(checkpoint.tensors)[:3])
    raise Missing(
        f"{checkpoint.path}: the architecture is not one of {', '.join(ARCHITECTURES)} "
        f"({len(checkpoint.tensors)} tensors: {keys}, …); {OWN_CODE}"
    )


def recognised(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]] | None:
    """The architecture that a checkpoint is of, and its configuration; None for none that is here.

    Raises:
        Missing: it is of one, but cannot be built; or an adapter, of a model that is elsewhere.
    """
    if checkpoint.layout == "peft":
        raise Missing(
            f"{checkpoint.path}: an adapter of PEFT's, without the model that it is for:"
            f" {lora.command(checkpoint)}"
        )
    for name in ARCHITECTURES:
        config = _get(name).recognise(checkpoint)
        if config is not None:
            return name, config
    return None


def build(
    name: str,
    config: Mapping[str, Any],
    inputs: Sequence[TensorSpec] | None = None,
    given: Given | None = None,
) -> Model:
    """The model of a built-in architecture, its weights not set yet.

    Args:
        name: of the architecture.
        config: as its `recognise` returns it.
        inputs: that the user says, for a model of any code.
        given: example inputs, which tell those of such a model.

    Raises:
        CorruptInput: as the architecture does.
        Missing: as the architecture does; or nothing tells the model's inputs.
        UsageError: it has inputs of its own, or its forward does not take these.
    """
    architecture = _get(name)
    general = getattr(architecture, "general", None)
    model = architecture.model(general(config) if inputs and general else config)
    others = set(given.values) - {spec.name for spec in model.inputs} if given else set()
    if others and general and not model.general:
        model = architecture.model(general(config))
    if inputs and not model.general:
        known = ", ".join(f"{spec.name}:{list(spec.dims)}" for spec in model.inputs)
        raise UsageError(f"--input-shapes: the architecture {name} has its own: {known}")
    if inputs:
        return with_inputs(model, ordered(model.module, inputs, "inputs: "))
    if given is not None and model.general:
        return with_inputs(model, specs_of(given, model.module))
    if not model.inputs:
        raise Missing(
            f"what {type(model.module).__name__} is to take of {takes(model.module)} is not known:"
            " say it, --input-shapes 'NAME:[batch,80,length]' for numbers and"
            " 'NAME:int64[batch,length]<50257' for tokens, or give tensors with --inputs"
        )
    return model


def signs(name: str) -> tuple[str, ...]:
    """What an architecture is told by; see `Architecture`."""
    return _get(name).SIGNS


def adapter_command(checkpoint: Checkpoint) -> str | None:
    """What exports a checkpoint that is an adapter; None for others."""
    return lora.command(checkpoint) if checkpoint.layout == "peft" else None


def quantized(config: Mapping[str, Any]) -> list[str]:
    """What a user is told of quantized layers in a configuration: a line for each way."""
    return quantized_layers.described(config)


def to_install(name: str) -> str | None:
    """The command that installs what an architecture needs and is not here; None if all is."""
    look = getattr(_get(name), "to_install", None)
    return look() if look else None


def rebuild(architecture: Mapping[str, Any], path: Path, *, code: str | None = None) -> Model:
    """The model that a bundle was exported from, from what its manifest says.

    Args:
        architecture: `name`, `config` and `sizes`, as `Model` has them.
        path: of the bundle's weights.safetensors.
        code: the user's own code, where the model came from it; it never runs unasked.

    Raises:
        CorruptInput: the manifest names an architecture that does not exist.
        Missing: the code or a package is not there, or the weights do not fit.
    """
    from safetensors.torch import load_file

    name, config = architecture["name"], architecture["config"]
    if name == user.NAME:
        if code is None:
            raise Missing(f"the model comes from {config['code']}: give it again with --model")
        model = user.rebuild(code, config)
    elif name in ARCHITECTURES:
        model = build(name, config)
    else:
        raise CorruptInput(f"{path.parent}: manifest.json: unknown architecture {name!r}")
    lora.place(model.module, config)
    weights.fit(model.module, load_file(path), str(path))
    for name in config.get("frozen", ()):
        model.module.get_parameter(name).requires_grad_(False)
    dtypes = config.get("tables", {})
    for name, table in tables(model.module).items():  # others are made at the first call
        table.data = table.data.to(getattr(torch, dtypes.get(name, ""), table.dtype))
    model.module.eval()  # some return nothing
    remember(model.module)
    return replace(model, sizes={**model.sizes, **architecture.get("sizes", {})})


def convert(model: Model, dtype: torch.dtype) -> tuple[str, ...]:
    """Convert the model's floating parameters and buffers in place, but those that must stay.

    Returns:
        The names of those that stayed as they were.
    """
    stayed = []
    for owner_name, owner in model.module.named_modules():
        for leaf, tensor in [
            *owner.named_parameters(recurse=False),
            *owner.named_buffers(recurse=False),
        ]:
            name = f"{owner_name}.{leaf}".lstrip(".")
            if not tensor.is_floating_point() or tensor.dtype == dtype:
                continue
            if dtype.itemsize < 4 and f".{name}".endswith(model.keeps_float32):
                stayed.append(name)
            else:
                tensor.data = tensor.data.to(dtype)
    return tuple(stayed)


def tables(module: nn.Module) -> dict[str, torch.Tensor]:
    """Floating buffers that are in no state dict, by name: a constructor makes them again."""
    return {
        f"{name}.{leaf}".lstrip("."): buffer
        for name, part in module.named_modules()
        for leaf, buffer in part.named_buffers(recurse=False)
        if leaf in part._non_persistent_buffers_set and buffer.is_floating_point()
    }


def frozen(module: nn.Module) -> list[str]:
    """Parameters that get no gradient, by name."""
    return [name for name, p in module.named_parameters() if not p.requires_grad]


def _get(name: str) -> Architecture:
    return cast(Architecture, importlib.import_module(f"{__name__}.{name}"))
