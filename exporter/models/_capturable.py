"""A user's module as a program of torch can hold it.

What `torch.compile` has wrapped is the module inside, whose names and values it has. And a program
of torch is a `torch.fx.GraphModule`, at the top of which some names are taken: `graph`, `code` and
`meta` among them, which models have, too.
"""

import inspect
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

__all__ = ["capturable"]

# `meta` and `shape_env` are attributes of each one, the others of the class.
_TAKEN = frozenset({*dir(GraphModule), "meta", "shape_env"} - {*dir(nn.Module)})
_HELD = "net"


def capturable(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The module without what `torch.compile` wrapped, inside of another if its names want that.

    Returns:
        The module, and what the user should know, a sentence each.
    """
    module = _without_compilation(module)
    own = (*module.named_children(), *module.named_parameters(), *module.named_buffers())
    if taken := sorted({name.split(".")[0] for name, _ in own} & _TAKEN):
        note = (
            f"torch's programs have {' and '.join(taken)} for themselves: the model is inside of "
            f"another, and the names of its parameters begin with {_HELD}"
        )
        return _held(module), (note,)
    return module, ()


def _without_compilation(module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):  # which has what is inside otherwise
        return module
    for name, child in module._modules.items():  # also where it occurs again
        if child is not None:
            module._modules[name] = _without_compilation(child)
    return module._modules.get("_orig_mod") or module


def _held(module: nn.Module) -> nn.Module:
    """A module that calls this one, with its signature and its attributes."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, _HELD, module)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__(_HELD), name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, _HELD)(*args, **kwargs)

    signature = inspect.signature(module.forward)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    names = [own, *signature.parameters.values()]
    Held.forward.__signature__ = signature.replace(parameters=names)  # type: ignore[attr-defined]
    Held.__name__ = type(module).__name__
    return Held()
