"""Hugging Face's `MambaForCausalLM`, through transformers, its scan replaced by the fused op.

The model's own code stays untouched: transformers calls the scan through a module-level function,
and that name is bound to the op for the time of an export or of a run. Truth and baseline run
without it, on transformers' own path, which makes them independent of the op.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.errors import Missing
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec
from fuseport.ops.selective_scan import selective_scan

__all__ = ["model", "recognise"]

_MODELING = "transformers.models.mamba.modeling_mamba"
_SCAN = "mamba_selective_scan"


def recognise(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The folder's config.json, where transformers calls its model `mamba`."""
    if checkpoint.layout != "huggingface" or checkpoint.config.get("model_type") != "mamba":
        return None
    return dict(checkpoint.config)


def model(config: Mapping[str, Any]) -> Model:
    """The model of a config.json, with random weights.

    Raises:
        Missing: transformers is not installed, or is of a version whose scan cannot be replaced.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise Missing(
            "this is a Hugging Face model, and transformers is not installed: "
            "pip install 'fuseport[huggingface]'"
        ) from error
    if not hasattr(importlib.import_module(_MODELING), _SCAN):
        raise Missing(
            f"transformers {transformers.__version__} has no {_MODELING}.{_SCAN}, where the fused "
            "scan goes in: install transformers 5"
        )
    settings = transformers.MambaConfig.from_dict({**config, "use_cache": False})
    module = transformers.MambaForCausalLM(settings)
    return Model(
        module=module,
        architecture="huggingface",
        config=dict(config),
        inputs=(TensorSpec("input_ids", "int64", ("batch", "length"), settings.vocab_size),),
        sizes={"batch": 2, "length": 16},
        scans=settings.num_hidden_layers,
        keeps_float32=("A_log", ".D", "dt_proj.bias"),
        fused=_fused,
    )


@contextmanager
def _fused() -> Iterator[None]:
    modeling = importlib.import_module(_MODELING)
    own = getattr(modeling, _SCAN)
    setattr(modeling, _SCAN, _scan)
    try:
        yield
    finally:
        setattr(modeling, _SCAN, own)


def _scan(
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
    """transformers' signature; `choices` are between its own ways to compute the same."""
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
