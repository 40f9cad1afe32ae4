"""The model itself, built again from the bundle, with the fused ops."""

import linecache
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

from fuseport.exporter import models, shims
from fuseport.exporter.models.fresh import repeatable
from fuseport.exporter.models.model import at, named
from fuseport.exporter.program import entry_of, one_line
from fuseport.exporter.runtimes import Unsupported
from fuseport.exporter.runtimes._device import OF_TORCH, device_of
from fuseport.exporter.runtimes._ops import prepare
from fuseport.exporter.runtimes._torch_module import ModuleSession
from fuseport.exporter.user_code import own_backward

__all__ = ["AUTOGRAD", "DEVICES", "FORMAT", "load", "missing", "prepare"]

FORMAT = None
AUTOGRAD = True
DEVICES = OF_TORCH


# What code raises that takes no inputs of a layout, by a view of them or on purpose.
_OF_LAYOUT = (RuntimeError, AssertionError, ValueError)


def missing() -> str | None:
    """Nothing can be missing: torch is what fuseport is built on."""
    return None


def load(artifact: Path, program: Mapping[str, Any]) -> ModuleSession:
    """The model of a bundle; `artifact` is its weights."""
    # What torch.compile made in the model's code may be asked for a gradient twice, like the rest.
    functorch.donated_buffer = False
    whole = models.rebuild(program["architecture"], artifact, code=program.get("code"))
    device = device_of(program)
    if device.type != "cpu":  # where all of it is: the user's own may have a `to` of its own
        whole.module.to(device)
    model = at(whole, entry_of(program.get("kind", "forward")))

    def call(*inputs: Tensor) -> Any:
        with model.fused():
            try:
                return model.module(*inputs)
            except _OF_LAYOUT as error:
                _blame_layout(model.module, inputs, error)
                raise

    session = ModuleSession(
        repeatable(model.module, call),
        model.module.named_parameters(),
        lambda result: named(model, result),
        device,
        _explained,
    )
    # For the session's life: entering at each call would be timed, and not be of one thread alone.
    held = ExitStack()
    held.enter_context(own_backward.without_reentry())
    if whole.stand_ins:  # a backward of the model's own may import, too
        held.enter_context(shims.installed(whole.stand_ins))
    weakref.finalize(session, held.close)
    return session


def _blame_layout(module: nn.Module, inputs: Sequence[Tensor], error: Exception) -> None:
    """Raise Unsupported where it is the inputs' memory layout that the model's code does not take.

    `x.view(-1, c, h, w)` is of contiguous inputs, for one, and some code asserts that they are.
    Programs copy what comes in so.
    """
    contiguous = [x.detach().contiguous() for x in inputs]
    if all(a is b or a.stride() == b.stride() for a, b in zip(contiguous, inputs, strict=True)):
        return
    try:
        with torch.no_grad():
            module(*contiguous)
    except _OF_LAYOUT:
        return  # it is something else
    raise Unsupported(
        f"the model's own code takes no inputs of this memory layout: {one_line(error)}"
    ) from error


def _refused(error: RuntimeError | ValueError) -> str | None:
    """What an autograd function of the model's own says that has no backward, or none in this mode.

    None where the error is another one: of a call in its backward, for one.
    """
    (*_, (frame, line)) = traceback.walk_tb(error.__traceback__)
    within = frame.f_code.co_name == "backward"
    if isinstance(error, NotImplementedError):
        none = within or "backward or vjp" in str(error)
        return "an autograd function of the model's own has no backward" if none else None
    code = linecache.getline(frame.f_code.co_filename, line).strip()
    if within and isinstance(error, ValueError) and code.endswith(".saved_tensors"):
        return f"the model's own backward wants what its forward has not saved ({one_line(error)})"
    if within and code.startswith("raise"):
        return f"the model's own backward refuses to be called ({one_line(error)})"
    return None


def _explained(error: RuntimeError | ValueError) -> Exception:
    if (said := _refused(error)) is not None:
        return Unsupported(f"{said}: artifacts have the gradient of its forward")
    if own_backward.in_place(error) is None:
        return error
    return Unsupported(
        "the model's own code writes in place into what the gradient of an input needs, which "
        "autograd refuses: without copies of what it saves there is no such form"
    )
