"""Convolutions of voxels, with parameters as checkpoints of spconv 2 have them.

A weight is (out, k₀, …, k_{d-1}, in). A convolution of one place without a stride takes its weight
for (in, out) as it lies in memory, as spconv does.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.shims import _voxels

from .. import constants
from ..core import ConvAlgo
from . import ops
from ._places import moved, returned, strided, within
from .core import IndiceData, SparseConvTensor, expand_nd
from .modules import OfPlaces

__all__ = [
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseConvolution",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
]

_COUNT = "max_num_voxels_during_training"
# How the axes of a weight of another layout become (out, places, in).
_AXES = {"RSKC": (-2, -1), "RSCK": (-1, -2)}


class SparseConvolution(OfPlaces):
    """Of voxels in `ndim` dimensions; the classes below say which arguments are whose.

    Args:
        subm: gives the voxels that it is given; stride and padding are of no effect.
        transposed: spreads features, as a transposed convolution.
        inverse: gives the voxels that the layer of the same `indice_key` was given.
        indice_key: under this a layer leaves its places in the tensor, for others.
        record_voxel_count: there is a buffer for it, of no effect.
        algo, fp32_accum, large_kernel_fast_algo: which kernel is taken there.
    """

    def __init__(
        self,
        ndim: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        subm: bool = False,
        output_padding: Any = 0,
        transposed: bool = False,
        inverse: bool = False,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        act_type: Any = None,
        act_alpha: float = 0,
        act_beta: float = 0,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name)
        assert groups == 1, "don't support groups for now"
        if act_type is not None:
            raise NotImplementedError(
                "spconv's act_type is of its inference on GPUs, and has no form in fuseport's "
                "stand-in: let a module of torch follow"
            )
        self.ndim = ndim
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = expand_nd(ndim, kernel_size)
        self.stride = expand_nd(ndim, stride)
        self.dilation = expand_nd(ndim, dilation)
        self.padding = expand_nd(ndim, padding)
        self.output_padding = expand_nd(ndim, output_padding)
        places = math.prod(self.kernel_size)
        self.conv1x1 = places == 1 and (subm or math.prod(self.stride) == 1)
        if self.conv1x1 and not subm:
            assert not any(self.padding), "padding must be zero for 1x1 conv (k=1,s=1)"
        if subm and any(size % 2 == 0 for size in self.kernel_size):
            raise ValueError("subm only support odd ksize")
        self.transposed = transposed
        self.inverse = inverse
        self.groups = groups
        self.subm = subm
        self.indice_key = indice_key
        self.record_voxel_count = record_voxel_count
        limit = 128 if large_kernel_fast_algo else 32
        own = ConvAlgo.MaskImplicitGemm if places <= limit else ConvAlgo.Native
        self.algo = own if algo is None else algo
        self.fp32_accum = fp32_accum
        self.weight_shape = [out_channels, *self.kernel_size, in_channels]
        if self._counts():
            self.register_buffer(_COUNT, torch.zeros(1, dtype=torch.int32, device=device))
        self.weight = nn.Parameter(torch.zeros(self.weight_shape, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_in_this_layout)  # type: ignore[no-untyped-call]

    def reset_parameters(self) -> None:
        """Uniform, by how many values an output is of."""
        bound = 1 / math.sqrt(self.in_channels * math.prod(self.kernel_size))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def is_inverseable(self) -> bool:
        """Whether an inverse convolution can refer to it."""
        return self.indice_key is not None and not self.subm

    def extra_repr(self) -> str:
        """Its arguments."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"output_padding={self.output_padding}, bias={self.bias is not None}, algo={self.algo}"
        )

    def forward(
        self, input: SparseConvTensor, add_input: SparseConvTensor | None = None
    ) -> SparseConvTensor:
        """Features of `add_input`, which has the voxels of the output, are added to them.

        Raises:
            ValueError: the layer of the same `indice_key` has another shape.
        """
        assert input.features.shape[1] == self.in_channels, "channel size mismatch"
        if self.conv1x1:
            weight = self.weight.view(self.in_channels, self.out_channels)
            features = input.features @ weight
            out = input.replace_feature(features if self.bias is None else features + self.bias)
            out.spatial_shape = self._spatial_shape(input.spatial_shape)
        else:
            out = self._over_places(input)
        return out if add_input is None else out + add_input

    def _over_places(self, input: SparseConvTensor) -> SparseConvTensor:
        known = input.find_indice_pair(self.indice_key)
        if known is not None:
            assert self.algo == known.algo, (
                "due to limitation of pytorch, you must provide same algo to layers share same "
                "indice key."
            )
        kept = dict(input.indice_dict)
        if self.inverse:
            assert known is not None, f"no layer of indice_key {self.indice_key} came before"
            assert not known.is_subm, (
                "inverse conv can only be used with standard conv and pool ops."
            )
            self._same("kernel size", known.ksize, self.kernel_size)
            self._same("spatial shape", known.out_spatial_shape, input.spatial_shape)
            data = returned(known)
        elif known is not None:
            assert self.subm, "only support reuse subm indices"
            assert known.is_subm, "only support reuse subm indices"
            self._same("kernel size", known.ksize, self.kernel_size)
            self._same("dilation", known.dilation, self.dilation)
            self._same("spatial shape", known.spatial_shape, input.spatial_shape)
            data = known
        else:
            data = self._found(input)
            if self.indice_key is not None:
                kept[self.indice_key] = data
        features = _voxels.convolved(input.features, data.rows, self.weight, self.bias)
        return moved(input, features, data, kept)

    def _found(self, input: SparseConvTensor) -> IndiceData:
        if not self.subm:
            geometry = _voxels.Geometry(
                self.kernel_size, self.stride, self.padding, self.dilation, self.transposed
            )
            return strided(input, geometry, self._spatial_shape(input.spatial_shape), self.algo)
        return within(input, self.kernel_size, self.dilation, self.algo)

    def _spatial_shape(self, shape: list[Any]) -> list[Any]:
        if self.subm:
            return shape
        window = (self.kernel_size, self.stride, self.padding, self.dilation)
        if self.transposed:
            return ops.get_deconv_output_size(shape, *window, self.output_padding)
        return ops.get_conv_output_size(shape, *window)

    def _same(self, what: str, expected: Any, own: Any) -> None:
        if len(expected) != len(own) or any(map(_differs, expected, own)):
            raise ValueError(
                f"layers with the same indice_key, {self.indice_key}, must have the same {what}: "
                f"expect {expected}, this layer {own}"
            )

    def _counts(self) -> bool:
        return self.record_voxel_count and not self.subm and not self.inverse

    def get_max_num_voxels(self) -> Tensor | None:
        """The buffer, if there is one."""
        return getattr(self, _COUNT, None)


