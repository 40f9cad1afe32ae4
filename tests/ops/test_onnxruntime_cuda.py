"""The library for ONNX Runtime's CUDA provider on a GPU, where there is one.

What needs none is in `test_onnxruntime_cuda_on_cpu.py`, and what is built in `test_cuda.py`.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor

from fuseport.exporter.runtimes._onnxruntime import PROVIDERS
from fuseport.exporter.verify.op_check.symbolic import Session, Type
from fuseport.ops import onnxruntime_library
from fuseport.ops.selective_scan import SPEC as SCAN
from fuseport.tests.ops.cuda_on_cpu.nodes import CASES, by_nodes, check_case, contiguous

PROVIDER = PROVIDERS["cuda"]
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or PROVIDER not in onnxruntime.get_available_providers(),
    reason="there is no GPU here, or no ONNX Runtime for one",
)
# Each case in one of its dtypes, which take turns.
PAIRS = [
    pytest.param(case, case.dtypes[i % len(case.dtypes)], id=f"{case.operator}-{case.name}")
    for i, case in enumerate(CASES)
]


class OnGpu(Session):
    """Sessions that the CUDA provider runs, and none in its place."""

    def _opened(self, model: Any) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.register_custom_ops_library(self._library)
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=[PROVIDER]
        )
        assert session.get_providers()[0] == PROVIDER
        return session


@pytest.fixture(scope="module")
def library(fused_library: Path) -> Path:
    return onnxruntime_library(device="cuda")


@pytest.fixture(scope="module")
def run(library: Path) -> OnGpu:
    return OnGpu(None, str(library))


@pytest.mark.parametrize(("case", "dtype"), PAIRS)
def test_nodes_are_as_good_as_the_reference(run: OnGpu, case: Any, dtype: torch.dtype) -> None:
    check_case(run, case, dtype, scale=4)


def test_a_session_in_several_threads_at_once(run: OnGpu) -> None:
    """Each call has a stream of its own, and gets no scratch memory that another still uses."""
    case = next(case for case in SCAN.cases if case.name == "many_units")
    operator = SCAN.operator(case.operator)
    inputs = contiguous(case.make(torch.float32, 1))
    calls = []

    def keep(op: Type, given: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        calls.append((op, given, *rest))
        return run(op, given, *rest)

    by_nodes(keep, SCAN, operator, list(inputs.values()))
    [call] = calls
    expected = run(*call)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: run(*call), range(32)):
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
