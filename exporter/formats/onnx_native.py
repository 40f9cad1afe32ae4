"""Program → ONNX with operators that opset 23 or ONNX Runtime has of its own for fused ops.

The other ops stay nodes with function bodies, as in format `onnx`. The file runs in fewer places
than that one, which is exported beside it.
"""

import filecmp
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fuseport.exporter.formats import OPSETS, Options, onnx
from fuseport.exporter.program import Program
from fuseport.ops import OPS

__all__ = ["DEFAULT", "SUFFIX", "redundant", "value_names", "write"]

SUFFIX = ".native.onnx"
DEFAULT = False

_OPSET = OPSETS[-1]  # the earlier ones lack RMSNormalization, RotaryEmbedding and Attention


def write(program: Program, path: Path, options: Options) -> dict[str, Any]:
    """Write `program` as an ONNX file of opset 23, whatever `options.opset` is.

    Returns:
        `opset`, and `native`: the types of the operators that took the place of fused ops, or that
        only this opset has.

    Raises:
        ExportFailed: an operator of the graph has no ONNX form.
    """
    forms, own = _forms()
    types = onnx.write_as(program, path, Options(options.weights, _OPSET), forms)
    return {"opset": _OPSET, "native": sorted(types & own)}


def redundant(path: Path, facts: Mapping[str, Any]) -> str | None:
    """Why the portable file beside one that `write` made does as well; None without one, too."""
    portable = path.with_name(path.name.removesuffix(SUFFIX) + onnx.SUFFIX)
    if not portable.exists():
        return None
    if filecmp.cmp(path, portable, shallow=False):
        return f"the portable files, of opset {_OPSET} too, are the same"
    return None if facts["native"] else "ONNX has no operator of its own for any op there"


def value_names(program: Program, options: Options) -> dict[str, str]:
    """As `onnx.value_names`, of the file that `write` makes."""
    return onnx.value_names_as(program, Options(options.weights, _OPSET), _forms()[0])


def _forms() -> tuple[dict[str, Callable[..., Any]], set[str]]:
    """What takes the place of fused operators, and the types of the operators that do."""
    forms: dict[str, Callable[..., Any]] = {}
    own = {"Attention"}  # that torch makes of attention at this opset
    for op in (op for op in OPS.values() if op.has("onnx_native.py")):
        native = op.native_lowering()
        own |= native.TYPES
        for name, form in native.decompositions().items():
            operator = op.operator(name).qualified_name
            forms[operator] = _first(form, onnx.portable(op)[operator])
    return forms, own


def _first(native: Callable[..., Any], portable: Callable[..., Any]) -> Callable[..., Any]:
    def form(*arguments: Any) -> Any:
        result = native(*arguments)
        return portable(*arguments) if result is None else result

    return form
