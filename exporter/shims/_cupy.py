"""What CuPy's stand-in is made of: kernels by their text, and placeholders."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fuseport.exporter.shims import _placeholder

__all__ = ["Placeholder", "RawKernel", "RawModule", "launched", "memoize"]

Launch = Callable[[str, str, Sequence[int], Sequence[int], Sequence[Any], int], None]
"""Of a text: a kernel's name, the sizes of grid and block, arguments, bytes of shared memory."""

_LAUNCH: ContextVar[Launch | None] = ContextVar("launch", default=None)


@contextmanager
def launched(by: Launch) -> Iterator[None]:
    """For the time of the context, kernels that are launched are given to a function."""
    token = _LAUNCH.set(by)
    try:
        yield
    finally:
        _LAUNCH.reset(token)


class RawKernel:
    """A kernel: launched, it raises RuntimeError and says what it is.

    Args:
        code: its text.
        name: of the function there.
        options: of the compiler, which there is none of.
    """

    def __init__(
        self, code: str, name: str, options: Sequence[str] = (), *args: Any, **others: Any
    ) -> None:
        self.code, self.name = code, name

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_mem: int = 0,
        stream: Any = None,
        **others: Any,
    ) -> None:
        launch = _LAUNCH.get()
        if launch is not None:
            launch(self.code, self.name, grid, block, args, shared_mem)
            return
        code = sys._getframe(1).f_code
        place = f"{Path(code.co_filename).name}:{sys._getframe(1).f_lineno}"
        raise RuntimeError(
            f"the CUDA kernel {self.name} ({place}) was launched, but cupy here is fuseport's "
            "stand-in: CUDA kernels run on GPUs only, and no exported format holds one. Compute it "
            "by functions of torch, call the op of fuseport.ops that computes the same, or make it "
            "an op of your own (README, Ops of your own)"
        )


class RawModule:
    """Kernels of one text.

    Args:
        code: the text.
    """

    def __init__(self, code: str = "", *args: Any, **options: Any) -> None:
        self.code = code

    def get_function(self, name: str) -> RawKernel:
        """The kernel of that name."""
        return RawKernel(self.code, name)


def memoize(*args: Any, **options: Any) -> Callable[[Any], Any]:
    """Decorates a function, which is called each time: to make a kernel again costs nothing."""
    return lambda function: function


class Placeholder(_placeholder.Placeholder):
    """Something of CuPy's that code may name and look into, not call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self._name} was called, but cupy here is fuseport's stand-in, of which kernels can "
            "be made and nothing is computed: CuPy runs on GPUs only, and no exported format holds "
            "what it does"
        )
