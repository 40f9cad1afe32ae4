"""Inputs of a model of other sizes than its example's."""

from collections.abc import Iterator

import torch

from fuseport.exporter.models.model import Model, example

__all__ = ["about", "others", "roomy"]

_TRIED = 5  # inputs of larger sizes, and as many of the smallest
_SMALL = 8  # a size that may be larger
_OTHERS = (  # than one
    *(lambda n: 2 * n, lambda n: n + 1, lambda n: 1, lambda n: 2, lambda n: 3),
    lambda n: n - 1 if n > 2 else n,
)


def others(model: Model) -> Iterator[dict[str, torch.Tensor]]:
    """Other inputs than the example's: of its sizes, of small ones, and of larger ones."""
    generator = torch.Generator().manual_seed(len(model.inputs))
    sizes = model.sizes
    larger = {name: size * (4 if size <= _SMALL else 1) for name, size in sizes.items()}
    small = dict.fromkeys(sizes, 1)
    for each in (sizes, small, dict.fromkeys(sizes, 2), *(larger, small) * _TRIED):
        yield {spec.name: example(spec, each, generator) for spec in model.inputs}


def about(model: Model) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs of the example's sizes, of others about them, and of the smallest."""
    generator = torch.Generator().manual_seed(len(model.inputs))
    sizes = model.sizes
    more = ({name: of(size) for name, size in sizes.items()} for of in _OTHERS)
    for each in (sizes, *more):
        yield {spec.name: example(spec, each, generator) for spec in model.inputs}


def roomy(model: Model) -> dict[str, torch.Tensor]:
    """Inputs of sizes at which loops over them have some turns."""
    generator = torch.Generator().manual_seed(len(model.inputs))
    sizes = {name: size * -(-_SMALL // size) for name, size in model.sizes.items()}
    return {spec.name: example(spec, sizes, generator) for spec in model.inputs}
