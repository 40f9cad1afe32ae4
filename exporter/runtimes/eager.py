"""The model itself, built again from the bundle, with the fused ops."""

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._functorch import config as functorch

from fuseport.exporter import models, shims
from fuseport.exporter.models.fresh import repeatable
from fuseport.exporter.models.model import at
from fuseport.exporter.program import entry_of, named_outputs
from fuseport.exporter.runtimes._device import OF_TORCH, device_of
from fuseport.exporter.runtimes._ops import prepare
from fuseport.exporter.runtimes._torch_module import ModuleSession
from fuseport.exporter.user_code import own_backward

__all__ = ["AUTOGRAD", "DEVICES", "FORMAT", "load", "missing", "prepare"]

FORMAT = None
AUTOGRAD = True
DEVICES = OF_TORCH


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
            return model.module(*inputs)

    session = ModuleSession(
        repeatable(model.module, call),
        model.module.named_parameters(),
        lambda result: named_outputs(result, model.outputs),
        device,
    )
    # For the session's life: entering at each call would be timed, and not be of one thread alone.
    held = ExitStack()
    held.enter_context(own_backward.without_reentry())
    if whole.stand_ins:  # a backward of the model's own may import, too
        held.enter_context(shims.installed(whole.stand_ins))
    weakref.finalize(session, held.close)
    return session
