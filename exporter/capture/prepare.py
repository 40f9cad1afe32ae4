"""A model made ready for its capture: dtype, example inputs, dynamic dimensions."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from fuseport.exporter import models
from fuseport.exporter.capture import tried
from fuseport.exporter.capture.dynamic import found_dynamic
from fuseport.exporter.capture.float32 import kept
from fuseport.exporter.errors import UsageError
from fuseport.exporter.models import Model, with_inputs
from fuseport.exporter.models.given import Dynamic, Given, fitted, named, undefined

__all__ = ["prepared"]

_LISTED = 12


def prepared(
    model: Model,
    given: Given | None,
    dynamic: Dynamic | None,
    sizes: Mapping[str, int] | None,
    dtype: str | None,
    seed: int,
    progress: Callable[[str], None],
) -> tuple[Model, tuple[str, ...]]:
    """The model that is captured, and what the user should know, a sentence each.

    Args:
        model: with its weights, which are converted in place.
        given: example inputs of the user's, or None.
        dynamic: the dynamic dimensions that the user wants; None to find them, where the inputs of
            a model of any code are told by examples, and else for the model's own.
        sizes: of dynamic dimensions in the example, by name, instead of those that it has else.
        dtype: to convert to, or None.
        seed: of example inputs.
        progress: told of each step.

    Raises:
        UsageError: the inputs, the dimensions or the dtype do not fit the model.
        ExportFailed: the model does not run, in its dtype or in the one wanted, or cannot be
            captured to find its dynamic dimensions.
    """
    notes: list[str] = []
    own = model.general
    if dynamic and not own:
        known = ", ".join(f"{spec.name}:{list(spec.dims)}" for spec in model.inputs)
        raise UsageError(f"--dynamic: the architecture {model.architecture} has its own: {known}")
    if dynamic is not None and own:
        model = with_inputs(model, named(model.inputs, dynamic))
    if given is not None:
        model = fitted(model, given)
        notes += undefined(given)
    if sizes is not None:
        model = _sized(model, sizes)
    if dtype is not None:
        model, said = _converted(model, dtype, seed)
        notes += said
    model, more = tried(model, seed)  # before anything is traced: its error should be its own
    notes += more
    if given is not None and own:
        for spec in (spec for spec in model.inputs if spec.high is not None):
            low = f"from {spec.low} on, " if spec.low else ""
            most = spec.high
            below = "x".join(map(str, most)) if isinstance(most, tuple) else most
            notes.append(f"{spec.name}: compared on values {low}below {below}, as in the example")
        if dynamic is None:
            progress("finding dynamic dimensions")
            assert model.given is not None
            with model.fused():
                specs, found = found_dynamic(model.module, model.given, model.inputs)
            model = _again(with_inputs(model, specs), given.place)
            notes += found
    return model, tuple(notes)


def _sized(model: Model, sizes: Mapping[str, int]) -> Model:
    """The model with other sizes in its example."""
    if model.given is not None:
        raise UsageError("--size: the sizes are those of --inputs")
    if unknown := sizes.keys() - model.sizes.keys():
        known = ", ".join(f"{name} ({size})" for name, size in model.sizes.items()) or "none"
        raise UsageError(f"--size: no dynamic dimension {sorted(unknown)[0]}; there are: {known}")
    return replace(model, sizes={**model.sizes, **sizes})


def _converted(model: Model, dtype: str, seed: int) -> tuple[Model, list[str]]:
    target = getattr(torch, dtype, None)
    if not isinstance(target, torch.dtype) or not target.is_floating_point:
        raise UsageError(f"dtype {dtype}: choose float32, float64, float16 or bfloat16")
    notes: list[str] = []
    if model.general and target.itemsize < 4:
        way = kept(model, target, seed, lambda other: _inputs_in(other, dtype))
        model = replace(model, keeps_float32=way.ends)
        notes += way.notes
    stayed = models.convert(model, target)
    if model.general:
        model = _inputs_in(model, dtype)
    if not stayed:
        return model, notes
    kinds = list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in stayed))
    some = ", ".join(kinds[:_LISTED]) + (" and others" if len(kinds) > _LISTED else "")
    said = f"{len(stayed)} parameters stay float32 in {dtype}: those called {some}"
    return model, [said, *notes]


def _inputs_in(model: Model, dtype: str) -> Model:
    """The inputs of a model of any code, as its weights: in `dtype` where they are floating."""
    given = model.given
    specs = [replace(s, dtype=dtype) if s.floating else s for s in model.inputs]
    sizes = model.sizes
    model = with_inputs(model, specs)
    if given is None:
        return model
    wanted = {spec.name: spec.torch_dtype for spec in specs}
    return replace(model, sizes=sizes, given={n: t.to(wanted[n]) for n, t in given.items()})


def _again(model: Model, place: str) -> Model:
    """The values of the example, at sizes that have other names now."""
    assert model.given is not None
    return fitted(model, Given(place, model.given))
