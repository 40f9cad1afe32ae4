"""Stands in for the package `mamba_ssm` of state-spaces/mamba, version 2.3, and its forks' 1.x.

The fork that Vim and VideoMamba ship is served by the same classes: `Mamba` takes its arguments.
"""

from .models.mixer_seq_simple import MambaLMHeadModel
from .modules.mamba2 import Mamba2
from .modules.mamba3 import Mamba3
from .modules.mamba_simple import Mamba
from .ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn

__all__ = ["Mamba", "Mamba2", "Mamba3", "MambaLMHeadModel", "mamba_inner_fn", "selective_scan_fn"]
__version__ = "2.3.2"
