"""Which kernels a convolution has there; the names alone, but for `kmap_mode`."""

from enum import Enum
from typing import Any

__all__ = [
    "ConvMode",
    "Dataflow",
    "clear_global_conv_config",
    "get_conv_mode",
    "get_default_conv_config",
    "get_downsample_mode",
    "get_global_conv_config",
    "get_kmap_mode",
    "set_conv_mode",
    "set_downsample_mode",
    "set_global_conv_config",
    "set_kmap_mode",
]

ON_THE_FLY = "hashmap_on_the_fly"


class Dataflow(Enum):
    """How a convolution goes about it."""

    ImplicitGEMM = 0
    GatherScatter = 1
    FetchOnDemand = 2
    CodedCSR = 3


class ConvMode(Enum):
    """How its places are sorted."""

    mode0 = 0
    mode1 = 1
    mode2 = 2


class Config(dict[str, Any]):
    """Settings, as items or attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def copy(self) -> "Config":
        """Another of the same."""
        return Config(self)


_set: dict[str, Any] = {
    "mode": ConvMode.mode0,
    "kmap": ON_THE_FLY,
    "downsample": "spconv",
    "config": None,
}


def get_default_conv_config(conv_mode: ConvMode = ConvMode.mode0, training: bool = False) -> Config:
    """What a convolution has that is told nothing."""
    return Config(
        dataflow=Dataflow.ImplicitGEMM,
        ifsort=conv_mode != ConvMode.mode0,
        kmap_mode=ON_THE_FLY,
        downsample_mode="spconv",
        split_mask_num=3 if conv_mode == ConvMode.mode2 else 1,
        split_mask_num_bwd=3,
        epsilon=0.0,
        mm_thresh=0,
        FOD_fusion=True,
    )


def get_global_conv_config() -> Any:
    """What all convolutions have; None for the default."""
    return _set["config"]


def set_global_conv_config(conv_config: Any) -> None:
    """Another one."""
    _set["config"] = conv_config


def clear_global_conv_config() -> None:
    """The default."""
    _set["config"] = None


def get_conv_mode() -> ConvMode:
    """How places are sorted."""
    mode: ConvMode = _set["mode"]
    return mode


def set_conv_mode(conv_mode: Any) -> None:
    """By a mode, or its number."""
    _set["mode"] = ConvMode(conv_mode) if isinstance(conv_mode, int) else conv_mode


def get_kmap_mode() -> str:
    """What was set, of no effect there either: a config has its own."""
    mode: str = _set["kmap"]
    return mode


def set_kmap_mode(kmap_mode: str) -> None:
    """One of two."""
    assert kmap_mode in (ON_THE_FLY, "hashmap"), f"Unsupport kmap_mode: {kmap_mode}."
    _set["kmap"] = kmap_mode


def get_downsample_mode() -> str:
    """What was set, of no effect there either: a config has its own."""
    mode: str = _set["downsample"]
    return mode


def set_downsample_mode(downsample_mode: str) -> None:
    """One of two."""
    assert downsample_mode in ("spconv", "minkowski"), f"Unsupport {downsample_mode}."
    _set["downsample"] = downsample_mode
