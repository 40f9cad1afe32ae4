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
    native, cuda = spec.has("torch.cpp"), spec.has("kernel.cuh") or spec.has("kernel.cu")
    lowered, bound = spec.has("onnx.py"), spec.has("ort.cpp")
    differentiable = any(operator.backward for operator in spec.operators)
    plain = "plain torch"
    return {
        "reference": Support(True),
        "CPU": Support(native, None if native else plain),
        "CUDA": Support(cuda, None if cuda else plain),
        "fake": Support(True),
        "autograd": Support(differentiable, None if differentiable else "no backward"),
        "ONNX portable": Support(lowered, None if lowered else "no ONNX form"),
        "ONNX native": Support(False, "portable" if lowered else "no ONNX form"),
        "fused library": Support(bound, None if bound else _without_binding(lowered)),
    }


def _without_binding(lowered: bool) -> str:
    return "portable" if lowered else "no ONNX form"


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
