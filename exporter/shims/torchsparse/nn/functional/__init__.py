"""Functions over sparse tensors. Those of the extension may be imported, not called."""

from typing import Any

from fuseport.exporter.shims._placeholder import refusing

from . import conv_config
from .activation import leaky_relu, relu, silu
from .conv import conv3d, refuse_unknown
from .conv_config import (
    ConvMode,
    Dataflow,
    clear_global_conv_config,
    get_conv_mode,
    get_default_conv_config,
    get_downsample_mode,
    get_global_conv_config,
    get_kmap_mode,
    set_conv_mode,
    set_downsample_mode,
    set_global_conv_config,
    set_kmap_mode,
)
from .devoxelize import calc_ti_weights, spdevoxelize
from .hash import sphash, sphashquery
from .pooling import global_avg_pool, global_max_pool
from .voxelize import spcount, spcrop, spvoxelize

__all__ = [
    "ConvMode",
    "Dataflow",
    "calc_ti_weights",
    "clear_global_conv_config",
    "conv3d",
    "conv_config",
    "get_conv_mode",
    "get_default_conv_config",
    "get_downsample_mode",
    "get_global_conv_config",
    "get_kmap_mode",
    "global_avg_pool",
    "global_max_pool",
    "leaky_relu",
    "refuse_unknown",
    "relu",
    "set_conv_mode",
    "set_downsample_mode",
    "set_global_conv_config",
    "set_kmap_mode",
    "silu",
    "spcount",
    "spcrop",
    "spdevoxelize",
    "sphash",
    "sphashquery",
    "spvoxelize",
]


def __getattr__(name: str) -> Any:
    return refusing(
        __name__,
        name,
        f"torchsparse.nn.functional.{name} was called, of which fuseport's stand-in has no form: "
        "use torchsparse's layers",
    )
