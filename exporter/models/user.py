"""The user's own model code, given as `--model module:callable` or `--model file.py:callable`.

It runs because the user named it, and only then.
"""

import difflib
import hashlib
import inspect
import keyword
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fuseport.exporter import shims, user_code
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.interrupts import Interrupted
from fuseport.exporter.models import huggingface
from fuseport.exporter.models._capturable import capturable
from fuseport.exporter.models._forward import ordered, rewrap
from fuseport.exporter.models._inputs import kept, with_inputs
from fuseport.exporter.models._quantized import bitsandbytes, four_bits
from fuseport.exporter.models._stand_ins import call_under
from fuseport.exporter.models._views import renew
from fuseport.exporter.models.given import Given, flat, specs_of
from fuseport.exporter.models.model import Model
from fuseport.exporter.models.weights import some
from fuseport.exporter.program import TensorSpec, one_line
from fuseport.exporter.user_code import (
    compiled,
    flex_attention,
    own_backward,
    plain_subclasses,
    while_loop,
)

__all__ = ["NAME", "model", "parse_inputs", "rebuild"]

NAME = "user"

_INPUT = re.compile(
    r"(?P<name>[A-Za-z_]\w*(?:\.\w+)*):(?P<dtype>[a-z]+\d*)?\[(?P<dims>[\w, ]*)\]"
    r"(?:>=(?P<low>-?\d+))?(?:<(?P<equal>=?)(?P<high>\w+))?"
)
_VOLUME = re.compile(r"\d+(x\d+)+")
_NEXT = re.compile(r",(?=[A-Za-z_][\w.]*:)")  # no dimension has a colon
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")


