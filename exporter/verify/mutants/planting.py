"""Planting: one mutant takes the place of the right kernel, fake or body, for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library import simple_registry

from fuseport.exporter.verify.mutants import onnx_edits
from fuseport.exporter.verify.mutants.kinds import Change, Mutant
from fuseport.ops.spec import Operator, OpSpec, as_tuple

__all__ = ["planted"]


@contextmanager
def planted(spec: OpSpec, mutant: Mutant, device: str = "cpu") -> Iterator[OpSpec]:
    """The op with a mutant in it, for the time of the context.

    A kernel is replaced in torch's dispatcher, over the one that is registered, and a fake among
    the fakes: whatever calls the op meets the mutant, autograd, compilers and other threads too. A
    lowering is replaced in a copy of the spec.

    Args:
        spec: of the op, which is registered.
        mutant: of the op.
        device: whose kernels are meant, of torch's dispatcher: the CPU's or those for CUDA.
    """
    if mutant.kind.where == "lowering":
        yield onnx_edits.planted(spec, mutant)
        return
    operator = spec.operator(mutant.operator)
    assert mutant.change is not None
    library: Any = torch.library.Library(operator.namespace, "FRAGMENT")
    try:
        if mutant.kind.where == "fake":
            with _fake(operator, mutant.change, library):
                yield spec
        else:
            key = mutant.kind.key.replace("CPU", device.upper())
            _kernel(operator, mutant.change, key, library)
            yield spec
    finally:
        library._destroy()  # what was there before is there again


def _kernel(operator: Operator, change: Change, key: str, library: Any) -> None:
    right = torch.library.get_kernel(operator.overload, key)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return _changed(operator, change, lambda *a: right.call_boxed(keys, *a), args, kwargs)

    library.impl(operator.name, run, key, with_keyset=True, allow_override=True)


@contextmanager
def _fake(operator: Operator, change: Change, library: Any) -> Iterator[None]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _changed(operator, change, operator.fake, args, kwargs)

    holder = simple_registry.singleton.find(operator.qualified_name).fake_impl
    handle = holder.register(run, "a planted bug", library, allow_override=True)
    try:
        yield
    finally:
        handle.destroy()


def _changed(
    operator: Operator,
    change: Change,
    run: Callable[..., Tensor | tuple[Tensor, ...]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    names = operator.outputs
    given = dict(zip(operator.inputs, operator.bound(args, kwargs), strict=True))
    found = change(
        lambda inputs: dict(zip(names, as_tuple(run(*inputs.values())), strict=True)), given
    )
    results = tuple(found[name] for name in names)
    return results[0] if len(results) == 1 else results
