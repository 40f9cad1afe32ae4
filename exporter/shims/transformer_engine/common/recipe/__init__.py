"""How the package quantises: settings that code makes, names and asks, and nothing here follows.

Fields that are left out of what the package has are those of its environment variables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Number formats, with the largest finite number of the forward and of the backward."""

    E2M1 = _Largest(6, 6)
    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)


@dataclass(frozen=True)
class MMParams:
    """Of products of matrices."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Of quantising a tensor."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class Recipe:
    """What all recipes are, with the questions that code asks of one."""

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether it is `NVFP4BlockScaling`."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether it is `MXFP8BlockScaling`."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        """Whether it is `DelayedScaling`."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether it is `Float8CurrentScaling`."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether a tensor has one scale."""
        return issubclass(cls, DelayedScaling | Float8CurrentScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether it is `Float8BlockScaling`."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether it is `CustomRecipe`."""
        return issubclass(cls, CustomRecipe)


@dataclass
class DelayedScaling(Recipe):
    """Scales by the largest values of steps before."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    interval: int = -1
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)


@dataclass
class Float8CurrentScaling(Recipe):
    """Scales by the largest value of a tensor."""

    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = QParams()
    fp8_quant_fwd_weight: QParams = QParams()
    fp8_quant_bwd_grad: QParams = QParams()
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class MXFP8BlockScaling(Recipe):
    """Scales of blocks of 32 values, powers of 2."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    enable_2d_quantization: bool = False


@dataclass
class Float8BlockScaling(Recipe):
    """Scales of blocks of 128 values, or of 128 × 128."""

    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = QParams(power_2_scale=True)
    fp8_quant_fwd_weight: QParams = QParams(power_2_scale=True)
    fp8_quant_bwd_grad: QParams = QParams(power_2_scale=True)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class NVFP4BlockScaling(Recipe):
    """Scales of blocks of 16 values of 4 bits."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class CustomRecipe(Recipe):
    """Quantisers that a function of one's own makes."""

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
