"""Backward, asked for in all the ways that autograd offers: each has to give the same gradient.

The plain form is the vector-Jacobian product of `torch.autograd.grad`. Every other form is exact
arithmetic away from it (twice it, or its negative), so its gradients are the same bits, unless a
sum runs in another order.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

__all__ = ["AT_ONCE", "FORMS", "TRACED_AGAIN", "Asked", "Form", "Gradients", "agree", "plain"]

Gradients = dict[str, Tensor | None]

AT_ONCE = "from two threads at once"
"""The form that holds two sets of gradients in memory."""


_CHECKPOINTED = "with activation checkpointing"
_REENTRANT = "with reentrant activation checkpointing"

TRACED_AGAIN = (_CHECKPOINTED, _REENTRANT, AT_ONCE)
"""Forms that torch does not have of operators with graphs inside, such as `torch.cond`.

It traces these anew at every call: not from two threads, and `scan` not inside a backward.
"""


@dataclass(frozen=True)
class Asked:
    """A function, and what is asked of it.

    Attributes:
        run: inputs by name → outputs by name; with autograd, in a graph.
        inputs: floating and complex ones are differentiated; values that are no tensors are passed.
        parameters: leaves that `run` uses, and that are differentiated too.
        cotangents: by output.
    """

    run: Callable[[Mapping[str, object]], Mapping[str, Tensor]]
    inputs: Mapping[str, object]
    parameters: Mapping[str, Tensor]
    cotangents: Mapping[str, Tensor]


Form = Callable[[Asked], Iterator[tuple[Gradients, float]]]
"""Gradients by input and parameter, some or all, and how many times the plain ones they are."""


def plain(asked: Asked) -> Gradients:
    """The gradients by `torch.autograd.grad`; None where there is none."""
    leaves = _leaves(asked)
    return _differentiated(asked, leaves, [_outputs(asked, leaves)])


def agree(found: Tensor | None, plain: Tensor | None, factor: float) -> bool:
    """Whether a form's gradient is the plain one times the factor, exactly; NaN equals NaN."""
    if found is None or plain is None:
        return found is plain
    same = found.shape == plain.shape and found.dtype == plain.dtype
    scaled = plain if factor == 1.0 else plain * factor
    if not same or torch.equal(found, scaled):
        return same
    return bool(((found == scaled) | (found.isnan() & scaled.isnan())).all())


def _opposite(asked: Asked) -> Iterator[tuple[Gradients, float]]:
    opposite = {name: -cotangent for name, cotangent in asked.cotangents.items()}
    yield plain(replace(asked, cotangents=opposite)), -1.0


def _loss(asked: Asked) -> Iterator[tuple[Gradients, float]]:
    with _fields(asked) as leaves:
        _scalar(asked, leaves).backward()
        yield _read(asked, leaves), 1.0


def _accumulated(asked: Asked) -> Iterator[tuple[Gradients, float]]:
    with _fields(asked) as leaves:
        for _ in range(2):
            outputs, seeds = _roots(asked, _outputs(asked, leaves))
            torch.autograd.backward(outputs, seeds)
        yield _read(asked, leaves), 2.0


def _twice(asked: Asked) -> Iterator[tuple[Gradients, float]]:
    leaves = _leaves(asked)
    yield _differentiated(asked, leaves, [_outputs(asked, leaves) for _ in range(2)]), 2.0


def _retained(asked: Asked) -> Iterator[tuple[Gradients, float]]:
    leaves = _leaves(asked)
    outputs = _outputs(asked, leaves)
    for keep in (True, False):
        yield _differentiated(asked, leaves, [outputs], retain=keep), 1.0


def _checkpointed(asked: Asked) -> Iterator[tuple[Gradients, float]]:
    leaves = _leaves(asked)
    names: list[str] = []

    def run(*values: object) -> tuple[Tensor, ...]:
        outputs = _outputs(asked, dict(zip(leaves, values, strict=True)))
        names[:] = outputs
        return tuple(outputs.values())

    # Torch stops the second forward pass early by an exception, which TorchScript's interpreter
    # turns into another one.
    with set_checkpoint_early_stop(False):
        found = checkpoint(run, *leaves.values(), use_reentrant=False)
        gradients = _differentiated(asked, leaves, [dict(zip(names, found, strict=True))])
    yield gradients, 1.0


def _reentrant(asked: Asked) -> Iterator[tuple[Gradients, float]]:
    names: list[str] = []
    with _fields(asked) as leaves:

        def run(_: Tensor, *values: object) -> tuple[Tensor, ...]:
            outputs = _outputs(asked, dict(zip(leaves, values, strict=True)))
            names[:] = outputs
            # Torch would put its own node on a parameter that is handed out as it is, and then
            # find that node again in each of its passes, without end.
            return tuple(y.view_as(y) for y in outputs.values())

        # It looks at its inputs alone for what requires a gradient: parameters do not count.
        anchor = torch.zeros((), requires_grad=True)
        found = checkpoint(run, anchor, *leaves.values(), use_reentrant=True)
        outputs, seeds = _roots(asked, dict(zip(names, found, strict=True)))
        torch.autograd.backward(outputs, seeds)
        yield _read(asked, leaves), 1.0


