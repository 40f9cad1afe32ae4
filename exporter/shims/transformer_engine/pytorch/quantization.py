"""FP8 and FP4: off, or refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..common.recipe import DelayedScaling, Recipe
from ._refused import refuse

__all__ = [
    "FP8GlobalStateManager",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]

_REASON = "fuseport's stand-in for transformer_engine computes in the dtypes of weights"


class autocast:  # noqa: N801  # the package's name
    """Nothing where it is not enabled.

    Args:
        enabled: must be False.
        calibrating: has no effect.
        recipe: has no effect.
        amax_reduction_group: has no effect.

    Raises:
        NotImplementedError: it is entered, and enabled.
    """

    _name = "autocast"

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        self._enabled = enabled

    def __enter__(self) -> "autocast":
        if self._enabled:
            refuse(
                f"{self._name}(enabled=True)",
                "computes in FP8 or FP4",
                "give enabled=False: the layers then compute in the dtype of their weights",
            )
        return self

    def __exit__(self, *raised: Any) -> None:
        pass


class fp8_autocast(autocast):  # noqa: N801  # the package's name
    """`autocast` by its older name, whose recipe is fp8_recipe and whose group fp8_group."""

    _name = "fp8_autocast"

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        super().__init__(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Nothing where it is not enabled.

    Raises:
        NotImplementedError: it is.
    """
    if enabled:
        refuse(
            "quantized_model_init(enabled=True)",
            "makes weights of FP8 or FP4",
            "give enabled=False, and a checkpoint of weights in another dtype",
        )
    yield


fp8_model_init = quantized_model_init


def get_default_fp8_recipe() -> Recipe:
    """Delayed scaling."""
    return DelayedScaling()


get_default_recipe = get_default_fp8_recipe


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """No, and why not if that is asked."""
    return (False, _REASON) if return_reason else False


is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_fp8_available


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Yes, and no reason why not."""
    return (True, "") if return_reason else True


def check_fp8_support() -> tuple[bool, str]:
    """No, and why not."""
    return False, _REASON


check_mxfp8_support = check_fp8_block_scaling_support = check_nvfp4_support = check_fp8_support


class FP8GlobalStateManager:
    """What code asks of FP8: it is off."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """No."""
        return False

    is_fp8_calibration = with_fp8_parameters = fp8_graph_capturing = is_fp8_enabled

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """No, and why not."""
        return False, _REASON

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Delayed scaling."""
        return DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> None:
        """None."""

    @classmethod
    def reset(cls) -> None:
        """Nothing."""
