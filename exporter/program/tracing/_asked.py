"""What torch asks of all its operators at each decomposition, however small the program is."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

from torch._export import utils

__all__ = ["asked_once"]

_ASK = "_materialize_cpp_cia_ops"


@contextmanager
def asked_once() -> Iterator[None]:
    """Within, C++ is asked for the names of all operators once: by itself, torch does so for each
    library of operators."""
    ask = getattr(utils, _ASK, None)  # private: another torch may have it otherwise
    with mock.patch.object(utils, _ASK, functools.cache(ask)) if ask else nullcontext():
        yield
