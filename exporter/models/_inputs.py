"""What a model of any code takes, as its configuration keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fuseport.exporter.models import _user_step as decoding
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec

__all__ = ["kept", "with_inputs"]


def with_inputs(model: Model, specs: Sequence[TensorSpec]) -> Model:
    """The same model, of any code, with other inputs."""
    described = [[s.name, s.dtype, list(s.dims), s.high, *_more(s)] for s in specs]
    config = {**model.config, "inputs": described}
    sizes = _sizes(specs)
    return replace(
        model,
        inputs=tuple(specs),
        sizes=sizes,
        config=config,
        step=lambda: decoding.step(model.module, config, specs, sizes, model.stand_ins),
    )


def _more(spec: TensorSpec) -> list[Any]:
    if spec.descending:
        return [spec.low, spec.descending]
    return [spec.low] if spec.low else []


def kept(config: Mapping[str, Any]) -> list[TensorSpec]:
    """The inputs that a configuration has."""
    return [
        TensorSpec(name, dtype, tuple(dims), tuple(high) if isinstance(high, list) else high, *more)
        for name, dtype, dims, high, *more in config["inputs"]
    ]


def _sizes(specs: Sequence[TensorSpec]) -> dict[str, int]:
    """Example sizes, all different, so that no two dimensions look alike."""
    names = dict.fromkeys(d for spec in specs for d in spec.dims if isinstance(d, str))
    others = (16 + 8 * i for i in range(len(names)))
    return {name: 2 if name == "batch" else next(others) for name in names}
