"""What chooses natten's kernels: it is remembered, and changes nothing here."""

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

__all__ = [
    "MemoryUsagePreference",
    "allow_flex_compile",
    "allow_flex_compile_backprop",
    "are_deterministic_algorithms_enabled",
    "disable_autotuner",
    "disable_flex_compile",
    "disable_flex_compile_backprop",
    "disable_gemm_na",
    "disable_tf32",
    "disable_tiled_na",
    "enable_gemm_na",
    "enable_tf32",
    "enable_tiled_na",
    "force_flex_attention",
    "get_memory_usage_preference",
    "has_bfloat",
    "has_cuda",
    "has_fna",
    "has_fp32_gemm",
    "has_fp64_gemm",
    "has_fused_na",
    "has_gemm",
    "has_half",
    "has_tf32_gemm",
    "is_autotuner_enabled",
    "is_autotuner_enabled_for_backward",
    "is_autotuner_enabled_for_forward",
    "is_autotuner_thorough_for_backward",
    "is_autotuner_thorough_for_forward",
    "is_flex_compile_allowed",
    "is_flex_compile_backprop_allowed",
    "is_fna_enabled",
    "is_fused_na_enabled",
    "is_gemm_na_enabled",
    "is_kv_parallelism_in_fused_na_enabled",
    "is_memory_usage_default",
    "is_memory_usage_strict",
    "is_memory_usage_unrestricted",
    "is_tf32_in_gemm_na_enabled",
    "is_tiled_na_enabled",
    "set_memory_usage_preference",
    "should_force_flex_attention",
    "should_use_flex_attention",
    "use_autotuner",
    "use_deterministic_algorithms",
    "use_flex_attention",
    "use_fna",
    "use_fused_na",
    "use_gemm_na",
    "use_kv_parallelism_in_fused_na",
    "use_tf32_in_gemm_na",
    "use_tiled_na",
]


class MemoryUsagePreference(Enum):
    """How much memory kernels may take."""

    Default = 0
    Strict = 1
    Unrestricted = 2


_said: dict[str, bool] = {}
_memory = MemoryUsagePreference.Default


def _say(what: str, mode: bool = True, *args: Any, **kwargs: Any) -> bool:
    """Other arguments, which tell kernels how, have no effect."""
    _said[what] = mode
    return mode


def _take_back(what: str) -> bool:
    return _say(what, False)


def _is_said(what: str) -> bool:
    return _said.get(what, False)


_Switch = Callable[..., bool]


def _switch(what: str) -> tuple[_Switch, _Switch, _Switch]:
    return partial(_say, what), partial(_take_back, what), partial(_is_said, what)


use_fused_na, _, is_fused_na_enabled = _switch("fused")
use_fna, is_fna_enabled = use_fused_na, is_fused_na_enabled
use_autotuner, disable_autotuner, is_autotuner_enabled = _switch("autotuner")
is_autotuner_enabled_for_forward = is_autotuner_enabled_for_backward = is_autotuner_enabled
_, _, is_autotuner_thorough_for_forward = _switch("thorough")
is_autotuner_thorough_for_backward = is_autotuner_thorough_for_forward
use_deterministic_algorithms, _, are_deterministic_algorithms_enabled = _switch("deterministic")
use_kv_parallelism_in_fused_na, _, is_kv_parallelism_in_fused_na_enabled = _switch("parallel")
use_tiled_na, disable_tiled_na, is_tiled_na_enabled = _switch("tiled")
use_gemm_na, disable_gemm_na, is_gemm_na_enabled = _switch("gemm")
use_tf32_in_gemm_na, disable_tf32, is_tf32_in_gemm_na_enabled = _switch("tf32")
enable_tiled_na, enable_gemm_na, enable_tf32 = use_tiled_na, use_gemm_na, use_tf32_in_gemm_na
use_flex_attention, _, should_use_flex_attention = _switch("flex")
force_flex_attention, _, should_force_flex_attention = _switch("flex, always")
allow_flex_compile, disable_flex_compile, is_flex_compile_allowed = _switch("compiled")
(
    allow_flex_compile_backprop,
    disable_flex_compile_backprop,
    is_flex_compile_backprop_allowed,
) = _switch("compiled, backward")


def set_memory_usage_preference(pref: str = "default") -> None:
    """`default`, `strict` or `unrestricted`.

    Raises:
        ValueError: it is another.
    """
    global _memory
    known = {preference.name.lower(): preference for preference in MemoryUsagePreference}
    if pref not in known:
        raise ValueError(f"natten: a memory usage preference is {', '.join(known)}, not {pref!r}")
    _memory = known[pref]


def get_memory_usage_preference() -> MemoryUsagePreference:
    """What was set."""
    return _memory


def is_memory_usage_default() -> bool:
    """Whether that is `default`."""
    return _memory == MemoryUsagePreference.Default


def is_memory_usage_strict() -> bool:
    """Whether that is `strict`."""
    return _memory == MemoryUsagePreference.Strict


def is_memory_usage_unrestricted() -> bool:
    """Whether that is `unrestricted`."""
    return _memory == MemoryUsagePreference.Unrestricted


def has_fused_na(device_index: Any = None) -> bool:
    """Yes: attention in one step is here, and takes less memory than scores and weights do."""
    return True


has_fna = has_fused_na


def has_half(device_index: Any = None) -> bool:
    """Yes: half precision is computed in float32, and rounded once."""
    return True


has_bfloat = has_half


def has_cuda() -> bool:
    """No: there is nothing for CUDA here."""
    return False


def has_gemm(device_index: Any = None) -> bool:
    """No: there is one way to compute it here."""
    return False


has_tf32_gemm = has_fp32_gemm = has_fp64_gemm = has_gemm