def _differs(one: Any, other: Any) -> bool:
    return one is not other and bool(one != other)


def _in_this_layout(module: SparseConvolution, state_dict: Any, prefix: str, *others: Any) -> None:
    """A weight of another layout, before it is loaded; a count that is not there is 0."""
    if module._counts():
        state_dict.setdefault(prefix + _COUNT, torch.zeros(1, dtype=torch.int32))
    layout, key = constants.SAVED_WEIGHT_LAYOUT, f"{prefix}weight"
    if layout in _AXES and key in state_dict:
        out, into = _AXES[layout]
        state_dict[key] = state_dict[key].movedim((out, into), (0, -1)).contiguous()


class _Regular(SparseConvolution):
    """Of voxels that it makes, where its window has one in it."""

    DIMENSIONS: int
    _TRANSPOSED = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            self.DIMENSIONS,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            transposed=self._TRANSPOSED,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            record_voxel_count=record_voxel_count,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
        )


class SparseConv1d(_Regular):
    """In one dimension."""

    DIMENSIONS = 1


class SparseConv2d(_Regular):
    """In two."""

    DIMENSIONS = 2


class SparseConv3d(_Regular):
    """In three."""

    DIMENSIONS = 3


class SparseConv4d(_Regular):
    """In four."""

    DIMENSIONS = 4


class SparseConvTranspose1d(_Regular):
    """Transposed, in one dimension."""

    DIMENSIONS = 1
    _TRANSPOSED = True


class SparseConvTranspose2d(_Regular):
    """In two."""

    DIMENSIONS = 2
    _TRANSPOSED = True


class SparseConvTranspose3d(_Regular):
    """In three."""

    DIMENSIONS = 3
    _TRANSPOSED = True


class SparseConvTranspose4d(_Regular):
    """In four."""

    DIMENSIONS = 4
    _TRANSPOSED = True


class _Inverse(SparseConvolution):
    """Of the voxels that the layer of the same key was given."""

    DIMENSIONS: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        indice_key: str | None,
        bias: bool = True,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            self.DIMENSIONS,
            in_channels,
            out_channels,
            kernel_size,
            bias=bias,
            inverse=True,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
        )


class SparseInverseConv1d(_Inverse):
    """In one dimension."""

    DIMENSIONS = 1


class SparseInverseConv2d(_Inverse):
    """In two."""

    DIMENSIONS = 2


class SparseInverseConv3d(_Inverse):
    """In three."""

    DIMENSIONS = 3


class SparseInverseConv4d(_Inverse):
    """In four."""

    DIMENSIONS = 4


class _Submanifold(SparseConvolution):
    """Of the voxels that it is given."""

    DIMENSIONS: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            self.DIMENSIONS,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            subm=True,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
        )


class SubMConv1d(_Submanifold):
    """In one dimension."""

    DIMENSIONS = 1


class SubMConv2d(_Submanifold):
    """In two."""

    DIMENSIONS = 2


class SubMConv3d(_Submanifold):
    """In three."""

    DIMENSIONS = 3


class SubMConv4d(_Submanifold):
    """In four."""

    DIMENSIONS = 4
