"""The library for ONNX Runtime's CUDA provider, run on the CPU: values, gradients, checks, memory.

Its bindings and kernels are those of a GPU; `cuda_on_cpu/` stands in for that, and the CPU provider
for the CUDA one: what is their own is not seen here. Models are single nodes, and but for one test
without bodies: nothing but a kernel of the library can run them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from torch import Tensor

from fuseport.exporter.runtimes._onnxruntime import to_value
from fuseport.exporter.verify.op_check.symbolic import Session, Type
from fuseport.ops import OPS, onnxruntime_library, ort
from fuseport.ops.cross_scan import SPEC as WALKS
from fuseport.ops.ms_deform_attn import SPEC as ATTENTION
from fuseport.ops.rotary_embedding import SPEC as ROTARY
from fuseport.ops.selective_scan import SPEC as SCAN
from fuseport.ops.selective_scan.cases import _Shape
from fuseport.ops.selective_scan.shapes import CHUNK
from fuseport.ops.spec import Case
from fuseport.ops.ssd_chunk_scan import SPEC as CHUNKED
from fuseport.ops.ssd_chunk_scan.cases import _Shape as Chunked
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.nodes import (
    CASES,
    OF_OPERATOR,
    SPECS,
    OnNaN,
    by_nodes,
    check,
    check_case,
    contiguous,
)
from fuseport.tests.ops.cuda_on_cpu.stand_in import DTYPES

# A GPU of one thread is slow: what the largest have, others have in less.
LARGE = (
    "many_units",
    "heads_48",
    "channels_130",
    "channels_700",
    "mamba_2",
    "mamba_3",
    "height_131_width_40",
)
QUICK = [case for case in CASES if not any(name in case.name for name in LARGE)]
OF_DATA = ("within value", "targets must be in 0 to")  # refused on the CPU; a GPU's nobody reads
PLAIN = [next(case for case in spec.cases if case.name == "plain") for spec in SPECS]


@pytest.fixture(autouse=True)
def library(fused_library: Path) -> Path:
    """Of all kernels, its threads in ascending order, on one multiprocessor.

    Skips where ONNX Runtime's headers are not.
    """
    path = stand_in.onnxruntime_library()
    settings = stand_in.Settings(path)
    settings.multiprocessors(1)
    settings.order(0)
    return path


@pytest.mark.in_turn(QUICK, DTYPES, ("plain", "gated", "packed"))
def test_nodes_are_as_good_as_the_reference(library: Path, case: Case, dtype: torch.dtype) -> None:
    """And write all of their outputs."""
    check_case(OnNaN(library), case, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_passes_have_scratch_memory(library: Path, dtype: torch.dtype) -> None:
    """Time in segments, of which what each starts from is kept there."""
    shape = _Shape(b=1, d=5, l=9 * CHUNK + 5, N=16, gated=True)
    case = Case("segments", SCAN.operators[1].name, shape.make)
    whole = check_case(OnNaN(library), case, dtype)
    stand_in.Settings(library).multiprocessors(100)
    cut = check_case(OnNaN(library), case, dtype)
    assert any(not torch.equal(cut[name], whole[name]) for name in cut)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_products_of_several_tiles(library: Path, dtype: torch.dtype) -> None:
    """The same to the bit, whatever the order of threads."""
    shape = Chunked(b=1, l=66, H=4, P=33, N=70, G=2, gated=True)
    case = Case("tiles", CHUNKED.operators[1].name, shape.make)
    found = check_case(OnNaN(library), case, dtype)
    stand_in.Settings(library).order(7)
    again = check_case(OnNaN(library), case, dtype)
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_every_node_that_has_a_kernel_on_the_cpu_has_one_here(library: Path) -> None:
    operators = [operator.name for spec in OPS.values() for operator in spec.operators]
    others = {name for name in operators if ort.calls(library, name) is None}
    assert others == {name for name in operators if ort.calls(onnxruntime_library(), name) is None}
    bound = [operator.name for spec in SPECS for operator in spec.operators]
    assert others == {*operators}.difference(bound)


def test_calls_are_counted_by_op(library: Path) -> None:
    operator = WALKS.operators[0]
    before = ort.calls(library, operator.name)
    assert before is not None
    inputs = contiguous(PLAIN[SPECS.index(WALKS)].make(torch.float32, 1))
    by_nodes(Session(None, str(library), 1), WALKS, operator, list(inputs.values()))
    assert ort.calls(library, operator.name) == before + 1


def test_nodes_without_a_kernel_run_their_bodies(library: Path) -> None:
    """In a session that has the library."""
    operator, case = ROTARY.operators[0], ROTARY.cases[0]
    assert ort.calls(library, operator.name) is None
    inputs = contiguous(case.make(torch.float32, 1))
    check(Session(ROTARY.lowering(), str(library), 1), ROTARY, operator, inputs)


def test_more_samples_than_31_bits_count_are_refused(library: Path) -> None:
    """Before a kernel is started; cells, here: of 2^15 levels that may have 2^15 pixels each."""
    many = 2**15
    levels = torch.zeros(many, 3, dtype=torch.int64)
    weights = torch.ones(1, 1, 1, many, 1)
    value, locations = torch.ones(1, many, 1, 1), torch.ones(*weights.shape, 2)
    shapes, starts = levels[:, :2].contiguous(), levels[:, 2].contiguous()
    given = [torch.ones(1, 1, 1), value, shapes, starts, locations, weights]
    gradient = ATTENTION.operator("ms_deform_attn_backward")
    with pytest.raises(InvalidArgument, match=r"of fewer samples and levels .* got 32768"):
        by_nodes(Session(None, str(library), 1), ATTENTION, gradient, given)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.operator)
def test_what_is_refused_is_refused_as_on_the_cpu(library: Path, case: Case) -> None:
    """Each input with a step less along each dimension: the same words, or the same shapes."""
    libraries = (str(onnxruntime_library()), str(library))
    refused = set()

    def outcome(session: Session, *node: Any) -> list[Tensor] | str:
        try:
            return session(*node)
        except InvalidArgument as error:
            return str(error)

    def run(op: Type, given: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        sessions = [Session(None, library, 1) for library in libraries]
        right = [session(op, given, *rest) for session in sessions]
        for index, t in enumerate(given):
            for dim in range(t.dim()):
                wrong = [*given]
                wrong[index] = t.narrow(dim, 0, t.shape[dim] - 1).contiguous()
                usual, found = (outcome(session, op, wrong, *rest) for session in sessions)
                if isinstance(usual, str) and any(words in usual for words in OF_DATA):
                    assert not isinstance(found, str)
                    assert found[0].isnan().any()
                elif isinstance(usual, str):
                    assert found == usual
                    refused.add(index)
                else:
                    assert [y.shape for y in found] == [y.shape for y in usual]
        return right[0]

    spec = OF_OPERATOR[case.operator]
    operator = spec.operator(case.operator)
    inputs = contiguous(case.make(torch.float32, 1))
    by_nodes(run, spec, operator, list(inputs.values()))
    tensors = sum(isinstance(value, Tensor) for value in inputs.values())
    assert len(refused) >= tensors - 1


def test_memory_that_a_caller_binds_askew_is_refused(library: Path) -> None:
    """A kernel would write packs to it, which a GPU stops everything for."""
    operator, memory = WALKS.operators[0], np.zeros(4 * 4 + 8, np.float32)
    askew = memory.ctypes.data + 4 * (memory.ctypes.data % 16 == 0)

    def run(op: Type, given: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        holder = Session(None, str(library), 1)
        found = holder(op, given, *rest)
        [session] = holder._loaded.values()
        binding = session.io_binding()
        binding.bind_ortvalue_input("x0", to_value(given[0]))
        binding.bind_output("y0", "cpu", 0, np.float32, list(found[0].shape), askew)
        with pytest.raises(RuntimeError, match="the memory of output 0 must be aligned to 16"):
            session.run_with_iobinding(binding)
        return found

    by_nodes(run, WALKS, operator, [torch.ones(1, 1, 2, 2)])
    assert not memory.any()
