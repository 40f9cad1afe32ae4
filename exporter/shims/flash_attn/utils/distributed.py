"""What models import to be of several devices, which no program is."""

from typing import Any, NoReturn

from ..ops.fused_dense import refuse_parallel

__all__ = [
    "all_gather",
    "all_gather_raw",
    "all_reduce",
    "all_reduce_raw",
    "allreduce_sequence_parallel_grad",
    "get_dim_for_local_rank",
    "reduce_scatter",
    "reduce_scatter_raw",
    "sync_shared_params",
]


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """How much of `dim` one of `world_size` devices has, in multiples; the first have one more."""
    each, more = divmod(dim // multiple_of, world_size)
    return (each + (local_rank < more)) * multiple_of


def all_gather(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    refuse_parallel("utils.distributed.all_gather")


def all_gather_raw(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    refuse_parallel("utils.distributed.all_gather_raw")


def all_reduce(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    refuse_parallel("utils.distributed.all_reduce")


def all_reduce_raw(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    refuse_parallel("utils.distributed.all_reduce_raw")


def allreduce_sequence_parallel_grad(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    refuse_parallel("utils.distributed.allreduce_sequence_parallel_grad")


def reduce_scatter(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    refuse_parallel("utils.distributed.reduce_scatter")


def reduce_scatter_raw(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    refuse_parallel("utils.distributed.reduce_scatter_raw")


def sync_shared_params(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses."""
    refuse_parallel("utils.distributed.sync_shared_params")
