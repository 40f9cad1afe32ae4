"""Stands in for `deform_pool_ext`, the extension of mmdetection 1.1 to 2.

It is `deform_pool_cuda` under other names.
"""

from fuseport.exporter.shims._extensions.deform_pool_cuda import (
    deform_psroi_pooling_cuda_backward as deform_psroi_pooling_backward,
)
from fuseport.exporter.shims._extensions.deform_pool_cuda import (
    deform_psroi_pooling_cuda_forward as deform_psroi_pooling_forward,
)

__all__ = ["deform_psroi_pooling_backward", "deform_psroi_pooling_forward"]
