"""The four-bit layer: its storage value by value, what bitsandbytes saves, LoRA, lesser ISAs."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from torch import Tensor

from fuseport.ops import register
from fuseport.ops.nf4_linear import (
    SPEC,
    dequantize_4bit,
    dequantize_absmax,
    from_bitsandbytes,
    nf4_linear,
    quantize_4bit,
    reference,
)
from fuseport.ops.nf4_linear.storage import CODES, QUANT_TYPES


@pytest.fixture(autouse=True)
def _native() -> None:
    assert register("nf4_linear") == {"nf4_linear": "native"}


def weight_of(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.linspace(0.1, 3, rows)[:, None]


of_each_code = pytest.mark.parametrize("quant_type", QUANT_TYPES)


@of_each_code
@pytest.mark.parametrize(("rows", "columns", "block_size"), [(4, 64, 64), (5, 37, 16), (3, 50, 64)])
def test_storage_is_what_a_loop_makes_of_each_value(
    rows: int, columns: int, block_size: int, quant_type: str
) -> None:
    code = CODES[quant_type]
    # FP4 has two zeros: what is above them takes the second.
    above = [i for i in range(16) if code[i] == 0][-1]
    weight = weight_of(rows, columns)
    values = weight.flatten().tolist()
    blocks = [values[i : i + block_size] for i in range(0, len(values), block_size)]
    largest = [max(map(abs, block)) for block in blocks]
    indices = [
        min(range(16), key=lambda i: (abs(code[i] - v / m), (i == above) != (v > 0)))
        for block, m in zip(blocks, largest, strict=True)
        for v in block
    ]
    padded = [*indices, 0]
    packed, absmax = quantize_4bit(weight, block_size, quant_type)
    assert absmax.tolist() == largest
    assert packed.tolist() == [
        padded[i] * 16 + padded[i + 1] for i in range(0, len(indices), 2)
    ]  # the first of two in the high half
    found = dequantize_4bit(packed, absmax, (rows, columns), block_size, quant_type)
    expected = [code[n] * largest[i // block_size] for i, n in enumerate(indices)]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.flatten(), torch.tensor(expected), rtol=1e-7, atol=0)


def test_zeros_stay_zeros_ties_go_down_and_the_code_stays_as_it_is() -> None:
    code = CODES["nf4"]
    packed, absmax = quantize_4bit(torch.tensor([[0.0] * 16, code]), 16)
    assert packed.tolist() == [0x77] * 8 + [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert absmax.tolist() == [0, 1]
    between = (code[7] + code[8]) / 2
    tie = torch.tensor([1.0, between, between * 1.0001, *[0.0] * 13])
    assert quantize_4bit(tie, 16)[0].tolist()[:2] == [0xF7, 0x87]


@of_each_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_are_those_of_bitsandbytes(dtype: torch.dtype, quant_type: str) -> None:
    """Values on the edges between two of the code are there, too, and those about zero."""
    package = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").functional
    code = package.get_4bit_type(quant_type, device="cpu")
    assert code.tolist() == list(CODES[quant_type])
    sorted_code = code.sort().values
    edges = (sorted_code[1:] + sorted_code[:-1]) / 2
    about_zero = torch.tensor([1.0, 1e-9, -1e-9, 0.0, -0.0, 0.0026, -0.0026])
    exact = F.pad(torch.cat([about_zero, code, edges]), (0, 26)).reshape(1, 64)
    weight = torch.cat([exact, weight_of(40, 64)]).to(dtype)
    packed, state = package.quantize_4bit(weight, quant_type=quant_type)
    found, absmax = quantize_4bit(weight, quant_type=quant_type)
    assert torch.equal(found, packed.flatten())
    assert torch.equal(absmax, state.absmax)
    values = dequantize_4bit(found, absmax, tuple(weight.shape), quant_type=quant_type)
    assert torch.equal(values.to(dtype), package.dequantize_4bit(packed, state))


@of_each_code
@pytest.mark.parametrize("nested", [False, True])
def test_what_bitsandbytes_saves_is_read(nested: bool, quant_type: str) -> None:
    packed, absmax = quantize_4bit(weight_of(40, 128), quant_type=quant_type)
    state = {"quant_type": quant_type, "blocksize": 64, "dtype": "bfloat16", "shape": [40, 128]}
    tensors = {"w": packed[:, None], "w.quant_map": torch.tensor(CODES[quant_type])}
    expected = absmax
    if nested:
        code, scales = torch.linspace(-1, 1, 256), torch.tensor([0.5, 0.25])
        index = torch.arange(80).to(torch.uint8)
        state |= {"nested_blocksize": 64, "nested_offset": 0.75, "nested_dtype": "float32"}
        tensors |= {
            "w.absmax": index,
            "w.nested_quant_map": code,
            "w.nested_absmax": scales,
        }
        expected = torch.stack([code[i] * scales[i // 64] + 0.75 for i in range(80)])
        assert torch.equal(dequantize_absmax(index, code, scales, 0.75, 64), expected)
    else:
        tensors["w.absmax"] = absmax
    text = json.dumps(state).encode()
    marked = f"w.quant_state.bitsandbytes__{quant_type}"
    tensors[marked] = torch.tensor(list(text), dtype=torch.uint8)
    found = from_bitsandbytes(tensors, "w")
    assert torch.equal(found.packed, packed)
    assert torch.equal(found.absmax, expected)
    assert (found.shape, found.block_size, found.quant_type) == ((40, 128), 64, quant_type)
    with pytest.raises(ValueError, match=rf"w\.quant_map must be the code of {quant_type.upper()}"):
        from_bitsandbytes({**tensors, "w.quant_map": torch.linspace(-1, 1, 16)}, "w")
    with pytest.raises(KeyError, match="absmax"):
        from_bitsandbytes({n: t for n, t in tensors.items() if n != "w.absmax"}, "w")


@of_each_code
@pytest.mark.parametrize(("rows", "with_bias"), [(1, False), (9, True)])
def test_with_lora_it_is_two_linear_layers_gradients_included(
    rows: int, with_bias: bool, quant_type: str
) -> None:
    packed, absmax = quantize_4bit(weight_of(21, 37), 16, quant_type)
    torch.manual_seed(1)
    x, a, b, bias, cotangent = (
        torch.randn(shape, dtype=torch.float64)
        for shape in ((2, rows, 37), (3, 37), (21, 3), (21,), (2, rows, 21))
    )
    leaves = [x, a, b, *([bias] if with_bias else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    weight = dequantize_4bit(packed, absmax.double(), (21, 37), 16, quant_type)
    given = bias if with_bias else None
    out = nf4_linear(x, packed[:, None], absmax, 21, given, a, b, 0.7, 16, quant_type)
    expected = F.linear(x, weight + 0.7 * b @ a, given)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(out, leaves, cotangent)
    wanted = torch.autograd.grad(expected, leaves, cotangent)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_refused_by_name() -> None:
    packed, absmax = quantize_4bit(weight_of(6, 32), 16)
    x, a, b = torch.randn(2, 32), torch.randn(2, 32), torch.randn(6, 2)
    for expected, arguments in {
        r"bias must be \(out_features,\) = \(6,\)": (torch.zeros(5), None, None),
        "lora_B must be given with lora_A": (None, a, None),
        r"lora_A must be \(r, in_features\) = \(2, 32\)": (None, a[:, :31], b),
        r"lora_B must be \(out_features, r\) = \(6, 2\)": (None, a, b[:, :1]),
        "lora_B must be float32; got float64": (None, a, b.double()),
    }.items():
        with pytest.raises(ValueError, match=expected):
            nf4_linear(x, packed, absmax, 6, *arguments, block_size=16)
    with pytest.raises(ValueError, match="block_size must be a power of two from 16 up; got 24"):
        nf4_linear(x, packed, absmax, 6, block_size=24)
    with pytest.raises(ValueError, match="quant_type must be nf4 or fp4; got int4"):
        nf4_linear(x, packed, absmax, 6, quant_type="int4")
    with pytest.raises(ValueError, match="quant_type must be nf4 or fp4; got int4"):
        quantize_4bit(weight_of(6, 32), quant_type="int4")
    operator, given = torch.ops.fuseport.nf4_linear, (x, packed, absmax, torch.zeros(6), 32, 16)
    for run in (operator, reference.nf4_linear):
        with pytest.raises((ValueError, RuntimeError), match=r"quant_type must be 0 \(FP4\) or 1"):
            run(*given, 2)
    with pytest.raises(ValueError, match="packed must be uint8; got int8"):
        nf4_linear(x, packed.view(torch.int8), absmax, 6, block_size=16)
    with pytest.raises(ValueError, match="weight must be finite"):
        quantize_4bit(torch.tensor([float("nan")]))


def test_lesser_instruction_sets_are_as_good(
    run_python: Callable[..., "CompletedProcess[str]"],
) -> None:
    code = """if True:
        import torch
        from fuseport.ops import OPS, register
        from fuseport.ops.nf4_linear.reference import nf4_linear, nf4_linear_backward
        assert register("nf4_linear") == {"nf4_linear": "native"}
        ops = torch.ops.fuseport
        for case in OPS["nf4_linear"].cases:
            for dtype in (torch.float32, torch.float64, torch.float16):
                given = list(case.make(dtype, 0).values())
                close = {"rtol": 2e-3 if dtype == torch.float16 else 1e-5, "atol": 2e-4}
                out = nf4_linear(*given)
                torch.testing.assert_close(ops.nf4_linear(*given), out, **close)
                rest = (given[1], given[2], *given[4:])
                found = ops.nf4_linear_backward(out, *rest)
                torch.testing.assert_close(found, nf4_linear_backward(out, *rest), **close)
    """
    for isa in ("baseline", "avx2"):
        done = run_python(code, FUSEPORT_ISA=isa)
        assert done.returncode == 0, (isa, done.stderr)


def test_a_node_that_says_no_code_is_of_nf4(fused_library: Path) -> None:
    """As of files from before there were two."""
    inputs = SPEC.cases[0].make(torch.float32, 0)
    names = ["x", "packed", "absmax", "bias"]
    sizes = {name: inputs[name] for name in ("in_features", "block_size")}
    types = {torch.float32: onnx.TensorProto.FLOAT, torch.uint8: onnx.TensorProto.UINT8}
    graph = helper.make_graph(
        [helper.make_node("nf4_linear", names, ["out"], domain="fuseport.ops", **sizes)],
        "one",
        [
            helper.make_tensor_value_info(name, types[inputs[name].dtype], inputs[name].shape)
            for name in names
        ],
        [helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("fuseport.ops", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(fused_library))
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers)
    [out] = session.run(None, {name: inputs[name].numpy() for name in names})
    expected = reference.nf4_linear(*inputs.values())
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-5, atol=1e-5)
