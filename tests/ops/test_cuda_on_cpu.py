"""The CUDA kernels of ops, run on the CPU: values, gradients, barriers, bounds.

`cuda_on_cpu/` stands in for the GPU; what is its own is not seen here. Ops that another file,
`test_*_cuda_on_cpu.py`, names are left to that.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuseport.ops import OPS
from fuseport.ops.gated_delta_rule.cases import _Shape as _Rule
from fuseport.ops.spec import Case, Inputs, Operator, OpSpec
from fuseport.ops.ssd_chunk_scan.cases import _Shape
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.stand_in import DTYPES, Device, check
from fuseport.tests.ops.faint_states import error_of_gradient, faint
from fuseport.tests.ops.tensor_cores import CHUNKED, RULES

ELSEWHERE = "".join(
    path.read_text() for path in Path(__file__).parent.glob("test_*_cuda_on_cpu.py")
)
SPECS = [
    spec for spec in OPS.values() if spec.has("kernel.cu") and f'"{spec.name}"' not in ELSEWHERE
]
OF_OPERATOR = {operator.name: spec for spec in SPECS for operator in spec.operators}
CASE = {spec.name: {case.name: case for case in spec.cases} for spec in SPECS}

# A GPU of one thread is slow: what the largest have, others have in less; and each of the chunked
# scan's takes a second, most for the same paths.
LARGE = ("many_units", "mamba_2", "mamba_3")
OF_CHUNKED_SCAN = (
    *("plain", "without_softplus", "limited", "one_of_everything", "no_steps", "empty_batch"),
    *("chunk_plus_1", "width_17", "groups", "layout_transposed", "packed", "packed_last_step"),
    *(
        "discrete",
        "discrete_no_steps",
        "discrete_groups",
        "layout_discrete_expanded",
        "discrete_cut_off",
    ),
)
QUICK = [
    case
    for spec in SPECS
    for case in spec.cases
    if not case.name.endswith(LARGE)
    and (spec.name != "ssd_chunk_scan" or case.name in OF_CHUNKED_SCAN)
] + [
    # By products, whatever the dtype: four numbers at a time, and two blocks of heads in a group.
    Case("packs", "ssd_chunk_scan_gated", _Shape(b=1, l=66, H=10, P=8, N=257, G=2, gated=True).make)
]
Devices = Callable[[OpSpec], Device]


@pytest.fixture
def device_of() -> Iterator[Devices]:
    with ExitStack() as stack:
        yield lambda spec: stack.enter_context(stand_in.device(spec))


def assert_all_equal(runs: list[dict[str, Tensor]]) -> None:
    for run in runs[1:]:
        for tensor, value in run.items():
            assert torch.equal(value, runs[0][tensor]), tensor


@pytest.mark.in_turn(QUICK, DTYPES, ("plain", "packs"))
def test_kernels_are_as_good_as_the_reference(
    device_of: Devices, case: Case, dtype: torch.dtype
) -> None:
    check(device_of(OF_OPERATOR[case.operator]), case, dtype)


# Gradients of all dtypes fit into an H100's shared memory; in others they are made by products.
@pytest.mark.parametrize(("multiprocessors", "order"), [(1, 1), (40, 2)])
@pytest.mark.in_turn(CHUNKED, CHUNKED[0].dtypes, ("tensor_cores_parts_of_tiles",))
def test_the_chunked_scan_on_tensor_cores(
    device_of: Devices, case: Case, dtype: torch.dtype, multiprocessors: int, order: int
) -> None:
    device = device_of(OPS["ssd_chunk_scan"])
    device.multiprocessors(multiprocessors)
    device.shared_memory(227)
    runs = [check(device, case, dtype)]
    device.order(order)
    runs.append(device.forward_and_backward(*drawn(device, case, dtype)))
    assert_all_equal(runs)


def test_float32_is_cut_by_each_warp_where_its_parts_find_no_room(device_of: Devices) -> None:
    device = device_of(OPS["ssd_chunk_scan"])
    device.shared_memory(163)
    check(device, CHUNKED[0], torch.float32)


@pytest.mark.parametrize("dtype", RULES[0].dtypes, ids=str)
@pytest.mark.parametrize("case", RULES, ids=lambda case: case.name)
def test_the_gated_delta_rule_on_tensor_cores(
    device_of: Devices, case: Case, dtype: torch.dtype
) -> None:
    device = device_of(OPS["gated_delta_rule"])
    device.shared_memory(227)
    runs = [check(device, case, dtype)]
    device.multiprocessors(40)
    device.order(2)
    runs.append(device.forward_and_backward(*drawn(device, case, dtype)))
    assert_all_equal(runs)


def drawn(device: Device, case: Case, dtype: torch.dtype) -> tuple[Operator, Inputs, Inputs]:
    """What `check` draws."""
    operator = device.spec.operator(case.operator)
    inputs = case.make(dtype, 1)
    return operator, inputs, stand_in.cotangents_of(device.spec, operator, inputs, 2)


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 200])
def test_the_gated_delta_rule_at_edges_of_chunks(device_of: Devices, length: int) -> None:
    shape = _Rule(b=1, l=length, G=1, H=2, K=9, V=11)
    check(device_of(OPS["gated_delta_rule"]), _case_of(shape), torch.float32)


@pytest.mark.parametrize(("keys", "values"), [(64, 33), (65, 1), (1, 70), (128, 35)])
def test_the_gated_delta_rule_at_edges_of_tiles(device_of: Devices, keys: int, values: int) -> None:
    shape = _Rule(b=1, l=67, G=1, H=1, K=keys, V=values)
    check(device_of(OPS["gated_delta_rule"]), _case_of(shape), torch.bfloat16)


def _case_of(shape: _Rule) -> Case:
    return Case("drawn", "gated_delta_rule", shape.make)


def test_the_gated_delta_rule_takes_cotangents_in_any_layout(device_of: Devices) -> None:
    device = device_of(OPS["gated_delta_rule"])
    _, inputs, seeds = drawn(device, _case_of(_Rule(b=2, l=65, G=1, H=1, K=8, V=8)), torch.float16)
    gradient, dout = device.spec.operator("gated_delta_rule_backward"), seeds["dout"]
    for wanted in (dout[:, :1].expand(dout.shape), dout.mT.contiguous().mT, dout.movedim(1, 3)):
        given = wanted if wanted.shape == dout.shape else wanted.movedim(3, 1)
        rest = (seeds["dfinal_state"], *inputs.values())
        found, expected = (device(gradient, t, *rest) for t in (given, given.contiguous()))
        assert all(map(torch.equal, found, expected))


def test_the_gated_delta_rule_is_of_steps_where_shared_memory_is_small(device_of: Devices) -> None:
    device, found = device_of(OPS["gated_delta_rule"]), []
    for kibibytes in (48, 227):
        device.shared_memory(kibibytes)
        found.append(check(device, RULES[0], torch.float32))
    few, many = found
    assert not any(torch.equal(few[name], many[name]) for name in ("dq", "dk", "dv", "dg"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_is_exact_where_states_hardly_matter(
    device_of: Devices, dtype: torch.dtype
) -> None:
    spec = OPS["ssd_chunk_scan"]
    for seed in range(3):
        inputs, cotangents = faint(dtype, seed)
        operator = spec.operator("ssd_chunk_scan")
        found = device_of(spec).forward_and_backward(operator, inputs, cotangents)["dA"]
        assert found is not None
        assert error_of_gradient(found, inputs, cotangents) < 3e-6


IN_ANY_ORDER = {
    "correlation": "kernel_stride_padding",
    "cross_scan": "height_17_width_33",
    "cross_merge": "height_17_width_33",
    "deform_conv2d": "groups_across_offset_groups",
    "dplr_delta_rule": "chunks_3_minus_1",
    "gated_delta_rule": "chunks_3_minus_1",
    "matmul_nbits": "outputs_130",
    "ms_deform_attn": "query_blocks",
    "nf4_linear": "outputs_130",
    "rotary_embedding": "many_units",
    "softmax_cross_entropy": "classes_2085",
    "ssd_chunk_scan": "plain",
}


@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_bits_do_not_depend_on_the_order_of_threads(device_of: Devices, name: str) -> None:
    spec, case = OPS[name], CASE[name][IN_ANY_ORDER[name]]
    device, operator = device_of(spec), spec.operator(case.operator)
    inputs = case.make(torch.float32, 5)
    cotangents = stand_in.cotangents_of(spec, operator, inputs, 6)
    runs = []
    for order in (0, 1, 2):
        device.order(order)
        runs.append(device.forward_and_backward(operator, inputs, cotangents))
    assert_all_equal(runs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *(("correlation", tensor) for tensor in ("input1", "input2")),
        ("cross_scan", "x"),
        ("cross_merge", "ys"),
        *(("deform_conv2d", tensor) for tensor in ("input", "offset", "weight", "bias")),
        *(("ms_deform_attn", t) for t in ("value", "sampling_locations", "attention_weights")),
        *((op, tensor) for op in ("matmul_nbits", "nf4_linear") for tensor in ("x", "bias")),
        *(("rotary_embedding", tensor) for tensor in ("x", "cos")),
        ("softmax_cross_entropy", "logits"),
    ],
)
def test_nan_and_inf_spread_as_in_the_reference(
    device_of: Devices, name: str, tensor: str, value: float
) -> None:
    spec, case = OPS[name], CASE[name]["plain"]
    operator = spec.operator(case.operator)
    inputs = case.make(torch.float32, 10)
    flat = inputs[tensor].view(-1)
    flat[len(flat) // 2] = value
    cotangents = stand_in.cotangents_of(spec, operator, inputs, 11)
    got = device_of(spec).forward_and_backward(operator, inputs, cotangents)
    expected = stand_in.forward_and_backward(
        spec, stand_in.by_reference, operator, inputs, cotangents
    )
    for key, y in got.items():
        assert torch.equal(y.isnan(), expected[key].isnan()), key
        assert torch.equal(y.isposinf(), expected[key].isposinf()), key
        assert torch.equal(y.isneginf(), expected[key].isneginf()), key


@pytest.mark.parametrize(
    ("tensor", "wrong"),
    [
        ("value_spatial_shapes", -1),
        ("value_spatial_shapes", 2**62),
        ("value_level_start_index", -1),
        ("value_level_start_index", 9),
    ],
)
def test_a_level_that_is_not_there_makes_nan(device_of: Devices, tensor: str, wrong: int) -> None:
    """A GPU's data are read by nobody before the kernels, which must not read beyond value."""
    spec = OPS["ms_deform_attn"]
    operator = spec.operator("ms_deform_attn")
    inputs = CASE["ms_deform_attn"]["plain"].make(torch.float32, 3)
    inputs[tensor][0] = wrong
    with pytest.raises(ValueError, match=tensor):
        operator.reference(*inputs.values())
    cotangents = {"dout": torch.ones(2, 5, 16)}
    got = device_of(spec).forward_and_backward(operator, inputs, cotangents)
    assert got["out"].isnan().all()
    assert got["dattention_weights"][..., 0, :].isnan().all()
    assert got["dattention_weights"][..., 1, :].isfinite().all()
    assert got["dvalue"].isfinite().all()


@pytest.mark.parametrize("wrong", [-1, 5, -99, 2**40])
def test_a_target_that_is_no_class_makes_nan(device_of: Devices, wrong: int) -> None:
    spec = OPS["softmax_cross_entropy"]
    operator = spec.operators[0]
    inputs = {"logits": torch.randn(3, 5), "targets": torch.tensor([0, wrong, 1])}
    given = {**inputs, "ignore_index": -100, "label_smoothing": 0.1}
    cotangents = {"dlosses": torch.ones(3)}
    got = device_of(spec).forward_and_backward(operator, given, cotangents)
    assert got["losses"].isnan().tolist() == [False, True, False]
    assert got["dlogits"].isnan().all(1).tolist() == [False, True, False]
    assert got["dlogits"][::2].isfinite().all()


def test_the_operators_are_all_there() -> None:
    for spec in SPECS:
        binding = (spec.folder / "cuda.cpp").read_text()
        assert all(f'm.impl("{operator.name}"' in binding for operator in spec.operators), spec.name
