"""Stands in for the package `MinkowskiEngine`, version 0.5: networks of sparse tensors.

Voxels that a layer makes are in the order in which the voxels come that they are made of; there
they are in the order of a hash table, which is no order. Rows of batches are in order of batches.
What the package itself fails at (windows of RegionType.CUSTOM, MinkowskiStableInstanceNorm) may be
named, not made. Modules that there have the name of a class in them, such as MinkowskiConvolution,
have another here: importing one would take the class's place.
"""

from typing import Any

from fuseport.exporter.shims._placeholder import unusable

from . import MinkowskiFunctional, MinkowskiOps, modules, utils
from ._broadcast import (
    MinkowskiBroadcast,
    MinkowskiBroadcastAddition,
    MinkowskiBroadcastConcatenation,
    MinkowskiBroadcastMultiplication,
)
from ._channelwise import MinkowskiChannelwiseConvolution
from ._convolution import (
    MinkowskiConvolution,
    MinkowskiConvolutionTranspose,
    MinkowskiGenerativeConvolutionTranspose,
)
from ._interpolation import MinkowskiInterpolation
from ._network import MinkowskiNetwork
from ._pruning import MinkowskiPruning
from ._union import MinkowskiUnion
from .MinkowskiCommon import (
    BroadcastMode,
    ConvolutionMode,
    CoordinateMapType,
    GPUMemoryAllocatorType,
    MinkowskiAlgorithm,
    MinkowskiModuleBase,
    PoolingMode,
    RegionType,
    convert_to_int_tensor,
)
from .MinkowskiCoordinateManager import (
    CoordinateManager,
    CoordinateMapKey,
)
from .MinkowskiKernelGenerator import (
    KernelGenerator,
    get_kernel_volume,
)
from .MinkowskiNonlinearity import (
    MinkowskiAdaptiveLogSoftmaxWithLoss,
    MinkowskiAlphaDropout,
    MinkowskiCELU,
    MinkowskiDropout,
    MinkowskiELU,
    MinkowskiGELU,
    MinkowskiHardshrink,
    MinkowskiHardsigmoid,
    MinkowskiHardswish,
    MinkowskiHardtanh,
    MinkowskiLeakyReLU,
    MinkowskiLogSigmoid,
    MinkowskiLogSoftmax,
    MinkowskiPReLU,
    MinkowskiReLU,
    MinkowskiReLU6,
    MinkowskiRReLU,
    MinkowskiSELU,
    MinkowskiSigmoid,
    MinkowskiSiLU,
    MinkowskiSinusoidal,
    MinkowskiSoftmax,
    MinkowskiSoftmin,
    MinkowskiSoftplus,
    MinkowskiSoftshrink,
    MinkowskiSoftsign,
    MinkowskiTanh,
    MinkowskiTanhshrink,
    MinkowskiThreshold,
)
from .MinkowskiNormalization import (
    MinkowskiBatchNorm,
    MinkowskiInstanceNorm,
    MinkowskiSyncBatchNorm,
)
from .MinkowskiOps import (
    MinkowskiLinear,
    MinkowskiStackCat,
    MinkowskiStackMean,
    MinkowskiStackSum,
    MinkowskiStackVar,
    MinkowskiToDenseTensor,
    MinkowskiToFeature,
    MinkowskiToSparseTensor,
    cat,
    dense_coordinates,
    mean,
    to_sparse,
    to_sparse_all,
    var,
)
from .MinkowskiOps import _sum as sum
from .MinkowskiPooling import (
    MinkowskiAvgPooling,
    MinkowskiGlobalAvgPooling,
    MinkowskiGlobalMaxPooling,
    MinkowskiGlobalPooling,
    MinkowskiGlobalSumPooling,
    MinkowskiMaxPooling,
    MinkowskiPoolingTranspose,
    MinkowskiSumPooling,
)
from .MinkowskiSparseTensor import SparseTensor
from .MinkowskiTensor import (
    SparseTensorOperationMode,
    SparseTensorQuantizationMode,
    clear_global_coordinate_manager,
    global_coordinate_manager,
    set_global_coordinate_manager,
    set_sparse_tensor_operation_mode,
    sparse_tensor_operation_mode,
)
from .MinkowskiTensorField import TensorField

