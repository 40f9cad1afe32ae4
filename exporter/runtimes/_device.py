"""The device that a session computes on: the CPU, or a CUDA GPU."""

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["DEVICES", "OF_TORCH", "device_of", "missing", "place_of"]

DEVICES = ("cpu", "cuda")
"""What a program's `device` can be."""

OF_TORCH: Mapping[str, str | None] = dict.fromkeys(DEVICES)
"""`DEVICES` of a runtime of torch's, which has them all, and no execution providers."""


def device_of(program: Mapping[str, Any]) -> torch.device:
    """Where a program is to be run: its `device`, the CPU if that is absent.

    On a GPU, torch's convolutions round their factors to 10 bits (TF32) unless they are told not
    to: they are, for what is compared is float32.
    """
    device = torch.device(program.get("device", "cpu"))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    return device


def place_of(session: object) -> torch.device:
    """Where a session takes its tensors: on the CPU, if it does not say."""
    return getattr(session, "device", torch.device("cpu"))


def missing(device: str) -> str | None:
    """Why this process has no such device; None if it has."""
    if device == "cpu" or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "this torch is built without CUDA: install one that is built with it"
    return "torch sees no GPU (fuseport doctor tells more)"
