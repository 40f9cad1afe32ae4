"""What an unpickler made, without the attributes that a file gave it.

A pickle may set attributes of what it makes: an OrderedDict whose `items` is a number, a tensor
whose `numel` is a dictionary. They run nothing, but what asks such an object gets another's answer.
"""

from typing import Any

from torch import Tensor

from fuseport.exporter.checkpoint.allowed import Boxed, Namespace

__all__ = ["disarmed"]


def disarmed(loaded: object) -> object:
    """`loaded`, the attributes of every dictionary and tensor in it taken away, in place.

    Stand-ins keep theirs: these are data.
    """
    seen: set[int] = set()
    waiting: list[Any] = [loaded]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            vars(value).clear()
        elif isinstance(value, dict):
            if type(value) is not dict:
                vars(value).clear()
            waiting += dict.keys(value)
            waiting += dict.values(value)
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif isinstance(value, Namespace | Boxed):
            waiting += vars(value).values()
    return loaded
