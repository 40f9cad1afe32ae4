"""What stands for a function, a module or a kernel that cannot be exported."""

from fuseport.exporter import shims
from fuseport.ops import OPS

__all__ = ["OWN_OP", "advice", "stand_in"]

OWN_OP = "register it as an op of your own, with a reference: --ops FILE"

# What torch has itself, by parts of the names of what computes the same elsewhere.
_IN_TORCH = {
    "torch.nn.functional.scaled_dot_product_attention": (
        "flash_attn",
        "FlashAttn",
        "_flash_attention",
        "memory_efficient_attention",
        "sageattn",
    ),
}
_SHIMMED = (
    "selective_scan",
    "mamba_",
    "causal_conv1d",
    "flash_attn",
    "rms_norm",
    "layer_norm_fn",
    "triton",
    "MultiScaleDeformableAttention",
    "deform_conv_ext",
    "deform_conv_cuda",
    "DeformConv",
    "DCNv2",
    "_ext.dcn",
    "spatial_correlation",
    "SpatialCorrelation",
    "correlation_cuda",
    "CorrelationFunction",
)
"""Modules that `--shim auto` has a stand-in for, by parts of the names of what is in them."""


def advice(*names: str, otherwise: str = OWN_OP) -> str:
    """What to do about a call, in a few words.

    Args:
        names: under which it may be known, the best one first: of the function, its module, what
            it is called from.
    """
    for name in names:
        found = stand_in(name)
        if found is not None:
            shim = " (--shim auto, or call it yourself)" if _is_shimmed(name) else ""
            return f"{found} computes it{shim}"
        if (package := shims.called(name)) in shims.SHIMS:
            return f"fuseport has a stand-in for {package}: --shim auto"
    return otherwise


def stand_in(name: str) -> str | None:
    """The function that computes what one of that name seems to; None if there is none."""
    candidates = [
        (part, f"fuseport.ops.{op.name}" if op.namespace == "fuseport" else op.name)
        for op in OPS.values()
        for part in op.stands_for
    ]
    candidates += [(part, what) for what, parts in _IN_TORCH.items() for part in parts]
    fitting = [c for c in candidates if c[0] in name]
    # The longest part that fits decides.
    return max(fitting, key=lambda c: len(c[0]))[1] if fitting else None


def _is_shimmed(name: str) -> bool:
    return any(part in name for part in _SHIMMED)