def _hooked(asked: Asked) -> Iterator[tuple[Gradients, float]]:
    leaves = _leaves(asked)
    outputs = _outputs(asked, leaves)
    seen: list[str] = []
    handles = [
        output.register_hook(lambda _, name=name: seen.append(name))
        for name, output in outputs.items()
        if name in asked.cotangents and output.requires_grad
    ]
    expected = len(handles)
    wanted = _wanted(asked, leaves)
    handles += [leaf.register_hook(_doubled) for leaf in wanted.values()]
    try:
        gradients = _differentiated(asked, leaves, [outputs])
    finally:
        for handle in handles:
            handle.remove()
    if len(seen) != expected:
        raise RuntimeError(f"of {expected} hooks on outputs, {len(seen)} were called")
    yield gradients, 2.0


def _doubled(gradient: Tensor | None) -> Tensor | None:
    """Torch calls hooks of leaves without a gradient, too."""
    return None if gradient is None else gradient * 2


def _one_thread(asked: Asked) -> Iterator[tuple[Gradients, float]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = plain(asked)
    finally:
        torch.set_num_threads(before)
    yield found, 1.0


def _at_once(asked: Asked) -> Iterator[tuple[Gradients, float]]:
    barrier = threading.Barrier(2)
    found: list[Gradients] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            barrier.wait(60)
            found.append(plain(asked))
        except BaseException as error:  # it must reach the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    while found:
        yield found.pop(), 1.0


def _partial(asked: Asked) -> Iterator[tuple[Gradients, float]]:
    """Of the first input that has a gradient, and of the last parameter, alone."""
    for names in (list(_floating(asked.inputs))[:1], list(asked.parameters)[-1:]):
        for name in names:
            leaves = _leaves(asked, {name})
            outputs = _outputs(asked, leaves)
            wanted = _wanted(asked, leaves)[name]
            roots, seeds = _roots(asked, outputs)
            gradient = None
            if roots:
                (gradient,) = torch.autograd.grad(roots, [wanted], seeds, allow_unused=True)
            yield {name: gradient}, 1.0


FORMS: Mapping[str, Form] = {
    "of the opposite cotangents": _opposite,
    "of a scalar loss": _loss,
    "accumulated over two calls": _accumulated,
    "of inputs used twice": _twice,
    "again through a retained graph": _retained,
    "of one input alone": _partial,
    _CHECKPOINTED: _checkpointed,
    _REENTRANT: _reentrant,
    "with gradient hooks": _hooked,
    "on one thread": _one_thread,
    AT_ONCE: _at_once,
}
"""Every form, by name."""


def _floating(values: Mapping[str, object]) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    }


def _leaves(asked: Asked, names: set[str] | None = None) -> dict[str, object]:
    """The inputs, as leaves of a new graph where they can have a gradient, or as `names` says."""
    able = _floating(asked.inputs)
    return {
        name: able[name].detach().requires_grad_(names is None or name in names)
        if name in able
        else value
        for name, value in asked.inputs.items()
    }


def _wanted(asked: Asked, leaves: Mapping[str, object]) -> dict[str, Tensor]:
    found = {name: t for name, t in _floating(leaves).items() if t.requires_grad}
    return {**found, **asked.parameters}


def _outputs(asked: Asked, leaves: Mapping[str, object]) -> Mapping[str, Tensor]:
    with torch.enable_grad():
        return asked.run(leaves)


def _roots(asked: Asked, outputs: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that are differentiated, and their cotangents."""
    names = [n for n, y in outputs.items() if n in asked.cotangents and y.requires_grad]
    return [outputs[name] for name in names], [asked.cotangents[name] for name in names]


def _differentiated(
    asked: Asked,
    leaves: Mapping[str, object],
    runs: Sequence[Mapping[str, Tensor]],
    *,
    retain: bool = False,
) -> Gradients:
    """Gradients of all runs together."""
    wanted = _wanted(asked, leaves)
    pairs = [_roots(asked, outputs) for outputs in runs]
    roots = [root for found, _ in pairs for root in found]
    if not roots:
        return dict.fromkeys(wanted)
    seeds = [seed for _, found in pairs for seed in found]
    found = torch.autograd.grad(
        roots, list(wanted.values()), seeds, allow_unused=True, retain_graph=retain
    )
    return dict(zip(wanted, found, strict=True))


def _scalar(asked: Asked, leaves: Mapping[str, object]) -> Tensor:
    """The loss whose derivative by each output is its cotangent."""
    roots, seeds = _roots(asked, _outputs(asked, leaves))
    with torch.enable_grad():
        terms = [(root * seed.conj()).sum() for root, seed in zip(roots, seeds, strict=True)]
        real = [term.real if term.is_complex() else term for term in terms]
        return torch.stack([term.to(torch.float64) for term in real]).sum()


class _fields:  # noqa: N801  # a context, called like a function
    """Leaves whose `.grad` is empty, and is emptied at the end, like that of the parameters."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def __enter__(self) -> dict[str, object]:
        self.__exit__()
        return _leaves(self._asked)

    def __exit__(self, *error: object) -> None:
        for parameter in self._asked.parameters.values():
            parameter.grad = None


def _read(asked: Asked, leaves: Mapping[str, object]) -> Gradients:
    return {name: leaf.grad for name, leaf in _wanted(asked, leaves).items()}
