"""Decoding token by token against the whole sequence at once."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.models.fresh import fresh, undoing
from fuseport.exporter.models.model import Model, example
from fuseport.exporter.program import named_outputs
from fuseport.exporter.program.float64 import Float64, widened
from fuseport.exporter.verify.compare import Expected, Tolerance, judge
from fuseport.exporter.verify.measure import Norms, norms
from fuseport.exporter.verify.modes import References
from fuseport.exporter.verify.report import FLOAT64, Row

__all__ = ["decoded"]

# In float64 the two differ by how sums are ordered, amplified by the model's depth.
_RTOL = 1e-8


def decoded(
    model: Model,
    programs: Mapping[str, Any],
    seed: int,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """The step, fed a sequence from zero states, must give the model's outputs on the sequence.

    Both in float64 over references. Of a bundle without a step program there is no row.

    Args:
        model: in the working dtype; it is the same afterwards.
        programs: of the manifest, by kind.
        seed: of the sequence.
        progress: told of each step.
    """
    if "step" not in programs or model.step is None:
        return
    progress("decoding in float64, token by token")
    step = model.step()
    ids, *states = step.inputs
    generator = torch.Generator().manual_seed(seed)
    sequence = example(model.inputs[0], model.sizes, generator)
    wide = widened(fresh(model.module))
    wide_step = widened(fresh(step.module))
    stepped = undoing(wide_step, wide_step)
    carried = [
        # What grows has no size yet.
        torch.zeros([model.sizes.get(d, 0) if isinstance(d, str) else d for d in s.dims]).double()
        for s in states
    ]
    found: list[Tensor] = []
    with torch.no_grad(), References(), Float64():
        (name, whole), *_ = named_outputs(undoing(wide, wide)(sequence), model.outputs).items()
        for token in sequence.split(ids.dims[1], dim=1):
            first, *carried = named_outputs(stepped(token, *carried), step.outputs).values()
            found.append(first)
    scale = norms(whole)
    expected = Expected("float64", scale, Norms(0.0, 0.0), zero=True)
    tolerance = Tolerance(_RTOL * scale.max_abs, 0.0)
    yield Row(
        runtime=FLOAT64,
        provider=None,
        artifact="model",
        program="step",
        way="run",
        case="token by token",
        tensor=name,
        **vars(judge(name, torch.cat(found, 1), whole, expected, tolerance)),
    )
