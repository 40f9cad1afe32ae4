"""Of which operators of a program torch.onnx has no form: its error names the first alone."""

from collections.abc import Callable

from torch._ops import OpOverload
from torch.export import ExportedProgram

from fuseport.exporter.formats._quiet import quiet
from fuseport.exporter.program.provenance import layer

__all__ = ["lacking"]

_LISTED = 3  # layers


def lacking(translated: ExportedProgram | None, first: str) -> list[str]:
    """The operators, each with the layers that it is in.

    Args:
        translated: what torch.onnx was at; None if it had not come to that.
        first: what its error names, as `namespace.name.overload` or without an overload `default`.
    """
    found: dict[str, dict[str, None]] = {first: {}}
    nodes = [] if translated is None else translated.graph.nodes
    is_known = _is_known()
    for node in nodes:
        if isinstance(node.target, OpOverload) and not node.target.namespace.startswith("onnx"):
            name = str(node.target).removesuffix(".default")
            if name == first or not is_known(node.target):
                found.setdefault(name, {})[layer(node)] = None
    return [f"{name}{_within([at for at in layers if at])}" for name, layers in found.items()]


def _within(layers: list[str]) -> str:
    if not layers:
        return ""
    more = f" and {len(layers) - _LISTED} more" if len(layers) > _LISTED else ""
    return f" (in {', '.join(layers[:_LISTED])}{more})"


def _is_known() -> Callable[[OpOverload], bool]:
    """Whether torch.onnx has a form of an operator; of all, where it does not say so as it did."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        with quiet("torch.onnx"):
            return ONNXRegistry.from_torchlib().is_registered
    except (ImportError, AttributeError, TypeError):
        return lambda _: True
