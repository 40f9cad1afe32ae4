"""Which dimensions of a model's inputs can be dynamic, as torch.export finds out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.export import Dim

from fuseport.exporter.capture.integers import as_numbers
from fuseport.exporter.program import TensorSpec, named_outputs
from fuseport.exporter.program.forward import entry, failing_as
from fuseport.exporter.program.sizes._known import buffers_of, knowing
from fuseport.exporter.program.sizes.symbolic import Symbolic
from fuseport.exporter.program.tracing import any_sizes, known_constants

__all__ = ["found_dynamic"]


def found_dynamic(
    module: nn.Module, inputs: Mapping[str, Tensor], specs: Sequence[TensorSpec]
) -> tuple[tuple[TensorSpec, ...], tuple[str, ...]]:
    """Inputs with every dimension dynamic that can be, and what to tell of the others.

    The model is captured once with all dimensions of a size above 1 left to torch. Those that come
    out as a symbol get a name, the same where torch takes them for equal; the first of the only
    input is `batch`. Those that come out as a number, or as a multiple of another one, stay fixed.

    Args:
        module: in eval mode.
        inputs: example inputs by name, in order.
        specs: of the inputs, with all dimensions fixed.

    Raises:
        ExportFailed: torch cannot capture the module.
    """

    buffers = buffers_of(module)

    def call(*given: Tensor) -> dict[str, Tensor]:
        with knowing(module, buffers), Symbolic(), as_numbers():
            return named_outputs(module.forward(*given))

    with failing_as("forward"), any_sizes(), known_constants():
        exported = torch.export.export(
            entry(module, specs, call),
            tuple(inputs.values()),
            dynamic_shapes=tuple(
                {i: Dim.AUTO if n > 1 else Dim.STATIC for i, n in enumerate(t.shape)}
                for t in inputs.values()
            ),
            strict=False,
        )
    values = {n.name: n.meta["val"] for n in exported.graph.nodes if n.op == "placeholder"}
    shapes = [values[name].shape for name in exported.graph_signature.user_inputs]
    names = _names(specs, [[str(size) for size in shape] for shape in shapes])
    found = tuple(
        replace(
            spec, dims=tuple(names.get(str(n), d) for d, n in zip(spec.dims, shape, strict=True))
        )
        for spec, shape in zip(specs, shapes, strict=True)
    )
    return found, tuple(_notes(found))


def _names(specs: Sequence[TensorSpec], shapes: Sequence[Sequence[str]]) -> dict[str, str]:
    """A name for each symbol that is a dimension, but for those that others are multiples of."""
    sizes = [size for shape in shapes for size in shape]
    compound = [size for size in sizes if not size.isidentifier() and not size.isdigit()]
    names: dict[str, str] = {}
    for spec, shape in zip(specs, shapes, strict=True):
        for i, size in enumerate(shape):
            if size.isidentifier() and not any(size in other for other in compound):
                first = "batch" if i == 0 and len(specs) == 1 else f"{spec.name}_{i}"
                names.setdefault(size, first)
    return names


def _notes(specs: Sequence[TensorSpec]) -> Iterator[str]:
    for spec in specs:
        dims = list(enumerate(spec.dims))
        free = [f"{i} ({dim})" for i, dim in dims if isinstance(dim, str)]
        one = [str(i) for i, dim in dims if dim == 1]
        fixed = [f"{i} (at {dim})" for i, dim in dims if isinstance(dim, int) and dim != 1]
        parts = [f"dynamic dimensions of {spec.name}, as found: {', '.join(free) or 'none'}"]
        if fixed:
            parts.append(f"fixed by the model's code or weights: {', '.join(fixed)}")
        if one:
            parts.append(f"fixed since they are 1 in the example: {', '.join(one)}")
        yield "; ".join(parts) + f"; --dynamic '{spec.name}:{{…}}' says otherwise"
