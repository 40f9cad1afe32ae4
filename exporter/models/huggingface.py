"""Hugging Face's Mamba models and hybrids, through transformers, with the fused ops.

The models' own code stays untouched: transformers calls scans and causal filters through functions
of each modeling file, and those names are bound to the ops for the time of an export or of a run.
Truth and baseline run without it, on transformers' own path, which makes them independent of the
ops.
"""

import importlib
import importlib.util
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.models import _huggingface_step as decoding
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec
from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.selective_scan import selective_scan
from fuseport.ops.ssd_chunk_scan import ssd_chunk_scan

__all__ = ["SIGNS", "fused", "model", "readied", "recognise", "to_install"]

_INSTALL = "pip install 'fuseport[huggingface]'"
_EXPERTS = "batched_mm"  # how a mixture of experts is computed
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def recognise(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The folder's config.json, where transformers calls its model one of those above."""
    kind = checkpoint.config.get("model_type")
    if checkpoint.layout != "huggingface" or not isinstance(kind, str) or kind not in _FAMILIES:
        return None
    return dict(checkpoint.config)


def to_install() -> str | None:
    """What installs transformers, where it is not here or too old; it is not imported."""
    here = importlib.util.find_spec("transformers") is not None
    return None if here and Version(metadata.version("transformers")).major >= 5 else _INSTALL


def model(config: Mapping[str, Any]) -> Model:
    """The model of a config.json, with random weights.

    Raises:
        Missing: transformers is not installed, or is of a version without the model or whose scan
            cannot be replaced, or refuses the config.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise Missing(
            f"this is a Hugging Face model, and transformers is not installed: {_INSTALL}"
        ) from error
    kind = config["model_type"]
    family = _FAMILIES[kind]
    modeling = _modeling(kind)
    try:
        replaceable = hasattr(importlib.import_module(modeling), family.scan)
    except ImportError:
        replaceable = False
    if not replaceable:
        raise Missing(
            f"transformers {transformers.__version__} has no {modeling}.{family.scan}, where the "
            f"fused scan goes in: install transformers 5: {_INSTALL}"
        )
    try:
        settings = getattr(transformers, f"{family.classes}Config").from_dict(
            {**_finite_or_not(config), "use_cache": False}
        )
        settings._experts_implementation = _EXPERTS
        module = getattr(transformers, f"{family.classes}ForCausalLM")(settings)
    except Exception as error:  # transformers checks a config with errors of many types
        raise Missing(
            f"transformers {transformers.__version__} refuses the config.json of this {kind}: "
            f"{type(error).__name__}: {show(error)}; correct it, or install the version it is for"
        ) from error
    scans = _scans(module)

    def step() -> Model:
        if kind not in _RECURRENT:
            raise UsageError(
                f"program step: {kind} has layers of attention, whose cache grows with the text: a"
                " program's states have one size"
            )
        return decoding.step(
            module, settings.vocab_size, dict(config), scans, lambda: fused([modeling])
        )

    return Model(
        module=module,
        architecture="huggingface",
        config=dict(config),
        inputs=(TensorSpec("input_ids", "int64", ("batch", "length"), settings.vocab_size),),
        sizes={"batch": 2, "length": 16},
        scans=scans,
        keeps_float32=("A_log", ".D", "dt_proj.bias", "dt_bias"),
        fused=lambda: fused([modeling]),
        renamed=partial(_renamed, family.renamed),
        step=step,
    )


def _renamed(names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors by the model's own names; experts, there one by one, as one tensor.

    Those of which one is absent stay as they are, and do not fit then.
    """
    result = {_replaced(name, names): tensor for name, tensor in tensors.items()}
    experts: dict[str, dict[tuple[int, str], str]] = {}
    for name in result:
        if m := _EXPERT.fullmatch(name):
            experts.setdefault(m[1], {})[int(m[2]), m[3]] = name
    for place, own in experts.items():
        parts = {part for _, part in own}
        each = range(len(own) // len(parts))
        if set(own) != {(i, part) for i in each for part in parts}:
            continue
        stacks = {part: torch.stack([result.pop(own[i, part]) for i in each]) for part in parts}
        if "gate" in parts:
            stacks["gate_up"] = torch.cat([stacks.pop("gate"), stacks.pop("up")], 1)
        for part, stack in stacks.items():
            result[f"{place}.{part}_proj"] = stack
    return result


def _replaced(name: str, parts: Mapping[str, str]) -> str:
    for before, after in parts.items():
        name = name.replace(before, after)
    return name


def _finite_or_not(value: Any) -> Any:
    """transformers writes infinity to JSON as an object, and reads it so from files only."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _finite_or_not(inner) for key, inner in value.items()}
    return [_finite_or_not(inner) for inner in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class _Family:
    """What transformers calls the parts of a model.

    Attributes:
        classes: what the names of its classes begin with.
        scan: the function of its modeling file that scans a sequence.
        renamed: parts of names in files, and what they are in the model.
    """

    classes: str
    scan: str = "mamba2_chunk_scan"
    renamed: Mapping[str, str] = field(default_factory=dict)


_FAMILIES = {
    "mamba": _Family("Mamba", "mamba_selective_scan"),
    "falcon_mamba": _Family("FalconMamba", "mamba_selective_scan"),
    "mamba2": _Family("Mamba2"),
    "jamba": _Family("Jamba", "mamba_selective_scan"),
    "zamba": _Family("Zamba", "mamba_selective_scan"),
    "zamba2": _Family("Zamba2"),
    "bamba": _Family("Bamba"),
    "falcon_h1": _Family("FalconH1"),
    "nemotron_h": _Family("NemotronH", renamed={"backbone.": "model."}),
    "granitemoehybrid": _Family(
        "GraniteMoeHybrid",
        renamed={
            "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
            "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
            "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
        },
    ),
}
SIGNS = (
    f"config:model_type={'|'.join(_FAMILIES)}",
    "backbone.embeddings.weight",
    "backbone.layers.*.mixer.A_log",
)

_RECURRENT = (
    "mamba",
    "falcon_mamba",
    "mamba2",
)  # whose layers have states of one size, all of them


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
    known = {_modeling(kind) for kind in _FAMILIES}
    found = {base.__module__ for part in module.modules() for base in type(part).__mro__} & known
    if found:
        for part in module.modules():
            settings: Any = getattr(part, "config", None)
            if hasattr(settings, "_experts_implementation"):
                settings._experts_implementation = _EXPERTS
    return sorted(found)


@contextmanager
def fused(modelings: Sequence[str]) -> Iterator[None]:
    """Meanwhile the scans and filters of these files are the fused ops, in every thread."""
    for file in modelings:
        module = importlib.import_module(file)
        with _lock:
            if not _fused[file]:
                _own[file] = {n: getattr(module, n) for n in _REPLACEMENTS if hasattr(module, n)}
                vars(module).update({name: _REPLACEMENTS[name] for name in _own[file]})
            _fused[file] += 1
    try:
        yield
    finally:
        for file in modelings:
            with _lock:
                _fused[file] -= 1
                if not _fused[file]:
                    vars(importlib.import_module(file)).update(_own.pop(file))


_lock = threading.Lock()
_fused: Counter[str] = Counter()  # by file, how often that holds now
_own: dict[str, dict[str, Any]] = {}  # by file, what was there


def _modeling(kind: str) -> str:
    return f"transformers.models.{kind}.modeling_{kind}"


# Each has transformers' signature; `choices` are between its own ways to compute the same.


def _selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **choices: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    del choices
    # A module in float64 has its float32 casts in the way of the op, which takes one dtype.
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    return selective_scan(
        hidden_states,
        dt,
        A.to(wide),
        B,
        C,
        None if D is None else D.to(wide),
        z,
        None if delta_bias is None else delta_bias.to(wide),
        delta_softplus,
        return_last_state,
    )


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **choices: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    del choices
    low, high = dt_limit
    return ssd_chunk_scan(
        hidden_states,
        dt,
        A,
        B,
        C,
        chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        initial_states=initial_states,
        dt_softplus=dt_softplus,
        dt_limit=(low, high),
        return_final_states=return_final_states,
    )


def _causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **choices: Any,
) -> Tensor:
    del choices
    silu = activation if activation in ("silu", "swish") else None
    out = causal_conv1d(hidden_states.to(weight.dtype), weight, bias, activation=silu)
    if activation is not None and silu is None:
        out = importlib.import_module("transformers.activations").ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


_REPLACEMENTS: Mapping[str, Callable[..., Any]] = {
    "mamba_selective_scan": _selective_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "causal_conv1d_fn": _causal_conv1d,
    **decoding.REPLACEMENTS,
}
