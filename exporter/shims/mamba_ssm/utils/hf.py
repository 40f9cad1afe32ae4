"""What models import to load weights from a hub; a stand-in loads nothing."""

from typing import Any, NoReturn

__all__ = ["load_config_hf", "load_state_dict_hf"]


def load_config_hf(model_name: str) -> Any:
    """Refuses."""
    _refuse("load_config_hf", model_name)


def load_state_dict_hf(model_name: str, device: Any = None, dtype: Any = None) -> Any:
    """Refuses."""
    _refuse("load_state_dict_hf", model_name)


def _refuse(name: str, model_name: str) -> NoReturn:
    raise RuntimeError(
        f"mamba_ssm.utils.hf.{name}({model_name!r}) was called on fuseport's stand-in, which loads "
        "nothing: give the checkpoint's folder to fuseport export"
    )
