"""Extensions that repositories compile into packages of their own, such as `theirs.ops._ext`.

The files beside this one stand in for them, wherever code imports them from.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["DCN_V2", "EXTENSIONS", "called", "ending", "file"]

DCN_V2 = "_ext"
"""That of DCNv2, which is called as many others are."""

EXTENSIONS: Mapping[str, str] = {
    DCN_V2: "dcn_v2",
    "mmcv._ext": "mmcv",
    "bev_pool_ext": "pcdet",
    "causal_product_cpu": "causal_product",
    "causal_product_cuda": "causal_product",
    "deform_conv_cuda": "deform_conv_cuda",
    "deform_conv_ext": "deform_conv_ext",
    "deform_pool_cuda": "deform_pool_cuda",
    "deform_pool_ext": "deform_pool_ext",
    "fast_transformers.aggregate.aggregate_cpu": "fast_transformers",
    "fast_transformers.clustering.hamming.cluster_cpu": "fast_transformers",
    "fast_transformers.hashing.hash_cpu": "fast_transformers",
    "fast_transformers.sparse_product.clustered_sparse_product_cpu": "fast_transformers",
    "fast_transformers.sparse_product.sparse_product_cpu": "fast_transformers",
    "fused_act_ext": "fused_act_ext",
    "ingroup_inds_cuda": "pcdet",
    "iou3d_nms_cuda": "pcdet",
    "local_product_cpu": "local_product",
    "local_product_cuda": "local_product",
    "pointnet2_batch_cuda": "pointnet2",
    "pointnet2_cuda": "pointnet2",
    "pointnet2_stack_cuda": "pcdet",
    "pscan_cuda.pscan": "v2dmamba",
    "roiaware_pool3d_cuda": "pcdet",
    "roipoint_pool3d_cuda": "pcdet",
    "upfirdn2d_ext": "upfirdn2d_ext",
    "v2dmamba_scan": "v2dmamba",
    "v2dmamba_scan.pscan": "v2dmamba",
}
"""By their names, the files of their stand-ins. A name is the end of that of a module; what imports
`_ext` has to be code that calls DCNv2's."""

_CALLS = b"dcn_v2_"


def ending(fullname: str) -> str | None:
    """The name in `EXTENSIONS` that a module's ends with, the longest; None if there is none."""
    parts = fullname.split(".")
    ends = (".".join(parts[first:]) for first in range(len(parts)))
    return next((end for end in ends if end in EXTENSIONS), None)


def called(fullname: str) -> str | None:
    """The name in `EXTENSIONS` that a module has, be it in a package; None if it is none of them.

    `_ext` is the name of many an extension: it is DCNv2's where the file that imports it calls
    functions of DCNv2's.
    """
    if fullname.startswith(__name__):
        return None
    name = ending(fullname)
    return None if name == DCN_V2 and _CALLS not in _importing() else name


def file(name: str) -> Path:
    """The file that stands in for one of `EXTENSIONS`."""
    return Path(__file__).with_name(f"{EXTENSIONS[name]}.py")


def _importing() -> bytes:
    """The source of the code that imports something just now; nothing where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _of_imports(frame.f_globals):
        frame = frame.f_back
    source = None if frame is None else frame.f_globals.get("__file__")
    if not isinstance(source, str) or not source.endswith(".py"):
        return b""
    return Path(source).read_bytes()


def _of_imports(names: Mapping[str, Any]) -> bool:
    name = str(names.get("__name__"))
    return name.partition(".")[0] == "importlib" or name.startswith("fuseport.exporter.shims")
