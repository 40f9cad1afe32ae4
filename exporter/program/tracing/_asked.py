"""What torch asks at each decomposition: of all its operators, however small the program is, and
whether all is so of sizes that a capture took for granted."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch._export import utils
from torch.export import _unlift

__all__ = ["asked_once"]

_ASK = "_materialize_cpp_cia_ops"
_ASKS_AGAIN = "_ok_to_generate_guards_fn"


@contextmanager
def asked_once() -> Iterator[None]:
    """Within, C++ is asked for the names of all operators once: by itself, torch does so for each
    library of operators. What a capture took for granted is not asked again: as Python asks whether
    `min(h, w) > 2`, it would be taken for granted then that `h < w`, as in the example."""
    instead = (utils, _ASK, functools.cache), (_unlift, _ASKS_AGAIN, lambda _: lambda: False)
    with ExitStack() as stack:
        for module, name, form in instead:
            if (own := getattr(module, name, None)) is not None:  # private: another torch may
                stack.enter_context(mock.patch.object(module, name, form(own)))  # have none
        yield
