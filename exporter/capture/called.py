"""Which registered ops a model calls."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fuseport.ops import OPS
from fuseport.ops.spec import OpSpec

__all__ = ["ops_called"]


def ops_called(run: Callable[[], Any]) -> tuple[OpSpec, ...]:
    """The ops whose operators are called, in the order of `OPS`."""
    with _Names() as called:
        run()
    return tuple(
        spec
        for spec in OPS.values()
        if any(operator.qualified_name in called.names for operator in spec.operators)
    )


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))
