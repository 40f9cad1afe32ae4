"""The CUDA kernels of ops, run on the CPU: values, gradients, barriers, bounds.

`cuda_on_cpu/` stands in for the GPU; what is its own is not seen here. Ops with a test file of
their own, `test_<op>_cuda_on_cpu.py`, are left to that.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from fuseport.ops import OPS
from fuseport.ops.spec import Case, OpSpec
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.stand_in import DTYPES, Device, check

HERE = Path(__file__).parent
SPECS = [
    spec
    for spec in OPS.values()
    if spec.has("kernel.cu") and not (HERE / f"test_{spec.name}_cuda_on_cpu.py").exists()
]
OF_OPERATOR = {operator.name: spec for spec in SPECS for operator in spec.operators}
# Without the largest: what they have, others have in less, and a GPU of one thread is slow.
LARGE = ("many_units", "mamba_2")
QUICK = [c for spec in SPECS for c in spec.cases if not c.name.endswith(LARGE)]


@pytest.fixture
def device_of() -> Iterator[Callable[[OpSpec], Device]]:
    with ExitStack() as stack:
        yield lambda spec: stack.enter_context(stand_in.device(spec))


Devices = Callable[[OpSpec], Device]


@pytest.mark.in_turn(QUICK, DTYPES, ("plain", "gated"))
def test_kernels_are_as_good_as_the_reference(
    device_of: Devices, case: Case, dtype: torch.dtype
) -> None:
    check(device_of(OF_OPERATOR[case.operator]), case, dtype)


def test_the_operators_are_all_there() -> None:
    for spec in SPECS:
        binding = (spec.folder / "cuda.cpp").read_text()
        assert all(f'm.impl("{operator.name}"' in binding for operator in spec.operators), spec.name
