"""What each op has, and why not where it has not: derived from its folder and its `OpSpec`."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fuseport.ops.spec import OpSpec

__all__ = ["COLUMNS", "Support", "content", "markdown", "support", "text"]

COLUMNS = (
    "reference",
    "CPU",
    "CUDA",
    "fake",
    "autograd",
    "ONNX portable",
    "ONNX native",
    "fused library",
)


@dataclass(frozen=True)
class Support:
    """Whether an op has something, and the reason where it has not."""

    present: bool
    reason: str | None = None


def support(spec: OpSpec) -> dict[str, Support]:
    """What an op has, by column: `reference`, native kernels, `fake` and so on.

    `ONNX portable` is a form in standard operators, `ONNX native` an operator of its own that an
    opset or ONNX Runtime has and exports use, and `fused library` our kernels in ONNX Runtime.
    """
    lowered = spec.lowers
    found = {
        "reference": True,
        "CPU": spec.has("torch.cpp"),
        "CUDA": spec.has("kernel.cu") and spec.has("cuda.cpp"),
        "fake": True,
        "autograd": any(operator.backward for operator in spec.operators),
        "ONNX portable": lowered,
        "ONNX native": spec.has("onnx_native.py"),
        "fused library": spec.has("ort.cpp"),
    }
    usual = {
        "CPU": "plain torch",
        "CUDA": "plain torch",
        "autograd": "no backward",
        "ONNX portable": "no ONNX form",
        "ONNX native": "portable" if lowered else "no ONNX form",
        "fused library": "portable" if lowered else "no ONNX form",
    }
    reasons = {**usual, **spec.lacks}
    return {n: Support(here, None if here else reasons[n]) for n, here in found.items()}


def markdown(specs: Iterable[OpSpec]) -> str:
    """The table of README: a line for each op, a mark or a reason in each cell."""
    lines = [f"| op | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for spec in specs:
        found = support(spec)
        cells = ("✓" if found[name].present else str(found[name].reason) for name in COLUMNS)
        lines.append(f"| `{spec.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def text(specs: Iterable[OpSpec]) -> str:
    """For a terminal: under each op, a line for each column."""
    lines = []
    for spec in specs:
        lines.append(spec.name)
        for name, cell in support(spec).items():
            lines.append(f"  {name:<14} {'yes' if cell.present else f'no: {cell.reason}'}")
    return "\n".join(lines)


def content(specs: Iterable[OpSpec]) -> dict[str, Any]:
    """The same as plain data."""
    ops = {s.name: {name: asdict(cell) for name, cell in support(s).items()} for s in specs}
    return {"schema": "fuseport.ops-list/1", "ops": ops}
