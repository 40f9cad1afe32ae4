"""Which integers a model makes of its numbers: what it takes by order, or by rounding.

Where two equally good computations choose otherwise, what follows from the choice differs by far
more than by rounding. A detector that takes the best of hundreds of alike queries does so.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Choices", "FirstOfEqual"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# On the places that pooling takes its values from gradients alone depend: `kinks` has them. What is
# not filled yet, and the bits of a number, are no choice.
_NONE = ("max_pool", "empty", "view")


class Choices(TorchFunctionMode):
    """Notes the integers that functions of floating tensors give.

    Attributes:
        made: of each call, the function's name and a digest of the integers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, bytes]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        first = next(iter((*args, *(kwargs or {}).values())), None)
        if isinstance(first, Tensor) and first.is_floating_point():
            name = getattr(func, "__name__", "")
            if not any(part in name for part in _NONE):
                self.made += ((name, _digest(t)) for t in _integers(result))
        return result

    def has(self, function: str) -> bool:
        """Whether a function of that name was called."""
        return any(name == function for name, _ in self.made)

    def otherwise(self, other: "Choices") -> list[str]:
        """The functions that gave something else in another run, each once.

        A run that calls others tells nothing: model code may do so in another dtype.
        """
        if [name for name, _ in self.made] != [name for name, _ in other.made]:
            return []
        pairs = zip(self.made, other.made, strict=True)
        return list(dict.fromkeys(mine[0] for mine, theirs in pairs if mine != theirs))


class FirstOfEqual(TorchFunctionMode):
    """Of equal values `topk` takes the first, as ONNX's TopK does; torch takes any.

    Scores that a `relu` has cut are equal, whatever is rounded.

    Attributes:
        otherwise: whether torch took others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.otherwise = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk" or not isinstance(result, tuple):
            return result
        x, k, dim, largest = _of_topk(*args, **(kwargs or {}))
        if not x.dim() or not _has_values(x):
            return result
        values, places = x.sort(dim=dim, descending=largest, stable=True)
        first = [t.narrow(dim, 0, k).contiguous() for t in (values, places)]
        if torch.equal(first[1].sort(dim)[0], result[1].sort(dim)[0]):
            return result
        self.otherwise = True
        return type(result)(first)


def _of_topk(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any, **__: Any
) -> tuple[Tensor, int, int, bool]:
    return input, k, dim, largest


def _integers(result: Any) -> Iterator[Tensor]:
    for t in result if isinstance(result, tuple) else (result,):
        if type(t) is Tensor and t.dtype in _INTEGERS and _has_values(t):
            yield t


def _has_values(t: Tensor) -> bool:
    """Not what stands for a tensor while torch traces."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(t)
    traced = torch._C._get_tracing_state() is not None
    return (
        not wrapped
        and not traced
        and t.layout is torch.strided
        and not t.is_meta
        and not t.is_nested
    )


def _digest(t: Tensor) -> bytes:
    return hashlib.blake2b(t.detach().cpu().numpy().tobytes(), digest_size=16).digest()
