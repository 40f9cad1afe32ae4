"""Large outputs lie in huge pages, where the system leaves that to programs."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuseport.ops import OPS
from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.swiglu import swiglu

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "causal_conv1d": lambda x: causal_conv1d(x, torch.ones(x.shape[1], 4)),
    "rms_norm": lambda x: rms_norm(x, torch.ones(x.shape[-1])),
    "swiglu": lambda x: swiglu(x, x),
}


def flags(tensor: torch.Tensor) -> list[str]:
    """What the kernel knows of the mapping that the middle of the tensor's memory lies in."""
    address = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping with flags has {address:x}")


@pytest.mark.skipif(not SETTING.exists(), reason=f"this system has no huge pages: no {SETTING}")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_large_output_asks_for_huge_pages(name: str) -> None:
    with torch.no_grad():
        large = OPERATIONS[name](torch.randn(9, 1024, 1024))
        assert "hg" in flags(large)


def test_all_bindings_on_the_cpu_get_their_memory_there() -> None:
    bindings = [path for spec in OPS.values() for path in Path(spec.folder).glob("torch.*pp")]
    assert len(bindings) > 10
    assert [path for path in bindings if "at::empty" in path.read_text()] == []
