"""The user's own model code, given as `--model module:callable` or `--model file.py:callable`.

It runs because the user named it, and only then.
"""

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec

__all__ = ["NAME", "model", "parse_inputs", "rebuild"]

NAME = "user"

_INPUT = re.compile(
    r"(?P<name>[A-Za-z_]\w*):(?P<dtype>[a-z]+\d*)?\[(?P<dims>[\w, ]*)\](?:<(?P<high>\d+))?"
)
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")


def parse_inputs(texts: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Inputs as users write them: `x:[batch,3,length]`, `ids:int64[batch,length]<50257`.

    A dimension is a size, or a name: a dynamic dimension, the same wherever the name occurs. The
    dtype is float32 if not given; integers need an exclusive upper bound.

    Raises:
        UsageError: a text is not of that form.
    """
    specs = []
    for text in texts:
        match = _INPUT.fullmatch(text.replace(" ", ""))
        if match is None:
            raise UsageError(
                f"--input-shapes {text}: write NAME:[DIM,…] or NAME:DTYPE[DIM,…]<BOUND, "
                "for example x:[batch,3,length] or ids:int64[batch,length]<50257"
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
        high = None if match["high"] is None else int(match["high"])
        specs.append(TensorSpec(match["name"], dtype, dims, high))
    return tuple(specs)


def model(
    code: str, hyper_parameters: Mapping[str, Any], inputs: Sequence[TensorSpec] | None
) -> Model:
    """Call the user's code for a module.

    Args:
        code: `module:callable` or `file.py:callable`; it returns an `nn.Module`. Those of its
            parameters that the checkpoint's hyperparameters name are passed.
        hyper_parameters: the checkpoint's.
        inputs: of the module; if None, its `example_input_array` (Lightning's name) tells them,
            with the first dimension dynamic.

    Raises:
        UsageError: nothing of that name can be called, or the inputs are unknown.
        Missing: the code needs a package that is not installed, or fails.
    """
    file, function = _find(code)
    module = _call(code, function, hyper_parameters)
    specs = tuple(inputs) if inputs else _from_example(code, module)
    config = {
        "code": code,
        "hyper_parameters": {k: v for k, v in hyper_parameters.items() if _plain(v)},
        "source_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "inputs": [[spec.name, spec.dtype, list(spec.dims), spec.high] for spec in specs],
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
    }
    return Model(module, NAME, config, specs, _sizes(specs))


def rebuild(code: str, config: Mapping[str, Any]) -> Model:
    """The module again, from the code and what a manifest kept of the first time.

    Raises:
        Missing: as `model`.
    """
    inputs = [
        TensorSpec(name, dtype, tuple(dims), high) for name, dtype, dims, high in config["inputs"]
    ]
    return model(code, config["hyper_parameters"], inputs)


def _find(code: str) -> tuple[Path, Any]:
    place, _, name = code.rpartition(":")
    if not place or not name:
        raise UsageError(f"--model {code}: write module:callable or file.py:callable")
    try:
        module = _import(code, place)
    except UsageError:
        raise
    except Exception as error:  # the user's code can raise anything when imported
        raise Missing(
            f"--model {code}: importing it failed: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function) or module.__file__ is None:
        raise UsageError(f"--model {code}: {place} has no callable {name}")
    return Path(module.__file__), function


def _import(code: str, place: str) -> ModuleType:
    if not place.endswith(".py"):
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        if importlib.util.find_spec(place) is None:
            raise UsageError(f"--model {code}: there is no module {place}")
        return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        raise UsageError(f"--model {code}: there is no file {place}")
    # Its neighbours are what it imports, as if it were run.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def _call(code: str, function: Any, hyper_parameters: Mapping[str, Any]) -> nn.Module:
    try:
        parameters = inspect.signature(function).parameters
        given = {name: hyper_parameters[name] for name in parameters if name in hyper_parameters}
        module = function(**given)
    except Exception as error:  # the user's code can raise anything
        raise Missing(
            f"--model {code}: calling it failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"--model {code}: it returned {type(module).__name__}, not an nn.Module")
    return module


def _from_example(code: str, module: nn.Module) -> tuple[TensorSpec, ...]:
    example = getattr(module, "example_input_array", None)
    if example is None:
        raise UsageError(
            f"--model {code}: what are its inputs? Give --input-shapes 'x:[batch,3,length]', or "
            "set example_input_array on the module"
        )
    if isinstance(example, Tensor):
        example = (example,)
    names = list(inspect.signature(module.forward).parameters)
    pairs = example.items() if isinstance(example, Mapping) else zip(names, example, strict=False)
    return tuple(
        TensorSpec(
            name,
            str(tensor.dtype).removeprefix("torch."),
            ("batch", *tensor.shape[1:]),
            None if tensor.is_floating_point() else int(tensor.max()) + 1,
        )
        for name, tensor in pairs
    )


def _sizes(specs: Sequence[TensorSpec]) -> dict[str, int]:
    """Example sizes, all different, so that no two dimensions look alike."""
    names = dict.fromkeys(d for spec in specs for d in spec.dims if isinstance(d, str))
    others = (16 + 8 * i for i in range(len(names)))
    return {name: 2 if name == "batch" else next(others) for name in names}


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | type(None))
