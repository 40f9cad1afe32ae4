"""Which registered ops a model calls, and with which of its parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fuseport.ops import OPS
from fuseport.ops.spec import OpSpec

__all__ = ["Called", "ops_called"]


@dataclass(frozen=True)
class Called:
    """What is called.

    Attributes:
        ops: in the order of `OPS`.
        float32: names of the parameters that are given, as they are, for arguments of which an op
            says that they stay float32 in half precision.
    """

    ops: tuple[OpSpec, ...]
    float32: tuple[str, ...]


def ops_called(run: Callable[[], Any], module: nn.Module) -> Called:
    """The ops whose operators are called while `run` calls the module."""
    with _Calls(module) as calls:
        run()
    return Called(
        tuple(spec for spec in OPS.values() if spec.name in calls.ops),
        tuple(name for name in calls.parameters.values() if name in calls.float32),
    )


class _Calls(TorchDispatchMode):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owners = {o.qualified_name: spec for spec in OPS.values() for o in spec.operators}
        self.parameters = {_place(p): name for name, p in module.named_parameters()}
        self.ops: set[str] = set()
        self.float32: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        owner = self.owners.get(func._schema.name)
        if owner is not None:
            self.ops.add(owner.name)
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.name in owner.float32_arguments and isinstance(value, Tensor):
                    self.float32.add(self.parameters.get(_place(value), ""))
        return func(*args, **(kwargs or {}))


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where its memory begins, and how many elements it has: a view of all of it has the same."""
    return tensor.data_ptr(), tensor.numel()
