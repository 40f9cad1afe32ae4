"""Counts of operations, which are of natten's kernels: they can be imported, and refuse."""

from typing import Any, NoReturn

__all__ = ["add_natten_handle", "get_flops"]


def add_natten_handle(flop_ctr: Any) -> NoReturn:
    """Refuses.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "natten.flops was called on fuseport's stand-in for natten, which has none of the kernels "
        "that it counts: count operations in a script of your own, not where the model is called"
    )


def get_flops(model: Any, input: Any, disable_warnings: bool = False) -> NoReturn:
    """Refuses.

    Raises:
        NotImplementedError: always.
    """
    add_natten_handle(model)
