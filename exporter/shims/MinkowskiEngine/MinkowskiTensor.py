"""What sparse tensors and fields of points have in common."""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NoReturn, Self

import torch
from torch import Tensor as Features
from torch._subclasses.fake_tensor import FakeTensor

from .MinkowskiCoordinateManager import CoordinateManager

__all__ = [
    "COORDINATE_KEY_DIFFERENT_ERROR",
    "COORDINATE_MANAGER_DIFFERENT_ERROR",
    "SparseTensorOperationMode",
    "SparseTensorQuantizationMode",
    "Tensor",
    "clear_global_coordinate_manager",
    "global_coordinate_manager",
    "manager_of",
    "set_global_coordinate_manager",
    "set_sparse_tensor_operation_mode",
    "sparse_tensor_operation_mode",
]

COORDINATE_MANAGER_DIFFERENT_ERROR = (
    "SparseTensors must share the same coordinate manager for this operation."
)
COORDINATE_KEY_DIFFERENT_ERROR = "SparseTensors must have the same coordinate_map_key."


class SparseTensorOperationMode(Enum):
    """Whether tensors that are made have a manager of their own."""

    SEPARATE_COORDINATE_MANAGER = 0
    SHARE_COORDINATE_MANAGER = 1


class SparseTensorQuantizationMode(Enum):
    """What becomes of the features of voxels that are alike."""

    RANDOM_SUBSAMPLE = 0
    UNWEIGHTED_AVERAGE = 1
    UNWEIGHTED_SUM = 2
    NO_QUANTIZATION = 3
    MAX_POOL = 4
    SPLAT_LINEAR_INTERPOLATION = 5


_shared: dict[str, Any] = {
    "mode": SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER,
    "manager": None,
}


def set_sparse_tensor_operation_mode(operation_mode: SparseTensorOperationMode) -> None:
    """Of all tensors that are made from now on."""
    assert isinstance(operation_mode, SparseTensorOperationMode)
    _shared["mode"] = operation_mode


def sparse_tensor_operation_mode() -> SparseTensorOperationMode:
    """The mode that is set."""
    mode: SparseTensorOperationMode = _shared["mode"]
    return mode


def global_coordinate_manager() -> CoordinateManager | None:
    """The manager that tensors share, where they do."""
    manager: CoordinateManager | None = _shared["manager"]
    return manager


def set_global_coordinate_manager(coordinate_manager: CoordinateManager | None) -> None:
    """Another one."""
    _shared["manager"] = coordinate_manager


def clear_global_coordinate_manager() -> None:
    """None: the next tensor makes one."""
    set_global_coordinate_manager(None)


def manager_of(dimension: int) -> CoordinateManager:
    """The manager of a tensor that is given none."""
    if sparse_tensor_operation_mode() != SparseTensorOperationMode.SHARE_COORDINATE_MANAGER:
        return CoordinateManager(D=dimension)
    manager = global_coordinate_manager()
    if manager is None:
        manager = CoordinateManager(D=dimension)
        set_global_coordinate_manager(manager)
    return manager


class Tensor:
    """Features, (n, c), at coordinates, (n, 1 + d), the batch first."""

    _F: Features
    _D: int
    _manager: CoordinateManager
    quantization_mode: SparseTensorQuantizationMode

    @property
    def features(self) -> Features:
        """(n, c)."""
        return self._F

    F = features

    @property
    def coordinates(self) -> Features:
        """(n, 1 + d)."""
        raise NotImplementedError

    C = property(lambda self: self.coordinates)

    @property
    def coordinate_manager(self) -> CoordinateManager:
        """What knows its coordinates."""
        return self._manager

    @property
    def dimension(self) -> int:
        """How many coordinates there are beside the batch."""
        return self._D

    D = dimension

    @property
    def shape(self) -> torch.Size:
        """That of features."""
        return self._F.shape

    def size(self) -> torch.Size:
        """That of features."""
        return self._F.shape

    def __len__(self) -> int:
        return len(self._F)

    @property
    def device(self) -> torch.device:
        """That of features."""
        return self._F.device

    def get_device(self) -> int:
        """Its number."""
        return self._F.get_device()

    @property
    def dtype(self) -> torch.dtype:
        """That of features."""
        return self._F.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether features have gradients."""
        return self._F.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> None:
        """Whether features are to have gradients."""
        self._F.requires_grad_(requires_grad)

    def float(self) -> Self:
        """Its features as float32, in this tensor."""
        self._F = self._F.float()
        return self

    def double(self) -> Self:
        """As float64."""
        self._F = self._F.double()
        return self

    def detach(self) -> Self:
        """Without gradients."""
        self._F = self._F.detach()
        return self

    @property
    def decomposition_permutations(self) -> Sequence[Features]:
        """The rows of each batch."""
        return _each(self.C, lambda rows: rows)

    @property
    def decomposed_coordinates(self) -> Sequence[Features]:
        """Coordinates of each batch, (n_b, d)."""
        return _each(self.C, lambda rows: self.C[rows, 1:])

    @property
    def decomposed_features(self) -> Sequence[Features]:
        """Features of each batch, (n_b, c)."""
        return _each(self.C, lambda rows: self._F[rows])

    @property
    def decomposed_coordinates_and_features(
        self,
    ) -> tuple[Sequence[Features], Sequence[Features]]:
        """Both."""
        return self.decomposed_coordinates, self.decomposed_features

    def coordinates_at(self, batch_index: int) -> Features:
        """Those of a batch."""
        return self.decomposed_coordinates[batch_index]

    def features_at(self, batch_index: int) -> Features:
        """Those of a batch."""
        return self.decomposed_features[batch_index]

    def coordinates_and_features_at(self, batch_index: int) -> tuple[Features, Features]:
        """Both."""
        return self.coordinates_at(batch_index), self.features_at(batch_index)


class _OfBatches(Sequence[Features]):
    """What there is of each batch, of which a program does not know how many there are."""

    def __init__(self, coordinates: Features, of: Any) -> None:
        self._batch = coordinates[:, 0]
        self._of = of

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int) or index < 0:
            self._refuse()
        return self._of((self._batch == index).nonzero().squeeze(1))

    def __len__(self) -> int:
        self._refuse()

    def __iter__(self) -> Iterator[Features]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(
            "how many batches a sparse tensor of MinkowskiEngine's has was asked for, which is in "
            "its coordinates: a program takes any number; ask for one by its number "
            "(decomposed_features[0]), or pool over each (MinkowskiGlobalAvgPooling)"
        )


def _each(coordinates: Features, of: Any) -> Sequence[Features]:
    found = _OfBatches(coordinates, of)
    if torch.compiler.is_exporting() or isinstance(coordinates, FakeTensor):
        return found
    count = int(coordinates[:, 0].max()) + 1 if len(coordinates) else 0
    return [found[index] for index in range(count)]
