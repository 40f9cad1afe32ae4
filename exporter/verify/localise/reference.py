"""What a program should give: in float64 over reference ops, and how near the working dtype is."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, fx, nn

from fuseport.exporter.program import Program, module_tree
from fuseport.exporter.program.float64 import Float64
from fuseport.exporter.runtimes._torch_module import ModuleSession
from fuseport.exporter.verify import baseline
from fuseport.exporter.verify.compare import Expected
from fuseport.exporter.verify.measure import Norms, errors, is_zero, norms
from fuseport.exporter.verify.modes import References

__all__ = ["Measured", "interpreted", "measured"]

Tensors = Mapping[str, Tensor]

Measured = dict[str, tuple[Tensor, Expected]]
"""By name, the truth in float64, and what else is known; see `compare.Expected`."""

# Of `baseline.ways`: the plain one, without its repetitions; in order; by other kernels; moved.
_WAYS = (0, 3, 4, 5)


def measured(
    program: Program,
    inputs: Tensors,
    wanted: Sequence[str],
    cotangents: Tensors | None = None,
) -> Measured:
    """Truth and baseline of some of what a program gives, by interpreting its graph.

    Args:
        program: any.
        inputs: in the working dtype, by name.
        wanted: names of outputs, or `grad/<input>` where there are cotangents. What does not exist
            is left out.
        cotangents: by output; None to run the program only.
    """
    module = _module(program)
    exact = interpreted(program, inputs, wanted, cotangents)
    found: Measured = {}
    for number, way in enumerate(baseline.ways(module, inputs)):
        if number not in _WAYS:
            continue
        with ExitStack() as stack:
            moved = stack.enter_context(way)
            stack.enter_context(References())
            results = _results(program, module, moved, cotangents, wanted)
        for name, value in results.items():
            truth = exact[name]
            error, vanished = errors(value, truth), is_zero(value)
            dtype = str(value.dtype).removeprefix("torch.")
            if name not in found:
                found[name] = truth, Expected(dtype, norms(truth), error, vanished)
                continue
            before = found[name][1]
            worst = Norms(
                max(error.max_abs, before.baseline.max_abs), max(error.rms, before.baseline.rms)
            )
            found[name] = truth, Expected(dtype, before.scale, worst, before.zero or vanished)
    return found


def interpreted(
    program: Program,
    inputs: Tensors,
    wanted: Sequence[str],
    cotangents: Tensors | None = None,
) -> dict[str, Tensor]:
    """The truth alone, in float64; see `measured`."""
    with References(), Float64():
        wide = {name: t.double() if _floats(t) else t for name, t in inputs.items()}
        seeds = {name: t.double() for name, t in (cotangents or {}).items()}
        given = None if cotangents is None else seeds
        return _results(program, _module(program), wide, given, wanted)


def _module(program: Program) -> nn.Module:
    """Its parameters, which ways of computing move, and its buffers, which they do not."""
    state = program.state(requires_grad=False)
    moved = {n for n, t in state.items() if isinstance(t, nn.Parameter) and _floats(t)}
    plain = {n: t.detach() for n, t in state.items()}  # in float64 where this is called for it
    return module_tree({n: nn.Parameter(t) if n in moved else t for n, t in plain.items()})


def _results(
    program: Program,
    module: nn.Module,
    inputs: Tensors,
    cotangents: Tensors | None,
    wanted: Sequence[str],
) -> dict[str, Tensor]:
    session = ModuleSession(
        lambda *tensors: _run(program, module, tensors),
        (),
        lambda result: dict(zip((s.name for s in program.outputs), result, strict=True)),
    )
    if cotangents is None:
        results: Mapping[str, Tensor | None] = session.run(inputs)
    else:
        results = session.differentiate(inputs, cotangents)
    return {name: t for name in wanted if (t := results.get(name)) is not None}


def _run(program: Program, module: nn.Module, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The graph of a program, node by node; values are let go after their last use."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    given = iter(inputs)
    arguments = [
        next(given) if spec.target is None else _value(spec.target, parameters, buffers)
        for spec in program.exported.graph_signature.input_specs
    ]
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        found = fx.Interpreter(program.exported.graph_module).run(
            *arguments, enable_io_processing=False
        )
    results: Sequence[Tensor] = found
    return results


def _value(name: str, parameters: Tensors, buffers: Tensors) -> Tensor:
    # Gradients are asked of inputs alone.
    return parameters[name].detach() if name in parameters else buffers[name]


def _floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point()
