"""Checks of arguments, and a logger, as models copy them from natten's layers."""

from . import checks, log
from .checks import check_all_args, get_num_na_weights

__all__ = ["check_all_args", "checks", "get_num_na_weights", "log"]
