"""What machine code is bound to: the version of torch, the system, the kind of processor."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["cpu_features", "gpu", "here", "unlike"]


def here() -> dict[str, str]:
    """What all machine code that is made here is bound to."""
    return {
        "torch": torch.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
    }


def cpu_features() -> tuple[str, ...]:
    """The instruction sets of this machine's processor, as torch calls them: `avx2`, `fma3`, …"""
    known = torch.cpu.get_capabilities()
    return tuple(sorted(name for name, present in known.items() if present is True))


def gpu() -> list[int]:
    """The compute capability of the GPU that torch computes on: [9, 0] of an H200."""
    return list(torch.cuda.get_device_capability())


def unlike(bound: Mapping[str, Any]) -> str | None:
    """Why code that is bound to `bound` does not run here; None if it does.

    Args:
        bound: as from `here`, and `cpu`, the instruction sets that it uses, if it is known, and
            `gpu`, as from `gpu`, if it is code for one.
    """
    differing = [
        f"{name} {bound[name]}, not {value}"
        for name, value in here().items()
        if bound.get(name) != value
    ]
    if differing:
        return f"compiled for {'; '.join(differing)}"
    if "gpu" in bound and bound["gpu"] != gpu():
        made, present = (".".join(map(str, found)) for found in (bound["gpu"], gpu()))
        return f"compiled for a GPU of compute capability {made}, not {present}"
    needed: Sequence[str] = bound.get("cpu", ())
    lacking = sorted(set(needed) - set(cpu_features()))
    return f"compiled for a processor with {', '.join(lacking)}" if lacking else None
