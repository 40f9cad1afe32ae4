"""Stands in for `deform_conv_cuda`, the extension of mmdetection before 1.1, and its copies.

It is `deform_conv_ext` under other names.
"""

from fuseport.exporter.shims._extensions.deform_conv_ext import (
    deform_conv_backward_input as deform_conv_backward_input_cuda,
)
from fuseport.exporter.shims._extensions.deform_conv_ext import (
    deform_conv_backward_parameters as deform_conv_backward_parameters_cuda,
)
from fuseport.exporter.shims._extensions.deform_conv_ext import (
    deform_conv_forward as deform_conv_forward_cuda,
)
from fuseport.exporter.shims._extensions.deform_conv_ext import (
    modulated_deform_conv_backward as modulated_deform_conv_cuda_backward,
)
from fuseport.exporter.shims._extensions.deform_conv_ext import (
    modulated_deform_conv_forward as modulated_deform_conv_cuda_forward,
)

__all__ = [
    "deform_conv_backward_input_cuda",
    "deform_conv_backward_parameters_cuda",
    "deform_conv_forward_cuda",
    "modulated_deform_conv_cuda_backward",
    "modulated_deform_conv_cuda_forward",
]
