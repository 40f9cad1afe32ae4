"""Layers, and what runs them one after another."""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from .core import SparseConvTensor

__all__ = [
    "OfPlaces",
    "RemoveGrid",
    "SparseBatchNorm",
    "SparseIdentity",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "SparseSyncBatchNorm",
    "ToDense",
    "assign_name_for_sparse_modules",
    "is_sparse_conv",
    "is_spconv_module",
]


class SparseModule(nn.Module):
    """What takes a sparse tensor in a `SparseSequential`; others take features."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self._sparse_unique_name = ""


class OfPlaces(SparseModule):
    """What convolutions are: they see the voxels in windows."""


class SparseSequential(SparseModule):
    """Modules in order: as arguments, by name, or in an ordered dictionary."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if len(args) == 1 and isinstance(args[0], OrderedDict):
            named = list(args[0].items())
        else:
            named = [(str(i), module) for i, module in enumerate(args)]
        for name, module in (*named, *kwargs.items()):
            if name in self._modules:
                raise ValueError("name exists.")
            self.add_module(name, module)

    def __getitem__(self, idx: int) -> Any:
        if not -len(self) <= idx < len(self):
            raise IndexError(f"index {idx} is out of range")
        return list(self._modules.values())[idx]

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """One more, called by its number unless it has a name."""
        if name is None:
            name = str(len(self._modules))
            if name in self._modules:
                raise KeyError("name exists")
        self.add_module(name, module)

    def forward(self, input: Any) -> Any:
        """What the last gives; modules of torch take the features alone."""
        for module in self._modules.values():
            assert module is not None
            if isinstance(input, SparseConvTensor) and not is_spconv_module(module):
                input = input.replace_feature(module(input.features))
            else:
                input = module(input)
        return input


class ToDense(SparseModule):
    """A dense tensor, channels first."""

    def forward(self, x: SparseConvTensor) -> Tensor:
        """(batch, c, …)."""
        return x.dense()


class RemoveGrid(SparseModule):
    """Takes away memory that was given beforehand."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """`x` itself."""
        x.grid = None  # type: ignore[assignment]  # as there
        return x


class _OfFeatures:
    """Mixed in before a module of torch: it takes sparse tensors, too."""

    def forward(self, input: Any) -> Any:
        """Of features."""
        if isinstance(input, SparseConvTensor):
            return input.replace_feature(super().forward(input.features))  # type: ignore[misc]
        return super().forward(input)  # type: ignore[misc]


class SparseBatchNorm(_OfFeatures, nn.BatchNorm1d):
    """Of features."""


class SparseSyncBatchNorm(_OfFeatures, nn.SyncBatchNorm):
    """Of features."""


class SparseReLU(_OfFeatures, nn.ReLU):
    """Of features."""


class SparseIdentity(_OfFeatures, nn.Identity):
    """Of features."""


def is_spconv_module(module: Any) -> bool:
    """Whether it takes sparse tensors."""
    return isinstance(module, (SparseModule, SparseBatchNorm, SparseReLU))


def is_sparse_conv(module: Any) -> bool:
    """Whether it is a convolution of voxels."""
    return isinstance(module, OfPlaces)


def assign_name_for_sparse_modules(module: nn.Module) -> None:
    """Let each know its name."""
    for name, part in module.named_modules():
        if isinstance(part, SparseModule):
            part._sparse_unique_name = name