__all__ = [
    "BroadcastMode",
    "ConvolutionMode",
    "CoordinateManager",
    "CoordinateMapKey",
    "CoordinateMapType",
    "GPUMemoryAllocatorType",
    "KernelGenerator",
    "MinkowskiAdaptiveLogSoftmaxWithLoss",
    "MinkowskiAlgorithm",
    "MinkowskiAlphaDropout",
    "MinkowskiAvgPooling",
    "MinkowskiBatchNorm",
    "MinkowskiBroadcast",
    "MinkowskiBroadcastAddition",
    "MinkowskiBroadcastConcatenation",
    "MinkowskiBroadcastMultiplication",
    "MinkowskiCELU",
    "MinkowskiChannelwiseConvolution",
    "MinkowskiConvolution",
    "MinkowskiConvolutionTranspose",
    "MinkowskiDropout",
    "MinkowskiELU",
    "MinkowskiFunctional",
    "MinkowskiGELU",
    "MinkowskiGenerativeConvolutionTranspose",
    "MinkowskiGlobalAvgPooling",
    "MinkowskiGlobalMaxPooling",
    "MinkowskiGlobalPooling",
    "MinkowskiGlobalSumPooling",
    "MinkowskiHardshrink",
    "MinkowskiHardsigmoid",
    "MinkowskiHardswish",
    "MinkowskiHardtanh",
    "MinkowskiInstanceNorm",
    "MinkowskiInterpolation",
    "MinkowskiLeakyReLU",
    "MinkowskiLinear",
    "MinkowskiLogSigmoid",
    "MinkowskiLogSoftmax",
    "MinkowskiMaxPooling",
    "MinkowskiModuleBase",
    "MinkowskiNetwork",
    "MinkowskiOps",
    "MinkowskiPReLU",
    "MinkowskiPoolingTranspose",
    "MinkowskiPruning",
    "MinkowskiRReLU",
    "MinkowskiReLU",
    "MinkowskiReLU6",
    "MinkowskiSELU",
    "MinkowskiSiLU",
    "MinkowskiSigmoid",
    "MinkowskiSinusoidal",
    "MinkowskiSoftmax",
    "MinkowskiSoftmin",
    "MinkowskiSoftplus",
    "MinkowskiSoftshrink",
    "MinkowskiSoftsign",
    "MinkowskiStackCat",
    "MinkowskiStackMean",
    "MinkowskiStackSum",
    "MinkowskiStackVar",
    "MinkowskiSumPooling",
    "MinkowskiSyncBatchNorm",
    "MinkowskiTanh",
    "MinkowskiTanhshrink",
    "MinkowskiThreshold",
    "MinkowskiToDenseTensor",
    "MinkowskiToFeature",
    "MinkowskiToSparseTensor",
    "MinkowskiUnion",
    "PoolingMode",
    "RegionType",
    "SparseTensor",
    "SparseTensorOperationMode",
    "SparseTensorQuantizationMode",
    "TensorField",
    "__version__",
    "cat",
    "clear_global_coordinate_manager",
    "convert_to_int_tensor",
    "dense_coordinates",
    "get_kernel_volume",
    "global_coordinate_manager",
    "is_cuda_available",
    "mean",
    "modules",
    "set_global_coordinate_manager",
    "set_gpu_allocator",
    "set_sparse_tensor_operation_mode",
    "sparse_tensor_operation_mode",
    "sum",
    "to_sparse",
    "to_sparse_all",
    "utils",
    "var",
]
__version__ = "0.5.4"


def is_cuda_available() -> bool:
    """Whether the package was built for GPUs, which code asks before it is run on one."""
    return False


def set_gpu_allocator(backend: GPUMemoryAllocatorType) -> None:
    """Whose memory it is there; of no effect."""


def __getattr__(name: str) -> Any:
    return unusable(__name__, name)
