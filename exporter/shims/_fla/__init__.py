"""Replacements for flash-linear-attention, `fla`, whose functions launch Triton kernels.

Names, arguments and semantics are those of versions 0.3.2 to 0.6; what a version lacks is not
asked for. Layers and models stay fla's own. What has no replacement refuses at its first kernel.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fuseport.exporter.shims._fla import decays, delta_rules, layers, losses, packed, rwkv7

__all__ = ["FUNCTIONS", "IMMATERIAL"]

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **packed.spared({**delta_rules.FUNCTIONS, **decays.FUNCTIONS, **rwkv7.FUNCTIONS}),
    **layers.FUNCTIONS,
    **losses.FUNCTIONS,
}

IMMATERIAL = frozenset(
    {
        "BT",
        "accumulate_grad_in_fp32",
        "backend",
        "chunk_indices",
        "chunk_size",
        "cu_seqlens_cpu",
        "disable_recompute",
        "inplace",
        "inplace_backward",
        "max_num_seqs",
        "num_chunks",
        "safe_gate",
        "use_graph",
    }
)
"""Choices between ways to compute the same, and what could be computed from other arguments."""