def parse_inputs(texts: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Inputs as users write them: `x:[batch,3,length]`, `ids:int64[batch,length]<50257`.

    One text may have several of them, with commas between.

    A dimension is a size, or a name: a dynamic dimension, the same wherever the name occurs. The
    dtype is float32 if not given; integers need an upper bound, a number or a dynamic dimension,
    and may have a lower one instead of 0: `lengths:int64[batch]>=1<=length`. Rows of coordinates
    have a bound for each column: `voxels:int32[n,4]<2x41x400x352`. A name with dots leads into an
    argument that is a mapping or a tuple: `batch.ids`, `pair.0`.

    Raises:
        UsageError: a text is not of that form.
    """
    specs: list[TensorSpec] = []
    for text in (one for several in texts for one in _NEXT.split(several.replace(" ", ""))):
        match = _INPUT.fullmatch(text)
        if match is None:
            raise UsageError(
                f"--input-shapes {text}: write NAME:[DIM,…] or NAME:DTYPE[DIM,…]<BOUND, "
                "for example x:[batch,3,length], ids:int64[batch,length]<50257 or "
                "lengths:int64[batch]<=length" + _instead(text)
            )
        dtype = match["dtype"] or "float32"
        if dtype not in _DTYPES:
            raise UsageError(
                f"--input-shapes {text}: dtype {dtype} is none of {', '.join(_DTYPES)}"
            )
        if dtype.startswith("int") and match["high"] is None:
            raise UsageError(f"--input-shapes {text}: integers need a bound, such as <50257")
        dims = tuple(int(d) if d.isdigit() else d for d in match["dims"].split(",") if d)
        for dim in dims:
            if isinstance(dim, str) and not dim.isidentifier():
                raise UsageError(f"--input-shapes {text}: {dim} is neither a size nor a name")
        high, low = _bound(match), int(match["low"] or 0)
        if (high, low) != (None, 0) and not dtype.startswith("int"):
            raise UsageError(f"--input-shapes {text}: a bound is for integers")
        if isinstance(high, tuple) and (low or dims[-1:] != (len(high),) or min(high) < 1):
            raise UsageError(
                f"--input-shapes {text}: a bound for each column, from 1 up, is of {len(high)} "
                f"columns: {match['name']}:{dtype}[n,{len(high)}]<{match['high']}"
            )
        if isinstance(high, int) and high <= low:
            raise UsageError(f"--input-shapes {text}: no integer is from {low} on and below {high}")
        name = match["name"]
        first = name.partition(".")[0]
        if keyword.iskeyword(first) or first == "self" or name in {spec.name for spec in specs}:
            raise UsageError(
                f"--input-shapes {text}: {name} cannot be an input's name, or is twice"
            )
        specs.append(TensorSpec(name, dtype, dims, high, low))
    known = {dim for spec in specs for dim in spec.dims if isinstance(dim, str)}
    for spec in specs:
        dim = spec.high.removesuffix("+1") if isinstance(spec.high, str) else None
        if dim is not None and dim not in known:
            raise UsageError(
                f"--input-shapes {spec.name}: its bound {dim} is neither a number nor a dynamic "
                f"dimension; there are: {', '.join(sorted(known)) or 'none'}"
            )
    return tuple(specs)


def _instead(text: str) -> str:
    """What to write, for what does not say an input, where that is known."""
    if _INPUT.fullmatch(text.removesuffix(">")):
        return ", without the last >"
    if computed := re.search(r"[\[,](\w+[*/+-][^,\]]*)", text):
        return (
            f"; {computed[1]} is a size of another name, as m, and --size m=NUMBER says how much "
            "that is in the example: how it hangs on others, the export finds"
        )
    return ""


def _bound(match: re.Match[str]) -> int | str | tuple[int, ...] | None:
    """The exclusive upper bound, as `TensorSpec` has it."""
    if match["high"] is None:
        return None
    if _VOLUME.fullmatch(match["high"]):
        return tuple(int(size) + bool(match["equal"]) for size in match["high"].split("x"))
    if match["high"].isdigit():
        return int(match["high"]) + bool(match["equal"])
    return match["high"] + ("+1" if match["equal"] else "")


def model(
    code: str,
    hyper_parameters: Mapping[str, Any],
    inputs: Sequence[TensorSpec] | None,
    shim: Sequence[str] = (),
    given: Given | None = None,
    training: Sequence[str] = (),
    stored: Mapping[str, four_bits.Stored] | None = None,
) -> Model:
    """Call the user's code for a module.

    Args:
        code: `module:callable` or `file.py:callable`; it returns an `nn.Module`. It gets those of
            the checkpoint's hyperparameters that it has parameters for, or all if it has `**`.
        hyper_parameters: the checkpoint's.
        inputs: of the module, by the names of its forward's parameters; see `_forward.ordered`. If
            None, its `example_input_array` (Lightning's name) tells them, with the first dimension
            dynamic.
        shim: which stand-ins there are for packages that it imports; see `shims.installed`.
        given: example inputs, which tell those of the module instead.
        training: names of the training script's settings, for the error: they are not passed.
        stored: layers that the checkpoint has in four bits; see `four_bits.stored`.

    Raises:
        UsageError: nothing of that name can be called, or the inputs are unknown.
        Missing: the code needs a package that is not installed, or fails; or it has layers of
            bitsandbytes that have no form here.
    """
    flex_attention.allow()
    while_loop.allow()
    with shims.installed(shim) as used:
        file, function = _find(code)
        passed = _passed(function, hyper_parameters)
        module, said = capturable(_call(code, function, passed, hyper_parameters, training))
    placed = bitsandbytes.place(code, module, stored or {})
    renew(module)
    if wrap := compiled.called_plainly(module):
        rewrap(module, wrap)
    if given is not None:
        specs = specs_of(given, module)
    elif inputs:
        specs = ordered(module, inputs, "inputs: ")
    else:
        specs = _from_example(code, module)
    call_under(module, shim)
    plain_subclasses.allow()
    config = {
        "code": code,
        "hyper_parameters": {k: v for k, v in hyper_parameters.items() if _plain(v)},
        "source_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "inputs": [],
        "shims": sorted(used),
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
        **four_bits.named(placed),
    }
    notes = [_told(code, passed, hyper_parameters)] if hyper_parameters else []
    notes += said
    if used:
        notes.append(_stood_in(used))
    modelings = huggingface.readied(module)
    made = Model(
        module,
        NAME,
        config,
        inputs=(),
        sizes={},
        renamed=lambda tensors: four_bits.taken(tensors, stored or ()),
        fused=lambda: huggingface.fused(modelings),
        notes=tuple(notes),
        stand_ins=tuple(shim),
        general=True,
    )
    return with_inputs(made, specs)


def _stood_in(used: Sequence[str]) -> str:
    whole = ", ".join(sorted(name for name in used if name not in shims.OVERLAID))
    parts = ", ".join(sorted(name for name in used if name in shims.OVERLAID))
    said = [f"stand-ins took the place of {whole}"] if whole else []
    if parts:
        said.append(f"fuseport's ops {'that' if whole else 'took the place'} of kernels in {parts}")
    return f"{' and '.join(said)}: see fuseport.shims"


def rebuild(code: str, config: Mapping[str, Any]) -> Model:
    """The module again, from the code and what a manifest kept of the first time.

    Raises:
        Missing: as `model`.
    """
    shim, stored = config.get("shims", ()), four_bits.layers(config)
    return model(code, config["hyper_parameters"], kept(config), shim, stored=stored)


def _find(code: str) -> tuple[Path, Any]:
    place, _, name = code.rpartition(":")
    if not place or not name:
        raise UsageError(f"--model {code}: write module:callable or file.py:callable")
    module = user_code.imported(f"--model {code}", place)
    function, file = getattr(module, name, None), getattr(module, "__file__", None)
    if not callable(function) or file is None:
        raise UsageError(f"--model {code}: {place} has no callable {name}{_there(module, name)}")
    return Path(file), function


def _there(module: ModuleType, wanted: str) -> str:
    """What a module itself defines that could be called for a model, as the end of a message."""
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    if near := difflib.get_close_matches(wanted, names, 1):
        return f"; did you mean {near[0]}?"
    return f"; there are: {some(names)}" if names else ""


def _passed(function: Any, hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that a callable has parameters for, or all."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of some written in C nothing tells them
        return {}
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {n: v for n, v in hyper_parameters.items() if everything or n in parameters}


def _told(code: str, passed: Mapping[str, Any], hyper_parameters: Mapping[str, Any]) -> str:
    name = code.rpartition(":")[2]
    if passed:
        shown = (f"{key}={show(value, 40)}" for key, value in passed.items())
        return f"{name} got of the checkpoint's hyperparameters: {', '.join(shown)}"
    return f"{name} takes none of the checkpoint's hyperparameters: {some(list(hyper_parameters))}"


def _call(
    code: str,
    function: Any,
    passed: Mapping[str, Any],
    hyper_parameters: Mapping[str, Any],
    training: Sequence[str],
) -> nn.Module:
    try:
        with own_backward.watched():  # a constructor may import, too
            module = function(**passed)
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:  # the user's code can raise anything
        known = ", ".join(hyper_parameters) or "none"
        if training:
            known += (
                f"; the training script's settings are not passed: {some(training)}: give a "
                "callable that passes those that the model takes"
            )
        raise Missing(
            f"--model {code}: calling it failed: {one_line(error)}{user_code.hint(error)}; "
            f"hyperparameters in the checkpoint: {known}"
        ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"--model {code}: it returned {type(module).__name__}, not an nn.Module")
    return module


def _from_example(code: str, module: nn.Module) -> tuple[TensorSpec, ...]:
    example = getattr(module, "example_input_array", None)
    if example is None:
        takes = list(inspect.signature(module.forward).parameters) or ["x"]
        raise UsageError(
            f"--model {code}: what are its inputs? Its forward takes {', '.join(takes)}. Give "
            f"--input-shapes '{takes[0]}:[batch,3,length]', and '{takes[0]}.KEY:[batch,3]' of what "
            "is in a mapping, give tensors with --inputs, or set example_input_array on the module"
        )
    if not isinstance(example, Mapping):
        tensors = (example,) if isinstance(example, Tensor) else tuple(example)
        names = list(inspect.signature(module.forward).parameters)
        example = {
            names[i] if i < len(names) else f"input_{i}": tensor for i, tensor in enumerate(tensors)
        }
    example = flat(example)
    others = [name for name, value in example.items() if not isinstance(value, Tensor)]
    if others:
        raise UsageError(
            f"--model {code}: example_input_array has {', '.join(others)}, which is no tensor: a "
            "program takes tensors only"
        )
    specs = [
        TensorSpec(
            name,
            str(tensor.dtype).removeprefix("torch."),
            ("batch", *tensor.shape[1:]) if tensor.dim() else (),
            None if tensor.is_floating_point() else int(tensor.max()) + 1,
        )
        for name, tensor in example.items()
    ]
    return ordered(module, specs, "example_input_array: ")


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | type(None))
